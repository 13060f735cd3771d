"""Four weak peers beside a strong one, in the virtual world with real tensors.

    python benchmarks/sync/weak_strong.py        # three minutes

The strong peer holds the whole of a small GPT; of the weak ones none does, and they hold it
together, as a pipeline. Replicas of DiLoCo, as many as the planner finds best (`plan.replicas =
"auto"`), a round each 10 steps, against the strong peer alone with the same batch and the same
number of samples. Lines, of all five: `good` (100 Mbit/s, 5 ms) and `bad` (1 Mbit/s, 50 ms).

weak_gain_…        samples a second of what the formation takes over those of the strong one alone
weak_promised_…    what the formation promises: its samples a second over those predicted of the
                   strong one alone
weak_replicas_…    how many replicas are formed
weak_loss_…        held-out loss at the end over that of the strong peer alone
weak_auto_gain_…   the same of `sync.kind = "auto"`, which may also leave replicas be
weak_auto_promised_… weak_auto_loss_…   the same
weak_kept          runs in which there is a gain if, and only if, one is promised; of all
"""

from __future__ import annotations

import sys

from shoal.benchmarks.sync.worlds import MBIT, Field, Played, lines
from shoal.benchmarks.table import Figure, arguments, report
from shoal.sim.virtual.spec import PeerSpec

LINES = {"good": (100 * MBIT, 0.005), "bad": (MBIT, 0.05)}
STEPS, BATCH = 60, 8
JOB = {
    "version": 1,
    "name": "weak",
    "model": {
        "factory": "shoal.examples.gpt:gpt",
        "args": {"layers": 4, "width": 32, "heads": 2, "length": 32, "dropout": 0.0},
    },
    "data": {"kind": "text", "length": 32},
    "train": {
        **{"steps": STEPS, "batch": BATCH, "microbatch": 2, "lr": 3e-3},
        **{"eval_every": 20, "eval_batches": 2, "schedule": "constant", "warmup": 0},
    },
}
STRONG = PeerSpec(name="strong", place="rack", flops_per_s=2e8, memory_bytes=1 << 30)
WEAK = [
    PeerSpec(name=f"weak-{i}", place="home", flops_per_s=5e7, memory_bytes=1_500_000)
    for i in range(4)
]


GAIN = 1.05
"""From which on samples a second are more: less is within what predictions are off."""


def predicted(ran: Played) -> float:
    """Samples a second, as the report says: of the formation, or of the only plan."""
    for event in ran.events:
        if event.formed.kind == "local":
            told = event.formed
            return told.every * told.batch / (told.local_s + told.exposed_s)
    plan = next(e for e in ran.events if e.HasField("plan"))
    return ran.batch / plan.report.predicted.step_s


def main() -> int:
    args = arguments(__doc__).parse_args()
    figures, kept = [], 0
    names = ["strong", *(w.name for w in WEAK)]
    with Field(JOB) as field:
        alone = field.play([STRONG], lines(["strong"], {"strong": MBIT}, 0.005), plan={"stages": 1})
        for name, (rate, latency_s) in LINES.items():
            network = lines(names, dict.fromkeys(names, rate), latency_s)
            sync = {"kind": "local", "every": 10}
            ran = field.play([STRONG, *WEAK], network, plan={"replicas": "auto"}, sync=sync)
            told = next(e.formed for e in ran.events if e.HasField("formed"))
            gain = ran.samples_per_s / alone.samples_per_s
            promise = predicted(ran) / predicted(alone)
            loss = ran.losses[-1][1] / alone.losses[-1][1]
            kept += (gain >= GAIN) == (promise >= GAIN)
            print(
                f"{name}: {alone.samples_per_s:.2f} samples/s alone, {ran.samples_per_s:.2f} of "
                f"{[list(r.peers) for r in told.replicas]}; promised {predicted(alone):.2f} and "
                f"{predicted(ran):.2f}; held-out {alone.losses[-1][1]:.3f} and "
                f"{ran.losses[-1][1]:.3f}",
                *(f"left out: {s.peer}, {s.reason}" for s in told.left_out),
                sep="\n  ",
                flush=True,
            )
            figures += [
                Figure(f"weak_gain_{name}", gain, "ratio", "higher"),
                Figure(f"weak_promised_{name}", promise, "ratio", "higher"),
                Figure(f"weak_replicas_{name}", len(told.replicas), "replicas", "higher"),
                Figure(f"weak_loss_{name}", loss, "ratio", "lower"),
            ]
            ran = field.play([STRONG, *WEAK], network, sync={"kind": "auto"})
            gain = ran.samples_per_s / alone.samples_per_s
            promise = predicted(ran) / predicted(alone)
            loss = ran.losses[-1][1] / alone.losses[-1][1]
            kept += (gain >= GAIN) == (promise >= GAIN)
            used = {p for e in ran.events for s in e.plan.stages for p in s.holders}
            print(
                f'  kind = "auto": {len(used)} peers, {len(ran.rounds)} rounds, '
                f"{ran.samples_per_s:.2f} samples/s, promised {predicted(ran):.2f}, "
                f"held-out {ran.losses[-1][1]:.3f}",
                flush=True,
            )
            figures += [
                Figure(f"weak_auto_gain_{name}", gain, "ratio", "higher"),
                Figure(f"weak_auto_promised_{name}", promise, "ratio", "higher"),
                Figure(f"weak_auto_loss_{name}", loss, "ratio", "lower"),
            ]
    figures.append(Figure("weak_kept", kept / (2 * len(LINES)), "ratio", "higher"))
    report("weak_strong", figures, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
