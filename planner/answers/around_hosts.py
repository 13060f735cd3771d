"""Replicas of federated training on data that stays with hosts, where some hosts have too little
memory for the model.

A host that has the memory trains alone. Around each of the others a pipeline forms: the host has
the stages that read its data or could tell of it (dag/analysis/beside.py), at both ends where
inputs and labels stay, and lends what lies between to peers without data, those with the fastest
links to it first, and no more of them than it takes. Hosts with most memory choose first; where
one finds too little then, the poorest do, and those with most memory. Nobody trains with another
host: what that has is for its own client.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...dag.ir.graph import Graph
from ...dag.plan.report import PlanWithReport
from ...job.words import count_of
from ..base.interface import NoPlan, Planner, PlannerOptions, PlanRequest
from ..network.communities import rates
from ..replicas.form import formed_of
from ..replicas.formation import Formation
from ..replicas.pace import Paces
from ..requests.asked import FormReplicas
from ..requests.client_data import has_client, offer_of_each, spec_of_client
from ..requests.request import plan_request
from ..requests.requirements import RunRequirements
from .deeper import fewest_of
from .planning import as_before, had_form

__all__ = ["around_hosts"]

_NOT_NEEDED = "no host needs it: each trains its client without it"


def around_hosts(
    ask: FormReplicas,
    graph: Graph,
    wish: RunRequirements,
    planner: Planner,
    *,
    alone: PlannerOptions | None,
    bytes_per_parameter: float,
) -> Formation:
    """Return a replica for each client whose host is on offer. `wish`: what each of them asks for.
    `alone`: the options of a host by itself; None: as of the others. At least one host is on offer.
    Raises NoPlan where one cannot train its client: it says which, and what to do."""
    offers = list(ask.peers)
    hosts = {c: offers.index(o) for c, o in sorted(offer_of_each(ask.spec, offers).items())}
    spec = spec_of_client(ask.spec, next(iter(hosts)))
    whole = replace(plan_request(spec, wish, graph, ask.peers, ask.network), local=())
    whole = replace(whole, microbatches=len(hosts) * whole.microbatches)
    helped = _Helped(ask, graph, wish, planner, alone, Paces(whole).needed)
    free = [i for i, o in enumerate(offers) if not has_client(ask.spec, o)]
    try:
        made = helped.plans(hosts, free, near=True)
    except NoPlan:
        made = helped.plans(hosts, free, near=False)
    plans = [made[client] for client in hosts]
    return formed_of(whole, plans, wish.sync.steps, bytes_per_parameter, _NOT_NEEDED)


@dataclass(frozen=True)
class _Helped:
    """Plans of one client each. needed: bytes of the whole model with one microbatch. `known`: what
    was planned, by client and peers."""

    ask: FormReplicas
    graph: Graph
    wish: RunRequirements
    planner: Planner
    alone: PlannerOptions | None
    needed: int
    known: dict[tuple[int, ...], PlanWithReport] = field(default_factory=dict)

    def plans(
        self, hosts: Mapping[int, int], free: Sequence[int], *, near: bool
    ) -> dict[int, PlanWithReport]:
        """Return the plan of each client, by its number. `near`: hosts with most memory choose
        first, and those with the fastest links to them; else the poorest hosts, and those with most
        memory. Raises NoPlan."""
        found: dict[int, PlanWithReport] = {}
        rooms = [o.device_memory_bytes for o in self.ask.peers]
        sign = -1 if near else 1
        for client, host in sorted(hosts.items(), key=lambda x: sign * rooms[x[1]]):
            line = [host, *self._ranked(host, free, near)]
            found[client] = self._plan(client, line, rooms)
            free = [i for i in free if self.ask.peers[i].peer not in found[client].plan.peers]
        return found

    def _plan(self, client: int, line: Sequence[int], rooms: Sequence[int]) -> PlanWithReport:
        """Return the plan of a client on the first of a line, its host, and on as few of those
        behind it as it takes. Raises NoPlan."""
        try:
            return self._planned(client, line[:1])
        except NoPlan as error:
            why = error
        enough = (n for n in range(2, len(line)) if sum(rooms[i] for i in line[:n]) >= self.needed)
        try:
            if len(line) > 1:
                least = next(enough, len(line))
                return fewest_of(least, len(line), lambda n: self._planned(client, line[:n]))
        except NoPlan as error:
            why = error
        others = count_of(len(line) - 1, "peer")
        raise NoPlan(
            f"{self.ask.peers[line[0]]} cannot train the client whose data it has, with {others} "
            f"that has none and helps no other host: {why.reason}. Let more peers without data "
            "join, or offer more memory on that host",
            why.code,
            why.short_bytes,
        )

    def _ranked(self, host: int, free: Sequence[int], near: bool) -> list[int]:
        """Return peers by the rate of their link to a host, its slower direction, if `near` says
        so; then by memory."""
        network, offers = self.ask.network, self.ask.peers
        rate = rates(network)[host] if near and network is not None else [0.0] * len(offers)

        def rank(i: int) -> tuple[float, int, int]:
            return -float(rate[i]), -offers[i].device_memory_bytes, i

        return sorted(free, key=rank)

    def _planned(self, client: int, some: Sequence[int]) -> PlanWithReport:
        key = client, *some
        if key not in self.known:
            self.known[key] = self.planner(self._request(client, some))
        return self.known[key]

    def _request(self, client: int, some: Sequence[int]) -> PlanRequest:
        ask, spec, options = self.ask, spec_of_client(self.ask.spec, client), self.wish.options
        if len(some) == 1:
            options = self.alone or options
        offers = tuple(ask.peers[i] for i in some)
        network = ask.network and ask.network.part(some)
        wish = replace(self.wish, options=options)
        request = plan_request(spec, wish, self.graph, offers, network)
        return as_before(request, had_form(spec))
