"""What links carry: by a load of its own where the broker asked for it (`probe.py`), for free from
the frames of a run (`traffic.py`)."""
