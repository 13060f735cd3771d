"""One conformance suite: what every transport does for the frames of its links."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from shoal.compression.codec import parse
from shoal.dag.ir.graph import TensorSpec
from shoal.dag.schedule.flow import Role
from shoal.net.links.frame import Payload
from shoal.net.links.transport import LinkError

ACT, GRAD, SYNC, SNAP = Role.ACTIVATION, Role.ACTIVATION_GRAD, Role.SYNC, Role.SNAPSHOT


def decoded(arrived):
    return parse(arrived.codec).decode(arrived.spec, arrived.codec_header, arrived.data)


async def test_frames_of_one_role_arrive_in_the_order_of_send(world):
    a, b = await world.pair()
    sent = [a.send("b", 3000, role, m) for m in range(20) for role in (ACT, GRAD, SYNC)]
    await world.until(lambda: len(b.arrived) == len(sent))
    for role in (ACT, GRAD, SYNC):
        expected = [key for key in sent if key.role == role]
        assert [key for key in b.arrived_keys if key.role == role] == expected


async def test_a_tensor_arrives_as_it_was_with_its_spec_and_codec(world):
    a, b = await world.pair()
    tensors = [
        torch.randn(3, 5),
        torch.randn(7, dtype=torch.bfloat16),
        torch.rand(2, 3, 4) > 0.5,
        torch.arange(5),
        torch.tensor(1.5, dtype=torch.float64),
        torch.empty(0, 4),
        torch.randn(6, 8).t(),
    ]
    for m, tensor in enumerate(tensors):
        a.send("b", tensor, ACT, m)
    await world.until(lambda: len(b.arrived) == len(tensors))
    for tensor, arrived in zip(tensors, b.arrived, strict=True):
        assert arrived.spec.sizes == tuple(tensor.shape)
        assert torch.equal(decoded(arrived), tensor)
        assert not arrived.data.readonly


@pytest.mark.parametrize(
    "size", [0, 1, 2**16 - 1, 2**16, 2**16 + 1, 2**20 + 1, 2**22 - 1, 2**22 + 1, 3 * 2**22 + 7]
)
async def test_frames_of_awkward_sizes_arrive_whole(world, size):
    a, b = await world.pair()
    tensor = torch.randint(256, (size,), dtype=torch.uint8)
    a.send("b", tensor)
    a.send("b", 5, microbatch=1)
    await world.until(lambda: len(b.arrived) == 2)
    assert torch.equal(decoded(b.arrived[0]), tensor)


async def test_buffers_are_sent_in_their_order_without_being_joined_first(world):
    a, b = await world.pair()
    parts = [bytes([n]) * (70_000 * n) for n in (1, 2, 0, 3)]
    spec = TensorSpec((sum(map(len, parts)),), "uint8")
    payload = Payload("raw/1", b"", spec, tuple(memoryview(p) for p in parts))
    a.transport.send("b", a.key("b", ACT, 0), payload)
    await world.until(lambda: b.arrived)
    assert bytes(b.arrived[0].data) == b"".join(parts)


async def test_an_absent_gradient_arrives_as_absent(world):
    a, b = await world.pair()
    payload = Payload("raw/1", b"", TensorSpec((64, 64), "float32"), absent=True)
    a.transport.send("b", a.key("b", GRAD, 0), payload)
    await world.until(lambda: b.arrived and a.acknowledged)
    assert b.arrived[0].absent
    assert b.arrived[0].spec == payload.spec
    assert b.arrived[0].data.nbytes == 0


async def test_frames_flow_both_ways_on_one_dial(world):
    a, b = await world.pair()
    forward, back = a.send("b", 200_000), b.send("a", 300_000)
    await world.until(lambda: a.arrived and b.arrived and a.acknowledged and b.acknowledged)
    assert (b.arrived_keys, a.arrived_keys) == ([forward], [back])


async def test_a_key_that_was_sent_is_ignored_before_and_after_its_acknowledgement(world):
    a, b = await world.pair()
    key = a.send("b", 1000)
    assert a.send("b", 1000) == key
    await world.until(lambda: a.acknowledged)
    b.transport.release("a", key)
    a.send("b", 1000)
    await world.settle(a, b)
    assert b.arrived_keys.count(key) == 1
    assert a.acknowledged.count(key) == 1


async def test_every_frame_is_acknowledged_once_and_its_bytes_are_let_go(world):
    a, _ = await world.pair()
    tensor = torch.zeros(100_000)
    storage = weakref.ref(tensor.untyped_storage())
    keys = [a.send("b", tensor, ACT, m) for m in range(3)]
    del tensor
    assert storage() is not None
    await world.until(lambda: len(a.acknowledged) == 3)
    assert a.acknowledged == keys
    gc.collect()
    assert storage() is None


async def test_frames_queued_before_the_link_is_up_go_when_it_is(world):
    a, b = await world.join("a"), await world.join("b")
    b.transport.expect("a")
    b.transport.allow("a", ACT, 3)
    await world.dial(a, b)
    keys = [a.send("b", 10, ACT, m) for m in range(3)]
    await world.until(lambda: b.arrived_keys == keys)


async def test_a_role_stops_at_its_slots_and_no_other_role_with_it(world):
    a, b = await world.pair(slots=2)
    acts = [a.send("b", 5000, ACT, m) for m in range(5)]
    grads = [a.send("b", 5000, GRAD, m) for m in range(2)]
    await world.settle(a, b)
    assert [k for k in b.arrived_keys if k.role == ACT] == acts[:2]
    assert [k for k in b.arrived_keys if k.role == GRAD] == grads
    b.transport.release("a", acts[1])
    await world.until(lambda: acts[2] in b.arrived_keys)
    b.transport.release("a", acts[1])  # again: without effect
    await world.settle(a, b)
    assert acts[3] not in b.arrived_keys
    b.transport.allow("a", ACT, 10)
    await world.until(lambda: acts[4] in b.arrived_keys)


async def test_a_link_without_free_slots_holds_up_no_other_link(world):
    a, b = await world.pair(slots=2)
    c = await world.join("c")
    await world.connect(a, c)
    for m in range(4):
        a.send("b", 100_000, ACT, m)
    keys = [a.send("c", 100_000, ACT, m) for m in range(4)]
    await world.until(lambda: c.arrived_keys == keys)
    await world.settle(a, b)
    assert len([k for k in b.arrived_keys if k.role == ACT]) == 2


async def test_a_small_urgent_frame_overtakes_a_big_snapshot(world):
    a, b = await world.pair()
    snapshot = a.send("b", 16_000_000, SNAP)
    urgent = [a.send("b", 1000, role) for role in (ACT, GRAD, SYNC)]
    await world.until(lambda: len(b.arrived) == 4)
    assert set(b.arrived_keys[:3]) == set(urgent)
    assert b.arrived_keys[3] == snapshot


async def test_a_break_in_mid_frame_costs_no_encoding_and_no_frame(world):
    a, b = await world.pair()
    tensors = [torch.randint(256, (20_000_000,), dtype=torch.uint8) for _ in range(2)]
    keys = [a.send("b", t, ACT, m) for m, t in enumerate(tensors)]
    small = a.send("b", 100, SYNC)
    await world.until(lambda: small in b.arrived_keys)
    world.cut(a, b)
    await world.until(lambda: a.ups("b") == 2 and len(b.arrived) == 2)
    world.cut(a, b)
    await world.until(lambda: len(b.arrived) == 3 and len(a.acknowledged) == 3)
    assert a.encodes == 3
    assert [k for k in b.arrived_keys if k.role == ACT] == keys
    big = [x for x in b.arrived if x.key.role == ACT]
    assert all(torch.equal(decoded(x), t) for x, t in zip(big, tensors, strict=True))
    assert a.downs("b") >= 2


async def test_releases_and_acknowledgements_lost_in_a_break_are_made_up_for(world):
    a, b = await world.pair(slots=2)
    keys = [a.send("b", 1000, ACT, m) for m in range(6)]
    released = []

    def release_and_cut(event):
        for key in b.arrived_keys:
            if key not in released and key.role == ACT:
                released.append(key)
                b.transport.release("a", key)
                if len(released) in (2, 4):
                    world.cut(a, b)

    b.on_event = release_and_cut
    await world.until(lambda: len(a.acknowledged) == 6)
    assert b.arrived_keys == a.acknowledged == keys


async def test_a_newer_dial_replaces_an_older_one_and_keeps_the_frames(world):
    a, b = await world.pair(slots=2)
    keys = [a.send("b", 1000, ACT, m) for m in range(4)]
    await world.until(lambda: len(b.arrived) == 2)
    await world.dial(a, b, generation=2)
    await world.until(lambda: a.ups("b") == 2 and b.ups("a") == 2)
    for key in keys[:2]:
        b.transport.release("a", key)
    await world.until(lambda: len(a.acknowledged) == 4)
    assert b.arrived_keys == keys


async def test_an_older_dial_is_ignored(world):
    a, b = await world.pair()
    await world.dial(a, b, generation=1)
    await world.dial(a, b, generation=0)
    a.send("b", 10)
    await world.settle(a, b)
    assert a.ups("b") == b.ups("a") == 1


async def test_a_peer_that_started_again_gets_what_it_has_not_acknowledged(world):
    a, b = await world.pair(slots=1)
    keys = [a.send("b", 1000, ACT, m) for m in range(3)]
    await world.until(lambda: a.acknowledged == keys[:1])
    await world.crash(b)
    b = await world.join("b", boot="2")
    b.transport.expect("a")
    b.transport.allow("a", ACT, 1)
    await world.until(lambda: b.arrived_keys == keys[1:2])
    b.transport.release("a", keys[1])
    await world.until(lambda: a.acknowledged == keys)


async def test_both_sides_may_hang_up_and_begin_anew(world):
    a, b = await world.pair()
    a.send("b", 1000)
    await world.until(lambda: a.acknowledged)
    a.transport.hang_up("b")
    b.transport.hang_up("a")
    a.events.clear()
    b.events.clear()
    b.transport.expect("a")
    b.transport.allow("a", ACT, 1)
    await world.dial(a, b, generation=2)
    key = a.send("b", 1000)  # the key of before: the new link never saw it
    await world.until(lambda: a.acknowledged == [key] and b.arrived_keys == [key])


async def test_only_one_side_hung_up_and_began_anew(world):
    a, b = await world.pair()
    a.send("b", 1000)
    back = b.send("a", 1000, SYNC)
    await world.until(lambda: a.acknowledged and b.acknowledged)
    a.transport.hang_up("b")
    late = b.send("a", 1000, SYNC, 1)
    await world.dial(a, b, generation=2)
    a.transport.allow("b", SYNC, 5)
    key = a.send("b", 1000, ACT, 7)
    await world.until(lambda: key in a.acknowledged and late in a.arrived_keys)
    assert a.arrived_keys == [back, late]


async def test_hang_up_frees_everything_and_says_nothing(world):
    a, b = await world.pair(slots=1)
    tensor = torch.zeros(1_000_000)
    storage = weakref.ref(tensor.untyped_storage())
    for m in range(3):
        a.send("b", tensor, ACT, m)
    del tensor
    await world.until(lambda: b.arrived)
    a.events.clear()
    a.transport.hang_up("b")
    gc.collect()
    assert storage() is None
    with pytest.raises(LinkError, match="no link to b"):
        a.send("b", 10)
    with pytest.raises(LinkError, match="no link to b"):
        a.transport.allow("b", ACT, 1)
    a.transport.release("b", a.key("b", ACT, 0))
    a.transport.hang_up("b")
    await world.until(lambda: b.downs("a") == 1)
    assert a.events == []


async def test_hanging_up_in_a_callback_is_possible(world):
    a, b = await world.pair()
    b.on_event = lambda event: b.transport.hang_up("a")
    a.send("b", 300_000)
    await world.until(lambda: a.downs("b") == 1)
    assert len(b.arrived) == 1


async def test_a_dial_that_nobody_answers_is_told_and_succeeds_later(world):
    a, b = await world.join("a"), await world.join("b")
    await world.crash(b)
    await world.dial(a, b)
    await world.until(lambda: a.downs("b") >= 2)
    b = await world.join("b", boot="2")
    b.transport.expect("a")
    await world.until(lambda: a.ups("b") == 1)
