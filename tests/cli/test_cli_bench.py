"""`shoal bench codecs`: the table of this machine, and what it says to wrong input."""

from __future__ import annotations

import json
import math

import pytest
import torch
from typer.testing import CliRunner

from shoal import cli
from shoal.client.bench import CODECS, CodecRow, gaussian, measure, table
from shoal.compression.codec import parse
from shoal.compression.interface import CodecError


def call(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, ["bench", "codecs", *arguments])
    return result.exit_code, result.output


@pytest.mark.parametrize("text", CODECS)
def test_every_codec_of_the_list_is_measured(text: str) -> None:
    row = measure(text, gaussian(64 * 1024))
    assert row.name == parse(text).name
    assert 0 < row.bytes_per_element <= 4.1
    assert row.encode_gb_per_s > 0
    assert row.decode_gb_per_s > 0
    assert math.isfinite(row.error)
    assert (row.error == 0) == (text == "lossless")


def test_raw_costs_its_bytes_and_loses_nothing() -> None:
    row = measure("raw", gaussian(4096))
    assert (row.bytes_per_element, row.error, row.announced_over_encoded) == (4.0, 0.0, 1.0)
    assert row.error_of_rest is None


def test_bf16_loses_what_its_eight_bits_lose() -> None:
    tensors = gaussian(100_000)
    row = measure("bf16", tensors)
    lost = [float((t.bfloat16().float() - t).norm() / t.norm()) for t in tensors]
    assert row.bytes_per_element == pytest.approx(2, rel=0.001)
    assert min(lost) * 0.999 <= row.error <= max(lost) * 1.001


def test_the_error_without_the_mean_is_over_what_differs_between_tokens() -> None:
    # The features of all tokens have the same large mean: what varies is a hundredth of it.
    tensors = [100 + t for t in gaussian(64 * 1024)]
    row = measure("bf16", tensors, features=-1)
    assert row.error_of_rest == pytest.approx(100 * row.error, rel=0.05)
    swapped = measure("bf16", [t.T.contiguous() for t in tensors], features=0)
    assert swapped.error_of_rest == pytest.approx(100 * swapped.error, rel=0.05)


def test_the_gaussian_tensor_has_whole_rows_and_is_the_same_every_time() -> None:
    assert gaussian(10_000)[0].shape == (9, 1024)
    assert gaussian(7)[0].shape == (1, 7)
    assert torch.equal(gaussian(5000)[1], gaussian(5000)[1])
    assert not torch.equal(gaussian(5000)[0], gaussian(5000)[1])


def test_the_verb_prints_a_row_per_codec(monkeypatch: pytest.MonkeyPatch) -> None:
    code, text = call("--elements", "5000", "--codec", "raw", "--codec", "bf16")
    assert code == 0, text
    head, columns, raw, half = text.splitlines()
    assert "fp32[4, 1024]" in head
    assert "relative L2" in columns
    assert raw.split()[:2] == ["raw", "4.000"]
    assert half.split()[0] == "bf16"


def test_json_has_the_machine_and_every_figure() -> None:
    code, text = call("--elements", "1", "--codec", "raw", "--json")
    assert code == 0, text
    found = json.loads(text)
    assert found["shape"] == [1, 1]
    assert found["machine"]["device"] == "cpu"
    [row] = found["codecs"]
    assert row["name"] == "raw/1"
    assert row["bytes_per_element"] == 4


def test_a_codec_that_cannot_write_the_tensor_is_left_out_and_named() -> None:
    code, text = call("--elements", "5", "--codec", "raw", "--codec", "lowrank:rank=8")
    assert code == 0, text
    assert "lowrank:rank=8 is left out" in text
    assert any(line.startswith("raw ") for line in text.splitlines())
    code, text = call("--elements", "5", "--codec", "lowrank:rank=8")
    assert code == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--codec", "zip"], "names no codec"),
        (["--codec", "raw", "--codec", "topk:ratio=0.5"], "ratio"),
        (["--elements", "0", "--codec", "raw"], "--elements"),
        (["--device", "cuda:99", "--codec", "raw"], "expected one of cpu"),
    ],
)
def test_wrong_input_is_said_before_anything_is_measured(arguments: list[str], says: str) -> None:
    code, text = call(*arguments)
    assert code == 2
    assert says in text
    assert "Traceback" not in text
    assert "relative L2" not in text


def test_a_text_that_names_no_codec_raises() -> None:
    with pytest.raises(CodecError, match="names no codec"):
        measure("zip", gaussian(10))


def test_speeds_of_what_copies_nothing_are_no_figures() -> None:
    row = CodecRow(
        codec="raw",
        name="raw/1",
        bytes_per_element=4,
        announced_over_encoded=1,
        encode_gb_per_s=1e6,
        decode_gb_per_s=2,
        error=0,
        error_of_rest=0.5,
    )
    head, line = table([row])
    assert head.split("  ")[-1].strip() == "without mean"
    assert "no copy" in line
    assert line.split()[-2:] == ["0", "0.5"]
