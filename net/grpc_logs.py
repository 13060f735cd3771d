"""What gRPC logs that is no error of ours."""

from __future__ import annotations

import logging

__all__ = ["pass_over_broken_streams"]


def pass_over_broken_streams() -> None:
    """No traceback any more for a stream that broke while gRPC sent its last status: whoever it was
    for is gone, and our side of the stream has ended."""
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("ExecuteBatchError raised in core by servicer method")
