"""Routes that skip and reorder stages: their rules, how long a step of them takes, the search for
them, and a bound that no routes are below. Pure calculation."""
