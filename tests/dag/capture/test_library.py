"""An error about a line of an installed library says what the user can do, not how to write it."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from shoal.dag.capture.capture import CaptureError, capture
from shoal.tests.dag.capture.test_models import EXPERTS

WRITES = "write it with|keep the value a tensor|keep shapes fixed|torch.where"


def test_experts_one_by_one_are_refused_with_the_setting_that_helps() -> None:
    module = EXPERTS["mixtral"]()
    module.set_experts_implementation("eager")  # type: ignore[operator]  # Hugging Face's
    words = {name: torch.randint(0, 20, (4, 6)) for name in ("input_ids", "labels")}
    with pytest.raises(CaptureError) as caught:
        capture(module, words)
    place, _, says = str(caught.value).partition("\n")
    assert "modeling_mixtral.py:" in place
    assert 'model.set_experts_implementation("grouped_mm")' in says
    assert "this model family (mixtral) is not supported" in says
    assert not re.search(WRITES, str(caught.value).replace("\n", " ").partition("  ")[2])


LAYERS = """
import torch

def inverse(h):
    return torch.linalg.inv(h.T @ h)

def positive(h):
    return h[h > 0]

def item(h):
    return h * h.sum().item()

def branch(h):
    if h.sum() > 0:
        return h
    return -h
"""


@pytest.fixture
def installed(tmp_path: Path, request: pytest.FixtureRequest) -> ModuleType:
    """A module of functions that lies where a library would."""
    file = tmp_path / "lib" / "site-packages" / str(request.param)
    file.parent.mkdir(parents=True)
    file.write_text(LAYERS)
    spec = importlib.util.spec_from_file_location("layers_of_a_library", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Uses(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x)).mean()


@pytest.mark.parametrize("function", ["inverse", "positive", "item", "branch"])
@pytest.mark.parametrize(
    ("installed", "says"),
    [
        ("layers/blocks.py", "this line is layers's, not yours: use another layer"),
        ("transformers/models/owl/modeling_owl.py", r"this model family \(owl\) is not supported"),
        ("transformers/masking_utils.py", 'set attn_implementation to "sdpa" or "eager"'),
        ("transformers/integrations/moe.py", 'set experts_implementation to "grouped_mm"'),
    ],
    indirect=["installed"],
)
def test_no_line_of_a_library_is_the_users_to_write(
    installed: ModuleType, says: str, function: str
) -> None:
    with pytest.raises(CaptureError, match=says) as caught:
        capture(Uses(getattr(installed, function)), {"x": torch.randn(4, 4)})
    assert str(caught.value).startswith(f"{installed.__file__}:")
    assert not re.search(WRITES, str(caught.value).replace("\n", " ").partition("  ")[2])
