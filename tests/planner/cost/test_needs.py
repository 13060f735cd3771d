"""What fits is what the judge says, and what is said to be short is short by that much."""

from __future__ import annotations

import dataclasses
import re

import pytest

from shoal.job.words import size_text
from shoal.planner.base.interface import NoPlan
from shoal.planner.cost.cost_model import CostModel
from shoal.planner.cost.shortage import fitting, shortage
from shoal.planner.schedulers.auto import auto, space_of
from shoal.planner.search.seeds import Seeds
from shoal.tests.planner.cases import random_case


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("recompute", "exchange"), [(False, 0), (True, 0), (False, 19)])
def test_an_interval_fits_where_the_judge_says_so(
    seed: int, recompute: bool, exchange: int
) -> None:
    request = random_case(seed, operators=12)
    options = dataclasses.replace(request.options, exchange_bytes=exchange)
    judge = CostModel(dataclasses.replace(request, options=options))
    needs = judge.needs(512)
    at = needs.positions.tolist()
    for shared in (False, True):
        for live in (1, 3):
            size = {
                (i, j): judge.stage_bytes(at[i], at[j], live, shared, recompute)
                for j in range(len(at))
                for i in range(j)
            }
            every = sorted(size.values())
            for room in (0, *every[:: len(every) // 6], every[-1] - 1, every[-1]):
                low = needs.low(room, live, recompute, shared)
                for j in range(1, len(at)):
                    fits = [size[i, j] <= room for i in range(j)]
                    assert all(fits[low[j] :])
                    assert low[j] == 0 or not fits[low[j] - 1]


@pytest.mark.parametrize("seed", range(6))
def test_the_operator_that_fits_nowhere_is_short_by_what_the_judge_says(seed: int) -> None:
    request = random_case(seed)
    judge = CostModel(request)
    n = judge.operators
    least = [
        min(
            judge.stage_bytes(i, j, 1, recompute=False)
            for i in range(k + 1)
            for j in range(k + 1, n + 1)
        )
        for k in range(n)
    ]
    room = max(least) - 1
    offers = tuple(dataclasses.replace(o, device_memory_bytes=room) for o in request.offers)
    text = shortage(CostModel(dataclasses.replace(request, offers=offers))).reason
    name = request.graph.operators[least.index(max(least))].name
    assert f"operator {name}" in text
    assert f"it needs {size_text(max(least))} " in text
    assert "short by 1 B" in text


@pytest.mark.parametrize("seed", range(4))
def test_more_memory_that_is_said_to_help_helps(seed: int) -> None:
    request = random_case(seed, operators=6, peers=3, held=False)
    small = [
        dataclasses.replace(o, device_memory_bytes=o.device_memory_bytes // 25)
        for o in request.offers
    ]
    tight = dataclasses.replace(request, offers=tuple(small))
    judge = CostModel(tight)
    assert all(fitting(judge, [o.device_memory_bytes for o in small], r) is None for r in (0, 1))
    with pytest.raises(NoPlan) as caught:
        auto(tight)
    found = re.search(r"([\d.]+) (B|KiB|MiB|GiB) more memory on peer-(\d+)", caught.value.reason)
    assert found, caught.value.reason
    size = float(found[1]) * 1024 ** ("B", "KiB", "MiB", "GiB").index(found[2])
    i = int(found[3])
    more = small[i].device_memory_bytes + int(size * 1.001) + 1  # it is said in four digits
    small[i] = dataclasses.replace(small[i], device_memory_bytes=more)
    auto(dataclasses.replace(request, offers=tuple(small)))  # has a plan


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("share", [1, 4, 9])
def test_what_is_told_not_to_fit_without_compiling_it_does_not(seed: int, share: int) -> None:
    request = random_case(seed, operators=8, held=False)
    offers = tuple(
        dataclasses.replace(o, device_memory_bytes=o.device_memory_bytes // share)
        for o in request.offers
    )
    judge = CostModel(dataclasses.replace(request, offers=offers))
    for candidate in Seeds(judge, space_of(request)).all():
        if judge.cuttable(candidate):
            needed = judge.device_bytes(candidate)
            fits = all(size <= offers[p].device_memory_bytes for p, size in needed.items())
            assert judge.fits(candidate) == fits
