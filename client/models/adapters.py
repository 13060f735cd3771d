"""Adapters of peft (`model.lora`, or a factory that made some): small trained matrices beside the
frozen layers of a model.

peft puts a layer `q_proj` into a wrapper and calls what was there `q_proj.base_layer`. In a graph,
and so in weights files, snapshots and exports, it keeps the name that it has without the adapter:
one file of the base model serves every run over it, adapters or not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "AdapterError",
    "adapted",
    "is_adapted",
    "made_of_base",
    "plain_name",
    "save_config",
    "trained_only",
]

CONFIG = "adapter_config.json"
_NAME = "default"
"""peft's own name of the one adapter of a model."""
_PREFIX = "base_model.model."


class AdapterError(ValueError):
    """Settings that peft does not take, or an adapter that cannot be trained or exported so."""


def adapted(module: nn.Module, settings: Mapping[str, Any], base: str) -> nn.Module:
    """The module with LoRA matrices in float32 beside the layers that `settings` (the arguments of
    peft's LoraConfig) choose; they alone are trained. `base`: where the model is from, for whoever
    loads the adapter. Changes the module. Raises AdapterError."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise AdapterError('`model.lora` needs peft: pip install "shoal[hf]"') from None
    given: dict[str, Any] = {"base_model_name_or_path": base, **settings}
    if hasattr(module, "generate"):
        given.setdefault("task_type", "CAUSAL_LM")
    try:
        made = inject_adapter_in_model(LoraConfig(**given), module)
    except Exception as error:  # peft raises what it likes for settings that do not fit
        raise AdapterError(f"`model.lora`: {type(error).__name__}: {error}") from error
    assert isinstance(made, nn.Module), f"peft gave a {type(made).__name__}"
    for parameter in made.parameters():
        if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()
    return made


def is_adapted(module: nn.Module) -> bool:
    """Whether it has adapters of peft; does not import peft."""
    layer = _peft("peft.tuners.tuners_utils", "BaseTunerLayer")
    return layer is not None and any(isinstance(part, layer) for part in module.modules())


def plain_name(module: nn.Module) -> Callable[[str], str]:
    """From the names of its parameters and buffers to those that they have without adapters; the
    adapter's own keep theirs, apart from the prefix of peft's wrapper around a whole model."""
    layer = _peft("peft.tuners.tuners_utils", "BaseTunerLayer")
    if layer is None:
        return str
    beside = _peft("peft.utils.other", "AuxiliaryTrainingWrapper")
    whole = _peft("peft", "PeftModel")
    prefix = _PREFIX if whole is not None and isinstance(module, whole) else ""
    wrapped = {name for name, part in module.named_modules() if isinstance(part, (layer, beside))}

    def plain(name: str) -> str:
        for inner in (".token_adapter.base_layer.", ".base_layer.", ".original_module."):
            owner, base, rest = name.rpartition(inner)
            if base and owner in wrapped:
                name = f"{owner}.{rest}"
        return name.removeprefix(prefix)

    return plain


def made_of_base(module: nn.Module) -> str:
    """The setting of an adapter whose values are made of those of the base; empty: there is
    none."""
    for config in _configs(module).values():
        initial = getattr(config, "init_lora_weights", True)
        if getattr(config, "use_dora", False):
            return "use_dora"
        if isinstance(initial, str) and initial not in ("gaussian", "eva", "orthogonal"):
            return f'init_lora_weights = "{initial}"'
    return ""


def _configs(module: nn.Module) -> Mapping[str, Any]:
    """peft's own, by the name of an adapter; empty for a module without adapters."""
    if not is_adapted(module):
        return {}
    found = (getattr(part, "peft_config", None) for part in module.modules())
    return next((c for c in found if c), {})


def save_config(module: nn.Module, folder: Path) -> Path | None:
    """Writes what `PeftModel.from_pretrained` reads beside the adapter's weights; None for a module
    without adapters. Raises AdapterError for several of them, and where more is trained than
    they."""
    if not is_adapted(module):
        return None
    configs = _configs(module)
    if [*configs] != [_NAME]:
        names = ", ".join(configs) or "(none that peft names)"
        raise AdapterError(f'the model has the adapters {names}: expected one, called "{_NAME}"')
    marks = tuple(f".{kind}" for kind in ("lora_", "modules_to_save."))
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and not any(mark in name for mark in marks):
            raise AdapterError(
                f'"{name}" is trained and belongs to no adapter: freeze it (model.freeze), or '
                'export with format = "safetensors"'
            )
    config = configs[_NAME]
    before = config.inference_mode
    config.inference_mode = True  # as peft's own save does
    config.save_pretrained(folder)
    config.inference_mode = before
    return folder / CONFIG


def trained_only(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The adapter's tensors of an export, under peft's names."""
    return {_file_name(n): t for n, t in weights.items() if ".lora_" in n or "modules_to_save" in n}


def _file_name(name: str) -> str:
    """The name of an adapter's tensor in a file that peft reads."""
    inner = f".{name}.".replace(".modules_to_save.", ".").replace(f".{_NAME}.", ".")
    return _PREFIX + inner.strip(".")


def _peft(module: str, name: str) -> Any:
    return getattr(sys.modules.get(module), name, None)
