"""SkipPipe's simulation and search as the benchmark has them: what was published comes out."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.benchmarks.schedules.published_search import blind_paths, conflict_search
from shoal.benchmarks.schedules.route_checks import broken_rules
from shoal.benchmarks.schedules.skip import SHIPPED_S, ours, shipped_s, simulated_s
from shoal.benchmarks.schedules.skip_places import (
    PUBLISHED,
    Instance,
    from_file,
    geography,
    published,
    published_paths,
)
from shoal.benchmarks.schedules.skip_world import executed
from shoal.planner.routes.route_timing import RouteClock

SLOW_S = {"full": 154.2, "skip_only": 87.2, "without_collisions": 75.8, "skippipe": 68.6}
"""Their simulation with forwards of 1.76 s."""


@pytest.fixture(scope="module")
def twelve() -> Instance:
    return published()


def test_the_shipped_schedule_takes_as_long_as_they_say(twelve: Instance) -> None:
    assert shipped_s(twelve) == pytest.approx(SHIPPED_S, abs=5e-4)
    assert shipped_s(replace(twelve, forward_s=1.76)) == pytest.approx(SLOW_S, abs=0.06)


@pytest.mark.parametrize("method", ["skip_only", "without_collisions", "skippipe"])
def test_the_shipped_schedule_keeps_the_rules(twelve: Instance, method: str) -> None:
    stage_of = {n: s for s, nodes in enumerate(PUBLISHED["stage_nodes"]) for n in nodes}
    paths = published_paths(method)
    wave = [path for path in paths for _ in range(15 // len(paths))]
    assert not broken_rules(twelve.rules, [stage_of[n] for n in range(20)], wave)
    by_clock = max(RouteClock(twelve.times()).run([wave, wave]))
    assert by_clock == pytest.approx(SHIPPED_S[method], rel=0.005)


def test_our_port_of_their_search_finds_the_shipped_step(twelve: Instance) -> None:
    found = conflict_search(
        twelve.rules,
        twelve.delay_s.tolist(),
        twelve.forward_s,
        PUBLISHED["stage_nodes"],
        lambda: False,
        bundle=3,
    )
    assert found is not None
    assert found.finished
    assert found.step_s == pytest.approx(SHIPPED_S["skippipe"], abs=5e-4)
    assert simulated_s(twelve, [found.paths] * 2) < 1.2 * found.step_s


@pytest.mark.parametrize("seed", range(3))
def test_blind_paths_keep_the_rules_on_any_places(seed: int) -> None:
    instance = geography(seed)
    assert (instance.delay_s == instance.delay_s.T).all()
    groups = [[n for n in range(20) if n % 6 == s] for s in range(6)]
    groups[0], groups[1] = [*groups[0], groups[1][3]], groups[1][:3]
    paths = blind_paths(instance.rules, groups, seed)
    stage_of = [next(s for s, nodes in enumerate(groups) if n in nodes) for n in range(20)]
    assert not broken_rules(replace(instance.rules, swaps=0), stage_of, paths)


def test_a_file_of_places_is_read_or_refused_by_what_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    links = [["a", "b", 20, 50e6], ["a", "c", 80, 10e6]]
    table = {"places": ["a", "b", "c"], "links": [*links, ["b", "c", 90, 10e6]]}
    file.write_text(json.dumps(table))
    found = from_file(file)
    assert found.name == "mine"
    assert found.sizes == (5, 3, 3, 3, 3, 3)
    for wrong, words in (
        ("places", "no JSON"),
        (json.dumps({"places": ["a"]}), "expected an object with places and links"),
        (json.dumps(table | {"links": links}), "no link between b and c"),
        (json.dumps(table | {"links": [["a", "z", 1, 1]]}), "not as in"),
        (json.dumps(table | {"node_places": [0, 1, 2]}), "3 nodes for 6 stages"),
    ):
        file.write_text(wrong)
        with pytest.raises(ValueError, match=words):
            from_file(file)
    with pytest.raises(ValueError, match="cannot be read"):
        from_file(tmp_path / "none.json")


@pytest.mark.slow
def test_the_machines_take_as_long_as_planned_over_the_twelve_places() -> None:
    twelve = published(as_shipped=False)
    ran = executed(twelve, ours(twelve).routes)
    assert ran.exact, "losses of the loop over the same routes"
    assert ran.world_s == pytest.approx(ran.planned_s, rel=0.03)
