"""Capture: what it keeps of a module, and what it refuses, in the user's words."""

import dataclasses
import linecache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoal.dag.capture.capture import CaptureError, capture
from shoal.dag.ir.graph import BufferUpdate, Graph, Size


class Model(nn.Module):
    """A linear layer around the function under test."""

    def __init__(self, function, **layers: nn.Module) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), function
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor):
        return self.function(self, x)


def graph_of(function, **layers: nn.Module) -> Graph:
    return capture(Model(function, **layers), {"x": torch.randn(4, 4)}).graph


def targets(graph: Graph) -> list[str]:
    return [op.target.split(".")[1] for op in graph.operators]


def test_dropout_attention_and_feature_dropout_become_operators_with_numbers_of_their_own() -> None:
    def forward(self, x):
        q = self.drop(self.linear(x))[:, None, :, None]
        y = F.scaled_dot_product_attention(q, q, q, dropout_p=0.2 if self.training else 0.0)
        return self.maps(y.expand(-1, 3, -1, 2)).mean()

    graph = graph_of(forward, drop=nn.Dropout(0.1), maps=nn.Dropout2d(0.3))
    random = [(op.target, op.args[-1]) for op in graph.operators if op.target.startswith("shoal")]
    assert random == [
        ("shoal.dropout.default", 0),
        ("shoal.attention.default", 1),
        ("shoal.feature_dropout.default", 2),
    ]
    assert graph.operators[-2].args[1] == 0.3


def test_random_tensors_become_counter_based_ones() -> None:
    def forward(self, x):
        noise = torch.rand_like(x) + torch.randn(x.shape[0], 4) + torch.bernoulli(x.sigmoid())
        return (self.linear(x) + noise).mean()

    made = {op.target: op for op in graph_of(forward).operators if op.target.startswith("shoal")}
    assert sorted(made) == [
        "shoal.bernoulli_like.default",
        "shoal.rand.default",
        "shoal.randn.default",
    ]
    assert made["shoal.randn.default"].args[0] == (Size(1), 4)


def test_tied_parameters_have_one_name_and_frozen_ones_no_gradient() -> None:
    module = Model(
        lambda self, x: (
            (self.b(self.a(x)) + self.cold(x)).mean() + self.spare.sum() + self.none.sum()
        )
    )
    module.a = nn.Linear(4, 4, bias=False)
    module.b, module.cold = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
    module.b.weight = module.a.weight
    module.spare, module.none = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(0, 4))
    captured = capture(module, {"x": torch.randn(4, 4)})
    by_name = {p.name: p for p in captured.graph.parameters}
    assert by_name["a.weight"].tied == ("b.weight",)
    assert "b.weight" not in by_name
    assert not by_name["cold.weight"].trainable
    assert not by_name["linear.weight"].trainable  # nothing reads it: no gradient, no update
    assert captured.tensors["a.weight"].data_ptr() == module.a.weight.data_ptr()
    reads = [v for op in captured.graph.operators for v in op.reads]
    assert reads.count("param:a.weight") == 2


def test_a_part_with_several_names_has_its_own_tensors_afterwards() -> None:
    module = Model(lambda self, x: self.again[1](self.linear(x)).mean() + self.seen)
    module.again = nn.ModuleList([module.linear] * 3)
    module.linear.register_buffer("scale", torch.ones(4))
    before = {n: (t, t.detach().clone()) for n, t in module.state_dict(keep_vars=True).items()}
    captured = capture(module, {"x": torch.randn(4, 4)})
    for name, tensor in module.state_dict(keep_vars=True).items():
        assert tensor is before[name][0], name
        assert torch.equal(tensor, before[name][1]), name
    assert captured.unproved == ()


def test_batch_norm_statistics_are_values_and_the_momentum_is_in_the_update() -> None:
    graph = graph_of(
        lambda s, x: s.norm(s.linear(x)).square().mean(), norm=nn.BatchNorm1d(4, momentum=0.3)
    )
    (norm,) = (op for op in graph.operators if "batch_norm" in op.target)
    updates = {b.name: b.update for b in graph.buffers if b.update}
    assert norm.args[6] == 1.0
    assert updates["norm.running_mean"] == BufferUpdate("ema", f"{norm.name}.3", 0.3)
    assert updates["norm.running_var"] == BufferUpdate("ema", f"{norm.name}.4", 0.3)
    assert updates["norm.num_batches_tracked"] == BufferUpdate("add", "", 1.0)


class KeepsNorm(Model):
    """Keeps its norm in eval mode, and one layer frozen, as fine-tuning of backbones does."""

    def train(self, mode: bool = True):
        super().train(mode)
        self.norm.eval()
        self.cold.requires_grad_(False)
        return self


@pytest.mark.parametrize("kind", [Model, KeepsNorm])
def test_a_part_in_eval_mode_trains_unless_its_own_train_keeps_it(kind) -> None:
    layers = {"norm": nn.BatchNorm1d(4), "cold": nn.Linear(4, 4)}
    module = kind(lambda s, x: s.cold(s.norm(s.linear(x))).square().mean(), **layers).train()
    module.cold.requires_grad_(True)
    module.norm.eval()
    graph = capture(module, {"x": torch.randn(4, 4)}).graph
    assert any(b.update for b in graph.buffers) is (kind is Model)
    trained = {p.name for p in graph.parameters if p.trainable}
    assert ("cold.weight" in trained) is (kind is Model)
    assert module.training
    assert not module.norm.training
    assert module.cold.weight.requires_grad


def test_outputs_may_be_a_dataclass_and_larger_entries_die() -> None:
    @dataclasses.dataclass
    class Out:
        loss: Tensor
        weight: Tensor
        hits: Tensor
        logits: Tensor

    def forward(self, x):
        h = self.linear(x)
        return Out(h.mean(), (x > 0).sum(), (h > 0).sum(), torch.linalg.svd(h)[0])

    graph = graph_of(forward)
    assert [name for name, _ in graph.metrics] == ["hits"]
    assert graph.spec[graph.weight].dtype == "float32"
    assert not any("svd" in op.target for op in graph.operators)


def test_the_batch_size_may_be_the_weight() -> None:
    graph = graph_of(lambda s, x: {"loss": s.linear(x).mean(), "weight": x.shape[0]})
    assert any(Size(1) in op.args for op in graph.operators)


def test_a_loss_function_takes_what_the_forward_does_not() -> None:
    def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(output, batch["y"])

    batch = {"x": torch.randn(4, 4), "y": torch.randn(4, 2)}
    graph = capture(nn.Sequential(nn.Linear(4, 2)).eval(), batch | {"input": batch["x"]}, loss=loss)
    assert "mse_loss" in targets(graph.graph)


def test_one_tensor_given_twice_is_two_inputs() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.mse_loss(self.linear(x), y)

    x = torch.randn(4, 4)
    graph = capture(Two(), {"x": x, "y": x}).graph
    assert {v for op in graph.operators for v in op.reads} >= {"in:x", "in:y"}


def test_no_grad_and_detach_stop_the_gradient() -> None:
    def forward(self, x):
        with torch.no_grad():
            target = self.linear(x)
        return ((self.other(x) - target) * self.third(x).detach()).mean()

    graph = graph_of(forward, other=nn.Linear(4, 4), third=nn.Linear(4, 4))
    assert [p.name for p in graph.parameters if p.trainable] == ["other.weight", "other.bias"]


def test_modules_are_named_by_their_path() -> None:
    graph = graph_of(
        lambda s, x: s.net(s.linear(x)).mean(), net=nn.Sequential(nn.ReLU(), nn.Linear(4, 1))
    )
    assert [op.module for op in graph.operators] == ["linear", "net.0", "net.1", ""]


def branch(self, x):
    h = self.linear(x)
    if h.sum() > 0:
        h = h * 2
    return h.mean()


def item(self, x):
    scale = self.linear(x).sum().item()
    return self.linear(x).mean() * scale


def loop(self, x):
    total = 0
    for row in self.linear(x):
        total = total + row.sum()
    return total


def batch_branch(self, x):
    if x.shape[0] > 3:
        return self.linear(x).mean()
    return self.linear(x).sum()


def fixed(self, x):
    return self.linear(x).view(4, 2, 2).mean()


def masked(self, x):
    h = self.linear(x)
    return h[h > 0].mean()


def printing(self, x):
    h = self.linear(x)
    print(f"mean {h.mean():.3f}")
    return h.mean()


def to_numpy(self, x):
    scale = self.linear(x).detach().numpy().sum()
    return self.linear(x).mean() * float(scale)


def random_order(self, x):
    order = torch.randperm(4)
    return self.linear(x)[:, order].mean()


def own_state(self, x):
    self.seen += x.sum()
    return self.linear(x).mean()


def forbidden(self, x):
    h = self.linear(x)
    return torch.linalg.inv(h.T @ h).mean()


def inverse_batch(self, x):
    scale = 1.0 / x.shape[0]
    return self.linear(x).sum() * scale


def sparse(self, x):
    h = F.embedding(x.long().abs() % 4, self.linear.weight, sparse=True)
    return h.mean()


def reentrant(self, x):
    h = checkpoint(self.linear, x, use_reentrant=True)
    return h.mean()


def changed_without_grad(self, x):
    h = self.linear(x)
    with torch.no_grad():
        h.t().mul_(2)
    return h.mean()


@pytest.mark.parametrize(
    ("function", "line", "says"),
    [
        (branch, "if h.sum() > 0:", "a branch on data.*torch.where"),
        (item, "scale = self.linear(x).sum().item()", "depends on data.*item"),
        (loop, "for row in self.linear(x):", "loop over the batch dimension.*batch size 4 only"),
        (batch_branch, "if x.shape[0] > 3:", r"branch on the batch size.*4 <= batch"),
        (fixed, "return self.linear(x).view(4, 2, 2).mean()", "batch size 4 only"),
        (masked, "return h[h > 0].mean()", r"how many elements a mask picks.*torch.where"),
        (printing, 'print(f"mean {h.mean():.3f}")', "printing.*metric"),
        (to_numpy, "scale = self.linear(x).detach().numpy().sum()", "numpy.*torch functions"),
        (random_order, "order = torch.randperm(4)", "randperm.*no counter-based form"),
        (own_state, "self.seen += x.sum()", "buffer 'seen' is changed"),
        (forbidden, "return torch.linalg.inv(h.T @ h).mean()", "linalg_inv.*allow-list"),
        (inverse_batch, "", "is not times·b"),
        (
            sparse,
            "h = F.embedding(x.long().abs() % 4, self.linear.weight, sparse=True)",
            "sparse=F",
        ),
        (reentrant, "h = checkpoint(self.linear, x, use_reentrant=True)", "use_reentrant=False"),
        (changed_without_grad, "h.t().mul_(2)", "made outside of it.*clone"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_cannot_be_captured_names_the_line_and_what_to_write(function, line, says) -> None:
    with pytest.raises(CaptureError, match=f"(?s){says}") as caught:
        graph_of(function)
    if line:
        where, _, code = str(caught.value).split("\n")[0].rpartition(f": {line}")
        assert code == ""
        file, number = where.rsplit(":", 1)
        assert file == __file__
        assert linecache.getline(file, int(number)).strip() == line


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda s, x: {"logits": s.linear(x)}, "returned no loss.*labels"),
        (lambda s, x: s.linear(x), r"loss is float32\[batch, 4\].*reduce"),
        (lambda s, x: (s.linear(x).mean(),), "returned tuple.*scalar loss"),
        (lambda s, x: s.linear(x).argmax(), "int64.*floating scalar"),
        (lambda s, x: x.mean(), "depends on no trainable parameter"),
        (lambda s, x: {"loss": s.linear(x).mean(), "weight": x}, r"weight is float32\[batch, 4\]"),
        (lambda s, x: torch.view_as_complex(s.linear(x).view(-1, 2, 2)).abs().mean(), "complex64"),
    ],
)
def test_a_forward_without_a_usable_result_is_refused(function, says) -> None:
    with pytest.raises(CaptureError, match=f"(?s){says}"):
        graph_of(function)


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        ({}, "no example inputs"),
        ({"x": torch.randn(1, 4)}, "at least 2"),
        ({"x": torch.randn(())}, "first dimension is the batch"),
        ({"x": torch.randn(2, 4), "z": torch.randn(2)}, "forward takes.*x, z"),
        ({"x": torch.randn(2, 4), "z": torch.randn(3)}, "the same number"),
    ],
)
def test_a_bad_example_is_refused(batch, says) -> None:
    with pytest.raises(CaptureError, match=f"(?s){says}"):
        capture(Model(lambda s, x: s.linear(x).mean()), batch)


def test_a_shared_batch_norm_is_refused() -> None:
    with pytest.raises(CaptureError, match="each called once"):
        graph_of(lambda s, x: s.norm(s.norm(s.linear(x))).mean(), norm=nn.BatchNorm1d(4))


def test_recurrent_dropout_is_refused() -> None:
    with pytest.raises(CaptureError, match="one-layer modules"):
        graph_of(
            lambda s, x: s.lstm(s.linear(x)[:, None])[0].mean(),
            lstm=nn.LSTM(4, 4, num_layers=2, dropout=0.5, batch_first=True),
        )


def test_parameters_over_the_same_memory_are_refused() -> None:
    module = Model(lambda s, x: s.other(s.linear(x)).mean(), other=nn.Linear(4, 4))
    module.other.weight = nn.Parameter(module.linear.weight.data)
    with pytest.raises(CaptureError, match=r"'linear.weight' and 'other.weight'.*same Parameter"):
        capture(module, {"x": torch.randn(4, 4)})


def test_the_core_form_comes_on_demand() -> None:
    module = Model(lambda s, x: F.silu(s.linear(x)).mean())
    captured = capture(module, {"x": torch.randn(4, 4)}, core=True)
    assert captured.core is not None
    assert captured.core.graph.operator_set == "core"
    assert captured.core.graph.batch == 4
