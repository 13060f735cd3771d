"""The runs of learning.py: one row trained with one seed, several at a time, and none twice.

A finished run is appended to a file of JSON lines as soon as it is there, so that an interrupted
benchmark goes on where it was. A run of other settings or codec texts has another key and does not
count.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from shoal.benchmarks.learning.chain import Data, Pipeline, Setting
from shoal.benchmarks.learning.rows import LINKS, Row
from shoal.benchmarks.learning.wire import Codecs, Use
from shoal.compression.codec import parse

__all__ = ["Run", "finished", "run_all", "train", "workers"]

Run = dict[str, Any]
"""`row`, `seed`; `loss` (through the codecs) and `weights_loss` (of the weights alone), held out,
in nats per byte; `curve` of [step, loss, weights_loss]; by role and link class `codecs`, `errors`
(relative L2, mean), `sent` and `dense` bytes (role grad has no class); `cpu_seconds`; `key`."""


def train(row: Row, seed: int, setting: Setting, source: Data) -> Run:
    """One run, on one thread."""
    torch.set_num_threads(1)
    began = time.thread_time()
    setting = row.setting(setting)
    codecs = row.codecs(setting)
    pipeline = Pipeline(setting, codecs, seed)
    data = source.reader(seed, codecs.replicas)
    held_out = source.reader(0, codecs.replicas)
    curve = []
    for step in range(setting.steps):
        pipeline.step(step, [data.batch(step, m, pipeline.size) for m in range(codecs.replicas)])
        if (step + 1) % setting.eval_every == 0:
            weights = pipeline.evaluate(held_out, setting.eval_windows)
            wire = pipeline.evaluate_on_wire(step, held_out, setting.eval_windows)
            curve.append([step + 1, round(wire, 5), round(weights, 5)])
    at, windows = setting.steps, setting.final_windows
    return {
        "row": row.name,
        "seed": seed,
        "key": key_of(row, seed, setting),
        "loss": pipeline.evaluate_on_wire(at, held_out, windows),
        "weights_loss": pipeline.evaluate(held_out, windows),
        "curve": curve,
        **_links(codecs, pipeline),
        "cpu_seconds": round(time.thread_time() - began, 1),
    }


def _links(codecs: Codecs, pipeline: Pipeline) -> dict[str, Any]:
    """What each role sent with on each class of links, what it cost and what it lost."""
    found: dict[str, dict[str, Any]] = {"codecs": {}, "errors": {}, "sent": {}, "dense": {}}

    def put(label: str, text: str, uses: Sequence[Use]) -> None:
        errors = [e for use in uses for e in use.errors]
        if not errors:
            return  # nothing of this role was sent
        found["codecs"][label] = parse(text).name
        found["errors"][label] = float(f"{statistics.fmean(errors):.4g}")
        found["sent"][label] = sum(use.sent_bytes for use in uses)
        found["dense"][label] = sum(use.dense_bytes for use in uses)

    for role in ("activation", "activation_grad"):
        texts: Sequence[str] = getattr(codecs, role)
        for link in sorted(set(LINKS)):
            cuts = [i for i, c in enumerate(LINKS) if c == link]
            put(f"{role} {link}", texts[cuts[0]], [pipeline.uses[role][i] for i in cuts])
    put("grad", codecs.grad, pipeline.uses["grad"])
    return found


def key_of(row: Row, seed: int, setting: Setting) -> str:
    """Of all that decides a run's numbers, the code apart."""
    known = {k: v for k, v in asdict(row.setting(setting)).items() if (k, v) != ("beta2", 0.95)}
    del known["eval_size"]  # no number hangs on it
    codecs = {k: v for k, v in asdict(row.codecs(setting)).items() if v or k != "ahead"}
    what = json.dumps([known, row.name, seed, codecs])
    return hashlib.sha256(what.encode()).hexdigest()[:16]


def finished(file: Path) -> dict[str, Run]:
    """The runs in a file of JSON lines by key; none where there is no file. A last line that an
    interrupted write left incomplete is passed over."""
    found: dict[str, Run] = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            run: Run = json.loads(line)
        except json.JSONDecodeError:
            continue
        found[run["key"]] = run
    return found


def run_all(
    rows: Iterable[Row], setting: Setting, cache: Path, *, jobs: int, seeds: int
) -> list[Run]:
    """Every row with its first `seeds` seeds, by seed and then in the order of the rows, from
    the cache where it has been; processes of their own, so many at a time."""
    cache.mkdir(parents=True, exist_ok=True)
    file = cache / "runs.jsonl"
    wanted = [(row, s) for s in range(seeds) for row in rows if s in row.seeds]
    keys = [key_of(row, seed, setting) for row, seed in wanted]
    there = finished(file)
    todo = [pair for pair, key in zip(wanted, keys, strict=True) if key not in there]
    with TemporaryDirectory() as folder, workers(jobs) as run_some:
        source = Data.write(Path(folder), setting)
        for i, run in enumerate(run_some(_train, [(*pair, setting, source) for pair in todo])):
            there[run["key"]] = run
            with file.open("a") as out:
                out.write(json.dumps(run) + "\n")
            print(
                f"{i + 1}/{len(todo)} {run['row']} seed {run['seed']}: loss {run['loss']:.4f}, "
                f"weights alone {run['weights_loss']:.4f}, {run['cpu_seconds']:.0f} CPU s",
                flush=True,
            )
    return [there[key] for key in keys]


@contextmanager
def workers(jobs: int) -> Iterator[Callable[..., Iterator[Run]]]:
    """A `map` that gives results as they come: over so many processes, or here for one job."""
    if jobs == 1:
        yield map
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=spawn) as pool:

        def run_some(call: Callable[..., Run], arguments: Iterable[object]) -> Iterator[Run]:
            for done in as_completed([pool.submit(call, what) for what in arguments]):
                yield done.result()

        yield run_some


def _train(what: tuple[Row, int, Setting, Data]) -> Run:
    return train(*what)
