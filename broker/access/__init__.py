"""Who may come in, who may call what, and how often. Decisions only."""
