"""What a run's events say of its rounds: a row for each that was committed, and the evaluations of
the versions between them. For people who
follow a run, for the page, and for the report of a simulation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ..dag.schedule.convert_plan import microbatches_of
from ..dag.schedule.filled import taken
from ..job.words import count_of, loss_text
from ..proto.broker_pb2 import (
    ClientUploads,
    Evaluation,
    RoundDone,
    RoundMember,
    RoundWork,
    RunEvent,
    VersionEvaluated,
)
from .records.version_ledger import pairs_of

__all__ = [
    "Local",
    "RoundRow",
    "RoundRows",
    "begun",
    "client_numbers",
    "evaluated",
    "planned",
    "samples_of",
    "sentence",
]


@dataclass(frozen=True, kw_only=True)
class Local:
    """What one replica did of a round."""

    replica: int
    steps: int
    """Local ones."""
    samples: int
    """What it weighs; 0: it took no part."""
    losses: tuple[float, ...]
    """Of its local steps, as far as they were seen."""
    clients: int = 0
    """Of federated training, that it was to train."""
    diverged: int = 0
    """Of these, that moved by what is no finite number, and count for nothing."""
    behind: int = 0
    """So many versions were made since they began."""

    @property
    def loss(self) -> float | None:
        """Their mean; None: none is a number."""
        return _mean(self.losses)


@dataclass(frozen=True, kw_only=True)
class RoundRow:
    """A committed round. Sizes in bytes, times in seconds."""

    round: int
    attempt: int
    members: tuple[Local, ...]
    left_out: tuple[Local, ...]
    """Who had work of it, and did not contribute, nor goes on with it."""
    joined: tuple[int, ...]
    """Replicas that took the version from others."""
    samples_before: int
    """Committed in the rounds before."""
    step: int | None
    """Steps of the run that are committed now, in whole ones; None: not known."""
    pairs: tuple[tuple[int, int], ...] | None
    """Of gossip: who met whom; who stands in none was alone. None: all met."""
    drift: float
    sent_bytes: int
    waited_s: float
    """The longest that a member waited for the version behind its last local step: for others that
    still worked or evaluated, and for the exchange."""
    exchange_s: float
    """From when all that meet were ready to the version; 0: not known."""
    seconds: float
    going: tuple[int, ...] = ()
    """Replicas that go on with their work in the next round."""
    uploads: ClientUploads | None = None
    """Of clients that sent a part of their updates; None: there are none."""
    clients_moved: float = 0.0
    """Of federated training, root mean square of what clients moved, by weight."""
    mean_moved: float = 0.0
    """Of federated training, the 2-norm of the mean of what members gave."""
    chosen_by: Literal["", "rule", "run"] = ""
    """Of a run whose submitter has a rule for who is in a round, whether these were chosen by it,
    or by the run itself since it had said nothing; "": there is no rule."""
    skipped: int = 0
    """Under fp16, local steps of clients that overflowed, so that nothing was updated."""
    sums: int = 0
    """Noisy sums of the run until now, which clients are hidden in; 0: they are not."""

    @property
    def asked(self) -> int:
        """Clients that the round had; 0: it was none of federated training."""
        return sum(m.clients for m in (*self.members, *self.left_out))

    @property
    def came(self) -> int:
        """Clients whose work is in the version."""
        return sum(m.clients - m.diverged for m in self.members)

    @property
    def staleness(self) -> dict[int, int]:
        """Clients in the version by how many others were made since they began, ascending; empty
        where none was, and all have come."""
        found = dict[int, int]()
        for m in sorted(self.members, key=lambda m: m.behind):
            found[m.behind] = found.get(m.behind, 0) + m.clients - m.diverged
        return found if self.going or any(found) else {}

    @property
    def alike(self) -> float | None:
        """How long the mean of clients' moves is by these: 1 where all moved alike, about the root
        of 1/n for n that have nothing in common; None: not known, as where clients send less than
        they moved, or what is left of earlier rounds as well."""
        known = self.clients_moved and self.uploads is None
        return self.mean_moved / self.clients_moved if known else None

    @property
    def samples(self) -> int:
        return sum(m.samples for m in self.members)

    @property
    def loss(self) -> float | None:
        """Mean local loss, by samples; None: none was seen."""
        known = [(m.loss, m.samples) for m in self.members if m.loss is not None]
        total = sum(n for _, n in known)
        return sum(x * n for x, n in known) / total if total else None

    def table(self) -> dict[str, object]:
        """Return the rows as plain dictionaries, for programs."""
        return {
            "round": self.round,
            "attempt": self.attempt,
            "members": [_numbers(m, _LOCAL) for m in self.members],
            "left_out": [_numbers(m, _LOCAL) for m in self.left_out],
            "joined": list(self.joined),
            **({} if self.pairs is None else {"pairs": [list(pair) for pair in self.pairs]}),
            "step": self.step,
            "samples": self.samples,
            "samples_committed": self.samples_before + self.samples,
            **_numbers(self, _ROUND),
            **({} if self.uploads is None else {"uploads": _numbers(self.uploads, _UPLOADS)}),
            **(self._of_clients() if self.asked else {}),
        }

    def _of_clients(self) -> dict[str, object]:
        return {
            "clients_asked": self.asked,
            "clients_came": self.came,
            "clients_lost": self.asked - self.came,
            "clients_moved": self.clients_moved,
            "mean_moved": self.mean_moved,
            "alike": self.alike,
            **({"skipped": self.skipped} if self.skipped else {}),
            **({"chosen_by": self.chosen_by} if self.chosen_by else {}),
            **({"staleness": [*self.staleness.items()]} if self.staleness else {}),
            **({"noisy_sums": self.sums} if self.sums else {}),
        }


_UPLOADS = ("clients", "bytes", "least_ratio", "most_ratio", "seconds")
_LOCAL = ("replica", "steps", "samples", "loss")
_ROUND = ("loss", "drift", "sent_bytes", "waited_s", "exchange_s", "seconds")


def _numbers(of: object, names: Sequence[str]) -> dict[str, object]:
    return {name: getattr(of, name) for name in names}


class RoundRows:
    """`see` takes the events of one run in their order, and gives the row of a round that is
    committed. rows: all of them. Who begins in the middle of a run has no losses of what was
    before. Without `keep` each is given, and none is kept."""

    def __init__(self, *, keep: bool = True) -> None:
        self.rows: list[RoundRow] = []
        self.evaluations: list[tuple[int, int, float]] = []
        """(samples committed before, step of the run, held-out loss) of each version that was."""
        self._keep = keep
        self._work: dict[int, RoundWork] = {}
        self._losses: dict[tuple[int, int], float] = {}
        """By replica and local step, of the round under way; of one done twice the newest."""
        self._samples = self._replicas = self._microbatches = 0
        self._chosen = False

    def see(self, event: RunEvent) -> RoundRow | None:
        match event.WhichOneof("kind"):
            case "state":
                self._replicas = len(event.state.replicas)
            case "plan":
                self._microbatches = microbatches_of(event.plan)  # of a step of one replica
            case "step":
                if self._work or self._losses:  # else a run without rounds
                    self._losses[event.replica, event.step.step] = event.step.outcome.loss
            case "round_begun":
                self._work |= {w.replica: w for w in event.round_begun.work}
                self._chosen |= event.round_begun.chosen
            case "round_done":
                row = self._done(event.round_done)
                if self._keep:
                    self.rows.append(row)
                return row
            case "evaluated" if self._keep:
                told = event.evaluated
                self.evaluations.append((self._samples, told.step, told.evaluation.loss))
        return None

    def _done(self, done: RoundDone) -> RoundRow:
        weights = {m.replica: samples_of(m) for m in done.members}
        local = [self._local(n, weights.get(n, 0)) for n in sorted({*self._work, *weights})]
        whole = self._microbatches * self._replicas
        step = done.microbatches // whole if whole else None
        if any(m.clients for m in local):  # of clients a step is a round
            step = done.round + 1
        row = taken(
            RoundRow,
            done,
            members=tuple(m for m in local if m.replica in weights),
            left_out=tuple(m for m in local if m.replica not in {*weights, *done.going}),
            going=tuple(done.going),
            joined=tuple(m.replica for m in done.joined),
            pairs=pairs_of(done.members) if any(m.group for m in done.members) else None,
            samples_before=self._samples,
            step=step,
            chosen_by=("rule" if self._chosen else "run") if done.HasField("clients") else "",
            uploads=done.uploads if done.HasField("uploads") else None,
        )
        self._samples += row.samples
        ends = {n: w.first_step + w.steps for n, w in self._work.items()}
        self._losses = {(n, s): x for (n, s), x in self._losses.items() if s >= ends.get(n, s + 1)}
        self._work.clear()
        self._chosen = False
        return row

    def _local(self, number: int, samples: int) -> Local:
        work = self._work.get(number, RoundWork())
        steps = range(work.first_step, work.first_step + work.steps)
        losses = [self._losses[number, s] for s in steps if (number, s) in self._losses]
        return Local(
            replica=number,
            steps=work.steps,
            samples=samples,
            losses=tuple(losses),
            clients=sum(r.count for r in work.cohort) + len(work.left_out),
            diverged=len(work.left_out),
            behind=work.behind,
        )


def samples_of(member: RoundMember) -> int:
    """Return what a member weighs, in samples, had it begun with the newest version."""
    return round(member.weight / (member.unit or 1) * math.sqrt(1 + member.behind))


def _mean(values: Sequence[float]) -> float | None:
    finite = [v for v in values if math.isfinite(v)]
    return sum(finite) / len(finite) if finite else None


def sentence(row: RoundRow) -> str:
    """A round in one line."""
    members = ", ".join(f"{m.replica} ({_did(m)})" for m in row.members)
    parts = [f"round {row.round}: replicas {members}"]
    if row.left_out:
        parts[0] += f"; without {', '.join(str(m.replica) for m in row.left_out)}"
    if row.going:
        parts[0] += f"; {', '.join(map(str, row.going))} still at work"
    if row.joined:
        parts[0] += f"; {', '.join(map(str, row.joined))} took its version"
    if row.pairs is not None:
        parts.append(f"pairs {', '.join(f'{a}-{b}' for a, b in row.pairs) or 'none'}")
    if row.asked:
        parts.append(f"{row.came} of {row.asked} clients")
    if row.chosen_by:
        parts[-1] += f", chosen by the {row.chosen_by}"
    if row.staleness:
        old = (f"{clients} by {behind}" for behind, clients in row.staleness.items())
        parts[-1] += f", behind by versions: {', '.join(old)}"
    if row.alike is not None:
        parts[-1] += f", alike by {row.alike:.0%}"
    if row.skipped:
        parts[-1] += f", {count_of(row.skipped, 'local step')} skipped: overflow"
    if row.sums:
        parts[-1] += f", noisy sum {row.sums}"
    if row.loss is not None:
        parts.append(f"local loss {row.loss:.4f}")
    parts += [f"drift {row.drift:.3g}", f"{row.sent_bytes / 1e6:.2f} MB"]
    parts.append(f"{row.seconds:.1f} s, up to {row.waited_s:.1f} s of it waiting")
    if row.exchange_s:
        parts[-1] += f"; exchange {row.exchange_s:.1f} s"
    if (sent := row.uploads) is not None:
        ratios = f"{sent.least_ratio:.2%} to {sent.most_ratio:.2%}"
        text = f"{sent.clients} clients sent {ratios} of their updates, {sent.bytes / 1e6:.2f} MB"
        parts.append(text + (f", in {sent.seconds:.1f} s at most" if sent.seconds else ""))
    if row.attempt > 1:
        parts.append(f"attempt {row.attempt}")
    return " · ".join(parts)


def _did(member: Local) -> str:
    """What a member has in a version: clients, whose weights need not be samples."""
    if not member.clients:
        return f"{member.samples} samples"
    count = member.clients - member.diverged
    return f"{count} client{'s' * (count != 1)}"


def evaluated(event: RunEvent) -> str:
    """One line on the evaluation of a version, or of the weights that replicas go on with."""
    told = event.evaluated
    of = f"version after {count_of(told.round, 'round')}"
    if told.step != told.round:  # of clients a step is a round
        of += f", {count_of(told.step, 'step')}"
    if told.replicas:
        of = f"mean of what {told.replicas} replicas came to {of.removeprefix('version ')}"
    loss = loss_text(told.evaluation.loss, told.evaluation.weight)
    by = "" if told.replicas else f", says replica {told.replica}"
    return " · ".join([f"{of} · held-out {loss}{by}", *_by_client(told)])


def client_numbers(found: Evaluation) -> dict[str, float | int]:
    """What clients came to on their own held-out samples as flat numbers, of the loss and of each
    metric the mean over all samples (`clients_NAME`), and of clients' own means the least, the
    median and the most; empty where none was evaluated."""
    row: dict[str, float | int] = {}
    for number in found.clients:
        name = f"clients_{number.name}"
        row |= {"clients": number.clients, name: number.mean, f"{name}_least": number.least}
        row |= {f"{name}_median": number.median, f"{name}_most": number.most}
    return row


def _by_client(told: VersionEvaluated) -> Iterator[str]:
    """How the numbers of clients are spread, for people."""
    for n in told.evaluation.clients:
        spread = f"{n.name} {n.mean:.4f} ({n.least:.4f}, {n.median:.4f}, {n.most:.4f})"
        yield f"{spread} over {n.clients} clients (least, median, most)"


def begun(event: RunEvent) -> str:
    """What local work was handed out, in one line."""
    new = (w for w in event.round_begun.work if not w.behind)
    work = ", ".join(f"replica {w.replica} {_work_of(w)}" for w in new)
    return f"round {event.round_begun.round} begins: {work}"


def _work_of(work: RoundWork) -> str:
    clients = sum(r.count for r in work.cohort)
    return f"trains {clients} clients" if clients else f"makes {work.steps} steps"


def planned(event: RunEvent) -> str:
    """Say in one line who exchanges."""
    found = event.round_planned
    text = f"round {found.round}, attempt {found.attempt}: replicas "
    text += f"{', '.join(str(m.replica) for m in found.members)} exchange"
    if any(m.group for m in found.members):
        text += f" in pairs: {', '.join(f'{a}-{b}' for a, b in pairs_of(found.members)) or 'none'}"
    if found.joiners:
        text += f"; {', '.join(map(str, found.joiners))} take their version"
    return text
