"""Which of gRPC's log lines are shown."""

from __future__ import annotations

import logging

import pytest

from shoal.net.grpc_quirks import pass_over_broken_streams

SAID = "{} raised in core by servicer method [/shoal.v1.Peer/Frames]"
"""As grpcio 1.85 says it (aio/server.pyx.pxi), seen when peers die while they are refused."""


def test_only_streams_that_broke_under_their_last_status_are_passed_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logger = logging.getLogger("grpc._cython.cygrpc")
    had = list(logger.filters)
    try:
        pass_over_broken_streams()
        for error in ("ExecuteBatchError", "UsageError"):
            logger.error(SAID.format(error))
        logger.error("Unexpected [ValueError] raised by servicer method [/shoal.v1.Peer/Frames]")
    finally:
        logger.filters[:] = had
    assert [r.getMessage().split()[0] for r in caplog.records] == ["UsageError", "Unexpected"]
