"""The proof that one capture says what every call of forward does.

A capture follows forward once. What Python decides while it runs (a counter, a cache, a number of
`random`, the size of the batch) is decided then, and held for the whole run. So forward is followed
again, on tensors without values, in train and in eval mode, and its calls of torch
(torch_calls.py) must be the same ones:

- in a second and a third call after the first, and in one after a great many, where forward
  changes numbers that it could count them by;
- under other seeds of Python and numpy, and with draws at both ends of their range;
- with every number of samples that a microbatch may have, where a number may be a multiple of that.

What no result depends on plays no part: a counter that nobody reads is no reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch._export.utils import _compiling_state_context

from ..ir.capture_errors import CaptureError, first_line, place_at, place_of, refused, text_of
from .export import forward_of
from .modes import given_without_values, in_mode, without_values
from .python_state import Number, PythonState
from .reseed import FIRST, OTHERS, drawn, reseed
from .torch_calls import Call, CallTrace, TorchCalls, same_identity, unlike

__all__ = ["NONE_ALONE", "PROOF_S", "Alone", "Forward", "Late", "Proved", "prove"]

_FEW, _MORE = 2, 5
"""Samples of the two microbatches that say how numbers follow the batch size."""
PROOF_S = 60.0
"""Seconds that the whole proof of a capture takes at most, but for the call that it is in."""
Late = Callable[[], bool]
"""Whether the time that a proof may take is used up; asked before each call of forward."""
_Followed = CallTrace | Exception
_FAR = (9, 10, 999, 1000, 999_999, 1_000_000)
"""Calls after which counters are tried."""

_KEEP = (
    "a microbatch is computed by itself, on any peer and in any order, so it must not depend on "
    "calls before it: make this a function of the inputs (pass a step or a hidden state as one), "
    "or leave it out; what follows the step (a rate, a schedule) belongs into [train]"
)
_DRAW = (
    "one draw would hold for the whole run: draw with torch and without a branch, such as "
    "h + branch * F.dropout(h.new_ones(h.shape[0], 1), p, self.training), or leave it out"
)


@dataclass(frozen=True)
class Forward:
    """A module in its present mode, with the shapes of its inputs and its loss. `known`: buffers
    whose changes the graph has."""

    module: nn.Module
    inputs: Mapping[str, Tensor]
    loss: Callable[..., Any] | None
    known: frozenset[str]


class Alone(NamedTuple):
    """Why a batch has one sample, in words, which is trained or evaluated on; empty: none has."""

    trained: str = ""
    evaluated: str = ""


NONE_ALONE = Alone()


@dataclass(frozen=True)
class Proved:
    """What was found of forward. `wrong`: those of the choices with which it does something else,
    or with which it was not tried, and why. `unproved`: what was not tried; empty: nothing."""

    wrong: dict[int, str]
    unproved: str = ""


class _LateError(Exception):
    """The time is used up."""


def prove(
    forward: Forward,
    sizes: Sequence[int],
    choices: Sequence[int],
    late: Late = lambda: False,
    alone: Alone = NONE_ALONE,
) -> Proved:
    """Raises CaptureError unless forward does the same in every call, whatever Python and numpy
    draw, and with each number of samples in `sizes`, and with one where `alone` says that there is.
    Finds the `choices` with which it does not. Ends early, and says so, when it is `late`. The
    module, and all random state, are as they were."""
    wrong: dict[int, str] = {}
    state = PythonState(forward.module, forward.loss)
    for train in (True, False):
        one = alone.trained or ("" if train else alone.evaluated)
        for on_meta in (True, False):
            with (
                state.restored(),
                in_mode(forward.module, train),
                _session(forward, on_meta, late, one) as trial,
            ):
                try:
                    found = trial.all((*sizes, 1) if one else sizes, choices)
                except _LateError:
                    mode = "train" if train else "eval"
                    untried = {n: "it was not tried in time" for n in choices if n not in wrong}
                    return Proved(
                        wrong | untried,
                        f"whether every call in {mode} mode does what the first "
                        f"does was not tried to the end in {PROOF_S:g} s",
                    )
                except CaptureError:
                    if not (on_meta and trial.raised):
                        raise
                    continue
                if found is None or (on_meta and trial.raised):
                    continue  # what forward makes on the CPU does not go with what is on meta
                wrong |= found
                break
    return Proved(wrong)


@contextmanager
def _session(forward: Forward, on_meta: bool, late: Late, one: str) -> Iterator[_Trial]:
    with without_values(forward.module, on_meta) as tensors:
        state = PythonState(forward.module, forward.loss)
        with state.restored():
            takes = {n: t.requires_grad for n, t in tensors.items()}
            yield _Trial(forward, tensors, takes, state, on_meta, late, one)


@dataclass
class _Trial:
    """Follows forward again and again, each time from the same state or from where it is."""

    forward: Forward
    tensors: Mapping[str, Tensor]
    takes: Mapping[str, bool]
    """Which of them took a gradient."""
    state: PythonState
    on_meta: bool
    late: Late
    one: str = ""
    """Why a batch of this mode has one sample."""
    first: CallTrace = field(default_factory=lambda: CallTrace([], ()))
    drew: bool = False
    """Whether a forward drew numbers of Python's or numpy's."""
    raised: bool = False
    """Whether any call raised."""
    _few: _Followed | None = None

    def all(self, sizes: Sequence[int], choices: Sequence[int]) -> dict[int, str] | None:
        """As `prove`, of this mode; None where forward does not run without values."""
        found = self._tried(lambda: self._again(_MORE, FIRST))
        if not isinstance(found, CallTrace):
            return None
        self.first = found
        self._flags()
        self.calls_in_sequence()
        self.draws()
        for size in (_FEW, *sizes):
            if why := self.size(size):
                raise why
        return {n: str(why) for n in choices if (why := self.size(n))}

    def _flags(self) -> None:
        """Raises CaptureError where forward decides what is trained, after it was looked up."""
        for name, tensor in self.tensors.items():
            if tensor.requires_grad != self.takes[name]:
                set_ = [c for c in self.first.calls if c.name.startswith("requires_grad")]
                raise refused(
                    text_of(set_[0].where if set_ else None),
                    f"forward changes requires_grad of {name}",
                    "set it before training (model.freeze, or in __init__)",
                )

    def calls_in_sequence(self) -> None:
        """Raises CaptureError where a later call does something else."""
        first = self.first
        self.state.restore()
        calls = self._calls()
        for number in ("another first", "a second", "a third"):
            seen = self._tried(lambda: self._call(calls, _MORE, FIRST))
            changed = self.state.numbers()
            if not isinstance(seen, CallTrace) or not same_identity(first, seen):
                raise self._remembers(first, seen, f"in {number} call", changed)
        for far in _FAR if changed else ():
            for one in changed:
                one.put(one.before + (one.now - one.before) / 3 * far)
            seen = self._tried(lambda: self._call(calls, _MORE, FIRST))
            if not isinstance(seen, CallTrace) or not same_identity(first, seen):
                raise self._remembers(first, seen, f"after {far} calls", changed)
        if any(c.generator for c in first.calls):
            raise _own_generator(next(c for c in first.calls if c.generator))
        _refuse_seeds(first)

    def draws(self) -> None:
        """Raises CaptureError where Python's or numpy's random numbers change what it does."""
        first = self.first
        for kind in OTHERS if self.drew else OTHERS[:1]:
            seen = self._tried(lambda k=kind: self._again(_MORE, k))  # type: ignore[misc]
            if not isinstance(seen, CallTrace) or not same_identity(first, seen):
                where, what = _seen(first, seen, "with one seed", "with another")
                raise refused(
                    where,
                    f"what forward does depends on random numbers of Python's or numpy's: {what}",
                    _DRAW,
                )

    def size(self, samples: int) -> CaptureError | None:
        """Why a microbatch of so many samples is another computation, if it is."""
        few = self._few = self._few or self._tried(lambda: self._again(_FEW, FIRST))
        seen = few if samples == _FEW else self._tried(lambda: self._again(samples, FIRST))
        why = self._differs(samples, self.first, few, seen)
        if why is None or samples != 1 or isinstance(seen, Exception):
            return why
        # What is expanded to the batch where that is more than one sample, and only there.
        traces = [
            self._tried(lambda n=n: self._again(n, FIRST, sees_through=True))  # type: ignore[misc]
            for n in (_MORE, _FEW, samples)
        ]
        more = traces[0]
        same = isinstance(more, CallTrace) and not self._differs(samples, more, *traces[1:])
        return None if same else why

    def _differs(
        self, samples: int, more: CallTrace, few: _Followed, seen: _Followed
    ) -> CaptureError | None:
        """Why what was `seen` of so many samples is not what was seen of _FEW and _MORE."""
        says = f"with {_samples(samples)}"
        if not isinstance(few, CallTrace) or not isinstance(seen, CallTrace):
            raised = seen if not isinstance(seen, CallTrace) else few
            assert isinstance(raised, Exception)
            where, what = _seen(more, raised, "", says)
        elif not _alike(more, few) or not _alike(more, seen):
            if not _alike(more, few):
                seen, says = few, f"with {_samples(_FEW)}"
            where, what = _calls_seen(more, seen, f"with {_MORE} samples", says, bare=True)
        elif call := _unfitting(more, few, seen, samples):
            where, what = text_of(call.where), f"{call.name} gets other numbers {says}"
        else:
            return None
        advice = _sized(samples, self.one if samples == 1 else "")
        return refused(where, f"what forward does depends on the batch size: {what}", advice)

    # ------------------------------------------------------------ one call

    def _calls(self, *, sees_through: bool = False) -> TorchCalls:
        names = {id(t): n for n, t in self.tensors.items()}
        return TorchCalls(names, self.forward.known, sees_through=sees_through)

    def _again(self, samples: int, seed: str, *, sees_through: bool = False) -> CallTrace:
        """A call from the state that all begin with."""
        self.state.restore()
        return self._call(self._calls(sees_through=sees_through), samples, seed)

    def _call(self, calls: TorchCalls, samples: int, seed: str) -> CallTrace:
        reseed(self.state.generators, seed)
        before = drawn(self.state.generators)
        given = given_without_values(self.forward.inputs, samples, self.on_meta)
        calls.begin(given)
        with _compiling_state_context(), calls:  # as in an export: a forward may ask
            results = forward_of(self.forward.module, given, self.forward.loss)
        self.drew |= before != drawn(self.state.generators)
        return calls.trace(results)

    def _tried(
        self, call: Callable[[], CallTrace], *, whenever: bool = False
    ) -> CallTrace | Exception:
        """A call that may raise now, though the first did not. Raises _LateError in place of a call
        for which there is no time left, unless it is made `whenever`."""
        if not whenever and self.late():
            raise _LateError
        try:
            return call()
        except Exception as error:  # whatever the user's code raises
            self.raised = True
            return error

    def _remembers(
        self, first: CallTrace, seen: CallTrace | Exception, when: str, changed: Sequence[Number]
    ) -> CaptureError:
        """The error for a call that is not the first one again."""
        where, what = _seen(first, seen, "in the first call", when)
        for one in changed[:1]:
            what += f"; {one.name} went from {one.before} to {one.now}"
        same = self._tried(lambda: self._again(_MORE, FIRST), whenever=True)
        if not isinstance(same, CallTrace) or not same_identity(first, same):
            return refused(
                where,
                f"forward does something else each time: {what}",
                "one moment would hold for the whole run: let it depend on no clock, no random "
                "numbers but torch's, and nothing outside of the module",
            )
        return refused(where, f"what forward does depends on calls before: {what}", _KEEP)


# ---------------------------------------------------------------- words


def _refuse_seeds(trace: CallTrace) -> None:
    """Draws of torch's become Shoal's, whose masks differ from step to step: with a seed of the
    forward's own they would not."""
    for number in trace.live:
        call = trace.calls[number]
        if call.seed is not None and call.seed != int(FIRST):
            raise refused(
                text_of(call.where),
                f"{call.name} draws after forward has set torch's seed ({call.seed}), so it draws "
                "the same in each call",
                "make such a tensor once, in __init__, and register it as a buffer; or leave the "
                "seed to the job",
            )


def _own_generator(call: Call) -> CaptureError:
    return refused(
        text_of(call.where),
        f"{call.name} draws from a torch.Generator of its own, which no peer has",
        "leave `generator` out (masks follow from the job's seed and the step), or make the tensor "
        "once, in __init__, and register it as a buffer",
    )


def _alike(a: CallTrace, b: CallTrace) -> bool:
    """Whether two forwards do the same, whatever their numbers."""
    return [r.bare for r in a.results] == [r.bare for r in b.results]


def _samples(samples: int) -> str:
    return "one sample" if samples == 1 else f"{samples} samples"


def _sized(samples: int, one: str) -> str:
    more = ", or set train.microbatch to 2 or more" if samples == 1 else ""
    if one:
        more = ", or choose another train.batch"
    return (
        f"{one or f'a microbatch may have {_samples(samples)}'}: write it for a batch of any size "
        f"(no branch on x.shape[0], squeeze(-1) for squeeze(), a norm that takes one sample){more}"
    )


def _seen(first: CallTrace, seen: CallTrace | Exception, then: str, now: str) -> tuple[str, str]:
    """Where, and what was seen."""
    if isinstance(seen, Exception):
        return text_of(
            place_of(seen)
        ), f"{now} it raises {type(seen).__name__} ({first_line(seen)})"
    return _calls_seen(first, seen, then, now)


def _calls_seen(
    first: CallTrace, seen: CallTrace, then: str, now: str, *, bare: bool = False
) -> tuple[str, str]:
    one, two = unlike(first, seen, bare=bare)
    # A line that only one of them came to is the one behind a branch.
    own = [(c, {d.place for d in t.calls}) for c, t in ((two, first), (one, seen)) if c and c.place]
    alone = [c for c, places in own if c.place not in places]
    where = text_of(next((c.where for c in (*alone, *(c for c, _ in own))), None))
    if two is not None and two.earlier is not None:
        at = place_at(two.earlier)
        return where, f"{now} {two.name} reads a tensor that an earlier call made ({text_of(at)})"
    if one is not None and two is not None and one.name == two.name:
        for a, b in zip(one.numbers, two.numbers, strict=False):
            if a != b:
                return where, f"{one.name} gets {a:.10g} {then} and {b:.10g} {now}"
        return (
            where,
            f"{one.name} reads a tensor of other values or another origin {now} than {then}",
        )
    names = [c.name if c else "nothing" for c in (one, two)]
    return where, f"{names[0]} is called {then}, and {names[1]} {now}"


def _unfitting(more: CallTrace, few: CallTrace, seen: CallTrace, samples: int) -> Call | None:
    """The first call with a number that is no fixed one and no multiple of the samples (apart from
    a fixed difference)."""
    lists = [[t.calls[n] for n in t.live] for t in (more, few, seen)]
    for a, b, c in zip(lists[0], lists[1], lists[2], strict=False):
        for x, y, z in zip(a.numbers, b.numbers, c.numbers, strict=False):
            if x == y == z or x != x:
                continue
            wanted = y + (x - y) / (_MORE - _FEW) * (samples - _FEW)
            if not abs(z - wanted) <= 1e-6 * max(1.0, abs(wanted)):
                return c
    return None
