"""From the [model] of a job to a module: the factory, starting weights, and frozen parameters.

This runs on the submitter's machine only; peers see a graph and named tensors, never a factory.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .job import LIVE, Job

__all__ = ["ModelError", "build", "frozen", "load_named", "read_weights", "tied_names"]


class ModelError(ValueError):
    """A factory, module or weights file that cannot be used; says where and what to do."""


def build(job: Job) -> nn.Module:
    """The job's module in train mode with its starting weights; a live module is returned itself.

    The factory runs under the job's seed, so the same job starts from the same weights. Raises
    ModelError.
    """
    if job.module is not None:
        if not isinstance(job.module, nn.Module):
            raise ModelError(
                f"model is a {type(job.module).__name__}: expected a torch.nn.Module, a table, or "
                'a factory such as "file.py:fn"'
            )
        module = job.module
    elif job.model.factory.startswith(LIVE):
        raise ModelError(
            f"the job names the live module {job.model.factory.removeprefix(LIVE)}, which is not "
            "in a job that was read back: pass Job(model=module, …)"
        )
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(job.seed)
            module = _from_factory(job)
    if job.model.weights != "init":
        load_named(module, read_weights(_find(job.model.weights, job.folder, "model.weights")))
    return module.train()


def _from_factory(job: Job) -> nn.Module:
    factory = job.model.factory
    if factory.startswith("hf:"):
        return _hugging_face(_find(factory.removeprefix("hf:"), job.folder, "model.factory"), job)
    place, _, name = factory.rpartition(":")
    function = getattr(_import(place, job.folder), name, None)
    if not callable(function):
        raise ModelError(f'factory "{factory}": {place} has no function "{name}"')
    module = _call(function, dict(job.model.args), factory)
    if not isinstance(module, nn.Module):
        raise ModelError(
            f'factory "{factory}" returned {type(module).__name__}: expected a torch.nn.Module'
        )
    return module


def _call(function: Callable[..., Any], args: Mapping[str, Any], factory: str) -> Any:
    try:
        return function(**args)
    except Exception as error:  # whatever the user's code raises is the user's to see
        raise ModelError(f'factory "{factory}" raised {_story(error)}') from error


def _story(error: BaseException) -> str:
    """The error and the line of the user's code that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if len(frames) > 1 else ""
    return f"{type(error).__name__}: {error}{where}"


def _import(place: str, folder: Path) -> Any:
    """The module of "pkg.mod" or "file.py"; the job's folder comes first."""
    with _first_on_path(folder):
        try:
            if not place.endswith(".py"):
                return importlib.import_module(place)
            path = _find(place, folder, "model.factory")
            name = f"_shoal_factory_{path.stem}"
            spec = importlib.util.spec_from_file_location(name, path)
            assert spec is not None, f"no import spec for {path}"
            assert spec.loader is not None, f"no loader for {path}"
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module  # dataclasses and pickling look a class up by its module
            spec.loader.exec_module(module)
            return module
        except ModelError:
            raise
        except Exception as error:  # an import runs the user's code
            raise ModelError(f'factory module "{place}" cannot be imported: {_story(error)}') from (
                error
            )


@contextmanager
def _first_on_path(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder.resolve()))
    try:
        yield
    finally:
        sys.path.remove(str(folder.resolve()))


def _find(name: str, folder: Path, key: str) -> Path:
    """A path of the job, looked up in the job's folder, then in the current one."""
    for base in (folder, Path()):
        if (base / name).exists():
            return (base / name).resolve()
    raise ModelError(f'`{key}` names "{name}", which is neither in {folder.resolve()} nor here')


# ---------------------------------------------------------------- Hugging Face


def _hugging_face(folder: Path, job: Job) -> nn.Module:
    """The causal language model of a folder with a config.json: its weights where they lie beside
    it, random ones otherwise. Its forward becomes `forward(x, y)`, and its names stay its own."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise ModelError(
            f'"{job.model.factory}" needs transformers: pip install "shoal[hf]"'
        ) from None
    if not (folder / "config.json").is_file():
        raise ModelError(f'"{job.model.factory}": there is no config.json in {folder}')
    try:
        if any(folder.glob("*.safetensors")):
            model = AutoModelForCausalLM.from_pretrained(
                folder, use_safetensors=True, dtype=torch.float32, **job.model.args
            )
        else:
            config = AutoConfig.from_pretrained(folder, **job.model.args)
            causal: Any = AutoModelForCausalLM  # its from_config has no annotations
            model = causal.from_config(config, dtype=torch.float32)
    except (ValueError, OSError, TypeError, KeyError) as error:
        raise ModelError(f'"{job.model.factory}": {_story(error)}') from error
    return _with_loss(model)


def _with_loss(model: nn.Module) -> nn.Module:
    """The model with `forward(x, y)`: mean cross-entropy over the y that are not -100, and their
    number as weight. Its class changes, and nothing else, so every name in its state stays."""
    base = type(model)

    def forward(self: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        # y holds the next tokens already. The model's own `labels=` would shift once more, and its
        # mean would not carry its weight over to other microbatches.
        logits = base.forward(self, input_ids=x, use_cache=False).logits  # (B, T, V)
        count = (y != -100).sum()
        total = F.cross_entropy(
            logits.float().flatten(0, 1), y.flatten(), ignore_index=-100, reduction="sum"
        )
        return {"loss": total / count.clamp(min=1), "weight": count.float()}

    model.__class__ = type(base.__name__, (base,), {"forward": forward, "__module__": __name__})
    return model


# ---------------------------------------------------------------- names and weights


def tied_names(module: nn.Module) -> dict[str, str]:
    """Every name in the module's state, mapped to the first name of the same tensor."""
    first: dict[int, str] = {}
    names: list[tuple[str, Tensor]] = [*module.named_parameters(remove_duplicate=False)]
    names += module.named_buffers(remove_duplicate=False)
    return {name: first.setdefault(id(tensor), name) for name, tensor in names}


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file. Raises ModelError."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is no readable safetensors file: {error}") from error


def load_named(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copies weights into a module by name; one name of a tied tensor is enough.

    Raises ModelError, before anything changes, when a name is missing or unknown, or a shape
    differs.
    """
    first = tied_names(module)
    state = module.state_dict(keep_vars=True)
    unknown = sorted(set(weights) - set(state))
    given = {first.get(name, name) for name in weights}
    missing = sorted({first.get(n, n) for n, t in state.items() if isinstance(t, Tensor)} - given)
    if unknown or missing:
        raise ModelError(
            f"the weights do not fit the module: {len(missing)} names are missing "
            f"({', '.join(missing[:3])}{' …' if len(missing) > 3 else ''}), {len(unknown)} are "
            f"unknown to it ({', '.join(unknown[:3])}{' …' if len(unknown) > 3 else ''})"
        )
    for name, value in weights.items():
        if state[name].shape != value.shape:
            raise ModelError(
                f'weight "{name}" has shape {tuple(value.shape)}: '
                f"the module's has {tuple(state[name].shape)}"
            )
    with torch.no_grad():
        for name, value in weights.items():
            state[name].copy_(value)


@contextmanager
def frozen(module: nn.Module, globs: tuple[str, ...]) -> Iterator[None]:
    """The module with the parameters that match a glob frozen; as it was before afterwards.

    Raises ModelError for a glob that matches nothing.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for glob in globs:
        if not any(fnmatch(name, glob) for name in parameters):
            raise ModelError(f'`model.freeze` has "{glob}", which matches no parameter')
    chosen = [
        p
        for name, p in parameters.items()
        if p.requires_grad and any(fnmatch(name, g) for g in globs)
    ]
    for parameter in chosen:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in chosen:
            parameter.requires_grad_(True)
