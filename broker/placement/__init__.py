"""Which waiting run gets which peers, and when a running plan gives way to a better one."""
