"""The event calculation against closed formulas and brute force."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.dag.cost.network import Network, uniform
from shoal.dag.cost.play import Coding, Hosts, max_min, play
from shoal.dag.cost.program import FRAME_BYTES, compile_program
from shoal.dag.cost.unshared import Unshared
from shoal.dag.plan.cut import tied_groups
from shoal.dag.plan.plan import PeerId
from shoal.dag.schedule.flow import Flow, Role
from shoal.dag.schedule.schedule import Kind

VISITS = (Kind.FORWARD, Kind.BACKWARD)


def line(stages: int, microbatches: int, schedule: str, chain: type) -> Flow:
    """One operator per stage and peer."""
    world = chain(stages, microbatches)
    return Flow(world.plan(schedule), world.stages, tied_groups(world.graph, world.stages))


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_gpipe_on_a_line_takes_what_the_flow_line_formula_says(
    seed: int, coded: bool, chain: type
) -> None:
    """Of a flow line: T_fwd = Σ F + Σ R + (M - 1) · max(F, n·beta), the same backwards. Codecs
    beside the compute are machines of the line as well."""
    rng = random.Random(seed)
    stages, m = rng.randint(2, 6), rng.randint(1, 9)
    flow = line(stages, m, "gpipe", chain)
    program = compile_program(flow, lambda t: 1000 if t.role is not Role.SYNC else 0)
    forward = [rng.uniform(0.1, 2) for _ in range(stages)]
    backward = [rng.uniform(0.1, 2) for _ in range(stages)]
    net = uniform(program.peers, 0.0, np.inf)
    for i in range(stages - 1):
        net.bandwidth[i, i + 1] = 1000 / rng.uniform(0.05, 3)
        net.bandwidth[i + 1, i] = 1000 / rng.uniform(0.05, 3)
        net.latency_s[i, i + 1] = rng.uniform(0, 0.5)
        net.latency_s[i + 1, i] = rng.uniform(0, 0.5)
    seconds = [
        forward[i] if a.kind is Kind.FORWARD else backward[i] if a.kind is Kind.BACKWARD else 0.0
        for i, a in zip(program.owner, program.actions, strict=True)
    ]
    codec_s = {
        (i, j): (rng.uniform(0, 2), rng.uniform(0, 2)) if coded else (0.0, 0.0)
        for i in range(stages)
        for j in (i - 1, i + 1)
    }
    by_message = [codec_s.get(program.lanes[lane][:2], (0.0, 0.0)) for lane in program.lane]
    coding = Coding([x for x, _ in by_message], [y for _, y in by_message]) if coded else None
    played = play(program, seconds, net, coding=coding)
    found, exact = Unshared(program).step_s(
        program.size_bytes, seconds, net, range(stages), net.rates(), coding
    )
    assert not exact or found == pytest.approx(played.step_s)
    size = 1000 + FRAME_BYTES
    there = [size / net.bandwidth[i, i + 1] for i in range(stages - 1)]
    back = [size / net.bandwidth[i + 1, i] for i in range(stages - 1)]
    delay = sum(net.latency_s[i, i + 1] for i in range(stages - 1))
    delay_back = sum(net.latency_s[i + 1, i] for i in range(stages - 1))
    there += [x for i in range(stages - 1) for x in codec_s[i, i + 1]]
    back += [x for i in range(stages - 1) for x in codec_s[i + 1, i]]
    t_forward = sum(forward) + sum(there) + delay + (m - 1) * max(*forward, *there, 0)
    t_backward = sum(backward) + sum(back) + delay_back + (m - 1) * max(*backward, *back, 0)
    visits = [a for a, x in enumerate(program.actions) if x.kind in VISITS]
    first_backward = [a for a, x in enumerate(program.actions) if x.kind is Kind.FORWARD]
    assert max(played.end[a] for a in first_backward) == pytest.approx(t_forward)
    # All forwards of the last stage come before its first backward, which needs no message.
    last = max(played.end[a] for a in visits)
    assert last == pytest.approx(t_forward + t_backward)


def test_two_lanes_share_an_uplink_and_the_rest_of_a_faster_one_is_used() -> None:
    # Flow 0 and 1 share resource 7 (10); flow 1 is held to 2 by its own; flow 0 takes the rest.
    assert max_min([(7,), (7, 1)], {7: 10.0, 1: 2.0}) == [8.0, 2.0]
    assert max_min([(), (3,)], {3: 4.0}) == [float("inf"), 4.0]


@given(st.integers(0, 10**6))
def test_max_min_rates_are_feasible_and_nobody_can_get_more(seed: int) -> None:
    rng = random.Random(seed)
    resources = {r: rng.uniform(1, 100) for r in range(rng.randint(1, 5))}
    flows = [
        tuple(rng.sample(sorted(resources), rng.randint(1, min(3, len(resources)))))
        for _ in range(rng.randint(1, 7))
    ]
    rates = max_min(flows, resources)
    used = {r: sum(x for x, f in zip(rates, flows, strict=True) if r in f) for r in resources}
    assert all(used[r] <= room * (1 + 1e-9) for r, room in resources.items())
    for rate, flow in zip(rates, flows, strict=True):
        # Each flow has a full resource on which nobody has more than it.
        assert any(
            used[r] >= resources[r] * (1 - 1e-9)
            and all(x <= rate * (1 + 1e-9) for x, f in zip(rates, flows, strict=True) if r in f)
            for r in flow
        )


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_no_step_is_shorter_than_its_busiest_peer_and_slower_parts_never_help(
    schedule: str, chain: type
) -> None:
    rng = random.Random(5)
    for _ in range(20):
        flow = line(rng.randint(2, 5), rng.randint(1, 6), schedule, chain)
        program = compile_program(flow, lambda t: 1000)
        seconds = [rng.uniform(0, 1) for _ in program.actions]
        net = uniform(program.peers, rng.uniform(0, 0.1), rng.uniform(500, 1e5))
        step = play(program, seconds, net).step_s
        for i in range(len(program.peers)):
            own = range(program.first[i], program.first[i + 1])
            assert step >= sum(seconds[a] for a in own) - 1e-9
        slower = [s * 1.5 for s in seconds]
        assert play(program, slower, net).step_s >= step


def test_peers_of_one_machine_share_its_cores(chain: type) -> None:
    flow = line(4, 8, "gpipe", chain)
    program = compile_program(flow, lambda t: 0)
    seconds = [1.0 if a.kind in VISITS else 0.0 for a in program.actions]
    net = uniform(program.peers)
    alone = play(program, seconds, net).step_s
    assert alone == pytest.approx(2 * (8 + 3))
    shared = Hosts((0, 0, 0, 0), (1, 1, 1, 1), (2,), (2,))
    crowded = play(program, seconds, net, shared).step_s
    assert crowded >= 4 * 16 / 2  # all the work on two cores
    assert crowded <= 4 * 16 / 2 + 2 * 6  # and the ends of the pipeline
    assert play(program, seconds, net, Hosts((0,) * 4, (1,) * 4, (4,), (4,))).step_s == alone


def test_who_waits_for_a_core_computes_no_longer_but_half_a_core_does(chain: type) -> None:
    """What a peer is seen to take is its thread's time: plans must predict the same."""
    program = compile_program(line(4, 8, "gpipe", chain), lambda t: 0)
    seconds = [1.0 if a.kind in VISITS else 0.0 for a in program.actions]

    def computed(cores: float, whole: float) -> float:
        hosts = Hosts((0,) * 4, (1,) * 4, (cores,), (whole,))
        return sum(play(program, seconds, uniform(program.peers), hosts).computed)

    assert computed(2, 2) == pytest.approx(sum(seconds))
    assert computed(1, 1) == pytest.approx(sum(seconds))
    # One real core as two: all the time two compute, but at the ends of the pipeline.
    assert sum(seconds) * 1.6 < computed(1, 2) <= 2 * sum(seconds)
    assert computed(4, 4) == sum(seconds)


def test_an_uplink_is_shared_by_what_a_peer_sends_at_once(chain: type) -> None:
    """One giver, two takers: 1,000 bytes each over an uplink of 100 bytes/s take 20 s together."""
    from shoal.dag.cost.program import Program
    from shoal.dag.schedule.schedule import Action

    program = Program(
        tuple(map(PeerId, "abc")),
        (0, 1, 2, 3),
        (Action(Kind.FORWARD), Action(Kind.FORWARD), Action(Kind.FORWARD)),
        (0, 1, 2),
        (0, 1, 1),
        ((0, 1), (), ()),
        (0, 0),
        (1, 2),
        (1000, 500),
        (0, 1),
        ((0, 1, Role.ACTIVATION), (0, 2, Role.ACTIVATION)),
        {},
    )
    net = Network(
        program.peers,
        np.zeros((3, 3)),
        np.full((3, 3), 100.0),
        np.array([100.0, np.inf, np.inf]),
        np.full(3, np.inf),
    )
    played = play(program, [0.0, 0.0, 0.0], net)
    # Both at 50 bytes/s until the smaller is through at 10 s; the rest of the larger at 100.
    assert played.arrived == pytest.approx([15.0, 10.0])
