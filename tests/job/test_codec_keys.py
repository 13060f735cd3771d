"""[codec] of a job: what each role has, and which texts are no codec."""

from __future__ import annotations

import math

import pytest

from shoal.job import Job, SettingsError
from shoal.job.tables import CODEC_ROLES


def test_roles_without_a_codec_of_their_own_have_the_default() -> None:
    job = Job(
        model="a:b", steps=1, codec={"default": "auto", "activation": "int8", "snapshot": "auto"}
    )
    assert [job.codec.of(role) for role in CODEC_ROLES] == ["int8", "auto", "auto", "auto"]
    assert Job.from_json(job.to_json()).codec == job.codec


@pytest.mark.parametrize(
    ("codec", "snapshots"),
    [
        ({}, "none"),
        ({"default": "adatopk"}, "lossless"),
        ({"default": "adatopk", "snapshot": "none"}, "none"),
        ({"snapshot": "lossless"}, "lossless"),
    ],
)
def test_snapshots_are_exact_whatever_else_is_not(codec: dict, snapshots: str) -> None:
    assert Job(model="a:b", steps=1, codec=codec).codec.snapshots == snapshots


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("activation", "x y", 'expected "none", "lossless", "adatopk", "auto" or'),
        ("grad", "topk:", "the text of a codec"),
        ("default", "", "the text of a codec"),
        ("default", "int8:block", "the text of a codec"),
        ("ratio", 0.5, "expected 1 or more"),
        ("ratio", math.nan, "expected 1 or more"),
        ("ratio", math.inf, "expected a finite number"),
        ("error_budget", -0.1, "expected 0 or more"),
        ("error_budget", math.inf, "expected a finite number"),
        ("feedback", "often", "ahead"),
    ],
)
def test_a_codec_that_cannot_be_is_refused_by_its_key(key: str, value: object, said: str) -> None:
    with pytest.raises(SettingsError, match=f"`codec.{key}`") as caught:
        Job(model="a:b", steps=1, codec={key: value})
    assert said in str(caught.value)
