"""Counting what runs: every kernel below autograd, in its class of `Work`, on fake tensors (as in
trial.py) and on real ones alike.

    product       2·m·n·k FLOPs
    convolution   FLOPs likewise, by the formulas of torch.utils.flop_counter; its bytes are special
    attention     FLOPs of the full square, and SCORE FLOPs for the softmax of each score
    memory        bytes read and written by kernels that only wait for memory
    special       bytes read and written by kernels that compute or decide per element:
                  exponentials, normalisation, masks, gathers; some weigh several times their bytes
    calls         kernels, each by its fixed time: 1 forward, VIEW for a view, and so on

The weights are those of torch's kernels on one core, where the classes differ most: a GELU in its
tanh form takes four times as long as an exponential over as many bytes. Elsewhere (GPUs) all of
these wait for memory, and the fitted speed of the class says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import conv_flop_count, flop_registry, sdpa_backward_flop, sdpa_flop

from .speed import Work

__all__ = ["Counter", "nodes"]

HASH_BYTES = 36
"""Special bytes per element of the integer hash behind a random mask (dag/ir/random.py)."""
HASH_CALLS = 8
"""Kernels of that hash."""
VIEW = 0.4
"""Calls of an operator that moves nothing: it passes through the dispatcher and autograd, too."""
LATER = 0.5
"""Calls of a kernel in a backward pass, beside those of the autograd node that runs it: it needs no
history of its own."""
OPERATOR = 0.5
"""Calls of any operator of a graph, for it is called from Python, whatever kernels it becomes."""
BATCH_NORM_CALLS = 5
"""Kernel calls of a batch norm, which copies its running statistics besides."""
CONVOLUTION_CALLS = 24
"""Kernel calls of a convolution and of each gradient of one: a library is set up."""
CONVOLUTION_MOVES, CONVOLUTION_MOVES_BACK, CONVOLUTION_WEIGHT = 0.85, 1.75, 2.5
"""Special bytes per byte that a convolution, or one gradient of one, reads and writes, for layouts
are changed before and after; and how much more a byte of the weight counts."""
SMALL_MAP_WEIGHTS = 4
"""Times the weight's bytes that the library takes, with one thread, for the gradient of a weight
whose kernel is larger than the picture in some dimension."""
SCORE, SCORE_BACKWARD = 64, 128
"""FLOPs per score of fused attention: an exponential, maxima, sums, a mask."""

_aten = torch.ops.aten


def _convolution_backward(
    grad: Tensor, x: Tensor, weight: Tensor, *args: Any, out_val: Any = None
) -> int:
    """As much as the forward for each of the two gradients. (The formula of torch 2.13 forgets that
    groups divide the work for the weight's: a depthwise one would count channels times too much.)
    """
    transposed, needed = args[4], args[7]
    forward: int = conv_flop_count(list(x.shape), list(weight.shape), list(grad.shape), transposed)
    return forward * (int(needed[0]) + int(needed[1]))


_FORMULAS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    _aten.convolution_backward: _convolution_backward,
    _aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward_flop,
}
_CONVOLUTIONS = frozenset({_aten.convolution, _aten._convolution, _aten.convolution_backward})
_GATHERS = frozenset({_aten.embedding, _aten.index, _aten.index_select, _aten.gather})
"""Operators that read only as much of their first input as they return."""
_FREE = frozenset({_aten._unsafe_view, _aten.empty, _aten.empty_like, _aten.empty_strided})
"""Operators that move nothing, beside the views."""


def _weights(**names: float) -> dict[Any, float]:
    """By operator; those that this torch does not have are left out."""
    return {getattr(_aten, name): w for name, w in names.items() if hasattr(_aten, name)}


_SPECIAL = _weights(
    # functions
    exp=1, exp2=1, expm1=1.5, log=1.2, log2=1.2, log1p=1.5, sigmoid=1, silu=1, silu_backward=0.8,
    gelu=1, gelu_backward=0.9, sin=1.6, cos=1.6, erf=1.5, erfc=1.5, tanh=3.3, softplus=3.3, mish=4,
    mish_backward=4, softplus_backward=1.5, log_sigmoid_forward=3, log_sigmoid_backward=2, pow=5,
    rsqrt=0.4, sqrt=0.5, logaddexp=3, _softmax=1, _log_softmax=1, _log_softmax_backward_data=0.8,
    logsumexp=1.5,
    # normalisation
    native_layer_norm=0.9, native_layer_norm_backward=0.5, native_batch_norm=2.1,
    _native_batch_norm_legit=2.1, _native_batch_norm_legit_functional=2.1,
    native_batch_norm_backward=0.8, native_group_norm=0.5, native_group_norm_backward=0.4,
    var=14, var_mean=14, std=14,
    # decisions per element
    masked_fill=1.5, masked_fill_=1.5, where=0.8, eq=1, ne=1, lt=1, le=1, gt=1, ge=1,
    bitwise_not=1, logical_not=1, logical_and=1, logical_or=1, bitwise_and=1, bitwise_or=1,
    argmax=2, argmin=2, max=2, min=2, amax=1, amin=1, topk=3, sort=10, cumsum=1,
    # gathers and the like
    index=1, index_put=2, _index_put_impl_=2, gather=2, scatter=2, scatter_add=2,
    embedding_dense_backward=1, nll_loss_forward=1, nll_loss_backward=1,
    max_pool2d_with_indices=9, avg_pool2d=4, avg_pool2d_backward=4, upsample_nearest2d=8,
    upsample_bilinear2d=8, _adaptive_avg_pool2d=2,
)  # fmt: skip
"""Operators of the class `special`: how long each takes beside an exponential over as many bytes
(one core of an EPYC, torch 2.13)."""
_VECTOR_POWERS = (0.5, 1.0, 2.0, 3.0, -0.5, -1.0, -2.0)
"""Exponents for which a power is a product or a root."""


class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's is untyped
    """Adds up, in `work`, everything that is dispatched below autograd while the mode is active.
    `random`: what runs is a random operator; `later`: a backward pass. With `follow`, `peak_bytes`
    is the most that the results of these kernels took at once."""

    def __init__(self, random: bool = False, later: bool = False, follow: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's is untyped
        self.work = Work()
        self.peak_bytes = 0
        self.bug: Exception | None = None
        """A bug of the counting itself: torch passes it on like an error of what it runs."""
        self._made: dict[int, tuple[StorageWeakRef, int]] | None = {} if follow else None
        self._random = random
        self._factor = LATER if later else 1.0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False keeps torch from loading its compiler, which takes seconds, at the first call."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        try:
            self._count(func, args, kwargs, out)
        except Exception as error:
            self.bug = error
            raise
        return out

    def _count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        packet = func._overloadpacket
        if self._made is not None:
            self._follow(self._made, [args, kwargs], out, _inside(packet, args, out))
        formula = _FORMULAS.get(packet)
        if formula is not None:
            flops = float(formula(*args, **kwargs, out_val=out))
            self._add(self._heavy(packet, flops, args, out))
        elif func.namespace != "aten":
            pass
        elif func.is_view or packet in _FREE:
            self._add(Work(calls=VIEW if func.is_view else 0.0))
        else:
            self._add(
                self._moved(packet, args, list(_tensors([args, kwargs])), list(_tensors(out)))
            )

    def _follow(
        self, made: dict[int, tuple[StorageWeakRef, int]], read: Any, out: Any, inside: int
    ) -> None:
        given = {t.untyped_storage()._cdata for t in _tensors(read)}
        for tensor in _tensors(out):
            if tensor.untyped_storage()._cdata not in given:  # a view is nothing new
                # torch's is untyped.
                ref = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
                made[ref.cdata] = ref, storage_bytes(tensor)
        for key, (ref, _) in tuple(made.items()):
            if ref.expired():  # type: ignore[no-untyped-call]
                del made[key]
        now = sum(size for _, size in made.values())
        self.peak_bytes = max(self.peak_bytes, now + inside)

    def _add(self, work: Work) -> None:
        self.work += work._replace(calls=work.calls * self._factor)

    def _heavy(self, packet: Any, flops: float, args: tuple[Any, ...], out: Any) -> Work:
        """What a formula counts."""
        if packet is _aten.convolution_backward:
            gradients = int(args[10][0]) + int(args[10][1])
            moved = _bytes(args[:2]) + CONVOLUTION_WEIGHT * _bytes(args[2])
            moved *= CONVOLUTION_MOVES_BACK * gradients
            calls = CONVOLUTION_CALLS * gradients / self._factor
            return Work(convolution=flops, special=moved, calls=calls)
        if packet in _CONVOLUTIONS:
            moved = _bytes([args[0], out]) + CONVOLUTION_WEIGHT * _bytes(args[1])
            moved *= CONVOLUTION_MOVES
            return Work(convolution=flops, special=moved, calls=CONVOLUTION_CALLS)
        if "attention" not in packet.__name__:
            return Work(product=flops, calls=1)
        backward = packet.__name__.endswith("_backward")
        query, key = args[1:3] if backward else args[:2]
        scores = query.shape[:-1].numel() * key.shape[-2]
        return Work(attention=flops + scores * (SCORE_BACKWARD if backward else SCORE), calls=1)

    def _moved(
        self, packet: Any, args: tuple[Any, ...], read: list[Tensor], made: list[Tensor]
    ) -> Work:
        """Bytes moved. The hash of a random operator counts where its integers become a mask or
        numbers, and its own steps not: the first of them are kept from call to call."""
        if self._random and not any(t.is_floating_point() for t in read):
            if all(t.dtype in (torch.int32, torch.int16) for t in made):
                return Work()
            return Work(special=HASH_BYTES * sum(t.numel() for t in made), calls=HASH_CALLS)
        if packet in _GATHERS:
            read = [*read[1:], *made]
        moved = _bytes([read, made])
        weight = _SPECIAL.get(packet, 0.0)
        if packet is _aten.pow and args[1] in _VECTOR_POWERS:
            weight = 0.0
        if not weight:
            return Work(memory=moved, calls=1)
        batch_norm = "batch_norm" in packet.__name__ and not packet.__name__.endswith("backward")
        return Work(special=weight * moved, calls=BATCH_NORM_CALLS if batch_norm else 1)


def _inside(packet: Any, args: tuple[Any, ...], out: Any) -> int:
    """Bytes that a kernel holds beside its inputs and results: copies in another layout, for the
    CPU's library for convolutions wants channels in blocks."""
    if packet is _aten.convolution_backward:
        x, weight = args[1:3]
        small = any(a < k for a, k in zip(x.shape[2:], weight.shape[2:], strict=True))
        return max(_bytes(args[:3]), small * SMALL_MAP_WEIGHTS * _bytes(weight))
    return _bytes([args[1], out]) if packet in _CONVOLUTIONS else 0


def nodes(roots: list[Tensor], leaf: float = 1.0) -> float:
    """Calls of the autograd nodes behind these tensors, beside the kernels that they run."""
    waiting = [t.grad_fn for t in roots if t.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node is not None and node not in seen:
                seen.add(node)
                waiting.append(node)
    return sum(leaf if "AccumulateGrad" in node.name() else 1.0 for node in seen)


def _bytes(tree: Any) -> int:
    """The bytes of all tensors in a tree. An expanded tensor has more elements than bytes behind
    it."""
    return sum(min(t.numel() * t.itemsize, storage_bytes(t)) for t in _tensors(tree))


def storage_bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        yield from _tensors(list(tree.values()))
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _tensors(item)
