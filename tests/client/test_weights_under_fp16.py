"""Which weights fp16 takes: those whose gradients and products torch's scaler and autocast take."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.client.submission import prepare
from shoal.job import Job, SettingsError


class Two(nn.Module):
    def __init__(self, dtype: torch.dtype, trained: bool) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4).to(dtype).requires_grad_(trained)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x.to(self.first.weight.dtype)).float()
        return F.cross_entropy(self.last(h), y)


@pytest.mark.parametrize(
    ("products", "dtype", "trained", "says"),
    [
        pytest.param("fp16", torch.float32, True, "", marks=pytest.mark.slow),
        pytest.param("fp16", torch.float16, False, "", marks=pytest.mark.slow),
        pytest.param("fp16", torch.float16, True, "is trained in float16", marks=pytest.mark.slow),
        pytest.param("fp16", torch.bfloat16, False, "is kept in bfloat16", marks=pytest.mark.slow),
        ("fp32", torch.float16, True, "is trained, in float16"),
    ],
    ids=str,
)
def test_weights_that_float16_has_no_gradients_or_products_of_are_refused(
    tmp_path: Path, products: str, dtype: torch.dtype, trained: bool, says: str
) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(16, 3)).astype("f4"), rng.integers(0, 2, 16)
    np.savez(tmp_path / "data.npz", x=x, y=y)
    module = Two(dtype, trained)
    job = Job(
        model={"factory": "live:Two", "dtype": products},
        module=module,
        data={"kind": "arrays", "source": "data.npz", "inputs": "x", "targets": "y"},
        steps=2,
        batch=4,
        folder=tmp_path,
    )
    with ExitStack() as stack:
        if says:
            with pytest.raises(SettingsError, match=f"`model.(dtype|factory)`.*first.*{says}"):
                stack.enter_context(prepare(job))
            return
        assert stack.enter_context(prepare(job)).graph.operators
