"""Files of a hub or a bucket, fetched to this machine by the libraries for them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ...peer.data.manifest import DataError

__all__ = ["FETCHED", "fetched"]

FETCHED = ("hf://", "s3://")
_LIBRARY = {"hf": "huggingface_hub", "s3": "s3fs"}
_HELP = {
    "hf": "HF_ENDPOINT and, for what is private, HF_TOKEN",
    "s3": "AWS_ENDPOINT_URL and the credentials of AWS",
}


def fetched(source: str, folder: Path) -> str:
    """Fetch a file, or those that a glob names, such as "hf://datasets/org/name/*.jsonl", into a
    folder; return the path or glob of them there, in the order of their names. Raises DataError:
    what was tried, and what to do."""
    scheme = source.partition("://")[0]
    try:
        import fsspec

        files, path = fsspec.core.url_to_fs(source, **_options(scheme))
        is_glob = bool(set("*?[") & set(path)) and not files.exists(path)
        found = sorted(files.glob(path)) if is_glob else [path]
        if not found:
            raise DataError(f"no file matches {source}")
        folder.mkdir(parents=True, exist_ok=True)
        names = [f"{n:06d}-{one.rpartition('/')[2]}" for n, one in enumerate(found)]
        for one, name in zip(found, names, strict=True):
            files.get_file(one, str(folder / name))
    except DataError:
        raise
    except ImportError:
        raise DataError(
            f"{source} is read by the library {_LIBRARY[scheme]}, which is not installed: pip "
            "install 'shoal[data]', or give files of this machine"
        ) from None
    except Exception as error:  # each library has errors of its own
        why = (str(error) or type(error).__name__).strip().splitlines()[0]
        at = _options(scheme).get("endpoint")
        raise DataError(
            f"{source} cannot be fetched{f' from {at}' if at else ''}: {why}; is there a network? "
            f"Look at {_HELP[scheme]}, or give files of this machine"
        ) from error
    if not is_glob:
        return str(folder / names[0])
    endings = {Path(name).suffix for name in names}
    return str(folder / (f"*{endings.pop()}" if len(endings) == 1 else "*"))


def _options(scheme: str) -> dict[str, Any]:
    if scheme == "hf":
        return {"endpoint": os.environ.get("HF_ENDPOINT") or None, "skip_instance_cache": True}
    return {"skip_instance_cache": True}
