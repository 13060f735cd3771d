"""What submitting a model takes that begins from scratch: its memory, and what is sent.

    python benchmarks/large/large.py --only submit

A GPT-2 of 124M and one of 1.3B parameters, from a config alone, each by a process of its own that
does what `shoal train` does until the run is submitted, to a broker in another process.

submit_memory_over_bound   the larger of the two peaks over 1.2 GiB + 0.2 times the model in fp32
submit_124m_gib, submit_1b3_gib        the peaks
submit_124m_seconds, submit_1b3_seconds   imports included
submit_1b3_sent_mb         what the broker stored of the larger one
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

from shoal.benchmarks.large.child import run
from shoal.benchmarks.table import Figure
from shoal.sim.processes import LocalCluster

__all__ = ["figures"]

MODELS = {"124m": {}, "1b3": {"n_layer": 24, "n_embd": 2048, "n_head": 16}}
BASE_GIB, SHARE = 1.2, 0.2
JOB = """version = 1

[model]
factory = "hf:model"

[data]
source = "text.txt"
length = 256
holdout = 0.0

[train]
steps = 1
batch = 8
microbatch = 8
"""


def figures() -> list[Figure]:
    """See the module."""
    found: list[Figure] = []
    over = []
    for name, sizes in MODELS.items():
        with tempfile.TemporaryDirectory(prefix="shoal-submit-") as folder:
            gib, seconds, sent, model = _submitted(Path(folder), sizes)
        over.append(gib / (BASE_GIB + SHARE * model))
        print(
            f"  {name}: {model:.2f} GiB of weights, {gib:.2f} GiB at its peak, {seconds:.0f} s, "
            f"{sent / 1e6:.1f} MB sent",
            flush=True,
        )
        found += [
            Figure(f"submit_{name}_gib", gib, "GiB", "lower"),
            Figure(f"submit_{name}_seconds", seconds, "s", "lower"),
        ]
    found.append(Figure("submit_1b3_sent_mb", sent / 1e6, "MB", "lower"))
    return [Figure("submit_memory_over_bound", max(over), "ratio", "lower"), *found]


def _submitted(folder: Path, sizes: dict[str, int]) -> tuple[float, float, int, float]:
    """Peak in GiB, seconds, bytes that the broker stored, and the model's GiB in fp32."""
    (folder / "model").mkdir()
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **sizes}
    (folder / "model" / "config.json").write_text(json.dumps(config))
    (folder / "text.txt").write_text("Many small fish move as one large body. " * 2000)
    (folder / "job.toml").write_text(JOB)
    with LocalCluster(peers=0, folder=folder / "cluster") as cluster:
        ran = run([sys.executable, __file__, str(folder / "job.toml"), cluster.address])
        if ran.status:
            raise SystemExit(ran.output)
        blobs = folder / "cluster" / "broker" / "blobs"
        sent = sum(f.stat().st_size for f in blobs.rglob("*") if f.is_file())
    return ran.gib, ran.seconds, sent, float(ran.output.split()[-1])


def _submit(job: str, address: str) -> None:
    """In a process of its own; prints the model's GiB."""
    import shoal
    from shoal.client.submission import prepare

    with shoal.connect(address) as client, prepare(shoal.Job.from_toml(Path(job))) as prepared:
        client.submit_prepared(prepared, Path(job).parent / "run")
        print(sum(4 * p.spec.elements for p in prepared.graph.parameters) / 2**30)


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    _submit(*sys.argv[1:])
