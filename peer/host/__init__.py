"""What a host and its owner say: settings, rights, identity, own data, and how fast the devices
are."""

__all__ = [
    "addresses",
    "calibrate",
    "config",
    "fit",
    "host",
    "identity",
    "own_data",
    "profile",
    "rights",
    "speeds_file",
]
