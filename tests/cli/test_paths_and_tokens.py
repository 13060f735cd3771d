"""What is pasted or typed: paths with "~", tokens with what came along, a damaged client.toml."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
import typer

from shoal.cli.admission import bare_token, read_token
from shoal.cli.base import verb
from shoal.client.access import find_address, settings_path
from shoal.peer.host.config import JoinConfig, host_name, with_suffix

TOKEN = "shl1.abc.def.ghi"


@pytest.mark.parametrize(
    "text",
    [
        TOKEN,
        f'"{TOKEN}"',
        f"'{TOKEN}'\r\n",
        f"\N{LEFT DOUBLE QUOTATION MARK}{TOKEN}\N{RIGHT DOUBLE QUOTATION MARK}",
        f"\ufeff{TOKEN}\n",
        f'SHOAL_TOKEN="{TOKEN}"\n',
        f"shoal join 1.2.3.4:7077 --token {TOKEN}\n",
        f"`{TOKEN}`",
        f"\u200b {TOKEN}\u00a0",
    ],
)
def test_a_token_is_found_in_what_came_along(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bare_token(text) == TOKEN
    file = tmp_path / "token"
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):
        file.write_text(text.lstrip("\ufeff"), encoding=encoding)
        assert read_token(None, file) == TOKEN
    monkeypatch.setenv("SHOAL_TOKEN", text)
    assert read_token(None, None) == TOKEN
    assert read_token(None, None) == "", "nobody else gets it"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert read_token(None, Path("-")) == TOKEN


def test_a_file_without_a_token_is_named(tmp_path: Path) -> None:
    file = tmp_path / "token"
    for data in (b"", b"\n", b"\0\0"):
        file.write_bytes(data)
        with pytest.raises(ValueError, match=str(file)):
            read_token(None, file)


def test_every_path_of_a_verb_has_the_home_for_its_tilde(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    got: dict[str, object] = {}

    @verb
    def one(**given: object) -> None:
        got.update(given)

    one(state=Path("~/net"), files=[Path("~/a"), Path("b")], name="~x", none=None)
    wanted = {"state": Path("/home/me/net"), "files": [Path("/home/me/a"), Path("b")]}
    assert got == wanted | {"name": "~x", "none": None}
    with pytest.raises(typer.Exit):
        one(state=Path("~nobody-here/net"))


@pytest.mark.parametrize(
    "data",
    [
        b'broker = "x',
        b"broker = 7077",
        b"",
        b"\xff\xfeb\0",
        b"\0\0\0",
        b"[broker]",
    ],
)
def test_a_damaged_client_toml_is_named(data: bytes) -> None:
    path = settings_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    try:
        with pytest.raises(ValueError, match=f"{path}.*shoal login"):
            find_address()
        path.write_bytes(b'\xef\xbb\xbfbroker = "127.0.0.1:1"\n')
        assert find_address() == "127.0.0.1:1"
    finally:
        path.unlink()


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("(none)", "none"),
        ("_lab", "lab"),
        ("", "peer"),
        ("---", "peer"),
        ("café.local", "caf-.local"),
        ("../../evil", "evil"),
        ("a" * 80, "a" * 64),
    ],
)
def test_a_hosts_name_gives_one_that_can_be(
    host: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: host)
    assert host_name() == name
    for suffix in ("", "-2", "-cuda-10"):
        JoinConfig(broker="h:1", name=with_suffix(host_name(), suffix))


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "../../evil"},
        {"name": "a/b"},
        {"name": ".."},
        {"name": "a b"},
        {"name": "x" * 65},
        {"name": "\N{CYRILLIC SMALL LETTER A}"},
        {"devices": ("../../evil",)},
        {"devices": ("cuda:0/..",)},
        {"devices": ("",)},
    ],
)
def test_what_would_name_a_folder_elsewhere_is_refused_first(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="cannot be"):
        JoinConfig(broker="h:1", **fields)  # type: ignore[arg-type]
