"""A problem in pfl-research's simulation, run by `elsewhere.py` with a Python that has pfl.

    python pfl_side.py PROBLEM.npz TASKS.json FOLDER

Plays tasks in turn, each {"key", "algorithm", "arguments"}: FOLDER gets KEY.npz with the weights,
and rows.jsonl a line of each. The sampler of users goes through the problem's cohorts; a user's
data set is what it has in that round, in the order of its steps.
"""

from __future__ import annotations

import json
import sys
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.algorithm.fedprox import FedProx, FedProxParams
from pfl.algorithm.scaffold import SCAFFOLD, SCAFFOLDParams
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.user_state import InMemoryUserStateStorage
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.internal.bridge import FrameworkBridgeFactory
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel

sys.path.insert(0, str(Path(__file__).parent))
from round_log import RoundLog, perceptron  # type: ignore[import-not-found]


class Scaffold(SCAFFOLD):  # type: ignore[misc]
    """With c_i added to gradients, and c taken from them: both have the other sign here."""

    def train_one_user(self, *args: Any, **named: Any) -> Any:
        bridge = FrameworkBridgeFactory.scaffold_bridge()
        as_it_is = bridge.do_control_variate_sgd

        def turned(*given: Any, local_c: Any, server_c: Any) -> None:
            as_it_is(*given, local_c=server_c, server_c=local_c)

        bridge.do_control_variate_sgd = turned
        try:
            return super().train_one_user(*args, **named)
        finally:
            bridge.do_control_variate_sgd = as_it_is


ALGORITHMS = {
    "FederatedAveraging": (FederatedAveraging, NNAlgorithmParams),
    "FedProx": (FedProx, FedProxParams),
    "SCAFFOLD": (Scaffold, SCAFFOLDParams),
    "SCAFFOLD as it is": (SCAFFOLD, SCAFFOLDParams),
}
RATE = 0.1


class Net(torch.nn.Module):
    """What pfl wants a model to be."""

    def __init__(self, weights: list[Any]) -> None:
        super().__init__()
        self.net = perceptron(weights)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.net(x)
        return found

    def loss(self, x: torch.Tensor, y: torch.Tensor, eval: bool = False) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self(x), y)

    @torch.no_grad()
    def metrics(self, x: torch.Tensor, y: torch.Tensor, eval: bool = False) -> dict[str, Any]:
        right = self(x).argmax(1) == y
        return {"accuracy": Weighted(float(right.sum()), len(y))}


class Watch(TrainingProcessCallback):  # type: ignore[misc]
    """Notes the end of each round."""

    def __init__(self, net: Net, log: RoundLog) -> None:
        self.net, self.log = net, log

    def _weights(self) -> list[Any]:
        return [p.detach().numpy() for p in self.net.parameters()]

    def on_train_begin(self, *, model: Any) -> Any:
        self.log.ended(0, self._weights())
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Any, model: Any, *, central_iteration: int
    ) -> tuple[bool, Any]:
        self.log.ended(central_iteration + 1, self._weights())
        return False, Metrics()


def play(problem: dict[str, Any], task: dict[str, Any]) -> RoundLog:
    x, y = torch.from_numpy(problem["x"]), torch.from_numpy(problem["y"])
    rounds, cohort = problem["cohorts"].shape
    batch, who = problem["steps"].shape[-1], problem["cohorts"].reshape(-1)

    def of_user(turn: int) -> Any:
        """The data of the client whose turn it is, counted over all rounds."""
        at = torch.from_numpy(problem["steps"][turn // cohort, turn % cohort].reshape(-1))
        return Dataset(raw_data=[x[at], y[at]], user_id=str(who[turn]))

    turns = count()
    net = Net([problem[f"start{i}"] for i in range(4)])
    log = RoundLog(problem)
    model = PyTorchModel(
        model=net,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(net.parameters(), 1.0),
    )
    algorithm, parameters = ALGORITHMS[task["algorithm"]]
    states = {}
    if "SCAFFOLD" in task["algorithm"]:
        states["user_state_storage"] = InMemoryUserStateStorage()
    algorithm().run(
        backend=SimulatedBackend(
            training_data=FederatedDataset(of_user, lambda: next(turns)),
            val_data=None,
            postprocessors=[WeightByDatapoints()],
        ),
        model=model,
        algorithm_params=parameters(
            central_num_iterations=rounds,
            evaluation_frequency=10**9,
            train_cohort_size=cohort,
            val_cohort_size=0,
            **task["arguments"],
            **states,
        ),
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=RATE, local_batch_size=batch
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[Watch(net, log)],
    )
    return log


def main() -> None:
    file, tasks, folder = sys.argv[1:]
    torch.set_num_threads(1)
    problem = dict(np.load(file))
    for task in json.loads(Path(tasks).read_text()):
        play(problem, task).write(Path(folder), task["key"])


if __name__ == "__main__":
    main()
