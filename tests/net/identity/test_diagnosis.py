"""Each reason for which TLS to a broker fails has words of its own, against a real handshake."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from email.utils import formatdate
from pathlib import Path

import pytest

from shoal.net.identity.authority import Authority, AuthorityError, utc
from shoal.net.identity.credential import Credential
from shoal.net.identity.diagnosis import VANISH, why_no_tls
from shoal.net.identity.enroll import BrokerAwayError, shown_by, validity_problem
from shoal.net.identity.names import Party, PartyRole

NOW = utc(time.time())
DAY, MONTH = timedelta(days=1), timedelta(days=30)
BROKER, PERSON = Party(PartyRole.BROKER, "broker"), Party(PartyRole.SUBMITTER, "ann")
AUTHORITY = Authority.new(NOW - DAY)
Serve = Callable[..., str]


class OnePort:
    """A front like the broker's: its authority in the clear, and TLS. `ahead`: of its clock.
    `shown`: by TLS; None: it never answers a hello, "": it hangs up."""

    def __init__(
        self, folder: Path, authority: Authority, shown: Credential | str | None, ahead: timedelta
    ) -> None:
        self._authority, self._shown, self._ahead = authority, shown, ahead
        self._held: list[socket.socket] = []
        self.vanish = False
        """Whether full packets do."""
        if isinstance(shown, Credential):
            shown.save(folder)
            self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._tls.load_cert_chain(folder / "certificate.pem", folder / "key.pem")
            self._tls.set_alpn_protocols(["h2"])
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            try:
                self._answer(connection)
            except OSError:
                connection.close()

    def _answer(self, connection: socket.socket) -> None:
        if connection.recv(1, socket.MSG_PEEK) == b"G":
            asked = connection.recv(4096)
            if b"/full-size" in asked and self.vanish:
                self._held.append(connection)
                return
            while b"\r\n\r\n" not in asked:
                asked += connection.recv(4096)
            date = formatdate((utc(time.time()) + self._ahead).timestamp(), usegmt=True)
            pem = self._authority.pem
            head = f"HTTP/1.1 200 OK\r\nDate: {date}\r\nContent-Length: {len(pem)}\r\n\r\n"
            connection.sendall(head.encode() + pem)
            connection.close()
        elif self._shown is None:
            self._held.append(connection)
        elif isinstance(self._shown, str):
            connection.close()
        else:
            with self._tls.wrap_socket(connection, server_side=True) as stream:
                stream.recv(1)

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for each in self._held:
            each.close()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    open_: list[OnePort] = []

    def begin(
        authority: Authority = AUTHORITY,
        shown: Credential | str | datetime | None = NOW,
        ahead: timedelta = timedelta(0),
        vanish: bool = False,
    ) -> str:
        if isinstance(shown, datetime):
            shown = authority.credential(BROKER, shown, MONTH)
        open_.append(OnePort(tmp_path / str(len(open_)), authority, shown, ahead))
        open_[-1].vanish = vanish
        return open_[-1].address

    yield begin
    for each in open_:
        each.close()


def mine(authority: Authority = AUTHORITY, made: datetime = NOW) -> Credential:
    return authority.credential(PERSON, made, MONTH)


def test_where_nothing_is_wrong_nothing_is_said(serve: Serve) -> None:
    assert why_no_tls(serve(), mine()) == ""


def test_where_nobody_answers_others_say_so(serve: Serve) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert why_no_tls(f"127.0.0.1:{port}", mine()) == ""


def test_each_reason_has_its_own_words(serve: Serve) -> None:
    other = Authority.new(NOW)
    future = Authority.new(NOW + 400 * DAY)
    told = [
        why_no_tls(serve(other), mine()),
        why_no_tls(serve(ahead=400 * DAY), mine()),
        why_no_tls(serve(ahead=-400 * DAY), mine()),
        why_no_tls(serve(future, NOW + 400 * DAY), mine(future, NOW + 400 * DAY)),
        why_no_tls(serve(), mine(), NOW + 4000 * DAY),
        why_no_tls(serve(), mine(made=NOW + DAY)),
        why_no_tls(serve(), mine(made=NOW - 2 * MONTH)),
        why_no_tls(serve(shown=NOW + DAY), mine()),
        why_no_tls(serve(shown=NOW - 2 * MONTH), mine()),
        why_no_tls(serve(shown=""), mine()),
    ]
    wanted = [
        "another authority answers",
        "this host's clock is 400 d behind the broker's",
        "this host's clock is 400 d ahead of the broker's",
        "the certificate of the broker's authority is not valid before",
        "the certificate of the broker's authority ended on",
        "the certificate of submitter ann is not valid before",
        "the certificate of submitter ann ended on",
        "shows is not valid yet",
        "shows is not valid any more",
        "breaks off",
    ]
    assert [w for t, w in zip(told, wanted, strict=True) if w not in t] == [], told
    assert len(set(told)) == len(told)


def test_a_certificate_that_never_comes_is_said_to_vanish(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.net.identity.diagnosis._PATIENCE_S", 0.5)
    assert VANISH in why_no_tls(serve(shown=None), mine())
    assert VANISH in why_no_tls(serve(vanish=True), mine())


def test_an_answer_that_never_comes_is_no_firewall() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(BrokerAwayError, match="lets itself be dialled, and no answer comes"):
            shown_by(address, 0.3)


def test_an_authority_is_not_opened_before_or_after_its_time(tmp_path: Path) -> None:
    Authority.open(tmp_path, NOW)
    with pytest.raises(AuthorityError, match=r"is of the future.*If the clock is wrong, set it"):
        Authority.open(tmp_path, NOW - DAY)
    with pytest.raises(AuthorityError, match=r"ended on .*If the clock is right, remove both"):
        Authority.open(tmp_path, NOW + 4000 * DAY)
    with pytest.raises(AuthorityError, match="clock says 1970-01-01, which is long ago"):
        Authority.open(tmp_path / "new", utc(3600))


def test_a_credential_holds_between_its_two_ends() -> None:
    found = mine()
    assert found.holds(NOW)
    for when, wanted in ((NOW - DAY, "not valid before"), (NOW + 2 * MONTH, "ended on")):
        assert not found.holds(when)
        assert wanted in validity_problem(found.certificate, when, "it")
    assert validity_problem(found.certificate, NOW, "it") == ""
