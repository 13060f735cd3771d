"""A web server that never falls silent and never gets on: a few bytes every few hundredths of a
second, and, after three seconds of that, all that was asked for. Who waits without end gets it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_EVERY_S = 0.02
_LONG = 150


@contextmanager
def dripping(*answers: tuple[bytes, bytes, bytes]) -> Iterator[str]:
    """Its address. Connection by connection (the last answer for all others): what comes at once,
    what comes again and again, and what comes in the end; {address} in them is its own."""
    over = threading.Event()
    server = socket.create_server(("127.0.0.1", 0))
    address = f"http://127.0.0.1:{server.getsockname()[1]}"
    threads: list[threading.Thread] = []

    def serve(sock: socket.socket, answer: tuple[bytes, bytes, bytes]) -> None:
        first, again, last = (part.replace(b"{address}", address.encode()) for part in answer)
        with sock:
            try:
                while not (asked := sock.recv(4096)).endswith(b"\r\n\r\n") and asked:
                    pass
                sock.sendall(first)
                for _ in range(_LONG if again else 0):
                    if over.wait(_EVERY_S):
                        return
                    sock.sendall(again)
                sock.sendall(last)
            except OSError:  # who asked has gone
                return

    def accept() -> None:
        for i in range(1 << 10):
            try:
                sock, _ = server.accept()
            except OSError:
                return
            answer = answers[min(i, len(answers) - 1)]
            threads.append(threading.Thread(target=serve, args=(sock, answer)))
            threads[-1].start()

    threads.append(threading.Thread(target=accept))
    threads[0].start()
    try:
        yield address
    finally:
        over.set()
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        for thread in threads:
            thread.join()
