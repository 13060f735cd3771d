"""When a run takes snapshots, who keeps copies of them, where they may lie, and which of them make
a complete set."""
