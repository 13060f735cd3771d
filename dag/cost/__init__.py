"""What a plan costs before it runs: work, memory, and the event calculation that gives the time of
a step."""
