"""The broker's page and metrics: what `shoal status` knows, for a browser and for Prometheus.

    digest.py       what happened in a run, small enough to be sent again and again
    seen.py         what all requests are answered from, read at most once a second
    metrics.py      the same as Prometheus' text
    keys.py         who may look
    app.py          the paths
    serving.py      HTTP on two Unix sockets, behind the front

It needs the extra `shoal[page]`; a broker without it works, and says so.
"""
