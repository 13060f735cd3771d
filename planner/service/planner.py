"""Planning in processes of its own, one request after the other, and fair among who asks.

- Requests wait in a queue per subject, and subjects take turns: who asks for much waits for
  themselves.
- A request has a time on the clock, its process a limit of memory and of CPU seconds
  (`process.py`). What passes one, or crashes, ends that process; who asked is told what
  happened, with numbers, and the next request gets another one (`children.py`).
- Who had a process ended comes behind all others for LAST_S, and gives way to whoever comes: such a
  request is begun anew when nobody else waits. So a graph that takes all the time there is holds
  others up once, however often it is asked about.
- A request that nobody waits for any more is dropped, also while it is worked on.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ...job.words import count_of
from ..requests.asked import LAST_S
from .children import Children, DroppedError, EndedError, PlannerLimits

__all__ = ["EndedError", "Planner", "PlannerBusyError", "PlannerLimits"]

log = logging.getLogger(__name__)


class PlannerBusyError(Exception):
    """A subject has too many requests waiting."""


@dataclass(eq=False)
class _Request:
    subject: str
    graph: str
    make: Callable[[], bytes]
    """The request, made in the planner's thread; what it raises is the answer."""
    answer: asyncio.Future[bytes]
    wanted: Callable[[], bool]
    gives_way: bool = False

    @property
    def dropped(self) -> bool:
        return self.answer.done() or not self.wanted()

    @property
    def ends(self) -> bool:
        """Whether nobody is to work on it now."""
        return self.gives_way or self.dropped


class Planner:
    """Carries out planning requests in other processes, one after the other. `warm_up` may be
    called before the first request; `close` ends everything, and requests that wait are cancelled.
    To be made in the loop's thread."""

    def __init__(self, limits: PlannerLimits | None = None) -> None:
        self.limits = limits or PlannerLimits()
        self._loop = asyncio.get_running_loop()
        self._waiting: OrderedDict[str, deque[_Request]] = OrderedDict()
        self._now: _Request | None = None
        self._last: dict[str, float] = {}  # subjects that come behind all others, until when
        self._news = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "shoal-broker-plan")
        self._children = Children(self.limits)
        self._task = self._loop.create_task(self._work())

    def warm_up(self) -> None:
        """Has the warm process started beside everything else: seconds of importing torch that the
        first run need not wait for."""
        self._thread.submit(self._children.warm_up)

    async def ask(
        self,
        subject: str,
        graph: str,
        make: Callable[[], bytes],
        wanted: Callable[[], bool] = lambda: True,
    ) -> bytes | None:
        """The answer to a request about a graph (its hash); None when it was not wanted any more
        before it came. Raises EndedError, PlannerBusyError, and what `make` raises."""
        queue = self._waiting.setdefault(subject, deque())
        if len(queue) >= self.limits.waiting:
            raise PlannerBusyError(
                f"{count_of(len(queue), 'request')} of {subject or 'this network'} already wait "
                "to be planned: ask again when some are answered"
            )
        request = _Request(subject, graph, make, self._loop.create_future(), wanted)
        queue.append(request)
        self._news.set()
        now = self._now
        if now is not None and self._is_last(now.subject) and not self._is_last(subject):
            now.gives_way = True
        try:
            return await request.answer
        except DroppedError:
            return None

    async def _work(self) -> None:
        while True:
            while not self._waiting:
                self._news.clear()
                await self._news.wait()
            first = next(iter(self._waiting))
            subject = next((s for s in self._waiting if not self._is_last(s)), first)
            queue = self._waiting.pop(subject)
            request = queue.popleft()
            if queue:
                self._waiting[subject] = queue  # behind all others
            await self._answer(request)

    def _is_last(self, subject: str) -> bool:
        return self._last.get(subject, 0.0) > self._loop.time()

    async def _answer(self, request: _Request) -> None:
        answer, self._now = request.answer, request
        try:
            found = await self._loop.run_in_executor(self._thread, self._carried_out, request)
        except Exception as error:  # whatever it is, it is told to who asked
            if isinstance(error, DroppedError) and not request.dropped:
                request.gives_way = False
                self._waiting.setdefault(request.subject, deque()).appendleft(request)
                return
            if isinstance(error, EndedError) and error.blame and request.subject:
                now = self._loop.time()
                self._last = {s: until for s, until in self._last.items() if until > now}
                self._last[request.subject] = now + LAST_S
            if not answer.done():
                answer.set_exception(error)
        else:
            if not answer.done():
                answer.set_result(found)
        finally:
            self._now = None
            if request not in self._waiting.get(request.subject, ()):
                answer.cancel()  # nothing, unless this is ended

    def _carried_out(self, request: _Request) -> bytes:
        # In the planner's thread.
        if request.ends:
            raise DroppedError
        data = request.make()
        try:
            return self._children.ask(request.graph, data, lambda: request.ends)
        except EndedError as error:
            if error.blame:
                raise
            log.warning("planner_again why=%s", error)
            return self._children.ask(request.graph, data, lambda: request.ends)

    def close(self) -> None:
        """Ends the processes; a plan that is being made is dropped."""
        self._task.cancel()
        for queue in self._waiting.values():
            for request in queue:
                request.answer.cancel()
        self._children.stop()
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._children.close()
