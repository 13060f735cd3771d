"""A peer's file that a power loss emptied or cut off is named with what to do, and nobody becomes
somebody else by it."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import pytest

from shoal.net.identity.authority import Authority, AuthorityError, utc
from shoal.net.identity.credential import Credential, CredentialError
from shoal.net.identity.names import Party, PartyRole
from shoal.peer.host.host import Host, HostError, Standing
from shoal.peer.host.identity import Identity, IdentityError

KNOWN = (AuthorityError, CredentialError, HostError, IdentityError)


def use(folder: Path) -> list[object]:
    """Reads all that is kept, as a start does; who this is by it."""
    authority = Authority.open(folder / "authority", utc(time.time()))
    credential = Credential.load(folder)
    with Identity(folder, "home") as me:
        standing = Host(folder).standing("home-1")
        assert standing is not None
        return [
            authority.fingerprint,
            credential and (credential.party, credential.key, credential.fingerprint),
            me.peer,
            standing.moved_bytes,
        ]


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    authority = Authority.open(tmp_path / "authority", utc(time.time()))
    authority.credential(Party(PartyRole.PEER, "home-1"), utc(time.time()), timedelta(days=1)).save(
        tmp_path
    )
    Host(tmp_path).keep(
        Standing(
            peer="home-1",
            name="home",
            broker="b:1",
            month="2026-11",
            moved_bytes=7,
            monthly_bytes=None,
            closed="",
        )
    )
    with Identity(tmp_path, "home"):
        pass
    return tmp_path


def test_each_file_emptied_or_cut_is_named_or_does_not_matter(kept: Path) -> None:
    before = use(kept)
    files = sorted(path for path in kept.rglob("*") if path.is_file())
    assert {path.name for path in files} >= {"key.pem", "certificate.pem", "peer.json", "lock"}
    for path in files:
        whole = path.read_bytes()
        if path.name == "peer.json":
            whole = whole.rstrip(b"\n")
        for data in (b"", whole[: len(whole) // 2], b"\0" * len(whole), b"\xff\xfe" + whole[:9]):
            path.write_bytes(data)
            try:
                assert use(kept) == before, (path, data)
            except KNOWN as error:
                said = str(error)
                assert str(path) in said
                assert "remove" in said or "restore" in said
                assert "cryptography.io" not in said
        path.write_bytes(whole)
        assert use(kept) == before
