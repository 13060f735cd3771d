"""Text as ids: by a tokenizer of transformers, or of a table, byte by byte."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...job import Job
from ...peer.data.array_files import matching
from ...peer.data.columns_of_files import parquet_rows
from ...peer.data.manifest import DataError
from ...peer.data.shard_writer import ShardWriter
from ...peer.data.sources import check_apart, text_of, windows_of
from .naming import config_of, path_of, tokenizer_of
from .templates import loaded_tokenizer

__all__ = ["OF_TOKENIZERS", "has_tokenizer", "read_text"]

OF_TOKENIZERS = (
    *("tokenizer.json", "tokenizer.model*", "tokenizer_config.json", "tekken.json", "*.tiktoken"),
    *("vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece*.model", "*.spm"),
)
"""Files beside the weights of a language model that say how text becomes its ids."""


def has_tokenizer(job: Job) -> bool:
    """Whether ids of the job's text are a tokenizer's, not bytes."""
    if job.data.kind != "text" or job.data.tokenizer == "bytes" or job.data.where == "peer":
        return False
    if job.data.tokenizer != "auto" or job.tokenizer is not None:
        return True
    if not job.model.factory.startswith("hf:") or "://" in job.model.factory:
        return False
    folder = Path(path_of(job, job.model.factory.removeprefix("hf:")))
    return any(next(folder.glob(p), None) is not None for p in OF_TOKENIZERS)


def read_text(job: Job, folder: Path, source: str, validation: str) -> dict[str, Any] | None:
    """Return `manifest` and `shards` (path by hash) of text in `source`, in one row, without the
    tokens that a tokenizer puts at the beginning or end; None where text goes as the bytes of
    files. validation: the source of text that is held out; empty: a share is. Raises SettingsError,
    DataError."""
    tokenized = has_tokenizer(job)
    of_files = not any(name.endswith(".parquet") for name in (source, validation))
    if job.dataset is None and of_files and not tokenized:
        return None
    check_apart(source, validation)
    live = _joined(_column(job)) if job.dataset is not None else None
    make = partial(_ids, job) if tokenized else _bytes
    ids = make(live if live is not None else _content(source), job.data.source)
    held = make(_content(validation), job.data.validation) if validation else None
    data = job.data
    manifest, shards = windows_of(
        ShardWriter(folder), ids, data.source, data.holdout, data.length, data.inputs,
        data.targets, "tokens" if tokenized else "text", held,
    )  # fmt: skip
    return {"manifest": manifest, "shards": shards}


def _content(source: str) -> bytes:
    return _joined(_of_tables(source)) if source.endswith(".parquet") else text_of(source)


def _joined(texts: Iterable[str]) -> bytes:
    return "\n".join(texts).encode()


def _bytes(content: bytes, source: str) -> npt.NDArray[Any]:
    return np.frombuffer(content, np.uint8)


def _ids(job: Job, content: bytes, source: str) -> npt.NDArray[Any]:
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{source or 'the standard library'} is no UTF-8 at byte {error.start}, and a "
            'tokenizer takes text: write it as UTF-8, or take tokenizer = "bytes"'
        ) from None
    tokenizer = loaded_tokenizer(tokenizer_of(job))
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    most, known = max(ids, default=0), config_of(job).get("vocab_size")
    if known is not None and most >= known:
        raise DataError(
            f"the tokenizer of {tokenizer.name_or_path or type(tokenizer).__name__} makes the id "
            f"{most}, and the model knows {known}: expected the tokenizer of the model"
        )
    return np.asarray(ids, np.uint16 if most < 2**16 else np.int32)


def _column(job: Job) -> Iterator[str]:
    for number in range(len(job.dataset)):
        yield _text(f"record {number}", job.dataset[number])


def _of_tables(source: str) -> Iterator[str]:
    paths = [path for path in matching(source) if path.is_file()]
    if not paths:
        raise DataError(f"no file matches {source}: expected a path or glob of .parquet")
    for path in paths:
        for number, row in enumerate(parquet_rows(path, ["text"]), 1):
            yield _text(f"{path}:{number}", row)


def _text(place: str, record: Any) -> str:
    text = record.get("text") if hasattr(record, "get") else None
    if not isinstance(text, str):
        raise DataError(f'{place} has no "text" that is text')
    try:
        text.encode()
    except UnicodeEncodeError:
        raise DataError(f"{place} has half of a character (a surrogate) in its text") from None
    return text
