"""Which of gRPC's log lines are shown, and what it says of a connection in plain words."""

from __future__ import annotations

import logging
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from shoal.net.grpc_quirks import in_words, pass_over_broken_streams
from shoal.proto.broker_pb2 import DescribeRequest
from shoal.proto.broker_pb2_grpc import RunsServicer, RunsStub, add_RunsServicer_to_server

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


def said(address: str, credentials: grpc.ChannelCredentials | None = None) -> str:
    """The details of a call that fails."""
    channel = (
        grpc.insecure_channel(address)
        if credentials is None
        else grpc.secure_channel(address, credentials)
    )
    with channel, pytest.raises(grpc.RpcError) as caught:
        RunsStub(channel).Describe(DescribeRequest(), timeout=2.0)
    assert isinstance(caught.value, grpc.Call)
    return caught.value.details() or ""


@contextmanager
def listening(answer: Callable[[socket.socket], Any]) -> Iterator[str]:
    """The address of something that is no broker."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                answer(connection)
                connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def http(connection: socket.socket) -> None:
    connection.recv(100)
    connection.sendall(b"HTTP/1.1 400 Bad\r\n\r\n")


def test_what_grpc_says_of_a_connection_is_put_plainly() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        free = nobody.getsockname()[1]
        assert in_words(said(f"127.0.0.1:{free}")) == "nobody listens there"
    assert in_words(said("nowhere.invalid:7")) == "its name is not known"
    with listening(http) as address:
        assert in_words(said(address)).startswith("what listens there is no broker")
        assert "speak TLS" in in_words(said(address, grpc.ssl_channel_credentials()))
    with listening(lambda connection: None) as address:
        assert re.search("breaks off|broke off", in_words(said(address)))


def test_what_a_server_says_stays_as_it_is() -> None:
    class Busy(RunsServicer):
        def Describe(self, request: Any, context: Any) -> Any:  # noqa: N802 (the call's name)
            context.abort(grpc.StatusCode.UNAVAILABLE, "the broker is stopping: ask again in 5 s")

    from concurrent.futures import ThreadPoolExecutor

    server = grpc.server(ThreadPoolExecutor(1))
    add_RunsServicer_to_server(Busy(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        text = said(f"127.0.0.1:{port}")
    finally:
        server.stop(None).wait()
    assert in_words(text) == text == "the broker is stopping: ask again in 5 s"
    found = in_words("fetching blob 12ab: Socket closed")
    assert found == "fetching blob 12ab: the connection broke off"
