"""Four weak peers beside a strong one, in the virtual world with real tensors.

    python benchmarks/sync/weak_strong.py        # three minutes

The strong peer holds the whole of a small GPT; of the weak ones none does, and they hold it
together, as a pipeline. Two replicas of DiLoCo, a round each 10 steps, against the strong peer
alone with the same batch and the same number of samples. Lines, of all five: `good` (100 Mbit/s,
5 ms) and `bad` (1 Mbit/s, 50 ms).

weak_gain_…        samples a second with the weak peers over those without
weak_promised_…    what the reports of the plans promise: the replicas' samples a second by their
                   predicted steps, over the strong one's; the exchange of rounds is not in it
weak_loss_…        held-out loss at the end over that of the strong peer alone
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


def promised(ran: Played) -> float:
    """Samples a second of all replicas together, by the newest plan of each."""
    newest = {e.replica: e for e in ran.events if e.HasField("plan")}
    return sum(
        len(e.plan.routes) * e.plan.microbatch_size / e.report.predicted.step_s
        for e in newest.values()
    )


def main() -> int:
    args = arguments(__doc__).parse_args()
    figures = []
    with Field(JOB) as field:
        for name, (rate, latency_s) in LINES.items():
            network = lines(["strong", *(w.name for w in WEAK)], dict.fromkeys(
                ["strong", *(w.name for w in WEAK)], rate
            ), latency_s)  # fmt: skip
            alone = field.play([STRONG], network, plan={"stages": 1})
            sync = {"kind": "local", "every": 10}
            ran = field.play([STRONG, *WEAK], network, plan={"replicas": 2}, sync=sync)
            stages = {e.replica: len(e.plan.stages) for e in ran.events if e.HasField("plan")}
            gain, promise = ran.samples_per_s / alone.samples_per_s, promised(ran) / promised(alone)
            loss = ran.losses[-1][1] / alone.losses[-1][1]
            print(
                f"{name}: {alone.samples_per_s:.2f} samples/s alone, {ran.samples_per_s:.2f} with "
                f"the weak ones (stages {stages}); promised {promised(alone):.2f} and "
                f"{promised(ran):.2f}; held-out {alone.losses[-1][1]:.3f} and "
                f"{ran.losses[-1][1]:.3f}",
                flush=True,
            )
            figures += [
                Figure(f"weak_gain_{name}", gain, "ratio", "higher"),
                Figure(f"weak_promised_{name}", promise, "ratio", "higher"),
                Figure(f"weak_loss_{name}", loss, "ratio", "lower"),
            ]
    report("weak_strong", figures, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
