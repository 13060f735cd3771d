"""Long runs: what is left of memory, descriptors, processes and steps when peers come and go.

    python benchmarks/soak.py real --minutes 20
    python benchmarks/soak.py killed --minutes 30 --every 20
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from table import arguments, report


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("part", choices=("virtual", "real", "killed", "chaos"))
    parser.add_argument("--minutes", type=float, default=20.0, help="of real and killed (20)")
    parser.add_argument("--hours", type=float, default=2.0, help="of virtual (2)")
    parser.add_argument("--every", type=float, default=20.0, help="seconds between kills (20)")
    parser.add_argument("--runs", type=int, default=100, help="of chaos (100)")
    parser.add_argument("--jobs", type=int, default=1, help="clusters at once, of chaos (1)")
    parser.add_argument("--warmup", type=float, help="minutes that memory does not count (a fourth)")
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
        if asked.part == "real":
            import soak_real

            figures = soak_real.real(asked.minutes, asked.seed, folder, asked.stretch, warmup)
        elif asked.part == "killed":
            import soak_real

            figures = soak_real.killed(
                asked.minutes, asked.every, asked.seed, folder, asked.stretch, warmup
            )
        elif asked.part == "virtual":
            import soak_virtual

            figures = soak_virtual.virtual(asked.hours, asked.seed)
        else:
            import soak_chaos

            figures = soak_chaos.chaos(asked.runs, asked.seed, asked.jobs, folder)
        report("soak", figures, asked.json)
    raise SystemExit(1 if figures[-1].value else 0)


if __name__ == "__main__":
    main()
