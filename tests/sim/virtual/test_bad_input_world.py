"""What comes in wrong in a run: one reason that says what and where, and all else goes on."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest

from shoal.dag.ir.graph import TensorSpec
from shoal.job import Job
from shoal.proto import broker_pb2, common_pb2, graph_pb2

JOB = Job.from_table(
    {
        "version": 1,
        "name": "gpt-bad-input",
        "model": {
            "factory": "shoal.examples.gpt:gpt",
            "args": {"layers": 1, "width": 16, "heads": 2, "length": 8, "dropout": 0.0},
        },
        "data": {"kind": "text", "length": 8},
        "train": {"steps": 3, "batch": 4, "microbatch": 2, "lr": 1e-2},
    }
)


@pytest.fixture
def gpt(laboratory):
    return laboratory(JOB)


def altered(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize(
    "change",
    [altered, lambda data: data[: len(data) // 2], lambda data: data + b"more"],
    ids=["corrupted", "truncated", "longer"],
)
def test_a_damaged_message_breaks_one_connection_and_changes_nothing(gpt, equal_training, change):
    world = gpt.world(3)
    damaged = []

    def tamper(source: str, destination: str, message: bytes) -> bytes:
        if len(message) < 1000 or len(damaged) == 2:  # only what carries a tensor
            return message
        damaged.append(f"{source} -> {destination}")
        return change(message)

    world.network.medium.tamper = tamper
    equal_training(gpt.train(world), gpt.plain())
    assert len(damaged) == 2, "the fault did not fire"


def test_a_tensor_of_another_shape_is_refused_with_both_shapes_and_frees_the_peers(
    gpt, equal_training
):
    world = gpt.world(2)
    device = world.peers["p0"].device
    honest = device.payload

    def flat(key):
        payload = honest(key)
        return replace(payload, spec=TensorSpec((payload.spec.elements,), payload.spec.dtype))

    device.payload = flat
    events = world.finish(world.submit(gpt.spec))
    refused = next(e.state.reason for e in events if e.state.reason.code == "frame")
    assert "expected float32[2, 8, 16]" in refused.text
    assert "float32[256]" in refused.text
    assert "p0 -> p1" in refused.text
    device.payload = honest
    equal_training(gpt.train(world), gpt.plain())


def test_a_graph_with_a_forbidden_operator_is_refused_and_the_next_run_is_not(gpt, equal_training):
    world = gpt.world(2)
    graph = graph_pb2.Graph.FromString(world.blobs[gpt.spec.graph.hash])
    graph.operators[1].target = "aten.from_file.default"
    spec = broker_pb2.RunSpec()
    spec.CopyFrom(gpt.spec)
    data = graph.SerializeToString()
    name = hashlib.sha256(data).hexdigest()
    world.blobs[name] = data
    spec.graph.CopyFrom(common_pb2.BlobRef(hash=name, size_bytes=len(data)))
    last = world.finish(world.submit(spec))[-1].state
    assert last.phase == broker_pb2.FAILED
    assert "aten.from_file.default is not on the 'full' allow-list" in last.reason.text
    equal_training(gpt.train(world), gpt.plain())
