"""Blocks that can be left out are found, and the graph without them is the module without them."""

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shoal.dag.analysis.skippable import bypass_of, describe_skippable, skippable_blocks
from shoal.dag.capture.capture import Captured, capture
from shoal.dag.ir.graph import GraphError
from shoal.dag.ir.validate import validate
from shoal.dag.transforms.bypass import without_blocks
from shoal.dag.transforms.evaluation import evaluation
from shoal.examples.encoder_decoder import encoder_decoder
from shoal.examples.gpt import gpt
from shoal.examples.moe import moe
from shoal.examples.resnet_digits import resnet
from shoal.examples.unet import unet
from shoal.tests.dag.analysis.test_blocks import gpt_graph
from shoal.tests.dag.capture.test_models import run
from shoal.tests.sim.layered_model import layered

Batch = dict[str, Tensor]


def words(*names: str) -> Batch:
    return {name: torch.randint(0, 20, (2, 8)) for name in names}


def hugging(family: str, **config: Any) -> nn.Module:
    import transformers

    made = getattr(transformers, f"{family}Config")(vocab_size=20, **config)
    model: nn.Module = getattr(transformers, f"{family}ForCausalLM")(made)
    return model


def llama() -> nn.Module:
    return hugging(
        "Llama", hidden_size=8, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2
    )


def gpt2() -> nn.Module:
    import transformers

    config = transformers.GPT2Config(
        n_layer=3, n_head=2, n_embd=8, vocab_size=20, n_positions=8, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


class Stack(nn.Module):
    """Layers of one kind between two linear ones."""

    def __init__(
        self, layer: Callable[[], nn.Module], count: int = 3, first: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 6), first or nn.Identity())
        self.layers = nn.ModuleList(layer() for _ in range(count))
        self.last = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for layer in self.layers:
            h = layer(h)
        return self.last(h).square().mean()


class Layer(nn.Module):
    """`how` of the stream and of two linear layers' result."""

    def __init__(self, how: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.how = nn.Linear(6, 5), nn.Linear(5, 6), how

    def forward(self, x: Tensor) -> Tensor:
        return self.how(x, self.b(torch.tanh(self.a(x))))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch], set[str]]] = {
    "gpt": (
        lambda: gpt(4, 8, 2, 8, 0.0),
        lambda: words("x", "y"),
        {f"blocks.{i}" for i in range(4)},
    ),
    "resnet": (
        lambda: resnet(4, 3),
        lambda: {"x": torch.rand(4, 1, 8, 8), "y": torch.randint(0, 10, (4,))},
        {f"layers.{i}" for i in (0, 1, 2, 4, 5, 7, 8)},
    ),
    "gpt2": (gpt2, lambda: words("input_ids", "labels"), {f"transformer.h.{i}" for i in range(3)}),
    "llama": (llama, lambda: words("input_ids", "labels"), {f"model.layers.{i}" for i in range(3)}),
    "layered": (layered, lambda: words("x", "y"), {f"layers.{i}" for i in range(4)}),
    "sums": (
        lambda: Stack(lambda: Layer(lambda x, y: x + y + 0.5)),
        lambda: {"x": torch.rand(3, 4)},
        {f"layers.{i}" for i in range(3)},
    ),
    "added behind a ReLU": (
        lambda: Stack(lambda: Layer(lambda x, y: x + F.relu(y))),
        lambda: {"x": torch.rand(3, 4)},
        {f"layers.{i}" for i in range(3)},
    ),
    "clamped": (
        lambda: Stack(lambda: Layer(lambda x, y: F.relu(x - 0.1 * y)), first=nn.ReLU()),
        lambda: {"x": torch.rand(3, 4)},
        {f"layers.{i}" for i in range(3)},
    ),
}


SLOW = ("gpt", "resnet", "gpt2", "llama")
NAMES = [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in CASES]


class Past(nn.Module):
    """Stands where a block was left out."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args else kwargs["hidden_states"]


@cache
def captured(name: str) -> tuple[nn.Module, Batch, Captured]:
    torch.manual_seed(0)
    make, batch, _ = CASES[name]
    module, data = make().train(), batch()
    return module, data, capture(module, data)


def loss_and_grads(module: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor | None]]:
    returned = module(**batch)
    loss = returned if isinstance(returned, Tensor) else returned["loss"]
    if module.training:
        loss.backward()
    return loss.detach(), {n: p.grad for n, p in module.named_parameters()}


@pytest.mark.parametrize("name", NAMES)
def test_repeated_residual_blocks_are_found(name: str) -> None:
    graph = captured(name)[2].graph
    found = skippable_blocks(graph)
    assert {b.name for b in found if not b.why_not} == CASES[name][2]
    assert skippable_blocks(graph.bind(5)) == found
    assert [b.start for b in found[1:]] == [b.stop for b in found[:-1]]


@settings(max_examples=12, deadline=None)
@given(st.data())
@pytest.mark.parametrize("name", NAMES)
def test_a_graph_without_blocks_is_the_module_without_them(name: str, data: st.DataObject) -> None:
    module, batch, whole = captured(name)
    # Without all of "layered" nobody would read what its blocks take besides.
    most = len(CASES[name][2]) - (name == "layered")
    left = data.draw(st.sets(st.sampled_from(sorted(CASES[name][2])), max_size=most))
    module = copy.deepcopy(module)
    for block in left:
        above, _, last = block.rpartition(".")
        module.get_submodule(above)._modules[last] = Past()
    graph = validate(without_blocks(whole.graph, left)).bind(len(next(iter(batch.values()))))
    values = run(graph, whole.tensors, batch)
    values[graph.loss].backward()
    loss, grads = loss_and_grads(module, batch)
    torch.testing.assert_close(values[graph.loss].detach(), loss, rtol=1e-5, atol=1e-6)
    assert {p.name for p in graph.parameters} == {n for n, g in grads.items() if g is not None}
    for p in graph.parameters:
        torch.testing.assert_close(values[f"param:{p.name}"].grad, grads[p.name])
    module.zero_grad()
    scored = run(evaluation(graph), whole.tensors, batch)[graph.loss]
    expected = loss_and_grads(copy.deepcopy(captured_eval(module, whole)), batch)[0]
    torch.testing.assert_close(scored.detach(), expected, rtol=1e-5, atol=1e-6)


def captured_eval(module: nn.Module, whole: Captured) -> nn.Module:
    """The module in eval mode, with the buffers of before it was run."""
    for name, buffer in module.named_buffers():
        if name in whole.tensors:
            buffer.copy_(whole.tensors[name])
    return module.eval()


HOW: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "plain": (lambda x, y: y, "is not residual"),
    "normalised": (lambda x, y: F.layer_norm(x + y, (6,)), "is not residual"),
    "scaled": (lambda x, y: 0.9 * x + y, "is not residual"),
    "twice": (lambda x, y: x + y + x, "stands 2 times"),
    "clamped": (lambda x, y: F.relu(x + y), "ReLU behind its sum"),
}


HOW_NAMES = [
    pytest.param(h, marks=pytest.mark.slow if h in ("plain", "scaled") else ()) for h in HOW
]


@pytest.mark.parametrize("how", HOW_NAMES)
def test_a_repeated_block_that_is_not_residual_is_not_skippable(how: str) -> None:
    change, why = HOW[how]
    graph = capture(Stack(lambda: Layer(change)), {"x": torch.rand(3, 4)}).graph
    first = next(b for b in skippable_blocks(graph) if b.name == "layers.0")
    assert why in first.why_not
    with pytest.raises(GraphError, match=r"block layers\.0 cannot be left out: it "):
        without_blocks(graph, ["layers.0"])


@pytest.mark.slow
def test_a_block_that_others_read_besides_is_not_skippable() -> None:
    found = describe_skippable(capture(moe(), words("x", "y")).graph)
    assert found[0] == "not skippable: no block of this model can be left out"
    assert any("blocks.0" in line and "2 values that others read" in line for line in found)


def test_layers_to_which_the_same_is_added_are_skippable_as_turns_of_their_loop() -> None:
    """But for the first one, whose input is what others get added."""

    class Long(Stack):
        def forward(self, x: Tensor) -> Tensor:
            h = first = self.first(x)
            for layer in self.layers:
                h = layer(h) + first
            return self.last(h).square().mean()

    module, batch = Long(lambda: Layer(lambda x, y: x + y), 4), {"x": torch.rand(3, 4)}
    whole = capture(module, batch)
    can = [b.name for b in skippable_blocks(whole.graph) if not b.why_not]
    assert can == ["layers.1", "layers.2", "layers.3"]
    graph = validate(without_blocks(whole.graph, can[1:])).bind(3)
    del module.layers[2:]
    found = run(graph, whole.tensors, batch)[graph.loss]
    torch.testing.assert_close(found, module(**batch))


def test_two_streams_that_are_added_up_are_not_skippable() -> None:
    """Neither is what all blocks take alike, so neither goes on in place of the sum."""

    class Two(Stack):
        def forward(self, x: Tensor) -> Tensor:
            h, other = self.first(x), x.repeat(1, 2)[:, :6]
            for layer in self.layers:
                other = other.flip(1)
                h = layer(h) + other
            return self.last(h).square().mean()

    graph = capture(Two(lambda: Layer(lambda x, y: x + y), 4), {"x": torch.rand(3, 4)}).graph
    assert any("2 values that others read" in line for line in describe_skippable(graph))
    assert describe_skippable(graph)[0].startswith("not skippable: no block")


def test_models_without_blocks_say_so() -> None:
    assert_says_so(Stack(lambda: Layer(lambda x, y: x + y), 1), {"x": torch.rand(3, 4)})


@pytest.mark.slow
def test_a_unet_says_that_it_has_no_blocks() -> None:
    x = torch.rand(2, 1, 16, 16)
    assert_says_so(unet(4, 1), {"x": x, "y": x.round()})


def assert_says_so(module: nn.Module, batch: Batch) -> None:
    lines = describe_skippable(capture(module, batch).graph)
    assert lines[0] == "not skippable: no block of this model can be left out"
    assert any("makes the loss" in line for line in lines)
    assert any("is no repeated block" in line for line in lines)


@pytest.mark.slow
def test_an_encoder_s_and_a_decoder_s_layers_are_skippable() -> None:
    graph = capture(encoder_decoder(2, 16, 2, 8), {"x": torch.randint(0, 20, (2, 8))}).graph
    can = [b.name for b in skippable_blocks(graph) if not b.why_not]
    assert can == ["encoder.0", "encoder.1", "decoder.0", "decoder.1"]


def test_the_blocks_of_a_gpt_are_skippable_and_stages_of_whole_ones() -> None:
    graph = gpt_graph()
    assert describe_skippable(graph) == [
        "skippable: blocks.0, blocks.1, blocks.2, blocks.3",
        "not skippable: bytes, positions, drop, norm: is no repeated block: no other one is like "
        "it",
        "not skippable: head: makes the loss",
    ]
    at = {b.name: b for b in skippable_blocks(graph)}
    one, two = at["blocks.1"], at["blocks.2"]
    found = bypass_of(graph, one.start, two.stop)
    assert not found.why_not
    assert (found.taken, found.made) == (one.taken, two.made)
    assert found.taken == at["blocks.0"].made
    part = bypass_of(graph, one.start, two.stop - 1)
    assert part.why_not == "has a part of blocks.2: expected whole blocks"
    assert bypass_of(graph, at["blocks.3"].start, at["norm"].stop).why_not.startswith("norm is no")


def test_a_block_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(GraphError, match=r"no block is named layers\.9"):
        without_blocks(captured("sums")[2].graph, ["layers.9"])
