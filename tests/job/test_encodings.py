"""Text as editors and shells save it: read by its mark, or refused with what to do."""

from __future__ import annotations

import codecs
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.job.encodings import decoded
from shoal.job.settings import Settings, SettingsError, read_toml

MARKS = {
    "utf-8": codecs.BOM_UTF8,
    "utf-16-le": codecs.BOM_UTF16_LE,
    "utf-16-be": codecs.BOM_UTF16_BE,
    "utf-32-le": codecs.BOM_UTF32_LE,
    "utf-32-be": codecs.BOM_UTF32_BE,
}


@given(
    text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\0")),
    encoding=st.sampled_from(sorted(MARKS)),
)
def test_a_marked_text_is_read(text: str, encoding: str) -> None:
    assert decoded(MARKS[encoding] + text.encode(encoding)) == text
    windows = text.replace("\n", "\r\n")
    assert decoded(MARKS[encoding] + windows.encode(encoding)) == text


@pytest.mark.parametrize(
    "data",
    [
        "ab = 1".encode("utf-16-le"),
        b"\0" * 100,
        "é".encode("latin-1"),
        codecs.BOM_UTF16_LE + b"a",
    ],
)
def test_what_is_no_text_says_what_to_do(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_bytes(data)
    with pytest.raises(SettingsError, match=r"job\.toml.*save it as UTF-8"):
        read_toml(Settings, path)
