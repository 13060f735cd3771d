"""What a stranger's URL makes a peer's machine do: nothing that its owner has not listed."""

from __future__ import annotations

import asyncio
import hashlib
import socket
from pathlib import Path
from typing import Any

import pytest

from shoal.job.settings import SettingsError
from shoal.net.cap import Cap, Meter
from shoal.net.web.places import check_place, reachable, why_not
from shoal.net.web.web import Web, WebError
from shoal.peer.blobs.fetching import Fetching
from shoal.peer.blobs.sharing import Fellows
from shoal.peer.blobs.weight_shards import WeightShard
from shoal.peer.host.rights import read_rights

from ...net.web.web_files import serving

LISTED = ("huggingface.co", "*.hf.co", "http://10.0.0.5:8000")


@pytest.mark.parametrize(
    "url",
    [
        "https://huggingface.co/a/resolve/main/model.safetensors?download=true",
        "https://HuggingFace.co:443/a",
        "https://cas-bridge.xethub.hf.co/x",
        "http://10.0.0.5:8000/w",
    ],
)
def test_what_is_listed_is_read(url: str) -> None:
    assert why_not(url, LISTED) == ""


@pytest.mark.parametrize(
    "url",
    [
        "http://huggingface.co/a",  # not encrypted
        "https://huggingface.co:8443/a",
        "https://sub.huggingface.co/a",
        "https://hf.co/a",  # the pattern is of names below it
        "https://evilhf.co/a",
        "https://huggingface.co.evil.org/a",
        "https://huggingface.co@evil.org/a",
        "https://evil.org\\@huggingface.co/a",
        "https://evil.org#huggingface.co",
        "https://evil.org/https://huggingface.co/",
        "https://huggingface.co\n.evil.org/",
        "https://huggingface.co /a",
        "https://HUGGINGFACE.CO./a",
        "https://10.0.0.5:8000/w",  # another scheme than the origin's
        "http://10.0.0.5/w",
        "http://10.0.0.5:80000/w",
        "http://169.254.169.254/latest/meta-data",
        "http://[::1]/",
        "file:///etc/passwd",
        "ftp://huggingface.co/a",
        "//huggingface.co/a",
        "",
    ],
)
def test_what_is_not_listed_is_not_read(url: str) -> None:
    assert why_not(url, LISTED)
    assert why_not(url, ())
    with pytest.raises(WebError):
        Web(allowed=lambda u: why_not(u, LISTED), reachable=reachable(LISTED)).look(url)


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True),
        ("2606:4700::1111", True),
        ("127.0.0.1", False),
        ("0.0.0.0", False),
        ("10.1.2.3", False),
        ("100.64.0.1", False),
        ("169.254.169.254", False),
        ("192.168.1.1", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("::1", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("fec0::1", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:93.184.216.34", True),
        ("2002:7f00:1::", False),  # 6to4 of 127.0.0.1
        ("64:ff9b::7f00:1", False),  # NAT64 of 127.0.0.1
        ("2606:4700::5efe:7f00:1", False),  # ISATAP of 127.0.0.1
        ("2606:4700::200:5efe:a9fe:a9fe", False),  # and of 169.254.169.254
        ("2606:4700::200:5efe:5db8:d822", True),  # and of 93.184.216.34
        ("192.0.0.192", False),  # a cloud's metadata
        ("168.63.129.16", False),  # another one's services
        ("192.0.0.1", False),
        ("64:ff9b:1::7f00:1", False),
        ("64:ff9b::5db8:d822", True),  # NAT64 of 93.184.216.34
        ("2001:0:4136:e378:8000:63bf:3fff:fdd2", False),  # Teredo
        ("::ffff:192.0.0.192", False),
        ("::127.0.0.1", False),
        ("no address", False),
    ],
)
def test_a_listed_name_leads_to_public_addresses_only(
    monkeypatch: pytest.MonkeyPatch, address: str, public: bool
) -> None:
    dialled: list[str] = []

    def looked_up(host: str, port: int, **_: Any) -> list[Any]:
        assert host == "huggingface.co"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

    class Socket:
        def __init__(self, *_: Any) -> None:
            pass

        def settimeout(self, seconds: float) -> None:
            pass

        def connect(self, there: tuple[str, int]) -> None:
            dialled.append(there[0])
            raise OSError("nobody is dialled in a test")

        def close(self) -> None:
            pass

    monkeypatch.setattr("shoal.net.web.dial.socket.getaddrinfo", looked_up)
    monkeypatch.setattr("shoal.net.web.dial.socket.socket", Socket)
    web = Web(allowed=lambda url: why_not(url, LISTED), reachable=reachable(LISTED), attempts=1)
    with pytest.raises(WebError, match="cannot be reached" if public else "no public address"):
        web.look("https://huggingface.co/a")
    assert dialled == ([address] if public else [])


def test_a_redirect_into_the_house_is_not_followed() -> None:
    with serving() as outside, serving() as inside:
        inside.files["/secret"] = b"secret"
        outside.redirects["/w"] = f"{inside.address}/secret"
        listed = (outside.address,)
        web = Web(allowed=lambda url: why_not(url, listed), reachable=reachable(listed))
        with pytest.raises(WebError, match="which is not read: its owner lists no"):
            web.look(f"{outside.address}/w")
        assert inside.asked == []


def test_no_proxy_looks_names_up_for_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as served, serving() as proxy:
        served.files["/w"] = b"0123456789"
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.address)
        monkeypatch.setenv("no_proxy", "")
        listed = (served.address,)
        web = Web(allowed=lambda url: why_not(url, listed), reachable=reachable(listed))
        assert web.look(f"{served.address}/w").size_bytes == 10
        assert proxy.asked == []


@pytest.mark.parametrize(
    "place", ["huggingface.co", "*.hf.co", "http://10.0.0.5:8000", "https://a"]
)
def test_an_owner_lists_names_and_origins(place: str) -> None:
    check_place(place)


@pytest.mark.parametrize(
    "place", ["", "*", "*.", "localhost", "https://a/b", "huggingface.co/a", "ftp://a", "a b.c"]
)
def test_what_is_neither_is_refused_in_the_owners_file(tmp_path: Path, place: str) -> None:
    (tmp_path / "peer.toml").write_text(f'web = ["{place}"]\n')
    with pytest.raises(SettingsError, match="is neither a name of hosts"):
        read_rights(tmp_path / "peer.toml")


async def test_what_is_read_of_the_web_counts_for_the_owners_month() -> None:
    meter, data = Meter(), bytes(range(256)) * 4096
    with serving() as served:
        served.files["/w"] = data
        fetching = Fetching(
            asyncio.get_running_loop(),
            lambda: pytest.fail("the broker has no part in it"),
            Fellows(lambda: None, Cap(None)),
            (served.address,),
            Cap(None, meter=meter),
        )
        name = hashlib.sha256(data).hexdigest()
        shard = WeightShard(name, len(data), f"{served.address}/w", 0)
        fetch = fetching.from_web(shard)
        assert await asyncio.to_thread(lambda: b"".join(fetch(name, 0, 0))) == data
    assert meter.bytes == len(data)
