"""Operators that are allowed, called with arguments made to harm: each is refused before it runs,
by broker and peer alike, or runs without reading what is not its own (docs/security.md)."""

from __future__ import annotations

import resource
from dataclasses import replace
from typing import Any

import pytest
import torch

from shoal.broker.options import BrokerOptions
from shoal.broker.service.server import Broker, BrokerConfig
from shoal.dag.execute.stage_module import build
from shoal.dag.ir.convert import graph_to_bytes
from shoal.dag.ir.graph import (
    Arg,
    Graph,
    GraphError,
    Input,
    Operator,
    Output,
    Ref,
    TensorSpec,
)
from shoal.dag.ir.infer import results_of
from shoal.dag.ir.rules.rules import MAX_GRAPH_STEPS, MAX_RESULTS, MAX_STEPS, check, check_graph
from shoal.dag.ir.rules.table import RESULTS
from shoal.net.blobs.client import BlobClient
from shoal.net.identity.names import PartyRole
from shoal.proto.broker_pb2 import FAILED, WatchRequest
from shoal.proto.broker_pb2_grpc import RunsStub

from ...broker.conftest import make_spec
from ...broker.service.test_hostile import with_a_peer
from ...broker.service.test_secured import channel, made


def floats(*shape: int) -> TensorSpec:
    return TensorSpec(shape, "float32")


def call(target: str, *args: Any, results: int = 1) -> tuple[Operator, dict[str, TensorSpec]]:
    """An operator and what it reads: specs among the arguments become values."""
    specs: dict[str, TensorSpec] = {}

    def arg(value: Any) -> Arg:
        if isinstance(value, TensorSpec):
            specs[f"t{len(specs)}"] = value
            return Ref(f"t{len(specs) - 1}")
        return tuple(map(arg, value)) if isinstance(value, tuple) else value

    args = tuple(map(arg, args))
    several = results > 1 or target in RESULTS
    return Operator("op", f"aten.{target}", args, (), (Output(None),) * results, several), specs


X, C = floats(2, 3, 4), floats(3)
LSTM = (floats(16, 3), floats(16, 4), floats(16), floats(16))
STATE = (floats(1, 2, 4), floats(1, 2, 4))
ONCE = (True, 1, 0.0, True, False, False)

EXPLOITS: dict[str, tuple[tuple[Operator, dict[str, TensorSpec]], str]] = {
    "leak of 56 MB": (
        call(
            "_native_batch_norm_legit_no_training.default",
            *(X, C, floats(1), C, C, 0.1, 1e-5),
            results=3,
        ),
        r"bias is float32\[1\]: expected float32\[3\]",
    ),
    "the same without statistics": (
        call("_native_batch_norm_legit.no_stats", X, C, floats(1), True, 0.1, 1e-5, results=3),
        "bias is",
    ),
    "statistics of one": (
        call(
            "_native_batch_norm_legit_functional.default",
            *(X, None, None, floats(1), C, False, 0.1, 1e-5),
            results=5,
        ),
        "running_mean is",
    ),
    "division by no sample": (
        call(
            "_native_batch_norm_legit_no_training.default",
            *(floats(0, 3), None, None, C, C, 0.1, 1e-5),
            results=3,
        ),
        "expected one float or more",
    ),
    "instance norm": (
        call("instance_norm.default", X, floats(1), C, None, None, True, 0.1, 1e-5, False),
        "weight is",
    ),
    "group norm told of more": (
        call(
            "native_group_norm.default", floats(2, 6, 4), None, None, 2, 6, 400, 3, 1e-5, results=3
        ),
        r"\(2, 6, 400\): expected \(2, 6, 4\)",
    ),
    "small g": (call("_weight_norm.default", floats(300, 40), floats(1, 1), 0), "g is"),
    "small g, fused": (
        call("_weight_norm_interface.default", floats(300, 40), floats(1, 1), 0, results=2),
        "g is",
    ),
    "weights of no LSTM": (
        call("lstm.input", floats(5, 2, 3), STATE, (floats(4, 3), *LSTM[1:]), *ONCE, results=3),
        r"params 0 is float32\[4, 3\]: expected float32\[16, 3\]",
    ),
    "too few weights": (
        call("lstm.input", floats(5, 2, 3), STATE, LSTM[:3], *ONCE, results=3),
        "too few",
    ),
    "the broker's death in 435 bytes": (
        call("gru.input", floats(5, 2, 3), floats(1, 2, 4), LSTM, *ONCE, results=2),
        "params 0",
    ),
    "a cell's weights": (
        call("gru_cell.default", floats(2, 3), floats(2, 4), floats(1, 3), floats(12, 4)),
        "w_ih is",
    ),
    "an odd mode": (
        call("grid_sampler_2d.default", floats(2, 3, 4, 5), floats(2, 6, 7, 2), 3, 0, False),
        "interpolation_mode is 3: expected one of 0, 1, 2",
    ),
    "an odd reduction": (call("mse_loss.default", C, C, 7), "reduction is 7"),
    "a scale that makes places negative": (
        call("upsample_nearest2d.default", floats(1, 1, 4, 5), (6, 8), 1e-38, 1e-38),
        "a scale is 1e-38",
    ),
    "a step that is no number of steps": (
        call("arange.start_step", -(1 << 40), 8, (1 << 63) - 1),
        r"step is 9223372036854775807: expected at most 2\^60",
    ),
    "a loss of which nothing is written": (
        call("binary_cross_entropy.default", floats(), floats(3, 0), None, 1),
        r"target is float32\[3, 0\]: expected float32\[\]",
    ),
    "weights of another kind": (
        call("binary_cross_entropy.default", C, C, TensorSpec((3,), "float64")),
        "weight is float64",
    ),
    "a product of no row": (
        call("addmv.default", floats(1), floats(0, 4), floats(4)),
        r"self is float32\[1\]: expected float32\[0\]",
    ),
    "strides beyond": (call("_reshape_alias.default", C, (3,), (1 << 20,)), "no contiguous view"),
    "a number as dtype": (call("to.dtype", C, (1 << 63) - 1), "dtype is 9223372036854775807"),
    "4 million results": (
        call("unbind.int", floats(1 << 26)),
        f"gives {1 << 26} results, the graph says 1",
    ),
    "the same by split": (call("split.Tensor", floats(1 << 26), 1), "results"),
    "the same by chunk": (call("unsafe_chunk.default", floats(1 << 26), 1 << 26), "results"),
    "the same by sections": (call("tensor_split.sections", C, 1 << 40), "results"),
    "many, as the graph says": (
        call("unbind.int", floats(MAX_RESULTS + 1), results=MAX_RESULTS + 1),
        f"expected at most {MAX_RESULTS}",
    ),
    "a sequence without end": (
        call("lstm.input", floats(MAX_STEPS + 1, 2, 3), STATE, LSTM, *ONCE, results=3),
        f"loop of {MAX_STEPS + 1} steps",
    ),
}


@pytest.mark.parametrize("what", EXPLOITS)
def test_a_call_made_to_harm_is_refused_before_it_runs(what: str) -> None:
    (op, specs), said = EXPLOITS[what]
    with pytest.raises(GraphError, match=said):
        results_of(op, {name: (spec, False) for name, spec in specs.items()})


def one_operator(op: Operator, specs: dict[str, TensorSpec]) -> Graph:
    """A graph whose loss is the sum of what the operator makes; its outputs' specs are believed."""
    named = {f"t{i}": f"in:t{i}" for i in range(len(specs))}
    args = tuple(_renamed(a, named) for a in op.args)
    op = replace(op, args=args, outputs=tuple(Output(C) for _ in op.outputs))
    loss = Operator("loss", "aten.sum.default", (Ref(op.values[0]),), (), (Output(floats()),))
    inputs = tuple(Input(n, s) for n, s in specs.items())
    return Graph(inputs, (), (), (op, loss), "loss", batch=2)


def _renamed(arg: Arg, names: dict[str, str]) -> Arg:
    if isinstance(arg, Ref):
        return Ref(names[arg.value])
    return tuple(_renamed(a, names) for a in arg) if isinstance(arg, tuple) else arg


@pytest.mark.parametrize(
    "what", ["leak of 56 MB", "small g", "weights of no LSTM", "strides beyond"]
)
def test_a_stage_of_it_is_not_built(what: str) -> None:
    """The peer looks again, whatever its broker said; also where only the evaluation has it."""
    op, specs = EXPLOITS[what][0]
    graph = one_operator(op, specs)
    with pytest.raises(GraphError, match=EXPLOITS[what][1]):
        build(graph, 0, 2, ("loss",), {}, torch.device("cpu"))


async def test_millions_of_results_fail_their_run_and_cost_nothing() -> None:
    op, _ = EXPLOITS["4 million results"][0]
    zeros = Operator("zeros", "aten.zeros.default", ((1 << 26,),), (), (Output(floats(1 << 26)),))
    op = replace(op, args=(Ref("zeros"),), outputs=(Output(floats()),))
    loss = Operator("loss", "aten.relu.default", (Ref(op.values[0]),), (), (Output(floats()),))
    data = graph_to_bytes(Graph((), (), (), (zeros, op, loss), "loss", batch=2))
    options = BrokerOptions(probe_s=0.0, lease_s=600.0)  # the peer's heartbeat is left out
    async with (
        Broker(BrokerConfig(port=0, options=options)) as broker,
        with_a_peer(broker),
        channel(broker, made(broker, PartyRole.SUBMITTER, "mallory")) as stubs,
    ):
        ask = make_spec()
        ask.graph.CopyFrom(await BlobClient(stubs).store(data))
        ask.data.CopyFrom(await BlobClient(stubs).store(b"no data"))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        run = (await RunsStub(stubs).Submit(ask)).run
        async for event in RunsStub(stubs).Watch(WatchRequest(run=run)):
            if event.state.phase == FAILED:
                break
        assert "67108864 results, the graph says 1" in event.state.reason.text
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10


# ---------------------------------------------------------------- honest calls


def test_what_honest_models_do_stays_within_the_limits() -> None:
    hidden = (floats(8, 2, 4), floats(8, 2, 4))
    layers = [f for i in range(4) for _ in "ab" for f in (floats(16, 8 if i else 3), *LSTM[1:])]
    given = (floats(1000, 2, 3), hidden, tuple(layers), True, 4, 0.0, True, True, False)
    honest = [
        call("lstm.input", *given, results=3),
        call("unbind.int", floats(8192, 4), results=8192),
        call("split.Tensor", floats(0, 4), 2),
        call("upsample_nearest2d.default", floats(1, 1, 3, 5), (4, 8), 1.5, 1.6),
        call("mul.Tensor", C, 0.5),
        call("slice.Tensor", C, 0, 0, (1 << 63) - 1),
    ]
    for op, specs in honest:
        check(op, specs)


def test_the_loops_of_a_graph_count_together() -> None:
    """Each alone is within the limit."""
    op, specs = call("lstm.input", floats(MAX_STEPS, 2, 3), STATE, LSTM, *ONCE, results=3)
    graph = one_operator(op, specs)
    again = tuple(replace(graph.operators[0], name=f"op{i}") for i in range(5))
    check_graph(replace(graph, operators=again[:4]))
    with pytest.raises(GraphError, match=f"expected at most {MAX_GRAPH_STEPS}"):
        check_graph(replace(graph, operators=again))
