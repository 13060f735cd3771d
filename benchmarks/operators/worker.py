"""Runs the cases of operators in processes of its own: part of benchmarks/operators/fuzz.py.

Reads lines `TARGET SEED FIRST COUNT` and answers each with one line of JSON, a row. Cases are run
in children, with limits on memory and time; a case that ends its child is named by what it wrote
last. What counts as a fault of an operator whose arguments were accepted:

    crash       a signal: an access beyond a tensor (memory is guarded, see guard.c) or an abort
    endless     more than LIMIT_S seconds of the processor
    unwritten   two runs give other bytes when memory nobody wrote holds other bytes
    spec        a result is not what meta tensors said it would be
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import resource
import signal
import struct
import sys
import warnings
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shoal.benchmarks.operators.cases import Case, draw, laid, stored
from shoal.benchmarks.operators.seeds import SEEDS
from shoal.dag.execute.stand_ins import function_of
from shoal.dag.ir.graph import GraphError, Operator, TensorSpec
from shoal.dag.ir.infer import python_arg, results_of, spec_of
from shoal.dag.ir.operators import takes_key

__all__ = ["FaultError", "attempt", "run_cases", "run_operator"]

LIMIT_S = 5.0
ROOM_BYTES = 2 << 30
ARENA_BYTES = (1 << 38) + (1 << 31)  # of guard.c, and its table
MOST_ELEMENTS = 1 << 16
"""Of a result. With more, a case is run only where that memory cannot be had (2^31 elements)."""
KEEP = 3  # examples of each kind of fault


class FaultError(Exception):
    """An accepted call that misbehaves; `kind` as in the module's text."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


def run_operator(
    op: Operator, values: Mapping[str, Tensor], device: torch.device, key: int = 0
) -> list[Any]:
    """The results of one operator of a bound graph, as a stage runs it: nothing is checked."""
    function, count = function_of(op.target)
    args = [python_arg(a, dict(values), device) for a in op.args[:count]]
    kwargs = {k: python_arg(a, dict(values), device) for k, a in op.kwargs}
    if takes_key(op.target):
        kwargs["key"] = key
    result: Any = function(*args, **kwargs)
    return list(result) if op.returns_tuple else [result]


def accepted(case: Case) -> tuple[list[tuple[TensorSpec, bool] | None], tuple[str, ...]]:
    """What validation says of it: specs of results, and which values get a gradient. Raises
    GraphError. As many values as can have a gradient have one."""
    floating = tuple(n for n, s in case.specs.items() if s.is_floating)
    for grads in dict.fromkeys((floating, floating[:1], ())):
        try:
            known = {n: (s, n in grads) for n, s in case.specs.items()}
            return results_of(case.operator, known), grads
        except GraphError as error:
            if not grads or not ("differentiable" in str(error) or "derivative" in str(error)):
                raise
    raise AssertionError("the last has no gradients")


def attempt(case: Case, device: torch.device) -> str:
    """Runs a case and returns what happened; raises FaultError."""
    try:
        results, grads = accepted(case)
    except GraphError:
        return "refused"
    most = max((r[0].elements for r in results if r), default=0)
    most = max(most, *(s.elements for s in case.specs.values()), 0)
    spread = any(like.layout == "expanded" for like in case.likes.values())
    if most > MOST_ELEMENTS and (spread or most < 1 << 31):
        return "large"
    generator = torch.Generator().manual_seed(1)
    seen: list[list[bytes]] = []
    try:
        memory = {name: stored(like, generator) for name, like in case.likes.items()}
        state = generator.get_state()
        for byte in (0x3F, 0xC1):
            generator.set_state(state)
            _fill(byte)
            seen.append(_run(case, memory, results, grads, generator, device))
    except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError) as error:
        if "CUDA" in str(error) and "out of memory" not in str(error):
            raise FaultError("crash", str(error)[:200]) from None
        return "raised"
    finally:
        _fill(None)
    if seen[0] != seen[1]:
        at = [i for i, (a, b) in enumerate(zip(*seen, strict=True)) if a != b]
        raise FaultError(
            "unwritten", f"of {len(results)} results and the gradients behind them: {at}"
        )
    return "ran"


_LIBC = ctypes.CDLL(None)


def _fill(byte: int | None) -> None:
    """What memory holds that nobody wrote. None: whatever it likes, and no guards about it."""
    if hasattr(_LIBC, "guard_fill"):
        _LIBC.guard_fill(-1 if byte is None else byte)
    elif byte is not None:  # not preloaded: glibc fills what it gives and takes back
        _LIBC.mallopt(-6, byte)


def _run(
    case: Case,
    memory: dict[str, Tensor],
    results: list[Any],
    grads: tuple[str, ...],
    generator: torch.Generator,
    device: torch.device,
) -> list[bytes]:
    values: dict[str, Any] = {}
    for name, like in case.likes.items():
        values[name] = laid(memory[name], like, device).detach()
        values[name].requires_grad_(name in grads)
    with torch.enable_grad():
        made = run_operator(case.operator, values, device)
    for i, (result, said) in enumerate(zip(made, results, strict=True)):
        got = spec_of(result) if isinstance(result, Tensor) else None
        if got != (said and said[0]):
            raise FaultError(
                "spec", f"result {i} is {got!r}, meta tensors said {said and said[0]!r}"
            )
    roots = [r for r in made if isinstance(r, Tensor) and r.requires_grad]
    leaves = [values[n] for n in grads]
    found = [_bytes(r) for r in made]
    if roots and leaves:
        # As a mean gives them: one number, expanded.
        seeds = [torch.full((), 0.5, dtype=r.dtype, device=device).expand(r.shape) for r in roots]
        for kind in (seeds, [torch.randn(r.shape, generator=generator).to(r) for r in roots]):
            taken = torch.autograd.grad(roots, leaves, kind, allow_unused=True, retain_graph=True)
            for gradient, leaf in zip(taken, leaves, strict=True):
                if gradient is not None and spec_of(gradient) != spec_of(leaf):  # type: ignore[comparison-overlap]
                    raise FaultError(
                        "spec", f"a gradient is {spec_of(gradient)!r} of {spec_of(leaf)!r}"
                    )
            found += [_bytes(g) for g in taken]
    return found


def _bytes(tensor: Any) -> bytes:
    if not isinstance(tensor, Tensor):
        return b""
    plain = tensor.detach().cpu().contiguous().reshape(-1)
    return bytes(plain.view(torch.uint8).numpy().data) if plain.numel() else b""


def run_cases(
    target: str, seed: int, first: int, count: int, device: torch.device
) -> dict[str, Any]:
    """The row of an operator: outcomes counted, and examples of faults with their case."""
    outcomes: Counter[str] = Counter()
    faults: list[dict[str, Any]] = []
    at, stop = first, first + count
    shared = mmap.mmap(-1, 1 << 20)
    for i in range(len(SEEDS[target])):  # imports of torch that children should not make each
        with contextlib.suppress(GraphError):
            accepted(draw(target, seed, i))
    while at < stop:
        child = os.fork()
        if child == 0:
            _child(target, seed, at, stop, device, shared)
        _, status = os.waitpid(child, 0)
        length, done = struct.unpack_from("<qq", shared)
        if length:
            told = json.loads(shared[16 : 16 + length])
            outcomes.update(told["outcomes"])
            faults += told["faults"]
            break
        # The child ended at case `done`; what it had counted before is counted by running it again.
        number = os.waitstatus_to_exitcode(status)
        kind = "endless" if number == -signal.SIGPROF else "crash"
        text = signal.Signals(-number).name if number < 0 else f"exit {number}"
        outcomes[kind] += 1
        outcomes["before a crash"] += done - at
        faults.append({"kind": kind, "case": done, "text": text})
        at = done + 1
    kept: list[dict[str, Any]] = []
    for fault in faults:
        if sum(k["kind"] == fault["kind"] for k in kept) < KEEP:
            kept.append({**fault, "call": repr(draw(target, seed, fault["case"]))})
    return {"operator": target, "seed": seed, "first": first, "cases": count} | {
        "outcomes": dict(outcomes),
        "faults": kept,
    }


def _child(
    target: str, seed: int, at: int, stop: int, device: torch.device, shared: mmap.mmap
) -> None:
    """Ends the process. Writes the number of the case into shared memory before running it, at the
    end what was found, with its length in front."""
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # torch's warnings, of which there are thousands
    os.dup2(sys.stderr.fileno(), 2)
    room = ROOM_BYTES + ARENA_BYTES + _virtual_bytes()
    resource.setrlimit(resource.RLIMIT_AS, (room, room))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    outcomes: Counter[str] = Counter()
    faults: list[dict[str, Any]] = []
    struct.pack_into("<qq", shared, 0, 0, at)
    for index in range(at, stop):
        struct.pack_into("<qq", shared, 0, 0, index)
        signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
        try:
            outcomes[attempt(draw(target, seed, index), device)] += 1
        except FaultError as fault:
            outcomes[fault.kind] += 1
            if sum(f["kind"] == fault.kind for f in faults) < KEEP:
                faults.append({"kind": fault.kind, "case": index, "text": str(fault)})
        except MemoryError:
            outcomes["raised"] += 1
    signal.setitimer(signal.ITIMER_PROF, 0)
    told = json.dumps({"outcomes": outcomes, "faults": faults}).encode()
    shared[16 : 16 + len(told)] = told
    struct.pack_into("<qq", shared, 0, len(told), stop)
    os._exit(0)


def _virtual_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * mmap.PAGESIZE


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    device = torch.device(sys.argv[1])
    for line in sys.stdin:
        target, seed, first, count = line.split()
        print(json.dumps(run_cases(target, int(seed), int(first), int(count), device)), flush=True)


if __name__ == "__main__":
    main()
