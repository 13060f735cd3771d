"""The map of addresses to dial instead of others: what it says, and how wrong ones are refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.peer.host.addresses import read_addresses, to_dial

MAP = {"10.0.0.2:7077": "127.0.0.1:9001", "home.example:1": "[::1]:65535"}


def test_toml_and_json_say_the_same(tmp_path: Path) -> None:
    toml, js = tmp_path / "via.toml", tmp_path / "via.json"
    toml.write_text("".join(f'"{a}" = "{b}"\n' for a, b in MAP.items()))
    js.write_text(json.dumps(MAP))
    assert read_addresses(toml) == read_addresses(js) == MAP


def test_an_address_that_is_not_named_is_dialled_as_it_is() -> None:
    assert to_dial(MAP, "10.0.0.2:7077") == "127.0.0.1:9001"
    assert to_dial(MAP, "10.0.0.2:7078") == "10.0.0.2:7078"
    # A replacement is final: chains would hide loops.
    assert to_dial({"a:1": "b:2", "b:2": "c:3"}, "a:1") == "b:2"


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("via.toml", '"10.0.0.2" = "127.0.0.1:9001"', 'no port in "10.0.0.2"'),
        ("via.toml", '"10.0.0.2:1" = "127.0.0.1:0"', '"127.0.0.1:0" is no address'),
        ("via.toml", '"10.0.0.2:1" = 9001', "stands for 9001"),
        ("via.toml", 'host.example = "127.0.0.1:1"', '"host" is a table: expected HOST:PORT'),
        ("via.toml", '"a:1" = "b:1"\n"a:1" = "b:2"', "no table of addresses in TOML"),
        ("via.toml", '"a:1" = x', "line 1"),
        ("via.json", '{"a:1": "b:1", "a:1": "b:2"}', '"a:1" stands in it twice'),
        ("via.json", "[]", "not a list"),
        ("via.json", '{"a:1": }', "line 1"),
        ("via.toml", "#" * (1 << 20) + "#", "at most 1048576"),
    ],
)
def test_what_is_wrong_is_named_with_the_file(
    tmp_path: Path, name: str, text: str, words: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(words)) as refused:
        read_addresses(path)
    assert str(path) in str(refused.value)


@given(st.binary(max_size=200), st.sampled_from(["via.toml", "via.json"]))
def test_any_bytes_give_a_map_or_a_value_error(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, name: str
) -> None:
    path = tmp_path_factory.getbasetemp() / name
    path.write_bytes(data)
    try:
        found = read_addresses(path)
    except ValueError:
        return
    assert all(isinstance(x, str) for pair in found.items() for x in pair)
