"""Predicted against allocated bytes of stages: part of benchmarks/steps/truth.py.

The peers of a plan run two steps in this process, device by device, with one thread each as their
offers say, and with every transfer; torch's profiler tells each allocation of its CPU allocator
with its address, so that what a peer asked for and what it gave back is known exactly. On CUDA
torch counts itself.
"""

from __future__ import annotations

import bisect
import copy
import math
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from shoal.dag.capture.capture import Captured, capture
from shoal.dag.plan.plan import PeerId
from shoal.dag.schedule.flow import Flow
from shoal.dag.schedule.slices import PlanSlices
from shoal.examples.gpt import gpt
from shoal.examples.resnet_digits import resnet
from shoal.examples.unet import unet
from shoal.job import Train, Training
from shoal.net.links.frame import Arrived, FrameKey, Payload
from shoal.peer.compute.device import TorchDevice
from shoal.peer.compute.order import BuildOrder
from shoal.peer.data.reader import Reader
from shoal.peer.data.sources import resolve
from shoal.planner.answers.planning import outlined
from shoal.planner.base.interface import PeerOffer, PlannerOptions, PlanRequest
from shoal.planner.cost.candidate import Candidate, StageShare, to_plan
from shoal.planner.cost.cost_model import CostModel

__all__ = [
    "LEAST_BYTES",
    "ModelRun",
    "Outcome",
    "World",
    "cases",
    "models",
    "outcomes",
    "peaks_of",
    "received",
    "summary",
]

LEAST_BYTES = 20e6
"""Peers that take less do not count: constants of torch would be measured."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One peer of one plan."""

    name: str
    predicted: int
    measured: int

    @property
    def error(self) -> float:
        return abs(self.predicted / self.measured - 1)

    def __str__(self) -> str:
        return (
            f"{self.name:44s} predicted {self.predicted / 1e6:8.2f} MB, "
            f"allocated {self.measured / 1e6:8.2f} MB, {self.predicted / self.measured - 1:+.1%}"
        )


@dataclass(frozen=True)
class Model:
    name: str
    make: Callable[[], nn.Module]
    batch: int
    microbatch: int
    length: int = 0
    shape: tuple[int, ...] = ()
    labels: tuple[int, ...] = ()
    optimizer: Literal["adamw", "adamw8bit", "sgd"] = "adamw"
    names: tuple[str, str] = ("x", "y")


def models() -> Iterator[Model]:
    yield Model("gpt-192", lambda: gpt(4, 192, 6, 128, 0.1), 24, 4, 128)
    yield Model("gpt-384", lambda: gpt(3, 384, 6, 64, 0.0), 24, 4, 64)
    yield Model("gpt-512-8bit", lambda: gpt(3, 512, 8, 64, 0.0), 24, 4, 64, optimizer="adamw8bit")
    yield Model("resnet-32", lambda: resnet(32, 2), 768, 128, 0, (1, 8, 8), (), "sgd")
    yield Model("unet-16", lambda: unet(16, 2), 24, 4, 0, (1, 64, 64), (1, 64, 64))
    yield Model("llama-256", llama, 24, 4, 128, names=("input_ids", "labels"))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=256,
            intermediate_size=688,
            num_hidden_layers=3,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=128,
        )
    )


def cases(operators: int, microbatches: int) -> Iterator[tuple[str, Candidate]]:
    """Cuts, schedules, recomputation, several holders and several stages on a peer."""

    def row(peers: Sequence[int], parts: int, again: bool = False) -> tuple[StageShare, ...]:
        at = [operators * k // parts for k in range(parts + 1)]
        return tuple(
            StageShare(peers[k % len(peers)], at[k], at[k + 1], again) for k in range(parts)
        )

    m = microbatches
    yield "alone", Candidate((row([0], 1),), (m,), "1f1b")
    yield "2 gpipe", Candidate((row([0, 1], 2),), (m,), "gpipe")
    yield "3 1f1b", Candidate((row([0, 1, 2], 3),), (m,), "1f1b")
    yield "3 1f1b, recompute", Candidate((row([0, 1, 2], 3, True),), (m,), "1f1b")
    yield "2 interleaved", Candidate((row([0, 1], 4),), (m,), "interleaved")
    yield "2 interleaved, recompute", Candidate((row([0, 1], 4, True),), (m,), "interleaved")
    half = (row([0, 1], 2), row([2, 3], 2))
    yield "2 pipelines", Candidate(half, (m // 2, m - m // 2), "1f1b")


def outcomes(
    wanted: Sequence[str] = (), say: Callable[[str], None] = lambda line: None
) -> list[Outcome]:
    """Every peer of every case, those below LEAST_BYTES included."""
    found: list[Outcome] = []
    torch.set_num_threads(1)
    for model in models():
        if wanted and model.name not in wanted:
            continue
        with tempfile.TemporaryDirectory() as folder:
            run = ModelRun(model, Path(folder))
            for name, candidate in cases(run.operators, model.batch // model.microbatch):
                for outcome in run.measure(f"{model.name} {name}", candidate):
                    found.append(outcome)
                    say(str(outcome))
    return found


def summary(found: Sequence[Outcome]) -> tuple[float, float, int]:
    """Worst and median error of those that count, and how many they are."""
    errors = [o.error for o in found if o.measured >= LEAST_BYTES]
    return max(errors), statistics.median(errors), len(errors)


class ModelRun:
    """A model with data."""

    def __init__(
        self,
        model: Model,
        folder: Path,
        dtype: Literal["fp32", "bf16"] = "fp32",
        *,
        steps: int = 2,
    ) -> None:
        torch.manual_seed(0)
        x, y = model.names
        rng = np.random.default_rng(0)
        if model.length:
            (folder / "t.txt").write_bytes(bytes(rng.integers(0, 256, 20000, dtype=np.uint8)))
            options: dict[str, Any] = {"source": str(folder / "t.txt"), "length": model.length}
        else:
            n = 2 * model.batch
            pixels = rng.random((n, *model.shape), dtype=np.float32)
            targets = rng.integers(0, 2, (n, *model.labels))
            targets = targets.astype(np.float32) if model.labels else targets
            arrays: dict[str, Any] = {x: pixels, y: targets}
            np.savez(folder / "d.npz", **arrays)
            options = {"kind": "arrays", "source": str(folder / "d.npz")}
        manifest, self.paths = resolve(
            folder / "blobs", **options, inputs=x, targets=y, holdout=0.1
        )
        self.model, self.manifest = model, manifest
        self.train = Train(
            steps=steps,
            batch=model.batch,
            microbatch=model.microbatch,
            optimizer=model.optimizer,
        )
        reader = Reader(
            manifest, self.paths.__getitem__, seed=0, microbatches=self.train.microbatches
        )
        batch = reader.batch(0, 0, model.microbatch)
        self.captured: Captured = capture(copy.deepcopy(model.make()), batch, dtype=dtype)
        self.graph = self.captured.graph.bind(model.microbatch)
        self.operators = len(self.graph.operators)
        self.offers = tuple(
            PeerOffer(PeerId(f"p{i}"), device_memory_bytes=2**50, threads=1) for i in range(4)
        )
        self.request = PlanRequest(
            self.graph,
            self.offers,
            self.train.microbatches,
            model.microbatch,
            options=PlannerOptions(
                optimizer_slots=self.train.optimizer_slots,
                state_bytes=self.train.state_bytes,
                in_8_bits=self.train.in_8_bits,
            ),
        )
        self.judge = CostModel(self.request)

    def measure(self, name: str, candidate: Candidate) -> Iterator[Outcome]:
        predicted = self.judge.device_bytes(candidate)
        world = self.world(candidate)
        peaks = world.run(2)
        if torch.cuda.is_available() and len(candidate.peers) == 1:  # gpu
            measured = world.on_card(2)
            yield Outcome(f"{name}: on cuda", predicted[candidate.peers[0]], measured)
        for i in candidate.peers:
            peer = self.offers[i].peer
            yield Outcome(f"{name}: {peer} {peaks[peer][1]}", predicted[i], peaks[peer][0])

    def world(self, candidate: Candidate) -> World:
        plan = to_plan(candidate, [o.peer for o in self.offers], self.model.microbatch)
        slices = PlanSlices(outlined(self.request.graph, plan))
        return World(
            slices,
            BuildOrder(
                run="r",
                term=1,
                peer=plan.peers[0],
                slice=slices.of(plan.peers[0]),
                graph=self.captured.graph,
                weights=self.captured.tensors,
                manifest=self.manifest,
                training=Training(seed=0, train=self.train),
                shard=self.paths.__getitem__,
            ),
        )


class World:
    """Devices of a plan on one CPU; each peer in turn runs its next action, if it can."""

    def __init__(self, slices: PlanSlices, order: BuildOrder) -> None:
        self.slices, self.order, self.plan = slices, order, slices.plan
        self.devices: dict[PeerId, TorchDevice] = {}
        self.flows: dict[PeerId, Flow] = {}

    def on_card(self, steps: int) -> int:
        """Runs a plan with one peer on a GPU; returns what torch counted at most."""
        device = self.build_on("cuda")
        for step in range(steps):
            self.step(step)
        found = device.peak_bytes
        device.discard()
        return found

    def build_on(self, device: str) -> TorchDevice:
        """Builds a plan with one peer there, in place of its device."""
        (peer,) = self.plan.peers
        self.devices[peer] = found = TorchDevice(device)
        self.flows[peer] = found.build(self._order(peer)).flow
        return found

    def run(self, steps: int) -> dict[PeerId, tuple[int, str]]:
        """Most bytes that each peer had allocated at once, and in which action."""
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            self.build()
            for step in range(steps):
                self.step(step)
        return peaks_of(seen)

    def build(self) -> None:
        for peer in self.plan.peers:
            with record_function(f"peer {peer}"):
                self.devices[peer] = TorchDevice()
                built = self.devices[peer].build(self._order(peer))
                self.flows[peer] = built.flow

    def _order(self, peer: PeerId) -> BuildOrder:
        return replace(self.order, peer=peer, slice=self.slices.of(peer))

    def step(self, step: int) -> float:
        """Its loss."""
        loss = math.nan
        lists = {p: flow.actions(p) for p, flow in self.flows.items()}
        at, there = dict.fromkeys(lists, 0), set()
        while any(at[p] < len(lists[p]) for p in lists):
            for peer, actions in lists.items():
                if at[peer] == len(actions):
                    continue
                flow, action = self.flows[peer], actions[at[peer]]
                if not all(t in there for t in flow.takes(peer, action)):
                    continue
                device = self.devices[peer]
                with record_function(f"peer {peer} {action}"):
                    outcome = device.compute(step, action).outcome
                    loss = outcome.loss if outcome else loss
                    for t in flow.takes(peer, action):
                        device.release(_key(step, t))
                for t in flow.gives(peer, action):
                    there.add(t)
                    if not t.is_local:
                        with record_function(f"peer {peer}"):
                            payload = device.payload(_key(step, t))
                        with record_function(f"peer {t.destination}"):
                            self.devices[t.destination].accept(received(_key(step, t), payload))
                        del payload
                at[peer] += 1
        return loss


def _key(step: int, t: Any) -> FrameKey:
    return FrameKey("r", 1, step, t.role, t.microbatch, t.hop, t.port, t.source, t.destination)


def received(key: FrameKey, payload: Payload) -> Arrived:
    """In memory of torch, so that it is counted."""
    data = b"".join(payload.buffers)
    copied = torch.empty(max(1, len(data)), dtype=torch.uint8)
    view = copied.numpy().data[: len(data)]
    view[:] = data
    return Arrived(
        key, payload.codec, payload.codec_header, payload.spec, view, absent=payload.absent
    )


def peaks_of(seen: profile) -> dict[PeerId, tuple[int, str]]:
    """By peer, from all allocations in the order of time. Memory belongs to whom it was allocated
    for; memory from before is not counted."""
    changes: list[tuple[int, int, int]] = []
    marks: list[tuple[int, str, str]] = []
    profiler: Any = seen.profiler
    ahead = list(profiler.kineto_results.experimental_event_tree())
    while ahead:
        event = ahead.pop()
        if event.tag.name == "Allocation":
            fields = event.extra_fields
            changes.append((event.start_time_ns, fields.alloc_size, fields.ptr))
        elif event.name.startswith("peer "):
            who, _, doing = event.name[5:].partition(" ")
            marks += [(event.start_time_ns, who, doing), (event.end_time_ns, who, "between")]
        ahead += event.children
    changes.sort()
    marks.sort()
    times = [at for at, *_ in marks]
    owner: dict[int, tuple[str, int]] = {}
    now: dict[str, int] = {}
    peak: dict[str, tuple[int, str]] = {}
    for at, size, pointer in changes:
        if size > 0:
            _, who, doing = marks[bisect.bisect(times, at) - 1]
            owner[pointer] = who, size
            now[who] = now.get(who, 0) + size
            peak[who] = max(peak.get(who, (0, "")), (now[who], doing))
        elif pointer in owner:
            who, size = owner.pop(pointer)
            now[who] -= size
    return {PeerId(p): most for p, most in peak.items()}
