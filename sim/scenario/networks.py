"""From places and links to matrices over peers.

What holds from one peer to another is what is said most specifically: of the two peers, else of one
of them and the other's place, else of the two places, else of the inside of the place they share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...dag.cost.network import Network
from ...dag.plan.plan import PeerId
from ...job.settings import SettingsError, meant
from .naming import BROKER
from .tables import LinkTable, PeerTable, Place

__all__ = ["Wide", "wide"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Wide:
    """Network of N ends, as a scenario says. Rows send, columns receive; arrays are read-only."""

    network: Network
    """Latency, bandwidth, uplinks and downlinks."""
    jitter_s: Floats
    """(N, N), a message is earlier or later by up to this."""
    loss: Floats
    """(N, N), share of packets, less than 1."""
    burst: Floats
    """(N, N), bytes that go at once after a rest."""


def wide(
    peers: Sequence[PeerTable], places: Mapping[str, Place], links: Sequence[LinkTable]
) -> Wide:
    """The matrices of a network with jitter, loss and bursts: between places they are those of the
    link that holds, inside a place there are none. Raises SettingsError, with
    the number of the link in its key, for an unknown end, for two links that contradict each other,
    and for a pair that no link covers."""
    names = list(dict.fromkeys(p.place for p in peers))
    place_index = {name: k for k, name in enumerate(names)}
    peer_index = {p.name: i for i, p in enumerate(peers)}
    stated = _stated(links, {**peer_index, **place_index})

    shaky = any(link.jitter or link.loss or link.burst for link in links)  # C is 5 then, else 2
    inside = [places.get(name, Place()) for name in names]
    between = np.zeros((5 if shaky else 2, len(names), len(names)))  # (C, K, K)
    between[:2] = np.nan
    np.einsum("ckk->ck", between)[:2] = [
        [float(p.latency) for p in inside],
        [float(p.bandwidth) for p in inside],
    ]
    for (a, b), i in stated.items():
        if a in place_index and b in place_index:
            between[:, place_index[a], place_index[b]] = _numbers(links[i])[: len(between)]
    at = np.array([place_index[p.place] for p in peers])
    pairs = between[:, at[:, None], at[None, :]]  # (C, P, P)

    _mixed(pairs, at, place_index, peer_index, stated, links)
    if peers[-1].name == BROKER:
        _beside(pairs, at)
    latency_s, bandwidth = np.ascontiguousarray(pairs[0]), np.ascontiguousarray(pairs[1])
    np.fill_diagonal(latency_s, 0.0)
    np.fill_diagonal(bandwidth, np.inf)
    missing = np.isnan(bandwidth)
    if missing.any():
        one, other = (peers[int(i)] for i in np.argwhere(missing)[0])
        raise SettingsError(
            "links",
            f'lack one from place "{one.place}" to place "{other.place}", where peers '
            f'"{one.name}" and "{other.name}" are: state it between the places, or '
            "between each two of their peers",
        )
    up = np.array([float(p.up) for p in peers])
    down = np.array([float(p.down) for p in peers])
    calm = np.broadcast_to(0.0, bandwidth.shape)  # takes no memory
    jitter_s, loss, burst = pairs[2:] if shaky else (calm, calm, calm)
    for array in (latency_s, bandwidth, up, down, jitter_s, loss, burst):
        array.setflags(write=False)  # one network for all who ask
    network = Network(tuple(PeerId(p.name) for p in peers), latency_s, bandwidth, up, down)
    return Wide(network, jitter_s, loss, burst)


def _stated(links: Sequence[LinkTable], known: Mapping[str, int]) -> dict[tuple[str, str], int]:
    """(from, to) -> number of the link that says it. Raises SettingsError."""
    stated: dict[tuple[str, str], int] = {}
    for i, link in enumerate(links):
        for key, name in (("from", link.from_), ("to", link.to)):
            if name not in known:
                raise SettingsError(
                    f"links[{i}].{key}",
                    f'is "{name}", which is neither a peer nor a place where one is'
                    f"{meant(name, known)}",
                )
        for pair in link.directions:
            other = links[stated.setdefault(pair, i)]
            for key in ("latency", "bandwidth", "jitter", "loss", "burst"):
                new, old = getattr(link, key), getattr(other, key)
                if not math.isclose(new, old, rel_tol=1e-9):
                    raise SettingsError(
                        f"links[{i}].{key}",
                        f'is {new} from "{pair[0]}" to "{pair[1]}", and {old} in the link from '
                        f'"{other.from_}" to "{other.to}" (number {stated[pair] + 1}): expected '
                        "one number for each direction (`both = false` states one of the two)",
                    )
    return stated


def _mixed(
    pairs: Floats,  # (C, P, P), written to
    at: NDArray[np.int64],
    place_index: Mapping[str, int],
    peer_index: Mapping[str, int],
    stated: Mapping[tuple[str, str], int],
    links: Sequence[LinkTable],
) -> None:
    """Writes the links of single peers: to places, then over these to peers. Raises SettingsError
    where two links of a peer and a place both cover a pair that has none of its own."""
    specific = {pair: i for pair, i in stated.items() if {*pair} & peer_index.keys()}
    if not specific:
        return
    count = len(at)
    members = {name: np.flatnonzero(at == k) for name, k in place_index.items()}
    said_by = np.full((count, count), -1, dtype=np.int32)
    twice = np.full((count, count), -1, dtype=np.int32)
    own: list[tuple[int, int, int]] = []
    for (a, b), i in specific.items():
        rows = members[a] if a in members else np.array([peer_index[a]])
        columns = members[b] if b in members else np.array([peer_index[b]])
        if a in peer_index and b in peer_index:
            own.append((peer_index[a], peer_index[b], i))
            continue
        grid = np.ix_(rows, columns)
        twice[grid] = np.where(said_by[grid] >= 0, i, twice[grid])
        said_by[grid] = np.where(said_by[grid] < 0, i, said_by[grid])
        pairs[:, grid[0], grid[1]] = _numbers(links[i])[: len(pairs), None, None]
    for row, column, i in own:
        twice[row, column] = -1
        pairs[:, row, column] = _numbers(links[i])[: len(pairs)]
    np.fill_diagonal(twice, -1)
    if (twice >= 0).any():
        row, column = (int(n) for n in np.argwhere(twice >= 0)[0])
        first, second = int(said_by[row, column]), int(twice[row, column])
        names = list(peer_index)
        raise SettingsError(
            f"links[{second}]",
            f'covers peer "{names[row]}" to peer "{names[column]}", and so does link number '
            f"{first + 1}; neither is more specific: state a link between these two peers",
        )


def _beside(pairs: Floats, at: NDArray[np.int64]) -> None:
    """Where no link covers the last end, the broker, it has what its neighbour has: the first peer
    of its place."""
    neighbour = int(np.flatnonzero(at == at[-1])[0])
    for of_broker, of_peer in (
        (pairs[:, -1], pairs[:, neighbour]),
        (pairs[:, :, -1], pairs[:, :, neighbour]),
    ):
        of_broker[:] = np.where(np.isnan(of_broker[1]), of_peer, of_broker)


def _numbers(link: LinkTable) -> Floats:
    sure, shaky = (link.latency, link.bandwidth), (link.jitter, link.loss, link.burst)
    return np.array([float(number) for number in (*sure, *shaky)])
