"""What learning.py compares: the links, the ratios that a policy gives them, and the runs.

The five cuts of the pipeline lie on links of two classes, "fast" and "slow". AdaTopK is what
`codec = "adatopk"` does (planner/codecs/codecs.py): ratios of bytes by rule A,
r_e = max(1, r_max·t_e / t_max) with t_e the seconds of link e without compression. Uniform top-k is
the same codec with one ratio on all links, the one with which a step takes as long as AdaTopK's
does. A step's seconds, when links rule it and M microbatches follow each other, are
those of a flow line, for either direction:

    Σ_e t_e + (M - 1) · max_e t_e
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Literal

from shoal.benchmarks.learning.chain import Setting
from shoal.benchmarks.learning.wire import SUPPORT, Codecs
from shoal.compression.codec import fitting, parse
from shoal.compression.sparse.topk import TopK
from shoal.dag.ir.graph import TensorSpec
from shoal.planner.codecs.adatopk import WIDTHS, best_within, harm, support_text, topk_text

__all__ = [
    "BASELINE",
    "LINKS",
    "PLAIN",
    "ROWS",
    "Class",
    "Row",
    "adatopk",
    "step_seconds",
    "uniform",
]

Class = Literal["fast", "slow"]
LINKS: tuple[Class, ...] = ("fast", "slow", "fast", "slow", "fast")
"""Of each cut, from the first on."""
BYTES_PER_S: Mapping[Class, float] = {"fast": 125e6, "slow": 1.25e6}
"""1 Gbit/s and 10 Mbit/s."""
MICROBATCHES = 8
BASELINE = "dense"
PLAIN = (BASELINE, "dense_lr8", "dense_lr16", "dense_beta99", "dense_beta99_lr8")
"""Nothing compressed, with other settings of the optimizer: what a row with settings of its own is
held against is the best of them."""
ONE = (0,)
"""The seeds of rows that nothing is promised of: the table of codecs needs one."""


def seconds_of(texts: Sequence[str], spec: TensorSpec) -> list[float]:
    """By link, of one tensor."""
    return [
        fitting(parse(text), spec).size_bytes(spec) / BYTES_PER_S[link]
        for text, link in zip(texts, LINKS, strict=True)
    ]


def step_seconds(texts: Sequence[str], spec: TensorSpec) -> float:
    """Of one direction of a step."""
    seconds = seconds_of(texts, spec)
    return sum(seconds) + (MICROBATCHES - 1) * max(seconds)


@cache
def adatopk(most: float, spec: TensorSpec) -> tuple[str, ...]:
    """Codec texts by link under rule A, with 1/`most` of the bytes on the slowest link."""
    seconds = seconds_of(["raw"] * len(LINKS), spec)
    fewer = [max(1.0, float(f"{most * s / max(seconds):.2g}")) for s in seconds]
    sizes = {width: partial(_size, spec, width) for width in WIDTHS}
    return tuple(best_within(sizes, spec.size_bytes / r, r) if r > 1 else "raw" for r in fewer)


@cache
def uniform(most: float, spec: TensorSpec) -> tuple[str, ...]:
    """One ratio on every link, to 0.01 the smallest with which a step is no longer than
    `adatopk(most)`'s, and the width chosen as there."""
    aim = step_seconds(adatopk(most, spec), spec)
    ratios = {width: _least_uniform(width, aim, most, spec) for width in WIDTHS}
    width = min(ratios, key=lambda width: harm(ratios[width], width))
    return (topk_text(ratios[width], width),) * len(LINKS)


def _least_uniform(width: str, aim: float, most: float, spec: TensorSpec) -> float:
    low, high = 100, round(200 * most)  # hundredths
    while low < high:
        ratio = (low + high) // 2
        if step_seconds([topk_text(ratio / 100, width)] * len(LINKS), spec) <= aim:
            high = ratio
        else:
            low = ratio + 1
    return low / 100


def _size(spec: TensorSpec, width: str, ratio: float) -> int:
    """Bytes of the larger of a value and its gradient."""
    texts = topk_text(ratio, width), support_text(ratio)
    return max(fitting(parse(text), spec).size_bytes(spec) for text in texts)


@dataclass(frozen=True, slots=True)
class Row:
    """One way to send, trained with every seed."""

    name: str
    title: str
    activation: str | Mapping[Class, str] = "raw"
    """A codec text for all links or by class, "adatopk R" or "uniform R"."""
    activation_grad: str | Mapping[Class, str] = "raw"
    """The same, or SUPPORT: where the activation is compressed."""
    grad: str = "raw"
    replicas: int = 1
    ahead: bool = False
    beta2: float = 0.95
    lr: float | None = None
    """None: the setting's."""
    seeds: tuple[int, ...] = field(default=(0, 1, 2))

    def setting(self, setting: Setting) -> Setting:
        """Of this row's runs."""
        return replace(setting, beta2=self.beta2, lr=self.lr or setting.lr)

    def codecs(self, setting: Setting) -> Codecs:
        windows = setting.batch // self.replicas
        spec = TensorSpec((windows, setting.length, setting.width), "float32")
        there = _by_cut(self.activation, spec)
        if self.activation_grad == SUPPORT:
            back = tuple(_on_support(text) for text in there)
        else:
            back = _by_cut(self.activation_grad, spec)
        return Codecs(there, back, self.grad, self.replicas, self.ahead)

    @property
    def step_seconds(self) -> float:
        """Of both directions of a step of the learning runs, where links rule it."""
        setting = Setting()
        codecs = self.codecs(setting)
        windows = setting.batch // self.replicas
        spec = TensorSpec((windows, setting.length, setting.width), "float32")
        return sum(
            step_seconds(texts, spec) for texts in (codecs.activation, codecs.activation_grad)
        )


def _by_cut(wish: str | Mapping[Class, str], spec: TensorSpec) -> tuple[str, ...]:
    if not isinstance(wish, str):
        return tuple(wish.get(link, "raw") for link in LINKS)
    policy, _, most = wish.partition(" ")
    match policy:
        case "adatopk":
            return adatopk(float(most), spec)
        case "uniform":
            return uniform(float(most), spec)
        case _:
            return (wish,) * len(LINKS)


def _on_support(text: str) -> str:
    codec = parse(text)
    return support_text(codec.ratio) if isinstance(codec, TopK) else text


def _slow(text: str) -> dict[Class, str]:
    return {"slow": text}


def _both(
    name: str, title: str, wish: str | Mapping[Class, str], seeds: tuple[int, ...] = (0, 1, 2)
) -> Row:
    return Row(name, title, wish, wish, seeds=seeds)


TENTH = _slow("topk:ratio=3.67,values=int8")
"""A tenth of the bytes on slow links. Which gradients come back is another question than how wide
numbers are, so its rows keep one text."""
HUNDREDTH = _slow("topk:ratio=49,values=int8")
"""By AdaTopK's rule (A in codecs.py), a hundredth of the bytes."""
AS_FAST = "topk:ratio=35.9,values=int8"
"""On every link, with the step time of HUNDREDTH."""

ONE_PERCENT = "ef+topk:ratio=100"

ROWS: tuple[Row, ...] = (
    Row(BASELINE, "nothing compressed"),
    Row("adatopk", "AdaTopK, 10× fewer bytes", "adatopk 10", SUPPORT),
    Row("uniform_topk", "uniform top-k, same step time", "uniform 10", SUPPORT),
    _both("adatopk_own", "int8 top-k 10×, the gradients' own choice", TENTH),
    Row("adatopk_activation", "int8 top-k 10×, activations only", activation=TENTH),
    Row("adatopk_grad", "int8 top-k 10×, their gradients only", activation_grad=TENTH),
    Row("adatopk_100", "int8 top-k by AdaTopK's rule, 100× fewer bytes", HUNDREDTH, SUPPORT),
    Row("uniform_topk_100", "uniform int8 top-k, as fast as that", AS_FAST, SUPPORT),
    Row("dense_lr8", "nothing compressed, rate 0.008", lr=8e-3),
    Row(
        "ef_topk1pct",
        "EF + top-k 1 %, stepped ahead, β₂ 0.99, rate 0.008",
        grad=ONE_PERCENT,
        replicas=2,
        ahead=True,
        beta2=0.99,
        lr=8e-3,
    ),
    Row("dense_beta99_lr8", "nothing compressed, β₂ 0.99, rate 0.008", beta2=0.99, lr=8e-3),
    Row("dense_lr16", "nothing compressed, rate 0.016", lr=16e-3),
    Row("dense_beta99", "nothing compressed, β₂ 0.99", beta2=0.99),
    Row(
        "ahead_topk1pct_beta99",
        "EF + top-k 1 %, stepped ahead, β₂ 0.99",
        grad=ONE_PERCENT,
        replicas=2,
        ahead=True,
        beta2=0.99,
    ),
    Row(
        "ahead_topk1pct_beta95",
        "EF + top-k 1 %, stepped ahead",
        grad=ONE_PERCENT,
        replicas=2,
        seeds=(0, 1),
        ahead=True,
    ),
    Row("late_ef_topk1pct", "EF + top-k 1 %", grad=ONE_PERCENT, replicas=2),
    _both("lowrank", "low rank on slow links", _slow("lowrank:rank=4"), ONE),
    _both("int4", "int4 on slow links", _slow("int4"), ONE),
    Row("int8", "int8 everywhere", "int8", "int8", "int8", 2, seeds=ONE),
    Row("topk1pct", "top-k 1 %, no feedback", grad="topk:ratio=100", replicas=2, seeds=ONE),
    Row("bf16", "bf16 everywhere", "bf16", "bf16", "bf16", 2, seeds=ONE),
    _both("delta_int4", "delta + int4 on slow links", _slow("delta+int4"), ONE),
)
"""The most telling first: an interrupted run has them."""
