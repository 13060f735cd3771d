"""The modelled world: a clock, a network, and shells around the real machines."""

__all__ = [
    "broker_shell",
    "clock",
    "control",
    "orders",
    "peer_shell",
    "spec",
    "wan",
    "world",
]
