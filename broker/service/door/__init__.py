"""The one port in front of everything: how connections begin, relays, addresses that can be
dialled, and the way into a swarm."""
