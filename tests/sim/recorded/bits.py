"""What of a run is recorded: losses and norms to the bit, hashes of the weights and of the event
log.

The event log is text, one line for each span and mark of the trace (`sim/trace.py`) and for each
event of the run that clients see, sorted by time. A line says who, what, which step, microbatch,
stage, role, codec and how many bytes; times are rounded to nanoseconds. It has no sentences, ids of
runs or encodings of plans, so that it is the same for as long as the peers do the same at the same
time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from safetensors.torch import load
from torch import Tensor

from shoal.proto.broker_pb2 import Phase, RunEvent
from shoal.sim.trace import Span, Trace
from shoal.sim.virtual.world import World
from shoal.tests.sim.played import merge_blocks

Step = tuple[int, int, str, str]
"""Replica, step, loss and norm of the gradients as hexadecimal floats."""


def steps_of(events: Iterable[RunEvent]) -> list[Step]:
    """The committed steps, in the order of being committed."""
    return [
        (e.replica, e.step.step, e.step.outcome.loss.hex(), e.step.outcome.grad_norm.hex())
        for e in events
        if e.HasField("step")
    ]


def evaluations_of(events: Iterable[RunEvent]) -> list[str]:
    """Losses of evaluations, of steps or of versions, as hexadecimal floats."""
    found = []
    for e in events:
        if e.HasField("step") and e.step.HasField("evaluation"):
            found.append(e.step.evaluation.loss.hex())
        elif e.HasField("evaluated"):
            found.append(e.evaluated.evaluation.loss.hex())
    return found


def weights_of(world: World, events: Iterable[RunEvent]) -> dict[str, Tensor]:
    """The weights that the run came to, under the user's names."""
    exported = [e.weights for e in events if e.HasField("weights")][-1]
    found: dict[str, Tensor] = {}
    for file in exported.files:
        found |= load(world.blobs[file.blob.hash])
    return merge_blocks(found)


def hash_of(weights: Mapping[str, Tensor]) -> str:
    """SHA-256 of names, types, shapes and numbers."""
    seen = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        values = np.ascontiguousarray(tensor.detach().numpy())
        seen.update(f"{name} {values.dtype} {values.shape}\n".encode())
        seen.update(values.tobytes())
    return seen.hexdigest()


def log_of(trace: Trace, events: Iterable[RunEvent], run: str) -> list[str]:
    """The lines of the event log; see the module."""
    lines = [(s.start_s, _span(s)) for s in trace.spans]
    lines += [(m.at_s, f"{m.who.replace(run, 'run')} {m.what}") for m in trace.marks]
    lines += [(e.at_s, _event(e)) for e in events]
    return [f"{at:.9f} {text}" for at, text in sorted((round(t, 9), text) for t, text in lines)]


def log_hash(lines: Iterable[str]) -> str:
    """SHA-256 of an event log."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _span(s: Span) -> str:
    what = {"step": s.step, "microbatch": s.microbatch, "stage": s.stage}
    where = [f"{name} {value}" for name, value in what.items() if value != -1]
    sent = [f"to {s.to} {s.role} {s.codec} {s.size_bytes} of {s.dense_bytes} bytes"] if s.to else []
    return " ".join([s.peer, s.kind, *where, *sent, f"until {s.end_s:.9f}"])


def _event(e: RunEvent) -> str:
    kind = e.WhichOneof("kind") or ""
    told: Any = getattr(e, kind)
    what = [f"run event {kind} term {e.term} replica {e.replica}"]
    match kind:
        case "state":
            what.append(f"{Phase.Name(told.phase)} step {told.step}")
        case "step":
            what.append(f"step {told.step} in {told.seconds:.9f}")
        case "round_begun":
            what += [f"round {told.round}", *(f"{w.replica}: {w.steps} steps" for w in told.work)]
        case "round_planned" | "round_done":
            what += [f"round {told.round}", *(str(m.replica) for m in told.members)]
        case "evaluated" | "checkpoint":
            what.append(f"step {told.step}")
    return " ".join(what)
