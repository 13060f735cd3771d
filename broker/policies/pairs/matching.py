"""A maximum-cardinality matching of a general graph, random but decided by its weights.

    1. maximal    edges in the order of their weights, each taken if both its ends are free
    2. maximum    from each vertex that is left, an augmenting path: breadth first, odd circles
                  (blossoms) contracted (Edmonds 1965, "Paths, trees, and flowers")

The first is done for all vertices at once: an edge that is the lightest of both its ends is what
the sequence would take. It leaves few vertices, so the second starts from few. A vertex that was
matched stays so. The tree of a search that finds no path is looked at never again: no later path
goes through it.

Time: maximal O(n²) in numpy; maximum O(n · edges) at worst, and in a random graph of 1,000 vertices
0.1 s at most.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

__all__ = ["ALONE", "Bools", "Mates", "maximal", "maximum", "weights"]

Mates = NDArray[np.int64]
"""(n,): whom each vertex is matched with, or ALONE."""
Bools = NDArray[np.bool_]
Weights = NDArray[np.uint64]

ALONE = -1
_NONE = np.iinfo(np.uint64).max


def weights(key: int, n: int) -> Weights:
    """(n, n), symmetric: 64 random bits for each edge. `key`: 64 bits."""
    # The words of this generator are promised to stay what they are, unlike its distributions.
    words = np.random.Philox(key=key).random_raw(n * n).reshape(n, n)
    return words ^ words.T


def maximal(edges: Bools, weights: Weights, mates: Mates) -> Mates:
    """`mates` and the edges (n, n, symmetric, none to itself) between vertices alone, lightest
    first, until none is left."""
    mates = mates.copy()
    free = np.flatnonzero(mates == ALONE)
    ours = np.ix_(free, free)
    cost = np.where(edges[ours], weights[ours], _NONE)
    while free.size:
        here = np.arange(free.size)
        best = cost.argmin(1)
        linked = cost[here, best] < _NONE
        both = linked & (best[best] == here)
        mates[free[both]] = free[best[both]]
        keep = np.flatnonzero(linked & ~both)
        free, cost = free[keep], cost[np.ix_(keep, keep)]
    return mates


def maximum(edges: Bools, weights: Weights, mates: Mates) -> Mates:
    """A matching of maximum cardinality that has every vertex of the matching `mates`, whose edges
    may be exchanged for others; of equal paths rather those of light edges."""
    mate = mates.tolist()
    left = edges.copy()
    for root in np.flatnonzero(mates == ALONE).tolist():
        if mate[root] == ALONE:
            tree = _Tree(left, weights, mate, root)
            end = tree.grow()
            if end == ALONE:
                seen = np.array(tree.seen)
                left[seen] = False
                left[:, seen] = False
            else:
                tree.augment(end)
    return np.array(mate, dtype=np.int64)


class _Tree:
    """Alternating paths from a vertex that is alone. A vertex is outer where it is reached over an
    even number of edges: the root, mates of inner ones, and everything in a blossom."""

    def __init__(self, edges: Bools, weights: Weights, mate: list[int], root: int) -> None:
        n = len(mate)
        self.edges, self.weights, self.mate, self.root = edges, weights, mate, root
        self.parent = [ALONE] * n
        """Of inner ones and in blossoms: the outer vertex that the path comes from."""
        self.base = np.arange(n)
        """The vertex over which the path enters the blossom that this one is in."""
        self.outer = np.zeros(n, dtype=bool)
        self.outer[root] = True
        self.seen = [root]

    def grow(self) -> int:
        """A vertex that is alone at the end of an augmenting path, or ALONE."""
        mate, parent, queue = self.mate, self.parent, deque([self.root])
        while queue:
            v = queue.popleft()
            near = np.flatnonzero(self.edges[v])
            lightest: list[int] = near[self.weights[v, near].argsort()].tolist()
            for w in lightest:
                if self.base[v] == self.base[w] or mate[v] == w:
                    continue
                if self.outer[w]:
                    queue.extend(self._contract(v, w))
                elif parent[w] == ALONE:
                    parent[w] = v
                    if mate[w] == ALONE:
                        return w
                    self.seen += [w, mate[w]]
                    self.outer[mate[w]] = True
                    queue.append(mate[w])
        return ALONE

    def augment(self, end: int) -> None:
        """Exchanges the edges of the path to `end`: one more is matched."""
        while end != ALONE:
            before = self.parent[end]
            following = self.mate[before]
            self.mate[end], self.mate[before] = before, end
            end = following

    def _contract(self, v: int, w: int) -> list[int]:
        """The outer vertices v and w have an edge, which closes an odd circle. Those that become
        outer by it."""
        top = self._meeting(v, w)
        circle = np.zeros(len(self.base), dtype=bool)
        self._mark(v, w, top, circle)
        self._mark(w, v, top, circle)
        inside = circle[self.base]
        self.base[inside] = top
        new = np.flatnonzero(inside & ~self.outer)
        self.outer[new] = True
        return new.tolist()

    def _meeting(self, v: int, w: int) -> int:
        """The last base that the paths to v and w have in common."""
        over = set()
        while True:
            v = int(self.base[v])
            over.add(v)
            if v == self.root:
                break
            v = self.parent[self.mate[v]]
        while (w := int(self.base[w])) not in over:
            w = self.parent[self.mate[w]]
        return w

    def _mark(self, v: int, child: int, top: int, circle: Bools) -> None:
        """Marks the bases from v up to `top`; the way back to each goes over `child` from now."""
        while self.base[v] != top:
            inner = self.mate[v]
            circle[self.base[v]] = circle[self.base[inner]] = True
            self.parent[v] = child
            child, v = inner, self.parent[inner]
