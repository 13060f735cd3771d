"""How a peer begins: `shoal join` supervises one worker process per device."""
