"""Plans that are fed into a world in place of a search, and how they are written.

A plan is written as it crosses the wire, in the JSON of protobuf, without what the broker finds out
by itself: what crosses between stages, and who keeps snapshots. The order in which each peer visits
its stages is written for people (`F3@1 B3@1`); a plan that is fed in is listed anew by its
schedule, which has to give the recorded order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict, ParseDict

from shoal.broker.events import FormReplicas, MakePlan, PlanReady, ReplicasFormed
from shoal.dag.ir.convert import graph_from_bytes
from shoal.dag.ir.graph import Graph
from shoal.dag.plan.cut import cut
from shoal.dag.plan.outline import Outline
from shoal.dag.plan.plan import Plan
from shoal.dag.plan.report import PlanWithReport
from shoal.dag.schedule.convert_plan import plan_from_proto, plan_to_proto
from shoal.dag.schedule.schedule import listed
from shoal.dag.transforms.vocabulary import planned_graph
from shoal.planner.answers.planning import ready_of
from shoal.proto import broker_pb2
from shoal.sim.virtual import broker_shell

Table = dict[str, Any]
TEXTS = ("reasons", "alternatives", "hangs_on", "left_out")
"""Of a formation, what is for people."""


def written_plan(plan: Plan, graph: Graph) -> Table:
    """A plan of a graph, as a table for JSON."""
    bare = replace(plan, keepers=(), outline=Outline(), visits=(), evaluations=())
    return {**MessageToDict(plan_to_proto(bare), preserving_proto_field_name=True)} | {
        "visits": visits_of(plan, graph)
    }


def read_plan(table: Table) -> Plan:
    """The plan that `written_plan` wrote. Raises ParseError for a field that the wire lacks."""
    told = {key: value for key, value in table.items() if key != "visits"}
    return plan_from_proto(ParseDict(told, broker_pb2.Plan()))


def visits_of(plan: Plan, graph: Graph) -> dict[str, str]:
    """By peer, its forwards and backwards in a step, in order."""
    form = planned_graph(graph.bind(plan.microbatch_size), plan)
    stages = cut(form, [(s.start, s.stop) for s in plan.stages])
    visits = plan.visits or listed(plan, stages).visits
    return {
        peer: " ".join(map(str, actions)) for peer, actions in zip(plan.peers, visits, strict=True)
    }


@dataclass
class Answers:
    """What a broker was answered when it asked for plans, in the order of its questions: the last
    answer of those about the same plan before, as a broker asks again when links are known better.
    Each is a table with `plans`, one for each replica, and where replicas were formed the
    `formation`."""

    tables: list[Table] = field(default_factory=list)

    @property
    def plans(self) -> list[Plan]:
        return [read_plan(plan) for table in self.tables for plan in table["plans"]]


class _Questions:
    """Counts the questions that are about another plan before than the one before them."""

    def __init__(self) -> None:
        self.number, self._before = -1, ""

    def asked(self, ask: MakePlan | FormReplicas) -> int:
        """The number of a question, from 0."""
        before = repr(getattr(ask, "before", None))
        if before != self._before:
            self.number, self._before = self.number + 1, before
        return self.number


@contextmanager
def searching(found: Answers) -> Iterator[None]:
    """Plans are searched for, and noted."""
    questions = _Questions()

    def noting(answer: Callable[..., Any]) -> Callable[..., Any]:
        def answered(ask: MakePlan | FormReplicas, data: bytes) -> Any:
            given, graph = answer(ask, data), graph_from_bytes(data)
            match given:
                case PlanReady():
                    table: Table = {"plans": [written_plan(given.plan, graph)]}
                case ReplicasFormed():
                    told = MessageToDict(given.formation, preserving_proto_field_name=True)
                    plans = [written_plan(ready.plan, graph) for ready in given.plans]
                    formation = {k: v for k, v in told.items() if k not in TEXTS}
                    table = {"plans": plans, "formation": formation}
                case _:
                    return given
            found.tables[questions.asked(ask) :] = [table]
            return given

        return answered

    with pytest.MonkeyPatch.context() as patch:
        for name in ("plan_answer", "form_answer"):
            patch.setattr(broker_shell, name, noting(getattr(broker_shell, name)))
        yield


@contextmanager
def feeding(given: Answers) -> Iterator[None]:
    """Nothing is searched for: the first question gets the first answer, and so on. Fails where
    there are more questions than answers, or less."""
    questions, plan_answer = _Questions(), broker_shell.plan_answer

    def table_for(ask: MakePlan | FormReplicas) -> Table:
        number = questions.asked(ask)
        assert number < len(given.tables), "the broker asks for more plans than were recorded"
        table = given.tables[number]
        assert ("formation" in table) == isinstance(ask, FormReplicas), "other plans are asked for"
        return table

    def planned(ask: MakePlan, data: bytes) -> Any:
        (plan,) = map(read_plan, table_for(ask)["plans"])
        return plan_answer(ask, data, lambda request: PlanWithReport(plan))

    def formed(ask: FormReplicas, data: bytes) -> ReplicasFormed:
        table, graph = table_for(ask), graph_from_bytes(data)

        def ready(plan: Plan) -> PlanReady:
            form = planned_graph(graph.bind(plan.microbatch_size), plan)
            return ready_of(ask, form, PlanWithReport(plan))

        told = ParseDict(table["formation"], broker_pb2.Formation())
        plans = tuple(ready(read_plan(plan)) for plan in table["plans"])
        return ReplicasFormed(ask.replica, ask.version, told, plans)

    def considered(ask: Any, data: bytes) -> Any:
        raise AssertionError("the broker looks for a better plan, which these worlds do not allow")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(broker_shell, "plan_answer", planned)
        patch.setattr(broker_shell, "form_answer", formed)
        patch.setattr(broker_shell, "consider", considered)
        yield
    assert questions.number == len(given.tables) - 1, "fewer plans were asked for than recorded"
