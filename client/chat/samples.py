"""The samples of a job's chats or instructions, as a manifest of arrays and its shards.

Records are read twice: once to know how many can be used, of which the last are held out, and once
to be laid into samples; no more of them is in memory than are packed at once, and one shard of each
column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ...job import Job, SettingsError
from ...job.tables import OF_PACKING
from ...peer.data.manifest import Column, DataError, Manifest
from ...peer.data.shard_writer import ARRAY_SHARD_BYTES, ShardWriter
from ...peer.data.sources import check_apart
from .naming import config_of, path_of, tokenizer_of
from .packing import Document, Sample, samples
from .record_files import ChatRecords, LiveRecords, RecordFiles
from .templates import IGNORED, Template, TemplateError

__all__ = ["PACKS", "read_records", "template_of"]

PACKS = frozenset({"gpt2", "llama", "qwen2", "qwen3"})
"""Model types of transformers that are known to take positions and a mask of documents, by tests.
Others may have layers that neither reaches (a state, a window)."""


def read_records(job: Job, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Return `manifest` and `shards` (path by hash), written into `folder`. Raises SettingsError,
    DataError."""
    data, config = job.data, config_of(job)
    template = template_of(job)
    apart = config.get("model_type") in PACKS and not config.get("use_sliding_window")
    pack = data.pack and apart
    if data.pack and not pack:
        kind = config.get("model_type", "of this factory")
        say(f"the model {kind} is not known to keep packed records apart: each is a sample, padded")
    reading = _Reading(template, data.length, config.get("vocab_size"))
    left_out: list[str] = []
    bad = left_out.append if data.bad_records == "skip" else None
    files: ChatRecords = (
        RecordFiles(path_of(job, data.source), data.kind, bad)
        if job.dataset is None
        else LiveRecords(job.dataset, data.kind, bad)
    )
    bad_held = list[str]()
    held = None
    if data.validation:
        bad = bad_held.append if data.bad_records == "skip" else None
        held = RecordFiles(path_of(job, data.validation), data.kind, bad)
        if job.dataset is None:
            check_apart(path_of(job, data.source), path_of(job, data.validation))
    count = sum(1 for _ in reading.documents(files))
    if left_out:
        say(f"records left out: {len(left_out)}; the first is {left_out[0]}")
    if reading.cut:
        say(f"records longer than data.length = {data.length}, cut off there: {reading.cut}")
    held_out = 0 if held or not data.holdout else max(1, int(count * data.holdout))
    if count <= held_out:
        raise DataError(f"{data.source} has {count} records to use, {held_out} of them held out")
    writer = _Columns(folder, data.inputs, data.targets, data.length, pack)
    documents = reading.documents(files)
    train = writer.add(samples(islice(documents, count - held_out), data.length, reading.pad, pack))
    kept = 0 if held else writer.add(samples(documents, data.length, reading.pad, pack))
    if (now := reading.count + sum(1 for _ in documents)) != count:
        raise DataError(
            f"{data.source or 'the dataset'} changed while it was read: {count} records at first, "
            f"{now} then; submit again when nobody writes to it"
        )
    if held:
        kept = writer.add(samples(reading.documents(held), data.length, reading.pad, pack))
    if held and not kept:
        raise DataError(f"{data.validation} has no record to use")
    share = writer.padding / ((train + kept) * data.length)
    say(f"samples of {data.length} positions: {train + kept}, {share:.1%} of it padding")
    if bad_held:
        say(f"records of validation left out: {len(bad_held)}; the first is {bad_held[0]}")
    return {"manifest": writer.manifest(train + kept, kept), "shards": writer.shards.paths}


def template_of(job: Job) -> Template:
    """Return the template, with its tokenizer, of a job's chats or instructions. Raises
    SettingsError, DataError."""
    return Template(tokenizer_of(job), _template(job), job.data.loss_on)


@dataclass
class _Reading:
    """Documents of records. vocabulary: ids that the model knows; None: not known here."""

    template: Template
    length: int
    vocabulary: int | None
    cut: int = 0
    count: int = 0

    @property
    def pad(self) -> int:
        """Id of padding, from which nothing is learned: any that the model knows."""
        own = self.template.tokenizer.pad_token_id
        return own if own is not None and own < (self.vocabulary or own + 1) else 0

    def documents(self, files: ChatRecords) -> Iterator[Document]:
        """Records that something is learned from. Raises DataError."""
        self.cut = self.count = 0
        for place, messages in files:
            try:
                ids, labels = self.template.ids(messages)
            except TemplateError as error:
                files.refuse(place, str(error))
                continue
            if self.vocabulary is not None and max(ids, default=0) >= self.vocabulary:
                raise DataError(
                    f"{place}: the tokenizer of {self.template.folder} makes the id {max(ids)}, "
                    f"and the model knows {self.vocabulary}: expected the tokenizer of the model"
                )
            if all(label == IGNORED for label in labels[1 : self.length + 1]):
                files.refuse(
                    place, f"no token is learned in the first {self.length} (data.length, loss_on)"
                )
                continue
            self.count += 1
            self.cut += len(ids) > self.length + 1
            yield ids, labels


class _Columns:
    """Writes samples into the columns of a manifest."""

    def __init__(self, folder: Path, inputs: str, targets: str, length: int, pack: bool) -> None:
        self.inputs, self.targets = inputs, targets
        names = (inputs, targets, *(OF_PACKING if pack else ()))
        self.columns = tuple(
            Column(name, "int64" if name == targets else "int32", (length,)) for name in names
        )
        self.shards = ShardWriter(folder)
        self.padding = 0

    def add(self, found: Iterable[Sample]) -> int:
        """Write samples; return how many."""
        per_shard, count = max(1, ARRAY_SHARD_BYTES // self.columns[0].item_bytes), 0
        found = iter(found)
        while part := list(islice(found, per_shard)):
            fields = ("inputs", "targets", "positions", "documents")
            for column, field in zip(self.columns, fields, strict=False):
                rows = np.array([getattr(s, field) for s in part], column.dtype)
                self.shards.add(column, rows, ARRAY_SHARD_BYTES)
            count += len(part)
            self.padding += sum(s.padding for s in part)
        return count

    def manifest(self, total: int, held_out: int) -> Manifest:
        shards = tuple(self.shards.shards)
        inputs, targets = self.inputs, self.targets
        return Manifest(
            "arrays", self.columns, shards, total, held_out, 0, inputs, targets
        ).validate()


def _template(job: Job) -> str | None:
    """The text of the job's own template; None: the tokenizer's."""
    if job.data.template == "auto":
        return None
    path = Path(path_of(job, job.data.template))
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError("data.template", f'is "{path}", and cannot be read: {error}') from None
