"""How much of a DiLoCo round its communication is: 124M parameters, four replicas, 3 s a step, 100
steps a round, lines of 50 Mbit/s, in the virtual world with ghosts.

    python benchmarks/sync/exposed.py        # a minute

GPT-2's size (12 layers, width 768), a peer for each replica, whose speed is set so that a step
takes 3 s. Exposed is what a round takes longer than its local steps, as the virtual world plays it.

diloco_exposed_share        of a round, contributions and results by int8 in blocks of 128, which
                            are exchanged beside the next local steps, by overlap = "auto"
diloco_exposed_share_…      streaming-diloco of four fragments in turn, also beside local steps; and
                            without overlap, by this codec (waits) and others
diloco_exposed_least        what 2·(n - 1)/n of the encoded vector takes over the line, of a round:
                            all that a peer sends, and receives at the same time
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping
from typing import Any

from shoal.benchmarks.sync.worlds import MBIT, Field, lines
from shoal.benchmarks.table import Figure, arguments, report
from shoal.net.links.outbox import PIECES
from shoal.sim.ghost.device import GhostDevice, Ghosts
from shoal.sim.virtual.spec import PeerSpec

REPLICAS, STEP_S, EVERY, ROUNDS = 4, 3.0, 100, 4
LINE = 50 * MBIT
FLOPS = 2.37e11
"""Of a peer."""
INT8 = "int8:block=128"
CASES: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "": ("diloco", INT8, {"overlap": "auto"}),
    "_streaming": ("streaming-diloco", "none", {"fragments": 4}),
    "_waits": ("diloco", INT8, {}),
    "_e3m0": ("diloco", "e3m0", {}),
    "_none": ("diloco", "none", {}),
}
"""Method, codec, and options."""
ARGS = {"layers": 12, "width": 768, "heads": 12, "length": 1024, "dropout": 0.0}
JOB: Mapping[str, Any] = {
    "version": 1,
    "name": "exposed",
    "model": {"factory": "shoal.examples.gpt:gpt", "args": ARGS},
    "data": {"kind": "text", "length": 1024},
    "plan": {"replicas": REPLICAS, "stages": 1, "scheduler": "uniform", "replan": False},
    "recovery": {"ladder": []},
    "sync": {"kind": "local", "every": EVERY},
    "train": {
        **{"steps": EVERY * ROUNDS, "batch": REPLICAS, "microbatch": 1},
        **{"eval_every": 0, "schedule": "constant", "warmup": 0},
    },
}


def ghosts() -> Callable[[PeerSpec], GhostDevice]:
    """Whose frames leave in pieces as long as those of real peers."""
    made = Ghosts()

    def ghost(spec: PeerSpec) -> GhostDevice:
        device = made(spec)
        device.pieces = PIECES
        return device

    return ghost


def main() -> int:
    args = arguments(__doc__).parse_args()
    figures = []
    names = [f"p{i}" for i in range(REPLICAS)]
    network = lines(names, dict.fromkeys(names, LINE), 0.02)
    with Field(JOB) as field:
        for name, (method, codec, options) in CASES.items():
            specs = [
                PeerSpec(name=n, place=n, flops_per_s=FLOPS, memory_bytes=64 << 30) for n in names
            ]
            sync = {**JOB["sync"], "method": method, "options": options}
            ran = field.play(specs, network, device=ghosts(), codec={"sync": codec}, sync=sync)
            step_s = statistics.median(e.step.seconds for e in ran.events if e.HasField("step"))
            last = ran.rounds[-2].round_done
            steps = EVERY // int(options.get("fragments", 1))
            exposed, sent = last.seconds - steps * step_s, last.sent_bytes / REPLICAS
            print(
                f"{method}, {codec}, {dict(options)}: step {step_s:.2f} s, "
                f"round {last.seconds:.1f} s, of it exposed {exposed:.1f} s, waited "
                f"{last.waited_s:.1f} s; each sends {sent / 1e6:.1f} MB, "
                f"{sent / LINE:.1f} s of its line",
                flush=True,
            )
            figures.append(
                Figure(f"diloco_exposed_share{name}", exposed / last.seconds, "share", "lower")
            )
            if name == "_waits":
                least = sent / LINE / last.seconds
                figures.append(Figure("diloco_exposed_least", least, "share", "lower"))
    report("exposed", figures, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
