"""What the files that a job names have in them, as a mark: another one where that has changed, so
that nobody takes what an older model or older data came to for a result of today's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

from ..job import Job
from ..net.surroundings import user_path
from ..peer.data.array_files import matching

__all__ = ["mark_of"]


def mark_of(job: Job) -> str:
    """Return the SHA-256 of names, sizes and times of the files of a job, and of the text of its
    Python: of factory, loss and rule, and of what lies beside them, which they may import."""
    seen = sha256()
    for path in sorted(set(_code(job))):
        with suppress(OSError):  # one beside them that this user may not read
            seen.update(f"{path}\n{sha256(path.read_bytes()).hexdigest()}\n".encode())
    for path in sorted(set(_files(job))):
        with suppress(OSError):  # that is gone since
            stat = path.stat()
            seen.update(f"{path}\n{stat.st_size} {stat.st_mtime_ns}\n".encode())
    return seen.hexdigest()


def _code(job: Job) -> Iterator[Path]:
    for name in (job.model.factory, job.model.loss, job.sync.select):
        place = name.rpartition(":")[0]
        if not place or place == "hf":
            continue
        names = [place]
        if not place.endswith(".py"):
            names = [place.replace(".", "/") + end for end in (".py", "/__init__.py")]
        for path in [p for n in names for p in _there(job, n)] or _installed(place):
            yield from path.parent.glob("*.py")


def _installed(place: str) -> list[Path]:
    """The file of a module that Python finds by its name."""
    try:
        spec = find_spec(place)
    except (ImportError, ValueError):  # none is there, which whoever imports it says
        return []
    return [Path(spec.origin)] if spec is not None and spec.origin else []


def _files(job: Job) -> Iterator[Path]:
    data, named = job.data, [job.data.source, job.data.validation, *job.model.weight_names]
    named += [data.tokenizer, data.template, job.model.factory.removeprefix("hf:")]
    for name in named:
        for path in _there(job, name):
            yield from (p for p in path.glob("*") if p.is_file())
            if path.is_file():
                yield path


def _there(job: Job, name: str) -> list[Path]:
    """The files and folders that a path or glob names; none where it is none of this machine."""
    if not name or "://" in name:
        return []
    found = (
        matching(str(base / user_path(name))) for base in (job.folder.resolve(), Path().resolve())
    )
    return [path for paths in found for path in paths if path.exists()]
