"""The net room: links between peers, and what carries them; it knows no jobs."""
