"""How fast a device does each class of work, from at most about a second of small layers.

Every sample is a short chain of operators as models have them, run forward and backward through
autograd like a stage, and counted by the code that counts operators for plans (dag/cost/count.py):
what the counting gets wrong, the speeds make up for. Small samples show the fixed time of a kernel,
large ones the rates (fit.py).

All samples run in turn, round after round, and the median of a sample's times counts: it is what a
step meets. (The lower quartile is a tenth shorter.) With one thread a time is the processor's for
that thread, so that peers that join one machine at once hardly disturb each other's figures.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from ...dag.cost.count import Counter, nodes
from ...dag.cost.speed import Speeds, Work
from ...dag.ir import random
from .fit import busy_share, fit

__all__ = ["Bench", "measure_speeds"]

LEAST_ROUNDS = 2
REPEATS = 2
AGREEING, AGREED = 3, 0.05
"""So many rounds in a row whose times differ by at most this share are enough: nothing disturbs."""
ROWS_OF_A_CARD = 64
"""A GPU gets samples with this many times more rows: small ones leave most of it idle."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BenchCase:
    """A function of tensors of these shapes, all of which take a gradient; of one result."""

    name: str
    function: Callable[..., Tensor]
    shapes: tuple[Shape, ...]
    random: bool = False
    whole: bool = False
    """Made like a stage: its classes of work as a model mixes them, at a size that is worth a
    peer."""


def _linear(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    return F.linear(F.linear(x, w1, b1), w2, b2)


def _convolutions(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    for _ in range(2):
        x = F.conv2d(F.conv2d(x, w1, padding=1), w2, padding=1)
    return x


def _residual(
    x: Tensor, w1: Tensor, w2: Tensor, short: Tensor, scale: Tensor, shift: Tensor
) -> Tensor:
    def norm(y: Tensor) -> Tensor:
        return F.batch_norm(y, None, None, scale, shift, True)

    y = torch.relu(norm(F.conv2d(x, w1, stride=2, padding=1)))
    y = norm(F.conv2d(y, w2, padding=1)) + norm(F.conv2d(x, short, stride=2))
    return torch.relu(y)


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _pointwise(x: Tensor, y: Tensor) -> Tensor:
    for _ in range(3):
        x = torch.relu(x * y) + x
    return x


def _moves(x: Tensor, y: Tensor) -> Tensor:
    heads = x.view(-1, 64, 4, 32).transpose(1, 2).reshape(-1, 64, 4, 32)
    halves = torch.cat([-y[:, 64:], y[:, :64]], 1)
    return heads.transpose(1, 2).reshape(x.shape) + halves * x


def _functions(x: Tensor) -> Tensor:
    return torch.softmax(F.silu(F.gelu(F.silu(F.gelu(x)))), -1)


def _norms(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    for _ in range(3):
        x = F.layer_norm(x, scale.shape, scale, shift) + x
    return x


def _dropouts(x: Tensor) -> Tensor:
    for operator in range(2):
        x = random.dropout(x, 0.1, operator, key=1)
    return x


def _block(
    x: Tensor, qkv: Tensor, out: Tensor, up: Tensor, down: Tensor, scale: Tensor, shift: Tensor
) -> Tensor:
    """A block of a transformer with layer norm, x (B, T, D)."""
    b, t, d = x.shape
    parts = F.linear(F.layer_norm(x, (d,), scale, shift), qkv).view(b, t, 3, -1, 32)
    q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
    x = x + F.linear(y, out, shift)
    y = F.gelu(F.linear(F.layer_norm(x, (d,), scale, shift), up))
    return x + random.dropout(F.linear(y, down, shift), 0.1, 0, key=1)


def _gated(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, scale: Tensor) -> Tensor:
    """Two feed-forwards with RMS norm and turned halves, x (B, T, D): small kernels, mostly."""
    half = x.shape[-1] // 2
    for _ in range(2):
        y = scale * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
        y = y * 0.8 + torch.cat([-y[..., half:], y[..., :half]], -1) * 0.6
        x = x + F.linear(F.silu(F.linear(y, gate)) * F.linear(y, up), down)
    return x


def samples(rows: int = 1) -> tuple[BenchCase, ...]:
    """Return the samples that are timed; `rows` multiplies the rows of the large ones."""

    def feed(n: int, width: int, inner: int) -> BenchCase:
        shapes = ((n * rows, width), (inner, width), (inner,), (width, inner), (width,))
        return BenchCase(f"linear {n}x{width}x{inner}", _linear, shapes)

    def squares(n: int, channels: int, size: int) -> BenchCase:
        weight = (channels, channels, 3, 3)
        shapes = ((n * rows, channels, size, size), weight, weight)
        return BenchCase(f"convolution {n}x{channels}x{size}", _convolutions, shapes)

    def residual(n: int, inside: int, outside: int, size: int) -> BenchCase:
        shapes = (
            (n * rows, inside, size, size),
            (outside, inside, 3, 3),
            (outside, outside, 3, 3),
            (outside, inside, 1, 1),
            (outside,),
            (outside,),
        )
        return BenchCase(f"residual {n}x{inside}x{size}", _residual, shapes, whole=True)

    def block(n: int, length: int, d: int) -> BenchCase:
        x, feed = (n * rows, length, d), ((4 * d, d), (d, 4 * d))
        shapes = (x, (3 * d, d), (d, d), *feed, (d,), (d,))
        return BenchCase(f"block {n}x{length}x{d}", _block, shapes, random=True, whole=d >= 64)

    def gated(n: int, length: int, d: int) -> BenchCase:
        weights = ((2 * d, d), (2 * d, d), (d, 2 * d), (d,))
        shapes = ((n * rows, length, d), *weights)
        return BenchCase(f"gated {n}x{length}x{d}", _gated, shapes, whole=d >= 64)

    def heads(*shape: int) -> BenchCase:
        return BenchCase(f"attention {shape}", _attention, ((shape[0] * rows, *shape[1:]),) * 3)

    def wide(name: str, function: Callable[..., Tensor], n: int, *others: Shape) -> BenchCase:
        first = (n * rows, 128)
        shapes = (first, *(first if s == () else s for s in others))
        return BenchCase(f"{name} {n}", function, shapes, function is _dropouts)

    width = (128,)
    return (
        feed(64, 64, 64),
        feed(512, 128, 512),
        feed(256, 384, 384),
        squares(4, 8, 8),
        squares(16, 32, 8),
        residual(16, 12, 24, 8),
        residual(8, 32, 64, 16),
        residual(24, 48, 96, 4),
        heads(4, 4, 64, 16),
        heads(4, 4, 128, 32),
        wide("pointwise", _pointwise, 512, ()),
        wide("pointwise", _pointwise, 4096, ()),
        wide("moves", _moves, 1024, ()),
        wide("functions", _functions, 256),
        wide("functions", _functions, 1024),
        wide("norms", _norms, 1024, width, width),
        wide("dropouts", _dropouts, 1024),
        block(2, 16, 32),
        block(8, 48, 96),
        block(2, 64, 320),
        gated(1, 16, 32),
        gated(8, 48, 96),
    )


class Bench:
    """The samples on one device: `round` times each, `speeds` fits what was timed so far."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.samples = samples(ROWS_OF_A_CARD if device.type == "cuda" else 1)
        source = torch.Generator().manual_seed(0)
        self._inputs = [
            [torch.rand(s, generator=source).to(device).requires_grad_() for s in sample.shapes]
            for sample in self.samples
        ]
        self.works: list[Work] = []
        self._seeds: list[Tensor] = []
        for sample, inputs in zip(self.samples, self._inputs, strict=True):
            forward, backward, result = count(sample, inputs)
            self.works += [forward, backward]
            self._seeds.append(torch.ones_like(result))
        self.times: list[list[float]] = [[] for _ in self.works]

    def round(self) -> None:
        """Runs every sample forward and backward REPEATS times; the first one fills the caches, as
        the microbatch before does in training, and its time is dropped."""
        for i, (sample, inputs) in enumerate(zip(self.samples, self._inputs, strict=True)):
            for repeat in range(REPEATS):
                for tensor in inputs:
                    tensor.grad = None
                began = self._clock()
                result = sample.function(*inputs)
                between = self._clock()
                torch.autograd.backward([result], [self._seeds[i]])
                if repeat:
                    self.times[2 * i].append(between - began)
                    self.times[2 * i + 1].append(self._clock() - between)

    @property
    def agrees(self) -> bool:
        """Whether the last AGREEING rounds took as long as each other."""
        last = [sum(times) for times in zip(*(t[-AGREEING:] for t in self.times), strict=True)]
        return len(last) == AGREEING and max(last) <= (1 + AGREED) * min(last)

    def forget(self) -> None:
        """Drops the times: the first round loads libraries and fills caches."""
        self.times = [[] for _ in self.works]

    @property
    def seconds(self) -> list[float]:
        """What counts of the times of each work, in the order of `works`."""
        return [median(times) for times in self.times]

    def speeds(self) -> Speeds:
        level = [2 * i + j for i, s in enumerate(self.samples) if s.whole for j in (0, 1)]
        return fit(self.works, self.seconds, level)

    def _clock(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        elif torch.get_num_threads() == 1:
            return time.thread_time()  # another process's turn does not count
        return time.perf_counter()


def count(sample: BenchCase, inputs: list[Tensor]) -> tuple[Work, Work, Tensor]:
    """Work of a sample, forward and backward, and its result. It runs: fake tensors, which would
    do, take seconds to load."""
    forward, backward = Counter(sample.random), Counter(sample.random, later=True)
    with forward:
        result = sample.function(*inputs)
    ends = nodes([result])
    with backward:
        torch.autograd.grad([result], inputs, [torch.ones_like(result)])
    return forward.work, backward.work + Work(calls=ends), result.detach()


def measure_speeds(device: torch.device, seconds: float = 1.0) -> Speeds:
    """The speeds of a device with torch's present number of threads; takes about `seconds`, longer
    on a slow device, which runs at least LEAST_ROUNDS rounds, and less where rounds agree."""
    bench = Bench(device)
    bench.round()
    bench.forget()
    end = time.perf_counter() + seconds
    done = 0
    while done < LEAST_ROUNDS or (time.perf_counter() < end and not bench.agrees):
        bench.round()
        done += 1
    speeds = bench.speeds()
    return replace(speeds, busy=busy_share()) if device.type == "cpu" else speeds
