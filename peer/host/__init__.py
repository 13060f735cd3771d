"""What a host and its owner say: settings, rights, identity, own data, and how fast the devices
are."""
