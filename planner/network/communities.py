"""Groups of peers with fast links among themselves.

    rate(p, q)   = min of both directions, uplinks and downlinks counted
    weight(p, q) = log2(1 + rate(p, q) / least rate)

Bandwidths span a factor of 1,000 and more, so raw weights would be ruled by the fastest pairs. Two
families of groupings, for none is right everywhere:

- Louvain (Blondel et al. 2008), which raises the modularity of the weights, with several seeds;
- single linkage: peers that hang together over links of at least some rate. The maximum spanning
  tree has all of these groupings; we take those at the widest gaps between its rates.

Beyond DENSE peers the graph is thinned to the fastest links of each peer and the spanning tree,
for on a complete graph of 1,000 peers one Louvain seed alone takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterator

import networkx
import numpy as np
from numpy.typing import NDArray

from ...dag.cost.network import Network
from ..base.interface import without_last_digits

__all__ = ["DENSE", "Grouping", "edges", "groupings", "linked", "louvain", "rates", "weights"]

Floats = NDArray[np.float64]
Grouping = tuple[tuple[int, ...], ...]
"""Groups of ascending positions, in the order of their first one; every peer is in one."""

DENSE = 64
"""Most peers whose links are all looked at."""
NEAREST = 8
"""Links of each peer that a thinned graph keeps: its fastest ones."""
SEEDS = (0, 1, 2, 3)
GAPS = 4
"""Most groupings by single linkage."""


def rates(network: Network) -> Floats:
    """(P, P) bytes/s in the slower direction, symmetric; inf on the diagonal."""
    one_way = network.rates()
    slower: Floats = np.minimum(one_way, one_way.T)
    return slower


def weights(rate: Floats) -> Floats:
    """(P, P) weights of rates; 1 everywhere when nothing is known. 0 on the diagonal."""
    n = len(rate)
    apart = ~np.eye(n, dtype=bool)
    known = rate[apart & np.isfinite(rate)]
    if not known.size:
        return apart.astype(np.float64)
    # A link without limit counts as twice the fastest.
    finite = np.where(np.isfinite(rate), rate, 2 * known.max())
    found = without_last_digits(np.log2(1 + finite / known.min()))
    np.fill_diagonal(found, 0.0)
    return found


def _tree(rate: Floats) -> list[tuple[int, int]]:
    """A maximum spanning tree (Prim), in the order in which peers are reached from peer 0."""
    n = len(rate)
    best, parent = rate[0].copy(), np.zeros(n, dtype=np.int64)
    outside = np.ones(n, dtype=bool)
    outside[0] = False
    found = []
    for _ in range(n - 1):
        j = int(np.argmax(np.where(outside, best, -1.0)))
        found.append((int(parent[j]), j))
        outside[j] = False
        closer = outside & (rate[j] > best)
        best[closer], parent[closer] = rate[j][closer], j
    return found


def edges(rate: Floats, nearest: int = NEAREST) -> list[tuple[int, int]]:
    """The pairs that are looked at, ascending: all of up to DENSE peers, else the spanning tree and
    each peer's `nearest` fastest."""
    n = len(rate)
    if n <= DENSE:
        return [(i, j) for i in range(n) for j in range(i + 1, n)]
    alone = rate.copy()
    np.fill_diagonal(alone, -1.0)
    fastest = np.argsort(-alone, axis=1, kind="stable")[:, :nearest]
    pairs = [(i, int(j)) for i in range(n) for j in fastest[i]] + _tree(rate)
    return sorted({(min(p), max(p)) for p in pairs})


def louvain(rate: Floats, seed: int) -> Grouping:
    """Communities by modularity."""
    weight = weights(rate)
    graph = networkx.Graph()
    graph.add_nodes_from(range(len(rate)))
    graph.add_weighted_edges_from((i, j, float(weight[i, j])) for i, j in edges(rate))
    return _tidy(networkx.community.louvain_communities(graph, seed=seed))


def linked(rate: Floats, most: int = GAPS) -> list[Grouping]:
    """Groupings by single linkage, those at the widest gaps first; neither all peers together nor
    each alone."""
    tree = sorted(((float(rate[i, j]), i, j) for i, j in _tree(rate)), key=lambda e: -e[0])
    gaps = []
    for k in range(1, len(tree)):
        above, below = tree[k - 1][0], tree[k][0]
        if below < above:
            gaps.append((-above / below, k))
    found = []
    for _, k in sorted(gaps)[:most]:
        graph = networkx.Graph()
        graph.add_nodes_from(range(len(rate)))
        graph.add_edges_from((i, j) for _, i, j in tree[:k])
        found.append(_tidy(networkx.connected_components(graph)))
    return found


def groupings(rate: Floats) -> Iterator[Grouping]:
    """Different groupings, Louvain's first; then all peers as one group."""
    n = len(rate)
    seen: set[Grouping] = set()
    if n > 2:
        seeds = SEEDS if n <= DENSE else SEEDS[:2]
        for grouping in (*(louvain(rate, seed) for seed in seeds), *linked(rate)):
            if 1 < len(grouping) < n and grouping not in seen:
                seen.add(grouping)
                yield grouping
    yield (tuple(range(n)),)


def _tidy(groups: object) -> Grouping:
    return tuple(sorted(tuple(sorted(group)) for group in groups))  # type: ignore[attr-defined]
