"""The one port in front of everything: how connections begin, relays, addresses that can be
dialled, and the way into a swarm."""

__all__ = [
    "clear",
    "front",
    "hello",
    "public",
    "reach",
    "relay",
    "swarm",
]
