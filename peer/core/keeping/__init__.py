"""Snapshots at one peer, decisions only: `snapshot_manager` says which lie here, are taken and are
deleted; `snapshot_plan` reads what an assignment says of them, and `gifts` sends copies to others,
a few parts at a time."""
