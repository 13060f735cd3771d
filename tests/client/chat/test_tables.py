"""Tables and other forms of records, against the same records as lines of JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from shoal.client.chat.record_files import RecordFiles
from shoal.peer.data import DataError
from shoal.peer.data.sources import resolve

from .chats import CHATS, messages, write_chats

SHARED = {"user": "human", "assistant": "gpt", "system": "system"}


def walked(path: Path, kind: str = "chat") -> list[Any]:
    return [said for _, said in RecordFiles(str(path), kind, None)]


def test_chats_of_parquet_and_conversations_are_those_of_messages(tmp_path: Path) -> None:
    wanted = walked(write_chats(tmp_path / "a.jsonl"))
    rows = [{"messages": messages(chat)} for chat in CHATS]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    said = [[{"from": SHARED[r], "value": c} for r, c in chat] for chat in CHATS]
    lines = [json.dumps({"conversations": chat}) for chat in said]
    (tmp_path / "b.jsonl").write_text("\n".join(lines))
    assert walked(tmp_path / "a.parquet") == walked(tmp_path / "b.jsonl") == wanted


@pytest.mark.parametrize("turns", ["[3]", '"hello"', '[{"from": "human"}]', '[{"value": "x"}]'])
def test_conversations_without_roles_or_text_are_refused(tmp_path: Path, turns: str) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"conversations": {turns}}}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:1: (message 0|expected a chat)"):
        walked(tmp_path / "a.jsonl")


X = np.arange(24, dtype=np.float32).reshape(12, 2) / 2
Y = np.arange(12, dtype=np.int64)


def test_arrays_of_tables_and_of_several_files_are_those_of_one(tmp_path: Path) -> None:
    def read(name: str, inputs: str = "x") -> Any:
        source = str(tmp_path / name)
        return resolve(tmp_path / "out", kind="arrays", source=source, inputs=inputs)[0]

    np.savez(tmp_path / "one.npz", x=X, y=Y)
    for n in range(3):
        np.savez(tmp_path / f"part-{n}.npz", x=X[n * 4 : n * 4 + 4], y=Y[n * 4 : n * 4 + 4])
    np.save(tmp_path / "x.npy", X)
    np.save(tmp_path / "y.npy", Y)
    parquet.write_table(
        pa.table({"x": X.tolist(), "y": Y, "z": ["-"] * 12}), tmp_path / "p.parquet"
    )
    wanted = read("one.npz")
    for name in ("part-*.npz", "*.npy", "p.parquet"):
        assert read(name) == wanted, name
    lines = "".join(f"{a},{b},{y}\n" for (a, b), y in zip(X, Y, strict=True))
    (tmp_path / "c.csv").write_text("a,b,y\n" + lines, encoding="utf-8-sig")  # as Excel does
    np.savez(tmp_path / "columns.npz", a=X[:, 0], b=X[:, 1], y=Y)
    assert read("c.csv", "a,b") == read("columns.npz", "a,b")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x,y\n1,2\n,3\n", "row 2 has no number in 'x'"),
        ("x\n1\n", "no column 'y'"),
        ("x,y\n", "no rows"),
        ("x,y\n1,9223372036854775808\n", "row 1 has a whole number of 2.63 or more in 'y'"),
        ("x,y\n1,-1\n1,9223372036854775808\n", "row 2 has a whole number of 2.63 or more in 'y'"),
        ("x,y\n1,0.5\n1,1e300\n", "row 2 has a number in 'y' that is none of float32"),
        ("x,y\n1,1\n1,2021_05\n", "row 2 has no number in 'y'"),
        ("x,y\n1,2\n3,4,5\n", r"a\.csv:3: the row has more than the 2 values"),
        ("x,x,y\n1,2,3\n", "2 columns 'x'"),
    ],
)
def test_a_table_without_numbers_is_refused_by_its_row(
    tmp_path: Path, text: str, says: str
) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(DataError, match=says):
        resolve(tmp_path / "out", kind="arrays", source=str(tmp_path / "a.csv"))


def test_a_row_with_fewer_numbers_than_the_first_is_refused(tmp_path: Path) -> None:
    table = pa.table({"x": [[1.0, 2.0], [3.0]], "y": [0, 1]})
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match="row 2 has no number in 'x', or not as many as the first"):
        resolve(tmp_path / "out", kind="arrays", source=str(tmp_path / "a.parquet"))


def test_a_column_that_is_whole_in_one_file_is_a_number_in_all(tmp_path: Path) -> None:
    (tmp_path / "a-1.csv").write_text("x,y\n1,0\n2,1\n")
    (tmp_path / "a-2.csv").write_text("x,y\n0.5,1\n")
    (tmp_path / "b.csv").write_text("x,y\n1,0\n2,1\n0.5,1\n")
    several, one = (
        resolve(tmp_path / "out", kind="arrays", source=str(tmp_path / name))[0]
        for name in ("a-*.csv", "b.csv")
    )
    assert several == one


def test_a_column_of_records_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt,completion,completion,\nhi,one,two,\n")
    with pytest.raises(DataError, match=r"a\.csv has 2 columns 'completion'"):
        walked(tmp_path / "a.csv", "instructions")


def test_a_row_of_csv_with_a_comma_too_many_is_no_record(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('prompt,completion\n"Say hi, please",Hi\nSay ho, please,Ho\n')
    with pytest.raises(DataError, match=r"a\.csv:3: the row has more than the 2 values"):
        walked(tmp_path / "a.csv", "instructions")
    bad: list[str] = []
    ((_, said),) = RecordFiles(str(tmp_path / "a.csv"), "instructions", bad.append)
    assert [one["content"] for one in said] == ["Say hi, please", "Hi"]
    assert len(bad) == 1


def test_files_that_are_no_parquet_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_text("no")
    with pytest.raises(DataError, match=r"a\.parquet cannot be read"):
        walked(tmp_path / "a.parquet")
