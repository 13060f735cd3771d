"""What the ends of a coded link remember: kept, loaded again, and unchanged by a wrong frame."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shoal.compression.codec import CodecError
from shoal.dag.execute.execute import TensorSpecError
from shoal.dag.schedule.flow import Role
from shoal.net.links.frame import Payload
from shoal.peer.core.step import transfer_of

from ..conftest import arrived
from .coded_runs import Mlp, digits, one_step, parameters, stateful_world


def test_a_run_goes_on_from_kept_states_bit_for_bit(make_case):
    case = make_case(Mlp(), **digits(), optimizer="sgd", momentum=0.0)
    world = stateful_world(case)
    for step in range(3):
        one_step(world, step)
    kept = {
        p: {n: t.clone() for n, t in d._work.streams.state_tensors(2).items()}
        for p, d in world.devices.items()
    }
    assert all(kept.values())
    at = {
        p: {k: {n: w.detach().clone() for n, w in h.executor.parameters.items()}
            for k, h in d._work.held.items()}
        for p, d in world.devices.items()
    }  # fmt: skip
    again = stateful_world(case)
    for peer, device in again.devices.items():
        device._work.streams.load_state_tensors(kept[peer])
        for k, held in device._work.held.items():
            with torch.no_grad():
                for name, parameter in held.executor.parameters.items():
                    parameter.copy_(at[peer][k][name])
    fresh = len(world.outcomes)
    for step in range(3, 6):
        one_step(world, step)
        one_step(again, step)
    assert [o.loss for o in world.outcomes[fresh:]] == [o.loss for o in again.outcomes]
    for stage in (0, 1):
        for one, other in zip(parameters(world, stage), parameters(again, stage), strict=True):
            assert all(torch.equal(one[n], other[n]) for n in one)


def test_the_state_of_the_step_before_is_still_known(make_case):
    """A neighbour can be one step ahead; a snapshot wants what was true after its step."""
    world = stateful_world(make_case(Mlp(), **digits()))
    one_step(world, 0)
    first = {p: dict(d._work.streams.state_tensors(0)) for p, d in world.devices.items()}
    one_step(world, 1)
    for peer, device in world.devices.items():
        before = device._work.streams.state_tensors(0)
        assert before.keys() == first[peer].keys()
        assert all(torch.equal(before[n], first[peer][n]) for n in before)
        now = device._work.streams.state_tensors(1)
        assert any(not torch.equal(before[n], now[n]) for n in now)


def test_states_of_another_plan_are_refused(make_case):
    case = make_case(Mlp(), **digits())
    world = stateful_world(case)
    one_step(world, 0)
    states = world.devices["a"]._work.streams.state_tensors(0)
    with pytest.raises(CodecError, match="another plan"):
        case.world(case.plan(2, ["a b", "c"])).devices["a"]._work.streams.load_state_tensors(states)
    with pytest.raises(CodecError, match="another plan"):
        world.devices["c"]._work.streams.load_state_tensors(states)
    with pytest.raises(CodecError, match="no name"):
        world.devices["a"]._work.streams.load_state_tensors({"x": torch.zeros(1)})


def test_a_frame_that_does_not_decode_changes_neither_state_nor_store(make_case):
    case = make_case(Mlp(), **digits())
    world = stateful_world(case)
    one_step(world, 0)
    device = world.devices["c"]
    key, good = next(
        (k, f) for k, f in world.frames if k.destination == "c" and k.role is Role.ACTIVATION
    )
    key = key._replace(step=1)
    before = {n: t.clone() for n, t in device._work.streams.state_tensors(0).items()}
    for wrong in (
        replace(good, key=key, data=good.data[:-1]),
        replace(good, key=key, codec_header=b""),
        replace(good, key=key),  # the payload of the step before
    ):
        with pytest.raises(CodecError):
            device.accept(wrong)
    with pytest.raises(TensorSpecError, match="expected codec delta"):
        device.accept(replace(good, key=key, codec="raw/1"))
    assert key not in device._work.store
    after = device._work.streams.state_tensors(0)
    assert all(torch.equal(before[n], after[n]) for n in before)
    one_step(world, 1)


def test_a_frame_that_comes_twice_counts_once(make_case):
    case = make_case(Mlp(), **digits())
    world = stateful_world(case)
    one_step(world, 0)
    device, (key, frame) = world.devices["c"], world.frames[0]
    before = device._work.streams.state_tensors(0)
    device.accept(replace(frame, data=memoryview(bytearray(frame.data))))
    assert key not in device._work.store
    assert all(torch.equal(before[n], t) for n, t in device._work.streams.state_tensors(0).items())
    one_step(world, 1)


def test_an_absent_gradient_leaves_the_states_as_they_are(make_case):
    world = stateful_world(make_case(Mlp(), **digits()))
    one_step(world, 0)
    key = next(k for k, _ in world.frames if k.role is Role.ACTIVATION_GRAD)
    key, sender = key._replace(step=1), world.devices[key.source]
    coding = sender._work.streams.codings.of(transfer_of(key))
    states = {p: d._work.streams.state_tensors(0) for p, d in world.devices.items()}
    payload = Payload(coding.codec.name, b"", coding.whole, absent=True)
    device = world.devices[key.destination]
    device.accept(arrived(key, payload))
    assert device._work.store.get(key).tensor is None
    device.release(key)
    assert all(
        d._work.streams.state_tensors(0).keys() == states[p].keys()
        for p, d in world.devices.items()
    )
    one_step(world, 1)
