"""Whole models: what a graph computes is what the module computes, in train mode, in eval mode, in
core operators and under bf16, at another batch size than the captured one."""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.dag.capture.capture import Captured, capture
from shoal.dag.ir.capture_errors import CaptureError
from shoal.dag.ir.graph import Device, Dtype, Graph, Lowered, MemoryFormat, Ref, Size
from shoal.dag.ir.operators import resolve, takes_key
from shoal.dag.ir.validate import validate
from shoal.dag.transforms.evaluation import evaluation
from shoal.dag.transforms.lower import lower

Batch = dict[str, Tensor]


def run(graph: Graph, tensors: dict[str, Tensor], batch: Batch, key: int = 0) -> Batch:
    """Every value of a bound graph; parameters get their gradient. The plain interpreter."""
    values: dict[str, Tensor] = {f"in:{name}": t for name, t in batch.items()}
    for p in graph.parameters:
        values[f"param:{p.name}"] = tensors[p.name].clone().requires_grad_(p.trainable)
    for b in graph.buffers:
        values[f"buffer:{b.name}"] = tensors[b.name]

    def python(arg):
        assert not isinstance(arg, Size)
        match arg:
            case Ref(value):
                return values[value]
            case Dtype(name) | MemoryFormat(name):
                return getattr(torch, name)
            case Device():
                return torch.device("cpu")
            case tuple():
                return [python(a) for a in arg]
        return arg

    for op in graph.operators:
        kwargs = {k: python(a) for k, a in op.kwargs}
        if takes_key(op.target):
            kwargs["key"] = key
        result = resolve(op.target)(*map(python, op.args), **kwargs)
        values |= zip(op.values, result if op.returns_tuple else [result], strict=True)
    return values


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.out, self.heads, self.causal = nn.Linear(width, width), heads, causal

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        def heads(t: Tensor) -> Tensor:
            return t.view(t.shape[0], t.shape[1], self.heads, -1).transpose(1, 2)

        k, v = self.kv(memory).chunk(2, dim=-1)
        y = F.scaled_dot_product_attention(
            heads(self.q(x)), heads(k), heads(v), is_causal=self.causal
        )
        return self.out(y.transpose(1, 2).reshape(x.shape))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.pos = nn.Embedding(20, 8), nn.Parameter(torch.randn(6, 8))
        self.norm, self.attention = nn.LayerNorm(8), Attention(8, 2, causal=True)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.emb(x) + self.pos
        h = h + self.attention(self.norm(h), self.norm(h))
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.pool, self.head = nn.MaxPool2d(2), nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        h = self.pool(F.relu_(self.norm(self.conv(x)))).mean((2, 3))
        logits = self.head(h)
        hits = (logits.argmax(-1) == y).float().mean()
        return {"loss": F.cross_entropy(logits, y), "logits": logits, "accuracy": hits}


class LSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 5, num_layers=2, batch_first=True)
        self.gru, self.head = nn.GRU(5, 4, batch_first=True), nn.Linear(4, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.head(self.gru(self.lstm(x)[0])[0][:, -1])
        return F.mse_loss(h[:, 0], y)


class MoE(nn.Module):
    """Top-1 routing with torch.where and a balance loss."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        p = self.gate(x).softmax(-1)
        best = p.argmax(-1, keepdim=True)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            out = out + torch.where(best == i, expert(x) * p[:, i : i + 1], 0.0)
        share = F.one_hot(best[:, 0], 3).float().mean(0)
        balance = 3 * (share * p.mean(0)).sum()
        return {"loss": ((out - y) ** 2).mean() + 0.01 * balance, "balance": balance}


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.mid = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm, self.up = nn.GroupNorm(2, 4), nn.ConvTranspose2d(4, 4, 2, stride=2)
        self.out = nn.Conv2d(8, 1, 1)

    def forward(self, x: Tensor, mask: Tensor) -> dict[str, Tensor]:
        skip = F.silu(self.down(x))
        h = self.up(self.norm(self.mid(F.avg_pool2d(skip, 2))))
        logits = self.out(torch.cat([h, skip], 1))
        loss = F.binary_cross_entropy_with_logits(logits, x.sigmoid(), reduction="none")
        return {"loss": (loss * mask).sum() / mask.sum(), "weight": mask.sum()}


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.encoder = nn.Embedding(9, 8), nn.Linear(8, 8)
        self.own, self.cross = Attention(8, 2, causal=True), Attention(8, 2, causal=False)
        self.head = nn.Linear(8, 9)
        self.emb.weight.requires_grad_(False)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.emb(source)
        memory = memory + self.encoder(memory).relu()
        h = self.emb(target[:, :-1])
        h = h + self.own(h, h)
        h = h + self.cross(h, memory)
        return F.cross_entropy(self.head(h).transpose(1, 2), target[:, 1:])


class Masked(nn.Module):
    """Losses per token, flat and in the shape of the batch again, weighted by masks."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(9, 4), nn.Linear(4, 9)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        logits, mask = self.head(self.emb(x)), (y > 2).float()
        flat = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none")
        loss = (flat * mask.flatten()).sum() / mask.sum().clamp(min=1)
        logs = logits.flatten(0, 1).log_softmax(-1)
        each = F.nll_loss(logs, y.flatten(), reduction="none").view(x.shape[0], x.shape[1])
        each = each + F.margin_ranking_loss(each, each.detach() + 1, mask, reduction="none")
        each = each + F.hinge_embedding_loss(each, 1 - 2 * mask, reduction="none")
        worst = (each * mask).amax(1).mean() + each.max()
        return {"loss": loss + 0.1 * worst, "weight": mask.sum(), "worst": worst}


class InPlace(nn.Module):
    """In-place operators on activations, a no_grad target, and a detached path."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = torch.tensor([1.0, 2.0, 3.0, 4.0])

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h[:, 0] = 0
        h.add_(1).mul_(self.scale.to(x.device)).relu_()
        with torch.no_grad():
            target = self.b(h)
        return ((self.b(h) - 2 * target) ** 2).sum() / x.shape[0] + self.a(x).detach().sum()


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=1, n_head=2, n_embd=8, vocab_size=20, n_positions=8, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, loss_type="ForCausalLM",
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=1, hidden_size=8, intermediate_size=16, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=20, max_position_embeddings=8, loss_type="ForCausalLM",
    )  # fmt: skip
    return LlamaForCausalLM(config)


def _experts(family: str, **config: Any) -> Callable[[], nn.Module]:
    """A small mixture of experts of Hugging Face's, two experts for each token."""

    def make() -> nn.Module:
        import transformers

        common: dict[str, Any] = {
            **{"num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 8, "vocab_size": 20},
            **{"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 8},
            **{"num_experts_per_tok": 2, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0},
        }
        made = getattr(transformers, f"{family}Config")(**common, **config)
        return getattr(transformers, f"{family}ForCausalLM")(made)

    return make


EXPERTS = {
    "mixtral": _experts("Mixtral", num_local_experts=4),
    "qwen3_moe": _experts("Qwen3Moe", num_experts=4, moe_intermediate_size=4, head_dim=4),
    "olmoe": _experts("Olmoe", num_experts=4),
    "gpt_oss": _experts("GptOss", num_local_experts=4, head_dim=4, sliding_window=3),
    "deepseek_v3": _experts(
        "DeepseekV3",
        **{"moe_intermediate_size": 4, "n_routed_experts": 8, "n_group": 2, "topk_group": 1},
        **{"first_k_dense_replace": 0, "q_lora_rank": 4, "kv_lora_rank": 4},
        **{"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4},
    ),
}


def _words(b: int, *names: str, length: int = 6, words: int = 20) -> Batch:
    return {name: torch.randint(0, words, (b, length)) for name in names}


@dataclass
class Case:
    make: Callable[[], nn.Module]
    batch: Callable[[int], Batch]

    @cached_property
    def module(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make().train()

    @cached_property
    def captured(self) -> Captured:
        return capture(self.module, self.batch(4))

    @cached_property
    def lowered(self) -> Lowered:
        return lower(self.captured.graph.bind(3))

    @cached_property
    def other(self) -> Batch:
        torch.manual_seed(1)
        return self.batch(3)


CASES = {
    "gpt": Case(GPT, lambda b: _words(b, "x", "y")),
    "convnet": Case(
        ConvNet, lambda b: {"x": torch.randn(b, 1, 6, 6), "y": torch.randint(0, 3, (b,))}
    ),
    "lstm": Case(LSTM, lambda b: {"x": torch.randn(b, 2, 3), "y": torch.randn(b)}),
    "moe": Case(MoE, lambda b: {"x": torch.randn(b, 4), "y": torch.randn(b, 4)}),
    "unet": Case(
        UNet,
        lambda b: {"x": torch.randn(b, 1, 4, 4), "mask": (torch.rand(b, 1, 4, 4) > 0.3).float()},
    ),
    "encoder_decoder": Case(EncoderDecoder, lambda b: _words(b, "source", "target", words=9)),
    "masked": Case(Masked, lambda b: _words(b, "x", "y", length=5, words=9)),
    "in_place": Case(InPlace, lambda b: {"x": torch.randn(b, 4)}),
    "gpt2": Case(_gpt2, lambda b: _words(b, "input_ids", "labels")),
    "llama": Case(_llama, lambda b: _words(b, "input_ids", "labels")),
    **{n: Case(make, lambda b: _words(b, "input_ids", "labels")) for n, make in EXPERTS.items()},
}


ALIKE = ("qwen3_moe", "olmoe")
"""Experts as mixtral's, of which the others are a case of their own each: by night."""


def by_day(names: Iterable[str]) -> list[Any]:
    return [pytest.param(n, marks=pytest.mark.slow) if n in ALIKE else n for n in names]


@pytest.fixture(params=by_day(CASES), scope="module")
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def eager(module: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor | None], nn.Module]:
    """Loss and gradients of a copy of the module, and the copy."""
    module = copy.deepcopy(module)
    returned = module(**batch)
    loss = returned if isinstance(returned, Tensor) else returned["loss"]
    if module.training:
        loss.backward()
    return loss, {n: p.grad for n, p in module.named_parameters()}, module


def assert_grads(graph: Graph, values: Batch, expected: dict[str, Tensor | None], rtol: float):
    grads = {p.name: values[f"param:{p.name}"].grad for p in graph.parameters}
    for p in graph.parameters:
        assert (grads[p.name] is None) == (expected[p.name] is None), p.name
        assert p.trainable == (expected[p.name] is not None), p.name
    pairs = [(grads[n], e) for n, e in expected.items() if e is not None]
    error = torch.stack([(a - e).norm() for a, e in pairs]).norm()
    norm = torch.stack([e.norm() for _, e in pairs]).norm()
    assert error <= rtol * norm


def test_loss_and_gradients_equal_the_module(case: Case) -> None:
    graph = case.captured.graph.bind(3)
    values = run(graph, case.captured.tensors, case.other)
    loss, grads, after = eager(case.module, case.other)
    values[graph.loss].backward()

    torch.testing.assert_close(values[graph.loss], loss, rtol=1e-6, atol=1e-6)
    assert_grads(graph, values, grads, 1e-6)
    for b in graph.buffers:
        if b.update and b.update.rule == "ema":
            old, new = case.captured.tensors[b.name], dict(after.named_buffers())[b.name]
            ours = (1 - b.update.factor) * old + b.update.factor * values[b.update.value]
            torch.testing.assert_close(ours, new)
        elif b.update:
            assert case.captured.tensors[b.name] + b.update.factor == after.get_buffer(b.name)


def test_one_sample_is_a_microbatch_too(case: Case) -> None:
    torch.manual_seed(2)
    one = case.batch(1)
    graph = case.captured.graph.bind(1)
    loss, _, _ = eager(case.module, one)
    torch.testing.assert_close(run(graph, case.captured.tensors, one)[graph.loss], loss)


def test_every_spec_is_what_really_comes_out(case: Case) -> None:
    graph = case.captured.graph.bind(3)
    values = run(graph, case.captured.tensors, case.other)
    read = {value for op in graph.operators for value in op.reads}
    for value, spec in graph.spec.items():
        # Up to torch 2.11 such states are misshapen; a model that reads them is refused.
        if value in read or not value.startswith("lstm."):
            assert tuple(values[value].shape) == spec.sizes
        assert values[value].dtype == getattr(torch, spec.dtype)


class States(nn.Module):
    """Reads what an LSTM ends with."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 5, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[1][0][-1].square().mean()


def test_last_states_are_captured_with_their_shape_or_refused() -> None:
    """The latter by a torch that does not know it before they are computed."""
    torch.manual_seed(1)
    module, x = States(), torch.randn(4, 6, 3)
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12):
        with pytest.raises(CaptureError, match=r"use torch 2\.12 or newer"):
            capture(module, {"x": x})
        return
    captured = capture(module, {"x": x})
    found = run(captured.graph.bind(4), captured.tensors, {"x": x})
    torch.testing.assert_close(found[captured.graph.loss], module(x))


def test_a_gradient_comes_exactly_where_the_graph_says(case: Case) -> None:
    graph = case.captured.graph.bind(3)
    values = run(graph, case.captured.tensors, case.other)
    made = [v for op in graph.operators for v in op.values if v in graph.spec]
    floating = [v for v in made if values[v].requires_grad]
    grads = torch.autograd.grad(
        values[graph.loss], [values[v] for v in floating], allow_unused=True
    )
    arrived = {v for v, g in zip(floating, grads, strict=True) if g is not None}
    assert arrived == graph.grads


def test_the_eval_form_equals_the_module_in_eval_mode(case: Case) -> None:
    graph = evaluation(case.captured.graph.bind(3))
    module = copy.deepcopy(case.module).eval()
    loss, _, _ = eager(module, case.other)
    names = [op.name for op in case.captured.graph.operators]
    assert [op.name for op in graph.operators] == names
    values = run(graph, case.captured.tensors, case.other)
    torch.testing.assert_close(values[graph.loss], loss, rtol=1e-6, atol=1e-6)


def test_the_core_form_has_the_same_gradients(case: Case) -> None:
    graph = case.captured.graph.bind(3)
    lowered = case.lowered
    full = run(graph, case.captured.tensors, case.other)
    core = run(lowered.graph, case.captured.tensors, case.other)
    full[graph.loss].backward()
    core[graph.loss].backward()
    validate(lowered.graph)

    torch.testing.assert_close(core[graph.loss], full[graph.loss], rtol=1e-5, atol=1e-6)
    grads = {p.name: full[f"param:{p.name}"].grad for p in graph.parameters}
    assert_grads(lowered.graph, core, grads, 1e-5)


def test_every_cut_of_the_core_form_has_the_ports_of_the_full_one(case: Case) -> None:
    graph = case.captured.graph.bind(3)
    lowered = case.lowered
    assert len(lowered.start) == len(graph.operators) + 1
    for cut in range(len(graph.operators) + 1):
        above = {v for op in graph.operators[:cut] for v in op.values}
        crossing = {v for op in graph.operators[cut:] for v in op.reads if v in above}
        at = lowered.start[cut]
        core_above = {v for op in lowered.graph.operators[:at] for v in op.values}
        below = lowered.graph.operators[at:]
        core_crossing = {v for op in below for v in op.reads if v in core_above}
        assert core_crossing <= crossing
        for value in core_crossing:
            assert lowered.graph.spec[value] == graph.spec[value]
            assert (value in lowered.graph.grads) == (value in graph.grads)


@pytest.mark.parametrize("name", by_day(EXPERTS))
def test_grouped_experts_equal_the_plain_loop_over_them(name: str) -> None:
    case = CASES[name]
    graph = case.captured.graph.bind(3)
    assert sum(op.target == "shoal.grouped_mm.default" for op in graph.operators) == 2
    values = run(graph, case.captured.tensors, case.other)
    values[graph.loss].backward()
    module = copy.deepcopy(case.module)
    module.set_experts_implementation("eager")  # type: ignore[operator]  # Hugging Face's
    loss, grads, _ = eager(module, case.other)
    torch.testing.assert_close(values[graph.loss], loss, rtol=1e-6, atol=1e-6)
    assert_grads(graph, values, grads, 1e-5)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("gpt", "bf16"),
        ("convnet", "bf16"),
        *(pytest.param(n, "fp16", marks=pytest.mark.slow) for n in ("gpt", "convnet", "mixtral")),
        pytest.param("mixtral", "bf16", marks=pytest.mark.slow),
    ],
)
def test_mixed_precision_is_close_to_autocast(name: str, dtype: Literal["bf16", "fp16"]) -> None:
    case = CASES[name]
    captured = capture(case.module, case.batch(4), dtype=dtype)
    graph = captured.graph.bind(3)
    values = run(graph, captured.tensors, case.other)
    values[graph.loss].backward()
    lower = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    with torch.autocast("cpu", dtype=lower):
        loss, grads, _ = eager(case.module, case.other)

    assert graph.spec[graph.loss].dtype == "float32"
    dtypes = {getattr(torch, s.dtype) for s in graph.spec.values() if s.is_floating}
    assert dtypes == {torch.float32, lower}
    assert all(p.spec.dtype == "float32" for p in graph.parameters)
    for value, spec in graph.spec.items():
        if value in graph.producer and not graph.operators[graph.producer[value]].returns_tuple:
            assert values[value].dtype == getattr(torch, spec.dtype)
    near, nearly = (2e-2, 5e-2) if dtype == "bf16" else (3e-3, 1e-2)
    torch.testing.assert_close(values[graph.loss], loss.float(), rtol=near, atol=near)
    assert_grads(graph, values, grads, nearly)
    assert run(evaluation(graph), captured.tensors, case.other)[graph.loss].isfinite()


def test_a_module_on_meta_gives_the_same_graph() -> None:
    case = CASES["convnet"]
    batch = {k: t.to("meta") for k, t in case.batch(4).items()}
    captured = capture(copy.deepcopy(case.module).to("meta"), batch)
    assert captured.graph == case.captured.graph
    assert all(t.is_meta for t in captured.tensors.values())
