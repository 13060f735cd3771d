"""Gossip: which two replicas meet in which round, as pure functions of seed, round, links and who
is there, and what has to be measured for that."""
