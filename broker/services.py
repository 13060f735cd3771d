"""The gRPC services of the broker: Attach, Runs and Blobs; Admission stands in `admitting.py`.

What all calls have in common is in `calls.py`, and blobs are in `blobs_service.py`.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import grpc
import grpc.aio
from google.protobuf.message import Message

from ..dag.plan import PeerId
from ..net.grpc_quirks import take_first
from ..net.identity.names import Party, Role
from ..proto.broker_pb2 import (
    BlobPiece,
    BlobQuery,
    BlobRange,
    BrokerMessage,
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
from ..proto.common_pb2 import BlobRef
from .admission import AdmissionError
from .blobs import BlobError
from .blobs_service import BlobsService
from .calls import FIRST_S, REFUSALS, MalformedError, checked, parser, refuse, unary_handler
from .events import (
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
from .guard import Guard
from .public import PublicAddress
from .reach import Reach
from .relay import Relay
from .shell import OUTBOX_MESSAGES, Outbox, Shell
from .wish import HASH

if TYPE_CHECKING:
    from grpc.aio import ServicerContext

__all__ = ["MOST_MESSAGE_BYTES", "add_services", "server_options"]

MOST_MESSAGE_BYTES = 16 << 20
"""Largest gRPC message: a plan of 65,536 microbatches, or four pieces of a blob."""
log = logging.getLogger(__name__)


def server_options() -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", MOST_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MOST_MESSAGE_BYTES),
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
    guard: Guard | None = None,
    relay: Relay | None = None,
    reach: Reach | None = None,
    public: PublicAddress | None = None,
    *,
    ways: Callable[[str], None] | None = None,
) -> None:
    """Registers all three services. `guard` None: everybody may call everything; `reach` None:
    addresses are taken as the peers say them; `public` None: none was named; `ways` gets the ways
    into the swarm that peers offer."""
    guard = guard or Guard()
    attach = AttachService(shell, guard, relay, reach, public, ways)
    runs = RunsService(shell, guard, public)
    blobs = BlobsService(shell, guard)
    unary = partial(unary_handler, guard)
    table: dict[str, dict[str, Any]] = {
        "Attach": {
            "Attach": grpc.stream_stream_rpc_method_handler(
                attach.attach, parser(PeerMessage), BrokerMessage.SerializeToString
            )
        },
        "Runs": {
            "Submit": unary("Runs.Submit", runs.submit, RunSpec, Submitted),
            "Cancel": unary("Runs.Cancel", runs.of_run("cancel"), RunRequest, RunState),
            "Pause": unary("Runs.Pause", runs.of_run("pause"), RunRequest, RunState),
            "Resume": unary("Runs.Resume", runs.of_run("resume"), RunRequest, RunState),
            "Recall": unary("Runs.Recall", runs.of_run("recall"), RunRequest, Recalled),
            "Describe": unary("Runs.Describe", runs.describe, DescribeRequest, Description),
            "Preview": unary("Runs.Preview", runs.preview, RunSpec, PreviewAnswer),
            "Resolve": unary("Runs.Resolve", runs.resolve, DataRequest, DataAnswer),
            "Watch": grpc.unary_stream_rpc_method_handler(
                runs.watch, parser(WatchRequest), RunEvent.SerializeToString
            ),
        },
        "Blobs": {
            "Store": grpc.stream_unary_rpc_method_handler(
                blobs.store, parser(BlobPiece), BlobRef.SerializeToString
            ),
            "Fetch": grpc.unary_stream_rpc_method_handler(
                blobs.fetch, parser(BlobRange), BlobPiece.SerializeToString
            ),
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
        relay: Relay | None,
        reach: Reach | None,
        public: PublicAddress | None,
        ways: Callable[[str], None] | None,
    ) -> None:
        self._shell = shell
        self._public = public
        self._ways = ways
        self._guard = guard
        self._relay = relay
        self._reach = reach
        self._count = 0

    async def attach(
        self, messages: AsyncIterator[PeerMessage | MalformedError], context: ServicerContext
    ) -> AsyncIterator[BrokerMessage]:
        try:
            caller = self._guard.caller("Attach.Attach", context)
        except AdmissionError as error:
            await take_first(context, FIRST_S)
            await refuse(context, self._guard, error)
        self._count += 1
        self._shell.warm_up()  # somebody is here to be planned for
        stream = StreamId(f"{self._count} from {caller.subject if caller else context.peer()}")
        outbox = self._shell.outboxes[stream] = Outbox()
        self._shell.post(StreamOpened(stream, PeerId(caller.subject) if caller else None))
        reader = asyncio.create_task(self._read(stream, caller, outbox, messages))

        def tell(ticket: str) -> bool:
            # Who does not read gets no tickets: what the machine tells it needs the room.
            if outbox.closed or len(outbox) > OUTBOX_MESSAGES // 4:
                return False
            return outbox.put(BrokerMessage(relayed=Relayed(ticket=ticket)))

        if self._relay is not None and caller is not None:
            self._relay.here(caller.subject, tell)
        try:
            while (message := await outbox.take()) is not None:
                yield message
        finally:
            if self._relay is not None and caller is not None:
                self._relay.gone(caller.subject, tell)
            reader.cancel()
            (end,) = await asyncio.gather(reader, return_exceptions=True)
            if isinstance(end, Exception):  # a bug of ours; it ends this stream only
                log.error("stream_failed stream=%s", stream, exc_info=end)
            self._ended(stream, "the connection broke")

    async def _read(
        self,
        stream: StreamId,
        caller: Party | None,
        outbox: Outbox,
        messages: AsyncIterator[PeerMessage | MalformedError],
    ) -> None:
        why = "the connection broke"
        try:
            async for message in messages:
                if outbox.closed:
                    return
                # A malformed message becomes one of no kind, which the machine refuses.
                said = PeerMessage() if isinstance(message, MalformedError) else message
                if said.HasField("confirmed"):  # nothing to decide
                    if self._public is not None and caller is not None:
                        self._public.answered(caller.subject, said.confirmed)
                    continue
                if said.HasField("way"):
                    if self._ways is not None:
                        self._ways(said.way.multiaddr)
                    continue
                if self._reach is not None and said.HasField("hello"):
                    hello = said.hello
                    hello.address = await self._reach.checked(hello.peer, hello.address)
                self._shell.post(PeerSaid(stream, said))
                if said.HasField("hello") and self._public is not None:
                    question = self._public.question()
                    if question is not None and not outbox.closed:
                        outbox.put(question)
            why = "its process ended it or its connection broke"
        finally:
            self._ended(stream, why)

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
        self._shell.warm_up()  # somebody wants something planned
        shell = self._shell
        named = [ref.hash for ref in _blobs_of(spec) if HASH.fullmatch(ref.hash)]
        run = asyncio.get_running_loop().run_in_executor  # the store may be busy with its disk
        missing = await run(shell.disk, shell.blobs.lacks, named)
        if missing:
            raise BlobError(
                "NOT_FOUND",
                f"{len(missing)} blobs of the run are not here, the first {missing[0]}: "
                "upload them before the run is submitted",
            )
        by = caller.subject if caller else ""
        answer: Submitted = await shell.ask(lambda request: RunSubmitted(request, spec, by))
        return answer

    def of_run(
        self, wanted: Literal["cancel", "pause", "resume", "recall"]
    ) -> Callable[[RunRequest, Party | None], Awaitable[Message]]:
        """The call that wants this of a run."""

        async def call(named: RunRequest, caller: Party | None) -> Message:
            run = RunId(named.run)
            by = caller.subject if caller and caller.role is not Role.OPERATOR else ""
            answer: Message = await self._shell.ask(
                lambda request: RunAsked(request, run, wanted, by)
            )
            return answer

        return call

    async def describe(self, _: DescribeRequest, caller: Party | None) -> Description:
        answer: Description = await self._shell.ask(DescribeAsked)
        if self._public is not None:
            answer.public.CopyFrom(self._public.describe())
        return answer

    async def preview(self, spec: RunSpec, caller: Party | None) -> PreviewAnswer:
        wanted: PreviewWanted = await self._shell.ask(lambda request: PreviewAsked(request, spec))
        return await self._shell.preview(wanted, caller.subject if caller else "")

    async def resolve(self, wanted: DataRequest, caller: Party | None) -> DataAnswer:
        by = caller.subject if caller else ""
        answer: DataAnswer = await self._shell.ask(
            lambda request: DataAsked(request, wanted.name, wanted.options, by)
        )
        return answer

    async def watch(
        self, wanted: WatchRequest | MalformedError, context: ServicerContext
    ) -> AsyncIterator[RunEvent]:
        try:
            caller = self._guard.caller("Runs.Watch", context)
            request = checked(wanted)
            run, at, end = RunId(request.run), request.from_event, math.inf
            while at < end:
                self._guard.still(caller)
                # Nothing is queued for a slow watcher: it asks again from where it is.
                watched, news = await self._shell.watch(run, at)
                if request.so_far:  # what comes while it is read is not waited for
                    end = min(end, watched.numbered)
                for event in watched.events:
                    if event.number < end:
                        yield event
                at = watched.first + len(watched.events)
                if watched.over:
                    return
                if not watched.events and at < end:
                    await news.wait()
        except REFUSALS as error:
            await refuse(context, self._guard, error)


def _blobs_of(spec: RunSpec) -> Iterator[BlobRef]:
    yield spec.graph
    if spec.HasField("core_graph"):
        yield spec.core_graph
    if spec.HasField("data"):
        yield spec.data
    for file in spec.weights:
        yield file.blob
    for saved in spec.resumed.files:
        yield saved.blob
