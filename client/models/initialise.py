"""A module that is made without its weights, and given them later, or by peers.

    module = shoal.deferred_init(lambda: GPT(config))     # no memory but that of its buffers
    shoal.initialise(module, seed=7)                      # what every peer would make of it

A job takes such a module as it is: its weights are then made where they are trained.
"""

from __future__ import annotations

import resource
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...dag.ir.recipe import make
from ...peer.host.profile import available_host_bytes
from .recording import Recording, recipe_of, record, replace_tensors

__all__ = [
    "TooLargeError",
    "Within",
    "check_seed",
    "deferred_init",
    "free_bytes",
    "give_values",
    "initialise",
    "recording_of",
    "replace_parameters",
]

# How much memory this process may still take, and whoever would take more is stopped before.


class TooLargeError(MemoryError):
    """What was about to be allocated is more than there is."""


def free_bytes() -> int:
    """What can be taken without swapping, within the limits of the container and of the process
    (`ulimit -v`)."""
    free = available_host_bytes()
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        free = min(free, max(0, limit - pages * resource.getpagesize()))
    return free


class Within(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's is untyped
    """While it is entered, tensors made of nothing are counted, and TooLargeError is raised in
    front of the one with which they would be more than there was memory for at the beginning."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's is untyped
        self.free, self.taken = free_bytes(), 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        made_of_nothing = not any(isinstance(t, Tensor) for t in tree_leaves((args, kwargs)))
        here = device is None or torch.device(device).type == "cpu"
        takes_device = any(a.name == "device" for a in func._schema.arguments)
        if made_of_nothing and takes_device and here:
            on_meta = {k: v for k, v in kwargs.items() if k != "generator"} | {"device": "meta"}
            meta = func(*args, **on_meta)
            size = sum(t.nbytes for t in tree_leaves(meta) if isinstance(t, Tensor))
            if self.taken + size > self.free:
                raise TooLargeError(
                    f"{self.taken / 2**30:.1f} GiB of weights so far and {size / 2**30:.1f} GiB "
                    f"more, where {self.free / 2**30:.1f} GiB are free"
                )
            self.taken += size
        return func(*args, **kwargs)


_recordings: weakref.WeakKeyDictionary[nn.Module, Recording] = weakref.WeakKeyDictionary()


def deferred_init(factory: Callable[[], nn.Module], *, seed: int = 0) -> nn.Module:
    """The module that a factory makes, its parameters on `meta`: how they begin is remembered with
    it. `seed` counts only where the factory looks at values that it has drawn.

    Raises whatever the factory raises, and TypeError where it returns no module.
    """
    module, recording = record(factory, seed)
    if not isinstance(module, nn.Module):
        raise TypeError(f"the factory returned {type(module).__name__}: expected a torch.nn.Module")
    _recordings[module] = recording
    return module


def recording_of(module: nn.Module) -> Recording | None:
    """How the weights of a module of `deferred_init` begin, while it has none."""
    return _recordings.get(module)


def initialise(module: nn.Module, seed: int = 0) -> nn.Module:
    """Gives the parameters of a module of `deferred_init` their starting values, in place, and
    returns it: bit for bit those that peers make in a run with this seed, on any machine.

    Raises ValueError for another module, and for a seed other than that of `deferred_init` where
    the factory has looked at what it drew.
    """
    recording = recording_of(module)
    if recording is None:
        raise ValueError(
            f"{type(module).__name__} was not made by shoal.deferred_init, so nothing is known of "
            "how its weights begin: expected initialise(deferred_init(factory), seed)"
        )
    give_values(module, recording, seed)
    del _recordings[module]
    return module


def give_values(
    module: nn.Module,
    recording: Recording,
    seed: int,
    elsewhere: Callable[[str], Tensor | None] = lambda name: None,
) -> None:
    """See `initialise`. What is tied stays tied. `elsewhere`: by name, values that come from
    somewhere else. Raises ValueError."""
    check_seed(recording, seed)
    recipe, _, _ = recipe_of(module, recording, seed)
    threads = torch.get_num_threads()

    def value(name: str, parameter: nn.Parameter) -> Tensor | None:
        if (other := elsewhere(name)) is not None:
            return other.to(parameter.dtype)
        if name in recipe.tensors:
            return make(recipe.tensors[name], seed, threads=threads)
        return recording.value(parameter, seed) if recording.has(parameter) else None

    replace_parameters(module, value)


def replace_parameters(
    module: nn.Module, value: Callable[[str, nn.Parameter], Tensor | None]
) -> None:
    """Gives parameters other tensors, in place; None leaves one as it is. What is tied stays
    tied."""
    made: dict[int, nn.Parameter] = {}
    for name, parameter in module.named_parameters():
        if (tensor := value(name, parameter)) is not None:
            made[id(parameter)] = new = nn.Parameter(tensor, parameter.requires_grad)
            new.__dict__.update(parameter.__dict__)
    for part in module.modules():
        for name, held in list(part._parameters.items()):
            if id(held) in made:
                setattr(part, name, made[id(held)])  # so that an LSTM hears of it
        replace_tensors(part, lambda tensor: made.get(id(tensor), tensor))


def check_seed(recording: Recording, seed: int) -> None:
    """Raises ValueError where the recording is of one seed only, and that is another one."""
    if recording.looked and recording.seed != seed:
        raise ValueError(
            f"the factory has looked at values that it drew, or drawn a buffer, with seed "
            f"{recording.seed}: expected the same, not {seed} (deferred_init(…, seed={seed}))"
        )
