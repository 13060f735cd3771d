"""The gRPC services of the broker: Attach, Runs and Blobs; Admission stands in `admitting.py`.

What all calls have in common is in `calls.py`, and blobs are in `blobs_service.py`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import grpc
import grpc.aio
from google.protobuf.message import Message

from ...dag.plan.plan import PeerId
from ...net.identity.names import Party, PartyRole
from ...net.knocks import RateLimiter
from ...planner.requests.run_spec import HASH, RunSpecError, check_size
from ...planner.service.process import MOST_ANSWER_BYTES
from ...proto.broker_pb2 import (
    BlobPiece,
    BlobQuery,
    BlobRange,
    BrokerMessage,
    CohortChoice,
    DataAnswer,
    DataRequest,
    DescribeRequest,
    Description,
    PeerMessage,
    PreviewAnswer,
    Recalled,
    Relayed,
    RunEvent,
    RunRequest,
    RunSpec,
    RunState,
    Submitted,
    WatchRequest,
)
from ...proto.common_pb2 import BlobRef
from ..access.admission import AdmissionError
from ..access.guard import Guard
from ..access.limits import MESSAGES, MOST_MESSAGE_BYTES
from ..events import (
    CohortAsked,
    DataAsked,
    DescribeAsked,
    PeerSaid,
    PreviewAsked,
    PreviewWanted,
    RunAsked,
    RunId,
    RunSubmitted,
    StreamClosed,
    StreamId,
    StreamOpened,
)
from ..machine import MOST_MESSAGE_BYTES as MOST_SAID_BYTES
from .blobs import BlobStoreError
from .blobs_service import BlobsService
from .calls import (
    MalformedError,
    parsed,
    refuse,
    stream_handler,
    unary_handler,
)
from .door.public import PublicAddress
from .door.reach import came_from
from .needed import blobs_of, lacking_shards
from .secured import Secured
from .shell import OUTBOX_MESSAGES, RejectedError, Shell, StreamOutbox

if TYPE_CHECKING:
    from grpc.aio import ServicerContext

__all__ = ["add_services", "server_options"]

MOST_STREAMS = 128
"""Calls on one connection; a client's further ones wait at the client. HTTP/2 advises no less than
100."""
_LOOK_S = 30.0
"""How often a watcher of a run in which nothing happens is asked whether it still may."""
_PAUSE_S = 0.05
"""Of reading from a peer that says too much."""
_MOST_SPEAKERS = 10_000
"""Whose messages are counted."""
log = logging.getLogger(__name__)


def server_options() -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", MOST_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MOST_ANSWER_BYTES),
        ("grpc.max_concurrent_streams", MOST_STREAMS),
        ("grpc.server_handshake_timeout_ms", 10_000),
        ("grpc.so_reuseport", 0),  # a second broker on this port is an error, not a lottery
        ("grpc.keepalive_time_ms", 10_000),  # finds peers whose host went away
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.ping_timeout_ms", 10_000),  # else a ping waits for a minute
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.max_ping_strikes", 0),
    ]


def add_services(
    server: grpc.aio.Server,
    shell: Shell,
    secured: Secured | None = None,
    public: PublicAddress | None = None,
    *,
    ways: Callable[[str, str, str], None] | None = None,
) -> None:
    """Registers all three services. `secured` None: everybody may call everything, and addresses
    are taken as the peers say them; `public` None: none was named; `ways` gets the ways into the
    swarm that peers offer, with the IP address and the id of who does."""
    guard = Guard() if secured is None else secured.guard
    attach = AttachService(shell, guard, secured, public, ways)
    runs = RunsService(shell, guard, public)
    blobs = BlobsService(shell, guard)
    unary = partial(unary_handler, guard)
    table: dict[str, dict[str, Any]] = {
        "Attach": {
            "Attach": stream_handler(guard, "Attach.Attach", attach.attach, BrokerMessage),
        },
        "Runs": {
            "Submit": unary("Runs.Submit", runs.submit, RunSpec, Submitted),
            "Cancel": unary("Runs.Cancel", runs.of_run("cancel"), RunRequest, RunState),
            "Pause": unary("Runs.Pause", runs.of_run("pause"), RunRequest, RunState),
            "Finish": unary("Runs.Finish", runs.of_run("finish"), RunRequest, RunState),
            "Choose": unary("Runs.Choose", runs.choose, CohortChoice, RunState),
            "Resume": unary("Runs.Resume", runs.of_run("resume"), RunRequest, RunState),
            "Recall": unary("Runs.Recall", runs.of_run("recall"), RunRequest, Recalled),
            "Describe": unary("Runs.Describe", runs.describe, DescribeRequest, Description),
            "Preview": unary("Runs.Preview", runs.preview, RunSpec, PreviewAnswer),
            "Resolve": unary("Runs.Resolve", runs.resolve, DataRequest, DataAnswer),
            "Watch": stream_handler(guard, "Runs.Watch", runs.watch, RunEvent, WatchRequest),
        },
        "Blobs": {
            "Store": stream_handler(guard, "Blobs.Store", blobs.store, BlobRef),
            "Fetch": stream_handler(guard, "Blobs.Fetch", blobs.fetch, BlobPiece, BlobRange),
            "Have": unary("Blobs.Have", blobs.have, BlobQuery, BlobQuery),
        },
    }
    for name, methods in table.items():
        handler = grpc.method_handlers_generic_handler(f"shoal.v1.{name}", methods)
        server.add_generic_rpc_handlers((handler,))


class AttachService:
    """One stream per peer: what it says becomes events, what the machine tells goes out."""

    def __init__(
        self,
        shell: Shell,
        guard: Guard,
        secured: Secured | None,
        public: PublicAddress | None,
        ways: Callable[[str, str, str], None] | None,
    ) -> None:
        self._shell, self._guard, self._secured = shell, guard, secured
        self._public, self._ways = public, ways
        self._often = RateLimiter(*MESSAGES, _MOST_SPEAKERS)
        self._count = 0

    async def attach(self, caller: Party | None, context: ServicerContext[Any, Any]) -> None:
        self._count += 1
        self._shell.warm_up()  # somebody is here to be planned for
        stream = StreamId(f"{self._count} from {caller.subject if caller else context.peer()}")
        outbox = self._shell.outboxes[stream] = StreamOutbox()
        self._shell.post(StreamOpened(stream, PeerId(caller.subject) if caller else None))
        came = came_from(context.peer())
        reader = asyncio.create_task(self._read(stream, caller, came, outbox, context))

        def tell(ticket: str) -> bool:
            # Who does not read gets no tickets: what the machine tells it needs the room.
            if outbox.closed or len(outbox) > OUTBOX_MESSAGES // 4:
                return False
            return outbox.put(BrokerMessage(relayed=Relayed(ticket=ticket)))

        if self._secured is not None and caller is not None:
            self._secured.relay.here(caller.subject, tell)
        try:
            while (message := await outbox.take()) is not None:
                await context.write(message)
            if reader.done() and isinstance(why := reader.exception(), AdmissionError):
                await refuse(context, self._guard, why)
        finally:
            if self._secured is not None and caller is not None:
                self._secured.relay.gone(caller.subject, tell)
            reader.cancel()
            (end,) = await asyncio.gather(reader, return_exceptions=True)
            refused = isinstance(end, AdmissionError)
            if (
                isinstance(end, Exception) and not refused
            ):  # a bug of ours; it ends this stream only
                log.error("stream_failed stream=%s", stream, exc_info=end)
            self._ended(stream, "the connection broke")

    async def _read(
        self,
        stream: StreamId,
        caller: Party | None,
        came: str,
        outbox: StreamOutbox,
        context: ServicerContext[Any, Any],
    ) -> None:
        """Raises AdmissionError when the peer may be here no longer."""
        why = "the connection broke"
        try:
            while isinstance(data := await context.read(), bytes):
                if outbox.closed:
                    return
                await self._in_turn(caller)
                self._guard.still(caller)
                said = PeerMessage()  # of no kind, which the machine refuses
                if len(data) > MOST_SAID_BYTES:
                    self._shell.post(PeerSaid(stream, said, len(data)))
                    continue
                with suppress(MalformedError):
                    said = parsed(data, PeerMessage)
                if said.HasField("confirmed"):  # nothing to decide
                    if self._public is not None and caller is not None:
                        self._public.answered(caller.subject, said.confirmed)
                    continue
                if said.HasField("way"):
                    if self._ways is not None:
                        self._ways(said.way.multiaddr, came, caller.subject if caller else "")
                    continue
                if self._secured and caller is not None and said.HasField("hello"):
                    hello = said.hello
                    mine = hello.peer == caller.subject  # else it is refused, and nobody dialled
                    address = hello.address if mine else ""
                    reach = self._secured.reach
                    hello.address = await reach.checked(caller.subject, address, came)
                self._shell.post(PeerSaid(stream, said))
                if said.HasField("hello") and self._public is not None:
                    question = self._public.question()
                    if question is not None and not outbox.closed:
                        outbox.put(question)
            why = "its process ended it or its connection broke"
        finally:
            self._ended(stream, why)

    async def _in_turn(self, caller: Party | None) -> None:
        """Returns when one more message of its is not too many; HTTP/2 holds up the others."""
        while True:
            if caller is None or self._often.allowed(caller.subject, time.monotonic()):
                return
            await asyncio.sleep(_PAUSE_S)

    def _ended(self, stream: StreamId, why: str) -> None:
        outbox = self._shell.outboxes.pop(stream, None)
        if outbox is not None:
            outbox.close()
            self._shell.post(StreamClosed(stream, why))


class RunsService:
    """For clients: every call is one event, and its answer the machine's."""

    def __init__(self, shell: Shell, guard: Guard, public: PublicAddress | None) -> None:
        self._shell = shell
        self._guard = guard
        self._public = public

    async def submit(self, spec: RunSpec, caller: Party | None) -> Submitted:
        _check_size(spec)
        self._shell.warm_up()  # somebody wants something planned
        shell = self._shell
        refs = [ref for ref in blobs_of(spec) if HASH.fullmatch(ref.hash)]
        named = dict.fromkeys(ref.hash for ref in refs)
        run = asyncio.get_running_loop().run_in_executor  # the store may be busy with its disk
        missing = await run(shell.disk, shell.blobs.lacks, named)
        if not missing:
            missing = await run(shell.disk, lacking_shards, shell.blobs, spec)
        if missing:
            raise BlobStoreError(
                "NOT_FOUND",
                f"{len(missing)} blobs of the run are not here, the first {missing[0]}: "
                "upload them before the run is submitted",
            )
        # Peers and planner go by these: they read nothing that is larger than what is said here.
        sizes = shell.blobs.sizes(named)
        for ref in refs:
            if sizes.get(ref.hash, ref.size_bytes) != ref.size_bytes:
                raise BlobStoreError(
                    "INVALID_ARGUMENT",
                    f"blob {ref.hash} has {sizes[ref.hash]} bytes, and the run's spec says "
                    f"{ref.size_bytes}: expected the size that it was uploaded with",
                )
        by = caller.subject if caller else ""
        free = await shell.free()
        return await shell.ask(partial(RunSubmitted, spec=spec, by=by, free=free), Submitted)

    def of_run(
        self, wanted: Literal["cancel", "pause", "resume", "finish", "recall"]
    ) -> Callable[[RunRequest, Party | None], Awaitable[Message]]:
        """The call that wants this of a run."""

        async def call(named: RunRequest, caller: Party | None) -> Message:
            asked = partial(RunAsked, run=RunId(named.run), wanted=wanted, by=_whose(caller))
            return await self._shell.ask(asked, Message)

        return call

    async def choose(self, wanted: CohortChoice, caller: Party | None) -> RunState:
        asked = partial(CohortAsked, run=RunId(wanted.run), cohort=wanted.cohort, by=_whose(caller))
        return await self._shell.ask(asked, RunState)

    async def describe(self, _: DescribeRequest, caller: Party | None) -> Description:
        peer = caller.subject if caller and caller.role is PartyRole.PEER else ""
        answer = await self._shell.ask(partial(DescribeAsked, peer=peer), Description)
        if self._public is not None:
            answer.public.CopyFrom(self._public.describe())
        return answer

    async def preview(self, spec: RunSpec, caller: Party | None) -> PreviewAnswer:
        _check_size(spec)
        by = caller.subject if caller else ""
        wanted = await self._shell.ask(partial(PreviewAsked, spec=spec, by=by), PreviewWanted)
        return await self._shell.preview(wanted, by)

    async def resolve(self, wanted: DataRequest, caller: Party | None) -> DataAnswer:
        by = caller.subject if caller else ""
        asked = partial(DataAsked, name=wanted.name, options=wanted.options, by=by)
        return await self._shell.ask(asked, DataAnswer)

    async def watch(
        self, request: WatchRequest, caller: Party | None, context: ServicerContext[Any, Any]
    ) -> None:
        run, at, end = RunId(request.run), request.from_event, math.inf
        while at < end:
            self._guard.still(caller)
            # Nothing is queued for a slow watcher: it asks again from where it is.
            watched, news = await self._shell.watch(run, at, _whose(caller))
            if request.so_far:  # what comes while it is read is not waited for
                end = min(end, watched.numbered)
            for event in watched.events:
                if event.number < end:
                    self._guard.still(caller)
                    await context.write(event)
            at = watched.first + len(watched.events)
            if watched.over:
                return
            if not watched.events and at < end:
                with suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_S):
                        await news.wait()


def _whose(caller: Party | None) -> str:
    """Return the owner whose runs somebody may look into and end; empty: everybody's."""
    return caller.subject if caller and caller.role is not PartyRole.OPERATOR else ""


def _check_size(spec: RunSpec) -> None:
    """Before anything is looked at. Raises RejectedError."""
    try:
        check_size(spec)
    except RunSpecError as error:
        raise RejectedError("INVALID_ARGUMENT", str(error)) from None
