"""The factory of a job's [model], as its user wrote it, or of a folder in Hugging Face's form; and
whatever goes wrong in that code, as a ModelError that says where."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...job import Job
from ...net.file_names import is_file_name
from ...net.surroundings import user_path
from ..files.weight_files import pretrained_file
from .tasks import Task, TaskError, task_of

__all__ = [
    "ModelError",
    "factory_of",
    "find",
    "function_of",
    "is_hugging_face",
    "pretrained_weights",
    "story",
    "unwrapped",
]

_TORCH = str(Path(torch.__file__).parent)


class ModelError(ValueError):
    """A factory, module or weights file that cannot be used; says where and what to do."""


def factory_of(job: Job) -> Callable[[], nn.Module]:
    """What makes the job's module, without the adapter of `model.lora`."""
    name = job.model.factory
    if name.startswith("hf:"):
        folder = find(name.removeprefix("hf:"), job.folder, "model.factory")
        return _hugging_face(folder, job)
    function = function_of(name, job.folder, "model.factory")

    def base() -> nn.Module:
        try:
            module = function(**job.model.args)
        except Exception as error:  # whatever the user's code raises is the user's to see
            raise ModelError(f'factory "{name}" raised {story(error)}') from error
        if not isinstance(module, nn.Module):
            raise ModelError(
                f'factory "{name}" returned {type(module).__name__}: expected a torch.nn.Module'
            )
        return module

    return base


def function_of(where: str, folder: Path, key: str) -> Callable[..., Any]:
    """That of "pkg.mod:name" or "file.py:name". `key`: where the job says so. Raises ModelError."""
    place, _, name = where.rpartition(":")
    function = getattr(_import(place, folder, key), name, None) if place else None
    if not callable(function):
        raise ModelError(f'`{key}` is "{where}": {place or "this"} has no function "{name}"')
    return function  # type: ignore[no-any-return]  # callable is all that is known


def story(error: BaseException) -> str:
    """The error and the line of the user's code that raised it."""
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first one is ours
    users = [f for f in frames if not f.filename.startswith("<frozen importlib")]
    users = [f for f in users if not f.filename.startswith(_TORCH)] or users
    where = f" ({users[-1].filename}, line {users[-1].lineno})" if users else ""
    if isinstance(error, SyntaxError):  # its text names the place
        where = ""
    return f"{type(error).__name__}: {error}{where}"


def _import(place: str, folder: Path, key: str) -> Any:
    """The module of "pkg.mod" or "file.py"; the job's folder comes first."""
    with _first_on_path(folder):
        try:
            if not place.endswith(".py"):
                return importlib.import_module(place)
            path = find(place, folder, key)
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
            raise ModelError(f'`{key}`: "{place}" cannot be imported: {story(error)}') from (error)


@contextmanager
def _first_on_path(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder.resolve()))
    try:
        yield
    finally:
        sys.path.remove(str(folder.resolve()))


def find(name: str, folder: Path, key: str) -> Path:
    """A path of the job, looked up in the job's folder, then in the current one."""
    for base in (folder, Path()):
        if (path := base / user_path(name)).exists():
            return path.resolve()
    raise ModelError(f'`{key}` names "{name}", which is neither in {folder.resolve()} nor here')


# ---------------------------------------------------------------- Hugging Face


def _hugging_face(folder: Path, job: Job) -> Callable[[], nn.Module]:
    """What makes the model of a folder with a config.json, for the task that `args.task` says;
    weights that lie beside it are `starting_files`."""
    try:
        import transformers
    except ImportError:
        raise ModelError(
            f'"{job.model.factory}" needs transformers: pip install "shoal[hf]"'
        ) from None
    if not (folder / job.model.args.get("subfolder", "") / "config.json").is_file():
        raise ModelError(f'"{job.model.factory}": there is no config.json in {folder}')
    args, dtype = _config_args(job)

    def make() -> nn.Module:
        with _told(job):
            config, unknown = transformers.AutoConfig.from_pretrained(
                folder, return_unused_kwargs=True, **args
            )
        if unknown:
            raise ModelError(
                f'"{job.model.factory}": `model.args` has {", ".join(sorted(unknown))}, which '
                "neither the config nor Shoal knows"
            )
        auto: Any = getattr(transformers, f"AutoModelFor{_task(config, job).kind}")
        with _told(job):
            model = auto.from_config(config, dtype=dtype or config.dtype or torch.float32)
        assert isinstance(model, nn.Module), f"transformers gave a {type(model).__name__}"
        return model

    return make


def _task(config: Any, job: Job) -> Task:
    """The task of a job's folder. Raises ModelError, for what another one would ignore, too."""
    args, name = job.model.args, job.model.factory
    try:
        task = task_of(config, args.get("task", "auto"))
    except TaskError as error:
        raise ModelError(f'"{name}": `model.args.task` {error}') from None
    kinds = task.classes(config.model_type)
    if len(kinds) > 1 and not config.architectures:
        raise ModelError(
            f'"{name}": config.json has no architectures, and of {task.name} transformers has '
            f"{', '.join(kinds)}: say which one it is, such as model.args = "
            f'{{ architectures = ["{kinds[0]}"] }}'
        )
    own = job.data.kind == "arrays" or job.model.loss != "forward"
    if "mlm_probability" in args and (task.name != "masked-lm" or own):
        raise ModelError(
            f'"{name}": `model.args.mlm_probability` changes nothing where the task is '
            f'{task.name}, data.kind "{job.data.kind}" and model.loss "{job.model.loss}": it is '
            'for masked-lm on text or tokens, and loss = "forward"'
        )
    return task


def _config_args(job: Job) -> tuple[dict[str, Any], torch.dtype | None]:
    """What `args` say to the config, and the dtype; None: that of the config. Raises ModelError."""
    name, args = job.model.factory, dict(job.model.args)
    if "dtype" in args and "torch_dtype" in args:
        raise ModelError(f'"{name}": `model.args` has dtype and torch_dtype: expected one of them')
    for key in ("gguf_file", "quantization_config", "load_in_8bit", "load_in_4bit"):
        if key in args:
            raise ModelError(
                f'"{name}": `model.args.{key}` is of quantised weights, which are not trained: '
                "expected files in float32, bfloat16 or float16; peers hold a frozen base so by "
                'model.frozen_dtype = "int8"'
            )
    dtype = args.pop("torch_dtype", args.pop("dtype", "float32"))
    args = {key: value for key, value in args.items() if key not in _OURS}
    return args, None if dtype == "auto" else _hugging_face_dtype(dtype, name)


_OURS = ("task", "mlm_probability", "variant", "use_safetensors")
"""Of `args`, those that are not the config's."""


def pretrained_weights(folder: Path, job: Job) -> Path | None:
    """The file or index of a folder of Hugging Face with the weights of its model, by the order of
    `from_pretrained`; None for a folder with no weights. Raises ModelError for one whose weights
    `from_pretrained` would not take so, or would change."""
    args = {"variant": "", "use_safetensors": None, "subfolder": ""} | dict(job.model.args)
    folder, name = folder / args["subfolder"], job.model.factory
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if (folder / "adapter_config.json").is_file():
        raise ModelError(
            f'"{name}": {folder} has an adapter_config.json beside the config: from_pretrained '
            "would put that adapter into the model. Merge it into the weights, or move it elsewhere"
        )
    explicit = config.get("transformers_weights")
    if isinstance(explicit, str) and is_file_name(explicit):
        found: Path | None = folder / explicit
    else:
        variant = args["variant"] or ""
        found = pretrained_file(folder, variant, safetensors=args["use_safetensors"])
    others = sorted(p.name for p in folder.iterdir() if p.suffix in _WEIGHTS)
    if found is None and others:
        listed = f"{', '.join(others[:3])}{', …' if len(others) > 3 else ''}"
        raise ModelError(
            f'"{name}": {folder} has {listed}, and none of the files that from_pretrained takes '
            "(model.safetensors, pytorch_model.bin, or the index of one of them): name the ones "
            "that are meant (model.weights)"
        )
    if found is not None and config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "quantised")
        raise ModelError(
            f'"{name}": the weights of {folder} are quantised ({method}, by quantization_config in '
            "its config.json), and such weights are not trained: expected a folder in float32, "
            "bfloat16 or float16"
        )
    return found


_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".ckpt")


@contextmanager
def _told(job: Job) -> Iterator[None]:
    """What transformers refuses, as a ModelError."""
    try:
        yield
    except (ValueError, OSError, TypeError, KeyError, MemoryError) as error:
        raise ModelError(f'"{job.model.factory}": {story(error)}') from error


def _hugging_face_dtype(name: Any, factory: str) -> torch.dtype:
    """What `args.dtype` says that weights and activations are in."""
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in known:
        raise ModelError(
            f'"{factory}": `model.args.dtype` is {name!r}: expected {", ".join(known)}, "auto"'
        )
    return known[name]


def is_hugging_face(module: nn.Module) -> bool:
    """Whether a model of transformers or of a subclass, or peft's wrapper around one; imports
    neither."""
    return any(c.__module__.startswith("transformers.") for c in type(unwrapped(module)).__mro__)


def unwrapped(module: nn.Module) -> Any:
    """The model that peft's wrapper has around it, or else the module itself."""
    inner: Any = module
    wrapped = type(module).__module__.startswith("peft.") and hasattr(inner, "get_base_model")
    return inner.get_base_model() if wrapped else inner
