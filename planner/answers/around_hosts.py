"""Replicas of federated training on data that stays with hosts, where some hosts have too little
memory for the model.

A host that has the memory trains alone. Around each of the others a pipeline forms: the host has
the stages that read its data or could tell of it (dag/analysis/beside.py), at both ends where
inputs and labels stay, and lends what lies between to peers without data, those with the fastest
links to it first, and no more of them than it takes. Hosts with most memory choose first. Nobody
trains with another host: what that has is for its own client.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...dag.ir.graph import Graph
from ...dag.plan.report import PlanWithReport
from ...job.words import count_of
from ..base.interface import NoPlan, Planner, PlannerOptions
from ..replicas.form import formed_of
from ..replicas.formation import Formation
from ..replicas.pace import Paces
from ..requests.asked import FormReplicas
from ..requests.client_data import has_client, offer_of_each, spec_of_client
from ..requests.request import plan_request
from ..requests.requirements import RunRequirements
from .planning import as_before

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
    made: dict[int, PlanWithReport] = {}
    for client, host in sorted(hosts.items(), key=lambda x: -offers[x[1]].device_memory_bytes):
        made[client] = helped.plan(client, host, free)
        free = [i for i in free if offers[i].peer not in made[client].plan.peers]
    plans = [made[client] for client in hosts]
    return formed_of(whole, plans, wish.sync.steps, bytes_per_parameter, _NOT_NEEDED)


@dataclass(frozen=True)
class _Helped:
    """Plans of one client each. needed: bytes of the whole model with one microbatch."""

    ask: FormReplicas
    graph: Graph
    wish: RunRequirements
    planner: Planner
    alone: PlannerOptions | None
    needed: int

    def plan(self, client: int, host: int, free: Sequence[int]) -> PlanWithReport:
        """Return the plan of a client on its host, and on as few of the free peers as it takes.
        Raises NoPlan."""
        rooms = [o.device_memory_bytes for o in self.ask.peers]
        line, why = [host, *self._nearest(host, free)], NoPlan("nobody is there", "peers")
        for count in range(1, len(line) + 1):
            some, options = line[:count], self.wish.options
            if count == 1:
                options = self.alone or options
            elif count < len(line) and sum(rooms[i] for i in some) < self.needed:
                continue  # the last try says what is short
            try:
                return self._planned(client, some, options)
            except NoPlan as error:
                why = error
        with_ = f"{count_of(len(free), 'peer')} without data that no other host needs"
        raise NoPlan(
            f"{self.ask.peers[host]} cannot train the client whose data it has, with {with_}: "
            f"{why.reason}. Let more peers without data join, or offer more memory on that host",
            why.code,
            why.short_bytes,
        )

    def _nearest(self, host: int, free: Sequence[int]) -> list[int]:
        """Return peers by the rate of their link to a host, its slower direction; of equal rates
        those with most memory first."""
        network, offers = self.ask.network, self.ask.peers
        rates = None if network is None else network.rates()

        def rank(i: int) -> tuple[float, int, int]:
            rate = 0.0 if rates is None else float(min(rates[host, i], rates[i, host]))
            return -rate, -offers[i].device_memory_bytes, i

        return sorted(free, key=rank)

    def _planned(self, client: int, some: Sequence[int], options: PlannerOptions) -> PlanWithReport:
        ask, spec = self.ask, spec_of_client(self.ask.spec, client)
        offers = tuple(ask.peers[i] for i in some)
        network = ask.network and ask.network.part(some)
        wish = replace(self.wish, options=options)
        request = plan_request(spec, wish, self.graph, offers, network)
        if spec.HasField("resumed"):
            had = spec.resumed.microbatch_size, spec.resumed.head_parts
            request = as_before(request, had)
        return self.planner(request)
