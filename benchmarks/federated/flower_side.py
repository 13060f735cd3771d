"""A problem in Flower's own simulation, run by `elsewhere.py` with a Python that has Flower.

    python flower_side.py PROBLEM.npz TASKS.json FOLDER

One simulation plays all tasks in turn, each {"key", "strategy", "arguments", "undo_bias"}: FOLDER
gets KEY.npz with the weights, and rows.jsonl a line of each. Which clients are in a round says the
client manager; a client makes its steps on the samples that the problem has for it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, ClassVar

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
os.environ |= {"FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_DISABLE_DOCKER_CPU_WARNING": "1"}

import numpy as np
import torch
from flwr.client import ClientApp, NumPyClient
from flwr.common import Context, GetPropertiesIns, ndarrays_to_parameters
from flwr.server import Grid, ServerApp, ServerConfig, SimpleClientManager, strategy
from flwr.server.client_proxy import ClientProxy
from flwr.server.compat import start_grid
from flwr.simulation import run_simulation

sys.path.insert(0, str(Path(__file__).parent))
from round_log import RoundLog, perceptron  # type: ignore[import-not-found]

FILE, TASKS, FOLDER = sys.argv[1:]
PROBLEM = dict(np.load(FILE))
START = [PROBLEM[f"start{i}"] for i in range(4)]
CLIENTS, ROUNDS = len(PROBLEM["own"]), len(PROBLEM["cohorts"])
BATCH, RATE = PROBLEM["steps"].shape[-1], 0.1


class Trainee(NumPyClient):  # type: ignore[misc]
    """A client: SGD on its batches of the round."""

    def __init__(self, number: int) -> None:
        self.number = number

    def get_properties(self, config: dict[str, Any]) -> dict[str, Any]:
        return {"client": self.number}

    def fit(
        self, parameters: list[Any], config: dict[str, Any]
    ) -> tuple[list[Any], int, dict[str, Any]]:
        torch.set_num_threads(1)
        count = int(config["round"])
        place = PROBLEM["cohorts"][count].tolist().index(self.number)
        net = perceptron(parameters)
        optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
        for at in PROBLEM["steps"][count, place]:
            optimizer.zero_grad()
            x, y = torch.from_numpy(PROBLEM["x"][at]), torch.from_numpy(PROBLEM["y"][at])
            torch.nn.functional.cross_entropy(net(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        came = [p.detach().numpy() for p in net.parameters()]
        return came, len(PROBLEM["own"][self.number]), {}


class GivenCohorts(SimpleClientManager):  # type: ignore[misc]
    """A client manager that samples what the problem says, round after round."""

    known: ClassVar[dict[str, int]] = {}
    """By node, which client it is."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds = 0

    def sample(
        self, num_clients: int, min_num_clients: int | None = None, criterion: Any = None
    ) -> list[ClientProxy]:
        self.wait_for(CLIENTS)
        for cid, proxy in list(self.clients.items()):
            if cid not in self.known:
                answer = proxy.get_properties(GetPropertiesIns({}), None, None)
                self.known[cid] = int(answer.properties["client"])
        by_number = {self.known[cid]: proxy for cid, proxy in self.clients.items()}
        self.rounds += 1
        return [by_number[n] for n in PROBLEM["cohorts"][self.rounds - 1].tolist()]


def made(task: dict[str, Any], log: RoundLog) -> Any:
    """Return the strategy of a task."""
    base = getattr(strategy, task["strategy"])

    class Watched(base):  # type: ignore[misc, valid-type]
        """It, at a rate without the correction of bias where the task says so."""

        def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
            assert not failures, failures
            if task["undo_bias"]:
                power = server_round + 1.0
                self.eta = task["arguments"]["eta"] * (1 - self.beta_1**power)
                self.eta /= np.sqrt(1 - self.beta_2**power)
            return super().aggregate_fit(server_round, results, failures)

    cohort = PROBLEM["cohorts"].shape[1]
    return Watched(
        fraction_fit=cohort / CLIENTS,
        fraction_evaluate=0.0,
        min_fit_clients=cohort,
        min_available_clients=CLIENTS,
        initial_parameters=ndarrays_to_parameters(START),
        on_fit_config_fn=lambda count: {"round": count - 1},
        evaluate_fn=lambda count, weights, _: log.ended(count, weights) or (0.0, {}),
        **task["arguments"],
    )


server = ServerApp()


@server.main()  # type: ignore[untyped-decorator]
def main(grid: Grid, context: Context) -> None:
    for task in json.loads(Path(TASKS).read_text()):
        log = RoundLog(PROBLEM)
        start_grid(
            grid=grid,
            config=ServerConfig(num_rounds=ROUNDS),
            strategy=made(task, log),
            client_manager=GivenCohorts(),
        )
        log.write(Path(FOLDER), task["key"])


def client(context: Context) -> Any:
    return Trainee(int(context.node_config["partition-id"])).to_client()


if __name__ == "__main__":
    run_simulation(
        server,
        ClientApp(client_fn=client),
        num_supernodes=CLIENTS,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": 2, "include_dashboard": False, "log_to_driver": False},
        },
    )
