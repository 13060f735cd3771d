"""Blocks that repeat are exported three or four times, however many there are.

    module of N blocks --shortened--> module of a few --export--> graph --repeated--> graph of N

Whether that gives the graph of the whole module is not guessed from classes and settings. The
whole module and the shortened one are both traced without values (trace.py), in train and
in eval mode, with two and with five samples (that any number is right, the export finds). Blocks
are left out only where every trace says:

- the blocks of a run do the same, each with weights of its own and with what the blocks right
  before it made: `period` blocks after each other, again and again (1 where all are alike, 2 where
  two kinds take turns);
- the shortened module does what the whole one does without the blocks that were left out: the same
  operators before the run, in what is left of it, and behind it.

So what is exported says what the module does with any number of periods, and `repeat.py`
writes it for the number that there is. Everything else (blocks that know their number, sums over
what all blocks returned, blocks in another order, a forward that counts) is exported as a whole.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .modes import in_mode
from .trace import CaptureFingerprints, ModuleChain, trace

__all__ = ["Repeat", "repeats", "shortened"]

_log = logging.getLogger(__name__)

FEWEST = 6
"""Blocks of a list, of one class, from which on it is looked at: below, tracing saves nothing."""
LONGEST = 12
"""Blocks of one period at most."""


@dataclass(frozen=True)
class Repeat:
    """A repetition in the list `path` of `blocks` children: those from `start` on repeat `count`
    times with a period of `period`; two periods are exported."""

    path: str
    blocks: int
    start: int
    period: int
    count: int

    @property
    def kept(self) -> list[int]:
        """The numbers of the blocks that are exported."""
        first, behind = self.start + 2 * self.period, self.start + self.count * self.period
        return [*range(first), *range(behind, self.blocks)]


def repeats(
    module: nn.Module,
    inputs: Mapping[str, Tensor],
    loss: Callable[..., Any] | None,
) -> tuple[Repeat, ...]:
    """What may be left out of an export of the module; nothing where that is not certain."""
    chains = list(_chains(module))
    if not chains:
        return ()

    def traced(train: bool, batch: int) -> CaptureFingerprints:
        with in_mode(module, train):
            return trace(module, inputs, loss, batch, chains)

    try:
        modes = [(True, 5), (True, 2), (False, 5)]
        whole = [traced(*mode) for mode in modes]
        runs = [_run(chain, blocks) for chain, blocks in zip(chains, whole[0].blocks, strict=True)]
        found = tuple(r for r in runs if r is not None)
        if found:
            with shortened(module, found):
                short = [traced(*mode) for mode in modes]
            if all(_agree(a, b, runs) for a, b in zip(whole, short, strict=True)):
                return found
            _log.info("blocks are exported one by one: without some, others do something else")
    except Exception as error:  # whatever the user's code raises on fake tensors, export explains
        _log.info("blocks are exported one by one: %s: %s", type(error).__name__, error)
    return ()


@contextmanager
def shortened(module: nn.Module, found: Sequence[Repeat]) -> Iterator[None]:
    """The module itself with the kept blocks only, numbered in order; whole again afterwards."""
    with ExitStack() as stack:
        for repeat in found:
            children = module.get_submodule(repeat.path)._modules
            before = dict(children)
            blocks = list(before.values())
            stack.callback(_put, children, before)
            _put(children, {str(n): blocks[k] for n, k in enumerate(repeat.kept)})
        yield


def _put(children: dict[str, nn.Module | None], new: Mapping[str, nn.Module | None]) -> None:
    children.clear()
    children.update(new)


def _chains(module: nn.Module) -> Iterator[ModuleChain]:
    """The outermost lists that have enough blocks of one kind, none of which is in two places."""
    places = Counter(id(m) for _, m in module.named_modules(remove_duplicate=False))
    owners = Counter(id(t) for _, t in module.named_parameters(remove_duplicate=False))
    todo = [("", module)]
    while todo:
        path, part = todo.pop(0)
        prefix = path + "." if path else ""
        children = [(n, m) for n, m in part._modules.items() if m is not None]
        kinds = Counter(type(m) for _, m in children)
        if (
            isinstance(part, (nn.ModuleList, nn.Sequential))
            and [n for n, _ in children] == [str(k) for k in range(len(part._modules))]
            and len(children) - len(kinds) >= FEWEST - 1
            and all(places[id(m)] == 1 for _, m in children)
            and all(owners[id(t)] == 1 for _, m in children for t in m.parameters())
        ):
            yield ModuleChain(part, path)
        else:
            todo += [(prefix + n, m) for n, m in children]


def _run(chain: ModuleChain, blocks: Sequence[bytes]) -> Repeat | None:
    """The run of equal blocks that leaves out most."""
    best, saved = None, 1
    for period in range(1, min(LONGEST, len(blocks) // 3) + 1):
        start = 0
        while start < len(blocks):
            stop = start
            while stop + period < len(blocks) and blocks[stop] == blocks[stop + period]:
                stop += 1
            count = (stop - start + period) // period
            if (count - 2) * period > saved:
                saved = (count - 2) * period
                best = Repeat(chain.path, len(blocks), start, period, count)
            start = stop + 1
    return best


def _agree(
    whole: CaptureFingerprints, short: CaptureFingerprints, runs: Sequence[Repeat | None]
) -> bool:
    """Whether one trace is the other one without the blocks that were left out."""
    if (whole.prefix, whole.results) != (short.prefix, short.results):
        return False
    for run, ours, theirs in zip(runs, whole.blocks, short.blocks, strict=True):
        if run is None:
            if ours != theirs:
                return False
            continue
        stop = run.start + run.period * (run.count - 1)
        if [ours[k] for k in run.kept] != theirs:
            return False
        if any(ours[k] != ours[k + run.period] for k in range(run.start, stop)):
            return False
    return True
