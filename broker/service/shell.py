"""The shell around the machine.

    Attach stream, client call, timer, finished plan  ->  event  ->  machine  ->  instructions

Everything runs on one event loop; events are handled one after the other (`Shell.post`), and only
the disk is in threads, and planning in processes of its own (`planner/service/planner.py`), as it
runs operators of strangers. What was decided is in the journal before anybody hears of it
(`broker/journal/barrier.py`). Every stream has a bounded queue: a peer that does not read
loses its stream, and nobody else notices.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from ...dag.ir.convert import MAX_GRAPH_BYTES
from ...planner.requests.asked import PLANNER
from ...planner.service.planner import EndedError, Planner, PlannerBusyError, PlannerLimits
from ...planner.service.wire import Asked, Told, answer_from_bytes, ask_to_bytes
from ...proto.broker_pb2 import BrokerMessage, PreviewAnswer
from ...proto.common_pb2 import Reason
from ..access.admission import CallRefusedError
from ..events import (
    Answer,
    CloseStream,
    ConsiderPlan,
    Event,
    FormReplicas,
    Instruction,
    Log,
    MakePlan,
    Persist,
    PlanConsidered,
    PlanFailed,
    PlanReady,
    PreviewWanted,
    Publish,
    Reject,
    ReplicaId,
    ReplicasFormed,
    RequestId,
    RunId,
    SetTimer,
    Started,
    StopServing,
    StreamClosed,
    StreamId,
    Tell,
    TimerFired,
    WasAway,
    WatchAsked,
    Watched,
)
from ..journal.barrier import Barrier
from ..journal.journal import Journal, JournalError
from ..machine import BrokerMachine
from .blobs import BlobStore, BlobStoreError
from .needed import Sweeper

__all__ = ["OUTBOX_MESSAGES", "RejectedError", "Shell", "StreamOutbox"]

log = logging.getLogger(__name__)
M = TypeVar("M")

ALIVE_S, AWAY_S = 0.5, 2.5
"""How often the loop's own clock is looked at, and which gap means that this process stood still: a
heartbeat's time longer. What came meanwhile is still to be read then."""
OUTBOX_MESSAGES = 256
"""Messages that wait for one peer: it gets a handful per run."""


class RejectedError(CallRefusedError):
    """A client's request that the machine refused."""


class StreamOutbox:
    """Messages on their way to one peer. `take` gives None at the end."""

    def __init__(self) -> None:
        self._messages: asyncio.Queue[BrokerMessage | None] = asyncio.Queue()
        self.closed = False

    def put(self, message: BrokerMessage) -> bool:
        """False when it is full: the peer does not read."""
        if len(self) >= OUTBOX_MESSAGES:
            return False
        self._messages.put_nowait(message)
        return True

    def __len__(self) -> int:
        return self._messages.qsize()

    def close(self) -> None:
        """Ends the stream after what is in it."""
        self.closed = True
        self._messages.put_nowait(None)

    async def take(self) -> BrokerMessage | None:
        return await self._messages.get()


class Shell:
    """Turns what happens into events, and carries instructions out in order.

    Its tasks belong to the TaskGroup that it is given; `close` ends its timers and threads. The
    machine was made from what the journal holds.
    """

    def __init__(
        self,
        machine: BrokerMachine,
        blobs: BlobStore,
        tasks: asyncio.TaskGroup,
        journal: Journal,
        limits: PlannerLimits | None = None,
    ) -> None:
        self.machine = machine
        self.blobs = blobs
        self.stopped = asyncio.Event()  # Set at StopServing, or when the journal fails.
        self.outboxes: dict[StreamId, StreamOutbox] = {}
        self.refused: Counter[str] = Counter()
        """Streams of peers that were refused, by the code of the reason."""
        self._tasks = tasks
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time() - machine.decided.clock_s
        self._events: deque[Event] = deque()
        self._busy = False
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._answers: dict[RequestId, asyncio.Future[Answer | Reject]] = {}
        self._journal = journal
        self._barrier = Barrier(journal, machine.decided.snapshot, self._pump)
        self._settled = asyncio.Event()  # Set while nothing waits for the disk.
        self._news: dict[RunId, asyncio.Event] = {}
        self._requests = 0
        self._alive_at = self._loop.time()
        self._alive: asyncio.TimerHandle = self._loop.call_later(ALIVE_S, self._tick)
        self._warm = False
        self.disk = ThreadPoolExecutor(4, "shoal-broker-disk")
        self.sweeper = Sweeper(blobs, machine.decided.runs.values, self.disk)
        self._sweeping = self._loop.create_task(self.sweeper.keep())
        self._planner = Planner(limits)
        self.post(Started())

    @property
    def now(self) -> float:
        """The broker's clock, seconds; it goes on where the journal ends."""
        return self._loop.time() - self._began

    @property
    def error(self) -> JournalError | None:
        """Why nothing leaves the broker any more."""
        return self._barrier.error

    def post(self, event: Event) -> None:
        """Handles an event, and those that carrying it out brings about, one after the other."""
        at, self._alive_at = self._alive_at, self._loop.time()
        if self._alive_at - at > AWAY_S:
            self._events.append(WasAway(self._alive_at - at))
        self._events.append(event)
        self._pump()

    def _pump(self) -> None:
        """Carries out what may be, and handles what is there to be handled."""
        if self._busy:
            return
        self._busy = True
        try:
            self._pass()
            while self._events:
                self._barrier.add(self.machine.handle(self._events.popleft(), self.now))
                self._pass()
        finally:
            self._busy = False
        if self._barrier:
            self._settled.clear()
        else:
            self._settled.set()
        if self.error is not None and not self.stopped.is_set():
            log.error("journal_failed why=%s", self.error)
            self.stopped.set()
            for request, answer in self._answers.items():
                if not answer.done():
                    answer.set_result(Reject(request, "UNAVAILABLE", self._why_not))

    def _pass(self) -> None:
        for instruction in self._barrier.passing():
            self._carry_out(instruction)

    async def settled(self) -> None:
        """Returns when nothing waits for the disk."""
        await self._settled.wait()

    async def ask(self, event: Callable[[RequestId], Event], kind: type[M]) -> M:
        """The machine's answer to a request, of the kind that is due, once all that it tells is on
        disk. Raises RejectedError."""
        self._requests += 1
        request = RequestId(f"q{self._requests}")
        if self.error is not None or self._barrier.full is not None:
            raise RejectedError("UNAVAILABLE", self._why_not)
        waiting = self._answers[request] = self._loop.create_future()
        try:
            self.post(event(request))
            answer = await waiting
        finally:
            del self._answers[request]
        if isinstance(answer, Reject):
            raise RejectedError(answer.code, answer.reason)
        assert isinstance(answer.message, kind), answer
        return answer.message

    @property
    def _why_not(self) -> str:
        """Why nothing can be asked now."""
        if self.error is not None:
            return f"the broker stops, as it {self.error}"
        return f"the broker waits, as it {self._barrier.full}"

    async def free(self) -> int | None:
        """Bytes of the journal's disk that new runs may fill; None: it is on none. Raises
        RejectedError when that cannot be asked."""
        try:
            return await self._loop.run_in_executor(self.disk, self._journal.free)
        except JournalError as error:
            raise RejectedError("UNAVAILABLE", str(error)) from error

    async def watch(self, run: RunId, start: int, by: str) -> tuple[Watched, asyncio.Event]:
        """Events of a run from a number on, and what is set when there may be more. `by`: as in
        RunAsked. Raises RejectedError."""
        news = self._news.setdefault(run, asyncio.Event())  # before it is asked: none is missed
        try:
            asked = partial(WatchAsked, run=run, from_event=start, by=by)
            return await self.ask(asked, Watched), news
        except RejectedError:
            self._news.pop(run, news).set()  # others may wait with it: they ask again
            raise

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case Tell(stream, message):
                outbox = self.outboxes.get(stream)
                if outbox is not None and not outbox.put(message):
                    text = f"{OUTBOX_MESSAGES} messages wait for it: it does not read"
                    self._end_stream(stream, text)
            case CloseStream(stream, why):
                self._end_stream(stream, why)
            case Answer(request) | Reject(request):
                waiting = self._answers.get(request)
                if waiting is not None and not waiting.done():  # else the client has gone
                    waiting.set_result(instruction)
            case Publish(run):
                news = self._news.pop(run, None)
                if news is not None:
                    news.set()
            case MakePlan() | FormReplicas():
                self._tasks.create_task(self._plan(instruction))
            case ConsiderPlan():
                self._tasks.create_task(self._consider(instruction))
            case SetTimer(name, at):
                old = self._timers.pop(name, None)
                if old is not None:
                    old.cancel()
                self._timers[name] = self._loop.call_at(self._began + at, self._fire, name)
            case Log(name, fields):
                if name == "stream_refused":
                    self.refused[str(dict(fields)["code"])] += 1
                _log(instruction)
            case StopServing():
                self.stopped.set()
            case Persist():
                raise AssertionError("the barrier keeps it")

    def _end_stream(self, stream: StreamId, why: str) -> None:
        outbox = self.outboxes.pop(stream, None)
        if outbox is not None:
            outbox.close()
            self._events.append(StreamClosed(stream, why))  # `post` is running: it comes next

    def _tick(self) -> None:
        self._alive = self._loop.call_later(ALIVE_S, self._tick)
        at, self._alive_at = self._alive_at, self._loop.time()
        if self._alive_at - at > AWAY_S:
            self.post(WasAway(self._alive_at - at))

    def _fire(self, name: str) -> None:
        del self._timers[name]
        self.post(TimerFired(name))

    def warm_up(self) -> None:
        """Starts what planning needs, once, beside everything else: seconds of importing torch that
        the first run need not wait for."""
        if not self._warm:
            self._warm = True
            self._planner.warm_up()

    async def _plan(self, ask: MakePlan | FormReplicas) -> None:
        began = time.monotonic()

        def wanted() -> bool:
            found = self.machine.replica(ask.replica)
            return found is not None and found.lifecycle.asked == ask.version

        try:
            answer = await self._told(ask, self._owner(ask.replica), wanted)
        except BlobStoreError as error:
            text = f"the graph of the run: {error.reason}: upload it before the run is submitted"
            answer = PlanFailed(ask.replica, ask.version, text, "graph")
        except EndedError as error:
            answer = PlanFailed(ask.replica, ask.version, str(error), PLANNER)
        except Exception as error:  # a bug of ours must not leave a run waiting forever
            log.exception("plan_crashed run=%s", ask.replica)
            text = f"planning crashed: {type(error).__name__}: {error}"
            answer = PlanFailed(ask.replica, ask.version, text, "internal")
        if isinstance(
            answer, PlanReady | ReplicasFormed | PlanFailed
        ):  # else nobody waits for it any more
            log.info("plan_made run=%s seconds=%.2f", ask.replica, time.monotonic() - began)
            self.post(answer)

    async def _consider(self, ask: ConsiderPlan) -> None:
        answer: Told | None = None
        try:
            answer = await self._told(ask, self._owner(ask.replica))
        except EndedError as error:
            answer = PlanConsidered(ask.replica, ask.version, given_up=str(error))
        except Exception:  # the run goes on under its plan
            log.exception("plan_not_considered run=%s", ask.replica)
        if not isinstance(answer, PlanConsidered):
            answer = PlanConsidered(ask.replica, ask.version)
        self.post(answer)

    async def preview(self, wanted: PreviewWanted, by: str = "") -> PreviewAnswer:
        """What the planner would do, for a subject; waits its turn. Raises RejectedError."""
        try:
            answer = await self._told(wanted, by)
        except BlobStoreError as error:
            text = f"the graph: {error.reason}: upload it before the preview is asked for"
            return PreviewAnswer(reason=Reason(code="graph", text=text))
        except EndedError as error:
            text = str(error).replace("planning this run", "planning this")
            return PreviewAnswer(reason=Reason(code=PLANNER, text=text))
        except PlannerBusyError as error:
            raise RejectedError("RESOURCE_EXHAUSTED", str(error)) from None
        assert isinstance(answer, PreviewAnswer), "it was not dropped"
        return answer

    async def _told(
        self, ask: Asked, by: str, wanted: Callable[[], bool] = lambda: True
    ) -> Told | None:
        """What a planning process answers; None when it is not wanted any more. Raises
        BlobStoreError, EndedError, PlannerBusyError."""
        graph = ask.spec.graph.hash

        def request() -> bytes:  # in the planner's thread
            return ask_to_bytes(ask, self.blobs.get(graph, MAX_GRAPH_BYTES))

        answer = await self._planner.ask(by, graph, request, wanted)
        return None if answer is None else answer_from_bytes(ask, answer)

    def _owner(self, replica: ReplicaId) -> str:
        found = self.machine.replica(replica)
        return "" if found is None else found.run.owner

    def close(self) -> None:
        """Ends timers, threads and planning processes; a plan that is being made is dropped."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._alive.cancel()
        self._sweeping.cancel()
        self._barrier.close()
        self._planner.close()
        self.disk.shutdown(wait=True, cancel_futures=True)


def _log(entry: Log) -> None:
    fields = " ".join(f"{key}={value}" for key, value in entry.fields)
    level = logging.WARNING if entry.level == "warning" else logging.INFO
    log.log(level, "%s %s", entry.name, fields, extra={"event": entry.name})
