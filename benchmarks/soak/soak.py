"""Long runs: what is left of memory, descriptors, processes and steps when peers come and go.

    python benchmarks/soak/soak.py virtual --hours 2                churn in the simulated world
    python benchmarks/soak/soak.py real --minutes 20                churn of real processes
    python benchmarks/soak/soak.py killed --minutes 30 --every 20   one run whose holders are killed
    python benchmarks/soak/soak.py chaos --runs 100 --jobs 2  short runs with one to three faults

All real processes have identities and mutual TLS, and train a small model in three stages; compute
is stretched, so that a step is mostly waiting. Every run must end with each step once and the
losses of the single process; tracebacks in logs and processes that are left are problems, and the
exit code is 1 then.

virtual  Ghosts under churn: two peers that stay and five of which each dies or leaves in good order
         every two minutes on the average and comes back. What can be reached from the machines of
         the broker and of those that stay is counted every two minutes.
real     Runs of 400 steps one after the other, with six peers. Every 15 to 35 s one of four guests
         is killed or interrupted (half and half) and comes back after 3 to 15 s. Memory,
         descriptors and threads of the broker and of the two that stay, read every 10 s.
killed   One run with six peers. From its second minute on, every so many seconds one of its
         holders is killed (SIGKILL, supervisor and worker) and started again 8 s later, for so many
         minutes; a kill waits until there is somebody in the pool, as starting a process may take
         longer than that. One peer is spared, so that there is a process that saw it all.
         Evaluated ten times.
chaos    Each run has one to three faults, drawn from its seed: a holder killed, frozen for 0.3 to
         5 s or for longer than its lease, a link between holders or to the broker cut for up to
         13 s, the broker killed and started again. The first run of each cluster is left alone;
         the others are compared with it, too.

Growth is that of a line through the median of all slopes, after a warm-up of a quarter of the time.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from shoal.benchmarks.table import arguments, report


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("part", choices=("virtual", "real", "killed", "chaos"))
    parser.add_argument("--minutes", type=float, default=20.0, help="of real and killed (20)")
    parser.add_argument("--hours", type=float, default=2.0, help="of virtual (2)")
    parser.add_argument("--every", type=float, default=20.0, help="seconds between kills (20)")
    parser.add_argument("--steps", type=int, default=0, help="of killed (by --minutes)")
    parser.add_argument("--runs", type=int, default=100, help="of chaos (100)")
    parser.add_argument("--jobs", type=int, default=1, help="clusters at once, of chaos (1)")
    parser.add_argument("--warmup", type=float, help="minutes of warm-up (a fourth)")
    parser.add_argument("--stretch", type=float, default=20.0, help="slowness of peers (20)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="where logs and states stay")
    asked = parser.parse_args()
    warmup = asked.minutes / 4 if asked.warmup is None else asked.warmup
    with tempfile.TemporaryDirectory() as name:
        folder = asked.keep or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        # Processes are started from a process that uses gRPC; it says so each time.
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
        os.environ["XDG_CONFIG_HOME"] = str(folder / "config")
        from shoal.benchmarks.soak import faults, real, virtual

        if asked.part == "real":
            figures = real.real(asked.minutes, asked.seed, folder, asked.stretch, warmup)
        elif asked.part == "killed":
            figures = real.killed(
                asked.minutes, asked.every, asked.seed, folder, asked.stretch, warmup, asked.steps
            )
        elif asked.part == "virtual":
            figures = virtual.virtual(asked.hours, asked.seed)
        else:
            figures = faults.chaos(asked.runs, asked.seed, asked.jobs, folder)
        report("soak", figures, asked.json)
    raise SystemExit(1 if figures[-1].value else 0)


if __name__ == "__main__":
    main()
