"""A few words of a language model, to hear what was learned: by the newest weights of a run that
are on this machine, or of a folder of Hugging Face. transformers' own `generate` finds them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ...job import LIVE, Job
from ..chat.naming import tokenizer_of
from ..chat.samples import template_of
from ..chat.templates import loaded_tokenizer
from ..chat.texts import has_tokenizer
from ..errors import RecordError, RunFailed
from ..files import weight_files
from ..files.records import own_job, read_run
from ..models import models
from ..models.adapters import NAMES, plain_name
from ..models.state_dicts import load_named
from ..models.tasks import task_of, task_of_module
from . import checkpoints
from .broker_calls import ENDED
from .run import Run

__all__ = ["SampleError", "Speaker", "speaker", "speaker_before"]


class SampleError(ValueError):
    """A model that gives no text here; says why."""


class Words(Protocol):
    """What makes ids of text, and text of ids."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str: ...


class Bytes:
    """The ids of text that goes as bytes."""

    eos_token_id = None

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")


@dataclass(frozen=True)
class Speaker:
    """A causal language model of transformers with its words. weights: where its own came from.
    chat: whether a prompt is what a user says to it, by its tokenizer's template."""

    model: nn.Module
    words: Words
    weights: str
    chat: bool

    def says(self, prompt: str, tokens: int, system: str = "") -> str:
        """Return what follows a prompt, the likeliest token each time, `tokens` of them at most.
        system: a message before the prompt, of chats. Raises SampleError."""
        model: Any = self.model
        ids = self._ids(prompt, system)
        most = getattr(model.config, "max_position_embeddings", None)
        if most is not None and len(ids) >= most:
            raise SampleError(f"the prompt has {len(ids)} tokens, and the model takes {most}")
        count = tokens if most is None else min(tokens, most - len(ids))
        given = torch.tensor([ids])
        model.eval()
        with torch.no_grad():
            found = model.generate(
                input_ids=given,
                attention_mask=torch.ones_like(given),
                max_new_tokens=count,
                do_sample=False,
                eos_token_id=getattr(self.words, "eos_token_id", None),
                pad_token_id=getattr(self.words, "pad_token_id", None) or 0,
            )
        return self.words.decode(found[0, len(ids) :].tolist(), skip_special_tokens=True)

    def _ids(self, prompt: str, system: str) -> list[int]:
        if not self.chat:
            if system:
                raise SampleError("--system is for chats, and this model was made for plain text")
            if not (ids := self.words.encode(prompt)):
                raise SampleError("the prompt is empty: expected some text to begin with")
            return ids
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": prompt})
        words: Any = self.words
        try:
            found = words.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=True
            )
        except Exception as error:  # a template raises what it wants
            raise SampleError(f"the chat template fails: {error}") from error
        return list(found["input_ids"])


def speaker(where: str, run: Callable[[str], Run]) -> Speaker:
    """Return what speaks with the newest weights of a folder of Hugging Face, of a run's folder, of
    the newest run in a folder of runs, or of a run by its id (`run`). Raises SampleError,
    RecordError, RunFailed, ValueError for a job that cannot be built."""
    folder = Path(where)
    if not folder.is_dir():
        if checkpoints.is_folder(where):
            raise SampleError(f"there is no folder {where}")
        return _of_run(run(where))
    if (folder / "config.json").is_file():
        return _of_hugging_face(folder)
    home = _run_folder(folder)
    return _of_record(home, read_run(home), folder)


def speaker_before(where: str, run: Callable[[str], Run]) -> Speaker:
    """Return what speaks with the weights that a run began with. Raises as `speaker`."""
    folder = Path(where)
    home = _run_folder(folder) if folder.is_dir() else run(where).folder
    job = _job_of(home)
    return _built(job, lambda module: None, "the weights that it began with")


def _run_folder(folder: Path) -> Path:
    """The folder of the run that is meant: this one, the one around it (an adapter's, a
    checkpoint's), or the newest in it."""
    for home in (folder, folder.resolve().parent):
        if (home / "run.json").is_file():
            return home
    runs = sorted(folder.glob("*/run.json"), key=lambda p: p.stat().st_mtime)
    if not runs:
        raise SampleError(
            f"{folder} has neither a config.json nor a run.json: expected a folder of Hugging "
            "Face, the folder of a run, or one with runs in it"
        )
    return runs[-1].parent


def _of_hugging_face(folder: Path) -> Speaker:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    bars: Any = logging  # without annotations
    bars.disable_progress_bar()
    try:
        task = task_of(AutoConfig.from_pretrained(folder, local_files_only=True))
        if task.name != "causal-lm":
            raise ValueError(f"its config is of a model for {task.name}")
        words: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, dtype=torch.float32
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SampleError(
            f"{folder} is no causal language model with a tokenizer: {error}"
        ) from error
    return Speaker(model, words, str(folder), isinstance(words.chat_template, str))


def _of_run(run: Run) -> Speaker:
    """The weights at its end, or of its newest checkpoint, from the broker."""
    job = _job_of(run.folder)
    if run.state().phase in ENDED:
        return _built(job, run.load_into, f"run {run.id}, at its end")
    try:
        kept = run.keep_checkpoint()
    except RunFailed as error:
        raise RunFailed(
            f"{error} yet, and goes on: its job makes them with output.every, else its first "
            "weights are those at its end"
        ) from None
    if "://" in kept:
        raise SampleError(f"the checkpoint is at {kept}: expected one on this machine")
    return _of_record(run.folder, read_run(run.folder), Path(kept))


def _of_record(home: Path, record: Mapping[str, Any], asked: Path) -> Speaker:
    """The newest weights in a run's folder; those in `asked`, where that is one of its folders."""
    if asked.resolve() != home.resolve() and asked.resolve().parent == home.resolve():
        there = [asked]
    else:
        files = (home / "model.safetensors", home / "model.safetensors.index.json")
        folders = (home / "model", home / "adapter", *home.glob("checkpoint-*/checkpoint.json"))
        there = [p.parent if p.name == "checkpoint.json" else p for p in (*files, *folders)]
        there = [p for p in there if p.exists()]
    if not there:
        run = record.get("run", home.name)
        raise RecordError(
            f"{home} has no weights and no checkpoint: `shoal export {run} --to {home.parent}` "
            f"brings them, or name the run, `shoal sample {run}`"
        )
    newest = max(there, key=lambda p: p.stat().st_mtime)
    if (newest / "config.json").is_file():
        said = record.get("job", {}).get("data", {}).get("kind")
        found = _of_hugging_face(newest)  # of plain text, whatever template its tokenizer has
        return replace(found, chat=False) if said in ("text", "tokens") else found
    if (newest / "adapter_config.json").is_file():
        names = json.loads((home / "sidecars" / NAMES).read_text(encoding="utf-8"))
        return _built(_job_of(home), lambda module: _load_adapter(module, newest, names), newest)
    if newest.is_dir():
        newest = Path(checkpoints.find(str(newest)).removeprefix("file://"))
    return _built(_job_of(home), lambda module: load_named(module, _tensors(newest)), newest)


def _job_of(home: Path) -> Job:
    """The job of a run that was submitted here, of a model that can be made again."""
    job = own_job(read_run(home))
    if job is None:
        raise RecordError(
            f"there is no job of this machine in {home / 'run.json'}: sample where the run was "
            "submitted from, with --to for the folder that holds the runs' folders"
        )
    if job.model.factory.startswith(LIVE):
        raise SampleError(
            "the job's model is a live module: load the weights into it (run.load_into(module)), "
            "and call its generate"
        )
    return job


def _built(job: Job, load: Callable[[nn.Module], None], weights: object) -> Speaker:
    words, chat = _words_of(job)
    module = models.build(job)
    task = task_of_module(module)
    if not hasattr(module, "generate") or (task and task.name != "causal-lm"):
        why = f"is for {task.name}" if task else "has no generate"
        raise SampleError(
            f"the model of {job.model.factory} {why}: expected a causal language model of "
            "transformers"
        )
    load(module)
    return Speaker(module, words, str(weights), chat)


def _words_of(job: Job) -> tuple[Words, bool]:
    """What made the job's ids of text, and whether its records are chats."""
    if job.data.is_records:
        return template_of(job).tokenizer, True
    folder = job.folder / job.model.factory.removeprefix("hf:")
    if job.data.kind == "text" and not job.data.targets:
        raise SampleError("the job learns no next tokens (data.targets is empty)")
    if has_tokenizer(job):
        return loaded_tokenizer(tokenizer_of(job)), False
    if job.data.kind == "text":
        return Bytes(), False
    if job.data.kind == "tokens" and (folder / "tokenizer_config.json").is_file():
        from transformers import AutoTokenizer

        words: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        return words, False
    raise SampleError(
        f'nothing here says which text the ids of data.kind = "{job.data.kind}" are: expected '
        "chats, instructions, text, or tokens of a model whose folder has a tokenizer"
    )


def _tensors(path: Path) -> dict[str, Tensor]:
    """The state that a file, an index, or a checkpoint has of a module."""
    where = weight_files.pretrained_file(path) if path.is_dir() else path
    if where is None:
        raise RecordError(f"{path} has no weights: expected model.safetensors in it")
    stored = weight_files.find([str(where)])
    return {name: stored.weights.read(entry) for name, entry in stored.entries.items()}


def _load_adapter(module: nn.Module, folder: Path, names: Mapping[str, str]) -> None:
    """Copy an exported adapter into the module that was trained. names: those of the graph, by
    those in peft's file."""
    found = _tensors(folder / "adapter_model.safetensors")
    plain = plain_name(module)
    own = {plain(name): parameter for name, parameter in module.named_parameters()}
    with torch.no_grad():
        for name, tensor in found.items():
            own[names[name]].copy_(tensor)
