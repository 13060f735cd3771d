"""What compression does to learning: held-out loss of one small byte GPT, sent in many ways.

    python benchmarks/learning/learning.py [--json FILE] [--jobs N] [--rows NAME,…] [--seeds N]
    python benchmarks/learning/learning.py --write-table  # all rows; also writes what is committed:
        benchmarks/learning/learning.json (the results), planner/codecs/codec_table.json
        (what `auto` may choose) and docs/compression-learning.png
    python benchmarks/learning/learning.py --committed [--write-table]   # no training

12 blocks in 6 stages, two of the five links slow, 2,000 steps on the standard library's sources,
three seeds; a seed decides the model's start and the order of the data, and is the same for all
rows. The pipeline runs in one process (chain.py); what compresses and what updates is what
peers use. Finished runs are kept in .cache/learning and not repeated. `--quick`: a smaller model,
200 steps, one seed; it shows that everything works, and no more.
"""

from __future__ import annotations

import platform
import sys
from dataclasses import asdict, replace
from pathlib import Path

import torch

from shoal.benchmarks.learning.chain import Setting
from shoal.benchmarks.learning.plot import plot
from shoal.benchmarks.learning.results import (
    TABLE,
    codec_table,
    describe,
    figures,
    load,
    means,
    save,
    table_text,
)
from shoal.benchmarks.learning.rows import ROWS
from shoal.benchmarks.learning.runs import run_all
from shoal.benchmarks.table import arguments, report

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).with_name("learning.json")
PICTURE = ROOT / "docs" / "compression-learning.png"
QUICK = Setting(
    steps=200,
    blocks=6,
    width=16,
    heads=2,
    length=16,
    batch=4,
    lr=1e-2,
    eval_every=100,
    eval_windows=64,
    final_windows=128,
)


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--rows", default="", help="names, comma between; empty: all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=0, help="0: 2,000, quick 200")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache" / "learning")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--committed", action="store_true", help="report learning.json, no runs")
    parser.add_argument("--write-table", action="store_true", help="write what is committed")
    options = parser.parse_args()
    wanted = [name for name in options.rows.split(",") if name] or [row.name for row in ROWS]
    unknown = sorted(set(wanted) - {row.name for row in ROWS})
    if unknown:
        known = ", ".join(row.name for row in ROWS)
        parser.error(f"there is no row {', '.join(unknown)}: expected some of {known}")
    partial = options.quick or options.rows or options.steps or options.seeds != 3
    if options.write_table and partial:
        parser.error("--write-table takes everything: leave out --quick, --rows, --steps, --seeds")
    if options.committed:
        _, runs = load(RESULTS)
    else:
        setting, seeds = (QUICK, 1) if options.quick else (Setting(), options.seeds)
        setting = replace(setting, steps=options.steps or setting.steps)
        rows = [row for row in ROWS if row.name in wanted]
        runs = run_all(rows, setting, options.cache, jobs=options.jobs, seeds=seeds)
        if options.write_table:
            about = {
                "setting": asdict(setting),
                "python": platform.python_version(),
                "torch": torch.__version__,
            }
            save(RESULTS, about, runs)
    found = means(runs)
    if options.write_table:
        TABLE.write_text(table_text(codec_table(found)))
        plot(PICTURE, found)
    print(describe(found))
    report("learning", figures(found), options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
