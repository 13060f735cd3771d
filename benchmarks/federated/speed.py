"""Speed of simulated federated training: the virtual world of four peers, in one process.

    python benchmarks/federated/speed.py [--json FILE] [--only round start …] [--rivals]
    python benchmarks/federated/speed.py one round 50            # one case: ROUNDS

The problem is that of `problem.py`; a case is a process of its own, with one thread. Seconds are
CPU seconds of all its processes unless it says otherwise.

    round   1,000 clients, 100 a round, 50 rounds; after each round one of a bare vectorised loop
            (`torch.func.vmap` over all 100): fed_round_over_bare is a ratio of medians
    start   the same without the loop, 5 rounds: fed_first_round_seconds, wall, from the command to
            the end of the first round; fed_round_mib, the largest resident set
    many    10,000 clients, 1,000 a round, 100 rounds: fed_10000_seconds, wall, of all rounds from
            the command on; fed_10000_growth, the resident set at the end over that after 20 rounds
    wide    100,000 clients of one sample, 100 a round, 20 rounds: fed_broker_ms, the machine and
            the shell of the broker in a round
    long    100 clients, 10 a round, 1,000 rounds: fed_1000_growth, the resident set at the end
            over that after 100 rounds, of broker, aggregators and all else

`--rivals` plays `round` in pfl-research and Flower too (`elsewhere.py`), and keeps what came:
fed_round_over_pfl, fed_round_over_flower. `--cache DIR`: where.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.func import functional_call, grad, vmap

from shoal.benchmarks.federated.elsewhere import CACHE, FLOWER, PFL, Framework
from shoal.benchmarks.federated.problem import BATCH, MEAN, RATE, Problem
from shoal.benchmarks.table import Figure, arguments, report

ROUNDS = {"round": 50, "start": 5, "many": 100, "wide": 20, "long": 1000}
SETTLED, SETTLED_LONG = 20, 100
"""Rounds after which memory should not grow any more, of 100 and of a thousand."""


def bare(problem: Problem) -> Iterator[list[torch.Tensor]]:
    """Rounds of FedAvg with nothing around them, one each time that it is asked: all clients of a
    cohort are copies in one tensor. Yields the version after each."""
    with np.load(problem.file) as data:
        x, y = torch.from_numpy(data["x"]).flatten(1), torch.from_numpy(data["y"])
    own = torch.from_numpy(problem.own())
    weights = problem.start()
    module = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    names = [n for n, _ in module.named_parameters()]
    version = dict(zip(names, weights.values(), strict=True))

    def loss(one: dict[str, torch.Tensor], xs: torch.Tensor, ys: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(functional_call(module, one, (xs,)), ys)

    gradients = vmap(grad(loss))
    generator = torch.Generator().manual_seed(problem.seed)
    while True:
        cohort = torch.randperm(problem.clients, generator=generator)[: problem.per_round]
        mine = own[cohort]
        copies = {n: w.expand(len(cohort), *w.shape).clone() for n, w in version.items()}
        for _ in range(problem.passes):
            order = torch.rand(mine.shape, generator=generator).argsort(1)
            for at in torch.gather(mine, 1, order).split(BATCH, 1):  # type: ignore[no-untyped-call]
                found = gradients(copies, x[at], y[at])
                copies = {n: c - RATE * found[n] for n, c in copies.items()}
        version = {n: c.mean(0) for n, c in copies.items()}
        yield [*version.values()]


def in_turns(rounds: int) -> dict[str, float]:
    with Problem(clients=1000, per_round=100, rounds=rounds) as problem:
        loop, seconds = bare(problem), list[float]()

        def other(count: int) -> None:
            before = time.process_time()
            next(loop)
            if count > 1:  # the first one makes what the others use
                seconds.append(time.process_time() - before)

        played = problem.play(MEAN, evaluate=False, ended=other)
    ours, theirs = statistics.median(played.round_cpu), statistics.median(seconds)
    return {"ours": ours, "bare": theirs, "broker": played.broker_cpu / (rounds - 1)}


def start(rounds: int) -> dict[str, float]:
    with Problem(clients=1000, per_round=100, rounds=rounds) as problem:
        played = problem.play(MEAN, evaluate=False)
        return {"first_at": played.first_at}


def many(rounds: int) -> dict[str, float]:
    resident = list[float]()
    with Problem(clients=10_000, per_round=1000, rounds=rounds) as problem:
        problem.play(MEAN, evaluate=False, ended=lambda count: resident.append(_resident()))
        ended = time.perf_counter()
    settled = resident[min(SETTLED, rounds // 2) - 1]
    return {"ended": ended, "growth": resident[-1] / settled}


def wide(rounds: int) -> dict[str, float]:
    shape = {"clients": 100_000, "per_round": 100, "rounds": rounds}
    with Problem(**shape, samples=1, passes=1) as problem:
        played = problem.play(MEAN, evaluate=False)
    return {"broker": played.broker_cpu / (rounds - 1)}


def long(rounds: int) -> dict[str, float]:
    resident = list[float]()
    with Problem(clients=100, per_round=10, rounds=rounds, passes=1) as problem:
        problem.play(MEAN, evaluate=False, ended=lambda count: resident.append(_resident()))
    return {"growth": resident[-1] / resident[min(SETTLED_LONG, rounds // 2) - 1]}


CASES: dict[str, Callable[[int], dict[str, float]]] = {
    "round": in_turns,
    "start": start,
    "many": many,
    "wide": wide,
    "long": long,
}


def _resident() -> float:
    """Bytes of this process, now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def apart(case: str, rounds: int) -> dict[str, float]:
    """A case in a process of its own; with its largest resident set, MiB, and CPU seconds."""
    done = subprocess.run(
        [sys.executable, __file__, "one", case, str(rounds)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def one(case: str, rounds: int) -> dict[str, float]:
    torch.set_num_threads(1)
    found = CASES[case](rounds)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    found["mib"] = usage.ru_maxrss / 1024
    return found


def _round(rounds: int) -> list[Figure]:
    found = apart("round", rounds)
    return [
        Figure("fed_round_over_bare", found["ours"] / found["bare"], "ratio", "lower"),
        Figure("fed_round_seconds", found["ours"], "s", "lower"),
        Figure("fed_bare_seconds", found["bare"], "s", "lower"),
        Figure("fed_round_broker_ms", 1000 * found["broker"], "ms", "lower"),
    ]


def _start(rounds: int) -> list[Figure]:
    began = time.perf_counter()  # the same clock in all processes
    found = apart("start", rounds)
    return [
        Figure("fed_first_round_seconds", found["first_at"] - began, "s", "lower"),
        Figure("fed_round_mib", found["mib"], "MiB", "lower"),
    ]


def _many(rounds: int) -> list[Figure]:
    began = time.perf_counter()
    found = apart("many", rounds)
    return [
        Figure("fed_10000_seconds", found["ended"] - began, "s", "lower"),
        Figure("fed_10000_growth", found["growth"], "ratio", "lower"),
        Figure("fed_10000_mib", found["mib"], "MiB", "lower"),
    ]


def _wide(rounds: int) -> list[Figure]:
    found = apart("wide", rounds)
    return [
        Figure("fed_broker_ms", 1000 * found["broker"], "ms", "lower"),
        Figure("fed_wide_mib", found["mib"], "MiB", "lower"),
    ]


def _long(rounds: int) -> list[Figure]:
    found = apart("long", rounds)
    return [
        Figure("fed_1000_growth", found["growth"], "ratio", "lower"),
        Figure("fed_1000_mib", found["mib"], "MiB", "lower"),
    ]


GROUPS: dict[str, Callable[[int], list[Figure]]] = {
    "round": _round,
    "start": _start,
    "many": _many,
    "wide": _wide,
    "long": _long,
}


def beside(ours: float, cache: Path) -> list[Figure]:
    """Our CPU seconds of a round over those of others, and their memory."""
    tasks: tuple[tuple[Framework, int, dict[str, Any]], ...] = (
        (PFL, 20, {"key": "speed", "algorithm": "FederatedAveraging", "arguments": {}}),
        (FLOWER, 6, {"key": "speed", "strategy": "FedAvg", "arguments": {}, "undo_bias": False}),
    )
    found: list[Figure] = []
    for framework, rounds, task in tasks:
        with Problem(clients=1000, per_round=100, rounds=rounds) as problem:
            theirs = framework.play(problem, [task], cache)["speed"]
        seconds = statistics.median(theirs.round_cpu[1:])
        found += [
            Figure(f"fed_round_over_{framework.name}", ours / seconds, "ratio", "lower"),
            Figure(f"fed_round_{framework.name}_seconds", seconds, "s", "lower"),
            Figure(f"fed_round_{framework.name}_mib", theirs.mib, "MiB", "lower"),
        ]
    return found


def main() -> int:
    match sys.argv[1:]:
        case ["one", case, rounds]:
            print(json.dumps(one(case, int(rounds))))
            return 0
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=list(GROUPS), metavar="CASE")
    parser.add_argument("--rivals", action="store_true", help="play `round` elsewhere too")
    parser.add_argument("--cache", type=Path, default=CACHE, metavar="DIR")
    asked = parser.parse_args()
    figures: list[Figure] = []
    for name in asked.only:
        figures += GROUPS[name](ROUNDS[name])
    if asked.rivals:
        ours = next((f.value for f in figures if f.name == "fed_round_seconds"), None)
        figures += beside(apart("round", 20)["ours"] if ours is None else ours, asked.cache)
    report("speed", figures, asked.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
