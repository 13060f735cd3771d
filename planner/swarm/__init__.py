"""SWARM's stochastic wiring as a planner: stages of equal work with many holders, each microbatch
on a way of its own."""
