"""Routes that skip and reorder stages: their rules, how long a step of them takes, and the search
for them. Pure calculation."""
