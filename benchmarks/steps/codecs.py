"""Codecs on real tensors, and top-k against the obvious way to write it.

    python benchmarks/steps/codecs.py [--json FILE] [--steps 300] [--elements 10000000]

The byte GPT of the examples is trained on the standard library's sources, and the ResNet on the
digits, until both have learned something (their losses are printed). Then three microbatches pass
through each, and what would cross a link between two stages is written with every codec of
`shoal bench codecs`: activations, their gradients, and the gradients of all parameters. Bytes are
per element (fp32 has 4), speeds in dense bytes, `without mean` is the error over what an activation
holds beside its mean over tokens (or pixels). A star: no other codec has both fewer bytes and less
error on this tensor.

`topk_bytes_ratio` and `topk_speed_ratio` compare with torch.topk, int64 indices and fp32 values at
k = 1 %; times are medians of interleaved pairs, encode + decode. `lossless_over_bf16` is the larger
of both models. `announced_error_worst` is the largest |announced / encoded − 1| of all codecs
without state but lossless: that and a stream's first tensor announce the most that they can be.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn

from shoal.benchmarks.table import Figure, arguments, report
from shoal.client.bench import CODECS, CodecRow, measure, table
from shoal.compression.codec import CodecError, Stream, is_stateful, parse
from shoal.dag.ir.graph import TensorSpec
from shoal.examples.gpt import gpt
from shoal.examples.resnet_digits import resnet

TOPK = "topk:ratio=100"
SELECTIONS = ("exact", "histogram", "gaussian")
MICROBATCHES = 3
LENGTH, WIDTH = 128, 128
"""Of the GPT: 64 windows of them are 1 M elements."""
PAIRS = 7
"""Interleaved measurements of the baseline and of ours."""

Batches = Callable[[int, int], tuple[Tensor, Tensor]]
"""(number, samples) -> the inputs and targets of a microbatch."""


def windows() -> Batches:
    """Bytes of the standard library's sources, and those that follow them."""
    folder = Path(os.__file__).parent
    text = b"".join(p.read_bytes() for p in sorted(folder.glob("*.py")))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

    def batch(number: int, samples: int) -> tuple[Tensor, Tensor]:
        random = torch.Generator().manual_seed(number)
        start = torch.randint(len(data) - LENGTH - 1, (samples, 1), generator=random)
        at = start + torch.arange(LENGTH)
        return data[at], data[at + 1]

    return batch


def digits() -> Batches:
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(found.target)

    def batch(number: int, samples: int) -> tuple[Tensor, Tensor]:
        random = torch.Generator().manual_seed(number)
        at = torch.randint(len(labels), (samples,), generator=random)
        return images[at], labels[at]

    return batch


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = model(x, y)
    loss: Tensor = out if isinstance(out, Tensor) else out["loss"]
    return loss


def train(model: nn.Module, batches: Batches, steps: int, samples: int) -> float:
    """Trains in place; the mean loss of the last tenth."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    losses = []
    for step in range(steps):
        loss = loss_of(model, *batches(step, samples))
        loss.backward()  # type: ignore[no-untyped-call]  # torch's is untyped
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return statistics.mean(losses[-max(1, steps // 10) :])


def crossing(
    model: nn.Module, at: nn.Module, batches: Batches, first: int, samples: int
) -> dict[str, list[Tensor]]:
    """What leaves the module `at` and what comes back to it, of MICROBATCHES microbatches, and the
    gradients of all parameters as rows of WIDTH."""
    found: dict[str, list[Tensor]] = {"activation": [], "activation_grad": [], "grad": []}

    def keep(module: nn.Module, inputs: object, output: Tensor) -> None:
        output.retain_grad()
        found["activation"].append(output)

    hook = at.register_forward_hook(keep)
    for number in range(first, first + MICROBATCHES):
        model.zero_grad()
        loss = loss_of(model, *batches(number, samples))
        loss.backward()  # type: ignore[no-untyped-call]  # torch's is untyped
        grads = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        found["grad"].append(grads[: len(grads) // WIDTH * WIDTH].view(-1, WIDTH).clone())
    hook.remove()
    for activation in found["activation"]:
        assert activation.grad is not None
        found["activation_grad"].append(activation.grad.clone())
    found["activation"] = [a.detach() for a in found["activation"]]
    return found


# ---------------------------------------------------------------- the table


def front(rows: list[CodecRow]) -> set[str]:
    """Codecs that no other beats in both bytes and error."""
    return {
        r.codec
        for r in rows
        if not any(
            o.bytes_per_element <= r.bytes_per_element
            and o.error <= r.error
            and (o.bytes_per_element, o.error) != (r.bytes_per_element, r.error)
            for o in rows
        )
    }


def pareto(model: str, role: str, tensors: list[Tensor], features: int | None) -> list[CodecRow]:
    """Measures and prints every codec on one kind of tensor."""
    print(f"\n{model} {role} fp32{list(tensors[0].shape)}")
    rows = []
    for text in CODECS:
        try:
            rows.append(measure(text, tensors, features=features))
        except CodecError as error:
            print(f"  {text} is left out: {error}")
    best = front(rows)
    head, *lines = table(rows)
    print(f"  {head}")
    for row, line in zip(rows, lines, strict=True):
        print(f"{'*' if row.codec in best else ' '} {line}", flush=True)
    return rows


def exact(text: str) -> bool:
    """Whether the codec announces what it writes, and not the most that it may write."""
    return text != "lossless" and not is_stateful(parse(text))


def named(model: str, role: str, rows: list[CodecRow]) -> Iterator[Figure]:
    for r in rows:
        key = f"{model}_{role}[{r.codec}]"
        yield Figure(f"{key}_bytes_per_element", r.bytes_per_element, "B", "lower")
        yield Figure(f"{key}_encode", r.encode_gb_per_s, "GB/s", "higher")
        yield Figure(f"{key}_decode", r.decode_gb_per_s, "GB/s", "higher")
        yield Figure(f"{key}_error", r.error, "relative L2", "lower")
        if r.error_of_rest is not None:
            yield Figure(f"{key}_error_without_mean", r.error_of_rest, "relative L2", "lower")


# ---------------------------------------------------------------- the obvious way


def obvious(x: Tensor, k: int) -> tuple[int, float]:
    """(bytes, seconds of encode + decode) of torch.topk, int64 indices and fp32 values."""
    start = time.perf_counter()
    flat = x.flatten()
    indices = flat.abs().topk(k, sorted=False).indices
    values = flat[indices]
    dense = torch.zeros_like(flat)
    dense[indices] = values
    dense.view(x.shape)
    return indices.nbytes + values.nbytes, time.perf_counter() - start


def ours(text: str, x: Tensor) -> tuple[int, float, float]:
    """(bytes, seconds of encode + decode, relative error)."""
    sender, receiver = Stream(parse(text)), Stream(parse(text))
    spec = TensorSpec(tuple(x.shape), "float32")
    start = time.perf_counter()
    encoded = sender.encode(x)
    half = time.perf_counter() - start
    data = memoryview(bytearray(b"".join(encoded.buffers)))  # the network's part, not the codec's
    start = time.perf_counter()
    decoded = receiver.decode(spec, encoded.header, data)
    seconds = half + time.perf_counter() - start
    error = float((decoded - x).norm() / x.norm())
    return encoded.size_bytes + len(encoded.header), seconds, error


def against_obvious(elements: int) -> list[Figure]:
    x = torch.randn(elements, generator=torch.Generator().manual_seed(0))
    k = elements // 100
    spent: dict[str, list[float]] = {s: [] for s in SELECTIONS}
    sizes: dict[str, float] = {}
    base_s = []
    for pair in range(PAIRS):
        base_bytes, seconds = obvious(x, k)
        base_s.append(seconds)
        for select in SELECTIONS:
            size, seconds, error = ours(f"{TOPK},select={select}", x)
            spent[select].append(base_s[-1] / seconds)
            sizes[select] = base_bytes / size
            if pair == PAIRS - 1:
                print(
                    f"  select={select}: {size / k:.2f} B per kept element, "
                    f"{statistics.median(base_s) / statistics.median(spent[select]) * 1e3:.0f} ms, "
                    f"relative L2 {error:.4f}"
                )
    print(f"  torch.topk: 12 B per kept element, {statistics.median(base_s) * 1e3:.0f} ms")
    default = "exact" if "select=exact" in parse(TOPK).name else "histogram"
    figures = [
        Figure("topk_bytes_ratio", sizes[default], "ratio", "higher"),
        Figure("topk_speed_ratio", statistics.median(spent[default]), "ratio", "higher"),
    ]
    for select in SELECTIONS:
        median = statistics.median(spent[select])
        figures.append(Figure(f"topk_speed_ratio_{select}", median, "ratio", "higher"))
    return figures


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=300, help="of the GPT; the ResNet: a half")
    parser.add_argument("--elements", type=int, default=10_000_000, help="of the comparison")
    options = parser.parse_args()
    torch.manual_seed(0)
    language, vision = gpt(4, WIDTH, 4, LENGTH, dropout=0.0), resnet()
    text, images = windows(), digits()
    loss = train(language, text, options.steps, 16)
    print(f"gpt: {options.steps} steps, loss {loss:.3f} nats per byte")
    loss = train(vision, images, options.steps // 2, 64)
    print(f"resnet: {options.steps // 2} steps, loss {loss:.3f}")
    tensors = {
        "gpt": crossing(language, language.blocks[1], text, options.steps, 64),
        "resnet": crossing(vision, vision.layers[1], images, options.steps, 1024),
    }
    feature = {"gpt": -1, "resnet": 1}
    rest: list[Figure] = []
    announced: list[float] = []
    lossless: list[float] = []
    for model, roles in tensors.items():
        for role, given in roles.items():
            rows = pareto(model, role, given, feature[model] if role == "activation" else None)
            rest += named(model, role, rows)
            announced += [abs(r.announced_over_encoded - 1) for r in rows if exact(r.codec)]
        half = measure("lossless", [a.bfloat16() for a in roles["activation"]])
        assert half.error == 0
        lossless.append(half.bytes_per_element / 2)
        rest.append(Figure(f"{model}_lossless_over_bf16", lossless[-1], "ratio", "lower"))
    print(f"\ntop-k, k = 1 % of {options.elements:,} standard normal elements, encode + decode")
    bars = against_obvious(options.elements)
    bars.append(Figure("lossless_over_bf16", max(lossless), "ratio", "lower"))
    bars.append(Figure("announced_error_worst", max(announced), "ratio", "lower"))
    print()
    report("codecs", bars)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(f) for f in bars + rest], indent=2) + "\n")


if __name__ == "__main__":
    main()
