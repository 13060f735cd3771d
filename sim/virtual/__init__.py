"""The modelled world: a clock, a network, and shells around the real machines."""
