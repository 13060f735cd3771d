"""Adapters of peft (`model.lora`, or a factory that made some): small trained matrices beside the
frozen layers of a model.

peft puts a layer `q_proj` into a wrapper and calls what was there `q_proj.base_layer`. In a graph,
and so in weights files, snapshots and exports, it keeps the name that it has without the adapter:
one file of the base model serves every run over it, adapters or not.
"""

from __future__ import annotations

import json
import re
import sys
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...job.settings import meant
from ...job.words import some_of
from .tasks import task_of_module

__all__ = [
    "AdapterError",
    "adapted",
    "check_kind",
    "is_adapted",
    "made_of_base",
    "merged",
    "of_adapter",
    "plain_name",
    "save_config",
]

CONFIG = "adapter_config.json"
NAMES = "adapter_names.json"
"""Which tensors of a run are the adapter's, kept at submission: by the names in its file."""
_NAME = "default"
"""peft's own name of the one adapter of a model."""
_PREFIX = "base_model.model."


class AdapterError(ValueError):
    """Settings that peft does not take, or an adapter that cannot be trained or exported so."""


def adapted(
    module: nn.Module,
    settings: Mapping[str, Any],
    base: str,
    say: Callable[[str], None] = lambda line: None,
) -> nn.Module:
    """The module with LoRA matrices in float32 beside the layers that `settings` (the arguments of
    peft's LoraConfig) choose; they alone are trained. `base`: where the model is from, for whoever
    loads the adapter. `say`: gets the layers that "auto" chooses. Changes the module. Raises
    AdapterError."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise AdapterError('`model.lora` needs peft: pip install "shoal[hf]"') from None
    given: dict[str, Any] = {"base_model_name_or_path": base, **settings}
    given |= _of_task(module, given)
    if given.get("target_modules") == "auto":
        given["target_modules"], why = _chosen(module)
        if _of_transposed(module, given["target_modules"]):
            given.setdefault("fan_in_fan_out", True)  # else peft does so, with a warning
        say(f"model.lora: beside {some_of(given['target_modules'], 12)} ({why})")
    try:
        made = inject_adapter_in_model(LoraConfig(**given), module)
    except Exception as error:  # peft raises what it likes for settings that do not fit
        raise AdapterError(f"`model.lora`: {_why(error, given, module)}") from error
    assert isinstance(made, nn.Module), f"peft gave a {type(made).__name__}"
    for parameter in made.parameters():
        if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()
    return made


_HEADS: Mapping[str | None, tuple[str, ...]] = {
    **dict.fromkeys(("SEQ_CLS", "TOKEN_CLS"), ("classifier", "score")),
    "QUESTION_ANS": ("qa_outputs",),
}
"""By task of peft, the modules that it trains whole beside an adapter."""


def _of_task(module: nn.Module, given: Mapping[str, Any]) -> dict[str, Any]:
    """What peft takes for a model by its task: its name, and the head, which is trained whole."""
    task = task_of_module(module)
    kind = task.peft if task else "CAUSAL_LM" if hasattr(module, "generate") else None
    kind = given.get("task_type", kind)
    heads = [name for name in _HEADS.get(kind, ()) if hasattr(module, name)]
    saved = [*(given.get("modules_to_save") or ()), *heads]
    of_heads = {"modules_to_save": list(dict.fromkeys(saved))} if heads else {}
    return {"task_type": kind} | of_heads if kind else {}


def _chosen(module: nn.Module) -> tuple[list[str], str]:
    """Return the layers that target_modules = "auto" means, by their own names or in full, and
    why: those that peft takes for the architecture, else every linear layer of the blocks."""
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as PEFTS

    linear = {n for n, part in module.named_modules() if _is_linear(part)}
    kind = getattr(getattr(module, "config", None), "model_type", "")
    named = PEFTS.get(kind, ())
    known = [] if isinstance(named, str) else [*named]
    if any(n.rpartition(".")[2] in known for n in linear):
        return known, f"what peft takes for {kind}"
    inner = sorted(n for n in linear if re.search(r"(^|\.)\d+\.", n))
    if not inner:
        raise AdapterError(
            '`model.lora`: target_modules is "auto", and the model has no blocks with linear '
            "layers: expected a list of names of modules"
        )
    return inner, f"{len(inner)} linear layers of its blocks, as peft has no choice of its own"


def _is_linear(part: nn.Module) -> bool:
    return isinstance(part, nn.Linear) or _is_transposed(part)


def _is_transposed(part: nn.Module) -> bool:
    """Whether a linear layer keeps its weight (in, out), as those of GPT-2 do."""
    own = _peft("transformers.pytorch_utils", "Conv1D")
    return own is not None and isinstance(part, own)


def _of_transposed(module: nn.Module, names: Collection[str]) -> bool:
    parts = [(n, p) for n, p in module.named_modules() if _is_transposed(p)]
    return any(n in names or n.rpartition(".")[2] in names for n, _ in parts)


def _why(error: Exception, given: Mapping[str, Any], module: nn.Module) -> str:
    """Say what is wrong with the settings of an adapter: which key peft does not know, or that no
    module has the name of a target, and which there are."""
    from peft import LoraConfig

    known = [f.name for f in fields(LoraConfig)]
    for key in given:
        if key not in known:
            return f"{key} is none of LoraConfig's arguments{meant(key, known)}"
    said = given.get("target_modules")
    wanted = [said] if isinstance(said, str) else list(said or ())
    layers = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d)
    parts = module.named_modules()
    there = [name for name, part in parts if isinstance(part, layers) or _is_transposed(part)]
    kinds = list(dict.fromkeys(name.rpartition(".")[2] for name in there))
    if said != "all-linear" and not any(
        n == w or n.endswith(f".{w}") for w in wanted for n in there
    ):
        near = next(filter(None, (meant(w, kinds) for w in wanted)), "")
        have = f"modules that take one: {some_of(kinds, 24)}" if kinds else "none can take one"
        which = ", ".join(map(repr, wanted)) or "nothing"
        return f"target_modules has {which}, and no module is called so{near} ({have})"
    return f"{type(error).__name__}: {error}"


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


_BY_DRAWS = "decides by a draw in its forward whether it takes part, which no graph holds"
_REFUSED = {
    "ADALORA": "takes ranks away between steps (update_and_allocate), which no run does",
    **dict.fromkeys(("LOHA", "LOKR"), _BY_DRAWS),
}
"""By peft's name, what cannot be trained as peft trains it."""


def check_kind(module: nn.Module) -> None:
    """Raise AdapterError for an adapter that would not be what peft makes of it."""
    for config in _configs(module).values():
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        if kind in _REFUSED:
            raise AdapterError(
                f"the adapter of the model is peft's {kind}, which {_REFUSED[kind]}: expected "
                "LoRA (`model.lora`), IA3 or OFT"
            )


def save_config(module: nn.Module, folder: Path) -> tuple[Path, ...]:
    """Writes what `PeftModel.from_pretrained` reads beside the adapter's weights, and which tensors
    these are; nothing for a module without adapters. Raises AdapterError for several of them, and
    where more is trained than they."""
    if not is_adapted(module):
        return ()
    configs = _configs(module)
    if [*configs] != [_NAME]:
        names = ", ".join(configs) or "(none that peft names)"
        raise AdapterError(f'the model has the adapters {names}: expected one, called "{_NAME}"')
    initial = getattr(configs[_NAME], "init_lora_weights", True)
    if isinstance(initial, str) and "_niter_" in initial:
        raise AdapterError(
            f'an adapter that begins with init_lora_weights = "{initial}" changes its base by '
            'random numbers, so that it fits no other: expected "pissa", or another output.format'
        )
    files, plain = _file_names(module), plain_name(module)
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and plain(name) not in files.values():
            raise AdapterError(
                f'"{name}" is trained and belongs to no adapter: freeze it (model.freeze), or '
                'export with format = "safetensors"'
            )
    config = configs[_NAME]
    before = config.inference_mode
    config.inference_mode = True  # as peft's own save does
    config.save_pretrained(folder)
    config.inference_mode = before
    (folder / NAMES).write_text(json.dumps(files, indent=1) + "\n", encoding="utf-8")
    return folder / CONFIG, folder / NAMES


def _file_names(module: nn.Module) -> dict[str, str]:
    """The tensors that peft saves of the one adapter of a module: the name in its file, and that of
    the graph."""
    from peft import PeftModel, get_peft_model_state_dict

    path, part = next((n, p) for n, p in module.named_modules() if getattr(p, "peft_config", None))
    state = part.state_dict(keep_vars=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of embeddings, which stay as they are
        saved = get_peft_model_state_dict(
            part, state_dict=dict(state), adapter_name=_NAME, save_embedding_layers=False
        )
    first = reversed(state.items())  # what is tied has its first name in the graph
    names = {id(tensor): f"{path}.{name}".strip(".") for name, tensor in first}
    plain, prefix = plain_name(module), "" if isinstance(part, PeftModel) else _PREFIX
    return {f"{prefix}{name}": plain(names[id(tensor)]) for name, tensor in saved.items()}


def of_adapter(weights: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    """The adapter's tensors of an export by the graph's names, under those of peft's file
    (`NAMES`); what was not trained is as it was, and is left out."""
    return {file: weights[name] for file, name in names.items() if name in weights}


def merged(module: nn.Module) -> nn.Module:
    """The model without adapters, what they do being part of its own weights; changes the module.
    Weights that were tied and differ now are apart, as the model's config then says."""
    if (whole := _peft("peft", "PeftModel")) is not None and isinstance(module, whole):
        wrapper: Any = module
        module = wrapper.get_base_model()
    layer = _peft("peft.tuners.tuners_utils", "BaseTunerLayer")
    beside = _peft("peft.utils.other", "AuxiliaryTrainingWrapper")
    parts = [(n, p) for n, p in module.named_modules() if isinstance(p, (layer, beside))]
    done: list[str] = []
    for name, part in parts:
        if any(name.startswith(f"{outer}.") for outer in done):
            continue
        done.append(name)
        for inner in part.modules():  # what is merged here must not change elsewhere
            for key, parameter in inner._parameters.items():
                if parameter is not None and not isinstance(inner, (layer, beside)):
                    inner._parameters[key] = nn.Parameter(parameter.detach().clone(), False)
        if isinstance(part, beside):
            new = part.unload_and_optionally_merge_module(
                merge=True, safe_merge=True, adapter_names=None
            )
        else:
            part.merge(safe_merge=True)
            new = part.get_base_layer()
        owner, _, own = name.rpartition(".")
        setattr(module.get_submodule(owner), own, new)
    config: Any = getattr(module, "config", None)
    if getattr(config, "tie_word_embeddings", False):
        model: Any = module
        config.tie_word_embeddings = torch.equal(
            model.get_input_embeddings().weight, model.get_output_embeddings().weight
        )
    return module


def _peft(module: str, name: str) -> Any:
    return getattr(sys.modules.get(module), name, None)
