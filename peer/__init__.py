"""The data plane: a process that drives one device and runs its part of a plan. `core` decides (no
I/O), `shell` carries out, `entry` starts both."""
