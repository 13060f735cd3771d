"""Weights in shards: byte ranges of large files, each a blob of its own hash, and a manifest of
which tensor lies where.

    {"version": 1,
     "shards": [{"hash": "…", "size_bytes": 33554432, "url": 0, "at": 4096}, …],
     "tensors": {"NAME": ["BF16", [4096, 4096], [[7, 0, 33554432]]], …},
     "urls": ["https://…/model-00001-of-00030.safetensors"]}

A tensor is the bytes of its parts (shard, offset, length), one behind the other. A shard has its
hash because a peer reads some of them and never the whole; what has the same content is one blob,
whoever brings it, in whichever file. `url` and `at` say where the same bytes lie on the web, for
peers whose owners allow reading there. The manifest comes from the network: nothing in it is
believed unchecked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...net.web.places import origin_of

__all__ = [
    "MOST_SHARD_BYTES",
    "MOST_SIZES",
    "StoredTensor",
    "WeightError",
    "WeightManifest",
    "WeightShard",
]

MOST_SHARD_BYTES = 64 << 20
"""The most bytes of one shard: it is read into memory."""
MOST_SIZES = 64
"""Dimensions of a tensor; torch's own limit."""
MOST_URL = 2000
"""Characters of one."""
_HASH = re.compile(r"[0-9a-f]{64}")
_VERSION = 1


class WeightError(ValueError):
    """Weights that are damaged, or that lack a tensor; the message names both."""


@dataclass(frozen=True, slots=True)
class WeightShard:
    """A blob. url: where its bytes lie on the web, from byte `at` on; empty: nowhere."""

    hash: str
    size_bytes: int
    url: str = ""
    at: int = 0


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """dtype: as safetensors calls it; parts: (index of the shard, offset, length)."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class WeightManifest:
    """Which shards a run's weights are cut into, and which tensor lies where in them."""

    shards: tuple[WeightShard, ...]
    tensors: Mapping[str, StoredTensor]

    def to_json(self) -> str:
        urls = {url: i for i, url in enumerate(dict.fromkeys(s.url for s in self.shards if s.url))}
        shards = [
            {"hash": s.hash, "size_bytes": s.size_bytes}
            | ({"url": urls[s.url], "at": s.at} if s.url else {})
            for s in self.shards
        ]
        tensors = {
            name: [t.dtype, [*t.shape], [[*part] for part in t.parts]]
            for name, t in self.tensors.items()
        }
        table = {"version": _VERSION, "shards": shards, "tensors": tensors, "urls": [*urls]}
        return json.dumps(table, ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> WeightManifest:
        """Raises WeightError for anything that `to_json` would not write."""
        try:
            table = json.loads(text)
            if (version := table["version"]) != _VERSION:
                raise WeightError(
                    f"a manifest of weights of version {version!r:.20}: this shoal reads version "
                    f"{_VERSION}, get a newer one"
                )
            urls = [_url(url) for url in table["urls"]]
            shards = tuple(_shard(raw, urls) for raw in table["shards"])
            tensors = {name: _tensor(name, raw, shards) for name, raw in table["tensors"].items()}
        except WeightError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            text = f"{type(error).__name__} {error}"
            raise WeightError(f"no manifest of weights: {text:.200}") from None
        return cls(shards, tensors)


def _url(url: Any) -> str:
    if not (isinstance(url, str) and len(url) <= MOST_URL and origin_of(url)):
        raise WeightError(
            f"a manifest of weights names the URL {url!r:.80}: expected http(s)://HOST/…, without "
            "a user or anything unprintable in it"
        )
    return url


def _shard(raw: Any, urls: Sequence[str]) -> WeightShard:
    hash, size, url, at = raw["hash"], raw["size_bytes"], raw.get("url"), raw.get("at", 0)
    sound = isinstance(hash, str) and _HASH.fullmatch(hash) and _whole(size) and _whole(at)
    if not sound or not 0 < size <= MOST_SHARD_BYTES:
        raise WeightError(
            f"a manifest of weights has the shard {raw!r:.200}: expected a SHA-256 and 1 to "
            f"{MOST_SHARD_BYTES} bytes"
        )
    if url is not None and not (_whole(url) and url < len(urls)):
        raise WeightError(f"a manifest of weights has {len(urls)} URLs, and a shard of {url!r:.20}")
    return WeightShard(hash, size, "" if url is None else urls[url], at)


def _tensor(name: str, raw: Any, shards: Sequence[WeightShard]) -> StoredTensor:
    dtype, shape, parts = raw
    made = StoredTensor(dtype, tuple(shape), tuple((i, at, length) for i, at, length in parts))
    numbers = (*made.shape, *(n for part in made.parts for n in part))
    if not (isinstance(dtype, str) and all(map(_whole, numbers)) and len(shape) <= MOST_SIZES):
        raise WeightError(f"a manifest of weights has {raw!r:.200} for {name!r:.80}")
    for i, at, length in made.parts:
        if i >= len(shards) or not 0 < length <= shards[i].size_bytes - at:
            raise WeightError(
                f"a manifest of weights has {name!r:.80} in bytes [{at}, {at + length}) of shard "
                f"{i}, which is not there"
            )
    return made


def _whole(number: Any) -> bool:
    return type(number) is int and 0 <= number < 2**63
