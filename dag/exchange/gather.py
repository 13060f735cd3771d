"""What each participant made, whole, to every receiver, who adds it up itself.

One hop. For what is small, what receivers need one by one (batch statistics), and what each holder
compresses on its own with an error feedback that must know what all others have of it.
"""

from __future__ import annotations

from collections.abc import Iterator

from .collective import Collective, Hop, Members

__all__ = ["Gather"]


class Gather(Collective):
    """The collective gather: every participant sends all it made to every receiver, who adds it
    up."""

    name, coded = "gather", True

    def hops(self, members: Members) -> Iterator[Hop]:
        for source in members.participants:
            for receiver in members.receivers:
                yield Hop(0, 1, source, receiver)
