"""Which codec each link and role of a plan gets, and why.

By role, as the job asks:

**A codec's text**: that codec on every link.

**adatopk**: top-k with the rule of FusionLLM, by which all compressed links take equally long, and
the best top-k within each link's bytes (adatopk.py). What would not get smaller is sent as it is.
The gradient of a value that top-k made sparse comes back where the value was sent
(`compression/sparse/support.py`): the exact gradient, and no index travels. So where both go by
adatopk, a value is sent as sparsely as its gradient has to come back, which is by another link or
at another rate: how many times fewer bytes a value has is the larger of the two.

**auto**: the shortest step that codecs of the table (codec_table.py) with at most `error_budget`
give, by the judge's own calculation, encoding and decoding counted; and with no more compression
than that step needs:

1. Everything is compressed as is fastest for its own link.
2. Single links are changed, those first on which the step hangs most, while it gets shorter.
3. Uncompressed again is whatever the step does not hang on: all lanes at once, halves of them where
   the step would get longer, down to single ones, which get the codec with the least error that
   keeps the step. Those go first on which it hangs least.

Starting from all of it and not from none matters where several links have to be faster together,
such as those of one exchange among holders. Each tensor is held to the budget by itself; over
several lossy links on a microbatch's way errors add up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ...compression.codec import parse
from ...compression.sparse.topk import TopK
from ...dag.schedule.flow import Role
from ..base.interface import CODED_ROLES, CodecOptions
from .adatopk import WIDTHS, best_within, rule_a, support_text, topk_text
from .carried import Choice, CodecLane, CodedStepCost
from .codec_reasons import why
from .codec_table import Rung, is_lossless, table, typical_error

__all__ = ["ChosenCodecs", "choose", "codec_of", "ladder"]

HIDDEN = 1.001
"""A step that is longer by less than this is as short."""
MOST_WORK = 400_000
"""Of one search, in actions and messages of the steps that it calculates: about a second."""
ROUNDS = 3
"""Passes of step 2."""


@dataclass(frozen=True, slots=True)
class ChosenCodecs:
    """By lane, the codec that it got; what each text typically loses; and the reasons."""

    choice: dict[int, str]
    errors: dict[str, float]
    seconds: float
    dense_s: float
    reasons: tuple[str, ...]


def choose(carried: CodedStepCost, options: CodecOptions) -> ChosenCodecs:
    """The codecs of a plan's lanes."""
    choice: dict[int, str] = {}
    errors: dict[str, float] = {}
    searched: dict[int, tuple[Rung, ...]] = {}
    for role in CODED_ROLES:
        lanes = [lane for lane in carried.lanes.values() if lane.role == role]
        match options.of(role):
            case "none":
                continue
            case "adatopk":
                fewer = rule_a(lanes, options.ratio)
                if role == Role.ACTIVATION and options.of(Role.ACTIVATION_GRAD) == "adatopk":
                    fewer = _as_its_gradient(carried, fewer, options.ratio)
                found = _sparse(carried, fewer, options) | _on_support(carried, lanes, choice)
            case "auto":
                searched |= {lane.number: ladder(carried, lane, options) for lane in lanes}
                continue
            case text:
                text = codec_of(text, role, options)
                found = {x.number: text for x in lanes if _pays(carried, x, text)}
        choice |= found
    dense_s = carried.seconds({})
    found = _Descent(carried, choice, searched).found()
    full = carried.without_room({**choice, **found})
    if full:
        # Their memory does not hold what a codec keeps there: without such codecs.
        choice = {n: text for n, text in choice.items() if not carried.keeps(n, text, full)}
        searched = {
            n: tuple(rung for rung in rungs if not carried.keeps(n, rung.codec, full))
            for n, rungs in searched.items()
        }
        found = _Descent(carried, choice, searched).found()
    choice |= found
    for number, text in choice.items():
        known = {rung.codec: rung.error for rung in searched.get(number, ())}
        errors[text] = known[text] if text in known else typical_error(text)
    seconds = carried.seconds(choice) if choice else dense_s
    reasons = [*why(carried, options, choice, errors, searched, seconds=seconds, dense_s=dense_s)]
    if full:
        names = ", ".join(str(carried.offers[i]) for i in sorted(full))
        reasons.append(f"no codec that keeps a state at {names}: too little memory is left there")
    return ChosenCodecs(choice, errors, seconds, dense_s, tuple(reasons))


def codec_of(text: str, role: str, options: CodecOptions) -> str:
    """A codec's text for a role: lossy codecs of parameter gradients get error feedback, unless the
    text has a wrapper or the job wants none. EF21 is what the codec `delta` does: both ends hold
    g, and C(x - g) is sent."""
    wrapped = "+" in text.partition(":")[0]
    if role != "sync" or wrapped or options.feedback == "none" or is_lossless(text):
        return text
    return f"delta+{text}" if options.feedback == "ef21" else f"ef+{text}"


def _pays(carried: CodedStepCost, lane: CodecLane, text: str) -> bool:
    return carried.load(lane.number, text).bytes < lane.dense_bytes


# ---------------------------------------------------------------- adatopk


def _as_its_gradient(
    carried: CodedStepCost, fewer: Mapping[int, float], ratio: float
) -> dict[int, float]:
    """The r_e of values, each at least that of the gradient on its way back."""
    lanes = [x for x in carried.lanes.values() if x.role == Role.ACTIVATION_GRAD]
    back = {
        (x.destination, x.source): r
        for x, r in zip(lanes, rule_a(lanes, ratio).values(), strict=True)
    }
    ends = {n: (carried.lanes[n].source, carried.lanes[n].destination) for n in fewer}
    return {n: max(r, back.get(ends[n], 1.0)) for n, r in fewer.items()}


def _sparse(
    carried: CodedStepCost, fewer: Mapping[int, float], options: CodecOptions
) -> dict[int, str]:
    """By lane, the top-k that sends so many times fewer bytes, where there is one that does."""
    found = {}
    for number, times in fewer.items():
        lane = carried.lanes[number]
        if times > 1:
            text = _best(carried, lane, times, options)
            if _pays(carried, lane, text):
                found[number] = text
    return found


def _best(carried: CodedStepCost, lane: CodecLane, fewer: float, options: CodecOptions) -> str:
    """The top-k of a lane that harms least within 1/fewer of its bytes. Where the gradient comes
    back on the support, that has to fit as well."""
    answered = lane.role == Role.ACTIVATION and options.of(Role.ACTIVATION_GRAD) == "adatopk"

    def size_bytes(values: str, ratio: float) -> int:
        texts = [codec_of(topk_text(ratio, values), lane.role, options)]
        if answered and values != "int8":  # else it is no larger
            texts.append(support_text(ratio))
        return max(carried.load(lane.number, text).bytes for text in texts)

    sizes = {values: partial(size_bytes, values) for values in WIDTHS}
    found = best_within(sizes, lane.dense_bytes / fewer, fewer)
    return codec_of(found, lane.role, options)


def _on_support(
    carried: CodedStepCost, lanes: Sequence[CodecLane], choice: Choice
) -> dict[int, str]:
    """By lane of gradients, `support` where the values of its link's other direction are sparse."""
    sparse: dict[tuple[int, int], float] = {}
    for number, text in choice.items():
        lane, codec = carried.lanes[number], parse(text)
        if lane.role == Role.ACTIVATION and isinstance(codec, TopK):
            sparse[lane.destination, lane.source] = codec.ratio
    return {
        lane.number: support_text(sparse[lane.source, lane.destination])
        for lane in lanes
        if lane.role == Role.ACTIVATION_GRAD and (lane.source, lane.destination) in sparse
    }


# ---------------------------------------------------------------- auto


def ladder(carried: CodedStepCost, lane: CodecLane, options: CodecOptions) -> tuple[Rung, ...]:
    """What a lane may get: those of the table within the budget that make it smaller."""
    rungs = table()[lane.role]["slow" if lane.slow else "fast"]
    found = []
    for rung in rungs:
        if rung.error <= options.error_budget:
            text = codec_of(rung.codec, lane.role, options)
            if _pays(carried, lane, text):
                found.append(Rung(text, rung.error))
    return tuple(found)


class _Descent:
    """The search of `auto` over one plan; `given` are the lanes of other modes."""

    def __init__(
        self, carried: CodedStepCost, given: Choice, ladders: Mapping[int, tuple[Rung, ...]]
    ) -> None:
        self.carried, self.given = carried, dict(given)
        self.ladders = {n: rungs for n, rungs in ladders.items() if rungs}
        program = carried.program
        steps = MOST_WORK // (len(program.actions) + len(program.giver))
        self.until = carried.played + max(40, steps)
        self.dense_s = self.least = carried.seconds(self.given)

    @property
    def open(self) -> bool:
        return self.carried.played < self.until

    def found(self) -> dict[int, str]:
        """The choice for the lanes with a ladder."""
        if not self.ladders:
            return {}
        strong = {n: text for n in self.ladders if (text := self._fastest(n))}
        best, best_s = self._improved(strong)
        if best_s > self.dense_s / HIDDEN:
            # Encoding everything costs more than it saves: links one by one.
            other, other_s = self._improved({})
            if other_s < best_s:
                best, best_s = other, other_s
        best = self._relaxed(best)
        return best if self._seconds(best) < self.dense_s else {}

    def _seconds(self, choice: Choice) -> float:
        found = self.carried.seconds({**self.given, **choice})
        self.least = min(self.least, found)
        return found

    def _fastest(self, lane: int) -> str:
        """Return the codec that is fastest for a lane by itself; empty: uncompressed."""
        best, best_s = "", self.carried.lanes[lane].dense_s
        rate = self.carried.lanes[lane].dense_bytes / max(best_s, 1e-30)
        for text, _ in self.ladders[lane]:
            load = self.carried.load(lane, text)
            seconds = load.bytes / rate + load.encode_s + load.decode_s
            if seconds < best_s:
                best, best_s = text, seconds
        return best

    def _improved(self, start: Choice) -> tuple[dict[int, str], float]:
        """Improve a choice lane by lane (step 2)."""
        state, now = dict(start), self._seconds(start)
        for _ in range(ROUNDS):
            before = now
            for lane in self._order(state, most_first=True):
                for text in ("", *(rung.codec for rung in self.ladders[lane])):
                    if text == state.get(lane, "") or not self.open:
                        continue
                    tried = _with(state, lane, text)
                    seconds = self._seconds(tried)
                    if seconds < now / (1 + 1e-9):
                        state, now = tried, seconds
            if now >= before / HIDDEN or not self.open:
                break
        return state, now

    def _order(self, state: Choice, *, most_first: bool) -> list[int]:
        hang = self.carried.hang_s({**self.given, **state})
        lanes = self.carried.lanes
        order = sorted(self.ladders, key=lambda n: (hang[n], lanes[n].dense_s, n))
        return order[::-1] if most_first else order

    def _relaxed(self, state: dict[int, str]) -> dict[int, str]:
        """Step 3. The step stays within HIDDEN of the least that was met."""
        order = self._order(state, most_first=False)
        ahead = [[n for n in order if n in state]]
        while ahead:
            part = ahead.pop()
            if not part or not self.open:
                continue
            tried = {n: text for n, text in state.items() if n not in part}
            if self._keeps(tried):
                state = tried
            elif len(part) > 1:
                half = (len(part) + 1) // 2
                ahead += [part[half:], part[:half]]
            else:
                state = self._weakest(state, part[0])
        return state

    def _weakest(self, state: dict[int, str], lane: int) -> dict[int, str]:
        for text, _ in self.ladders[lane]:
            if text == state[lane] or not self.open:
                break
            tried = _with(state, lane, text)
            if self._keeps(tried):
                return tried
        return state

    def _keeps(self, choice: Choice) -> bool:
        least = self.least
        return self._seconds(choice) <= least * HIDDEN


def _with(state: Mapping[int, str], lane: int, text: str) -> dict[int, str]:
    found = {n: x for n, x in state.items() if n != lane}
    return {**found, lane: text} if text else found
