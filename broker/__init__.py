"""The control plane: who is here, what runs, who runs what. `machine.py` decides (no I/O),
`service/server.py` carries out; `events.py` lists what passes between them."""
