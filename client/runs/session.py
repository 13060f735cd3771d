"""The Python client: submit a job, follow it, take its weights home.

    with shoal.connect("127.0.0.1:7077") as client:
        run = client.submit(shoal.Job(model=module, steps=300))
        run.wait()
        run.load_into(module)

A run goes on when the client leaves. Every call raises BrokerUnreachable when the broker does not
answer, and Refused when it says no.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

import grpc

from ...job import LIVE, Job
from ...net.grpc_quirks import in_words
from ...net.identity.credential import Credential
from ...net.identity.enroll import BrokerAwayError
from ...net.interrupts import elsewhere
from ...net.printable import printable
from ...proto import broker_pb2
from ...proto.admission_pb2 import (
    Invitation,
    InviteRequest,
    KickRequest,
    PageKey,
    PageRequest,
)
from ...proto.admission_pb2_grpc import AdmissionStub
from ...proto.broker_pb2 import (
    Cohort,
    Description,
    PreviewAnswer,
    Recalled,
    RunEvent,
    RunSpec,
    RunState,
)
from ...proto.broker_pb2_grpc import RunsStub
from ..access import AccessError, access_of_peer, access_to, find_address, login, named_in
from ..errors import BrokerUnreachable, ClientError, Refused
from ..files.hub import can_push
from ..files.records import check_output, write_run
from .callbacks import check_logs
from .run import ENDED, Run

if TYPE_CHECKING:
    from ...broker.candidates import Rule
    from ...job.tables import Data
    from ..job_data import JobData
    from ..submission import Prepared

__all__ = ["Client", "connect", "login"]

CALL_S = 30.0
"""Deadline of one short call."""
SO_FAR_S = 120.0
"""Deadline of all events of a run: 50,000 of a few KiB."""
PREVIEW_S = 600.0
"""Deadline of a preview: it waits its turn behind the plans of runs."""
DATA_S = 660.0
"""Deadline of asking peers for their data: the broker waits for them for ten minutes."""
REFUSALS = (
    "FAILED_PRECONDITION",
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "UNAUTHENTICATED",
)
"""gRPC statuses by which a broker says no."""


def connect(address: str | None = None, lent: Credential | None = None) -> Client:
    """A client of the broker at `address` (default: see `find_address`). `lent`: a credential of a
    peer of this host, to look with, in place of the user's.

    Raises BrokerUnreachable when nobody answers there, Refused without a credential for it.
    """
    client = Client(find_address(address), lent)
    try:
        client.describe()
    except BaseException:
        client.close()
        raise
    return client


class Client:
    """A connection to one broker. `connect` makes one; a context manager closes it."""

    def __init__(self, address: str, lent: Credential | None = None) -> None:
        self.address = address
        try:
            self.access = access_to(address) if lent is None else access_of_peer(address, lent)
        except AccessError as error:
            raise Refused(str(error)) from None
        except BrokerAwayError as error:
            raise BrokerUnreachable(str(error)) from None
        self.channel = self.access.channel(
            [
                ("grpc.max_receive_message_length", 64 * 2**20),
                ("grpc.initial_reconnect_backoff_ms", 200),
                ("grpc.max_reconnect_backoff_ms", 2000),
                # A broker that vanished without a word is noticed within 20 s: watching has no
                # deadline of its own.
                ("grpc.keepalive_time_ms", 10_000),
                ("grpc.keepalive_timeout_ms", 10_000),
                ("grpc.http2.ping_timeout_ms", 10_000),
                ("grpc.http2.max_pings_without_data", 0),
            ],
        )
        self._runs = RunsStub(self.channel)  # type: ignore[no-untyped-call]
        self._admission = AdmissionStub(self.channel)  # type: ignore[no-untyped-call]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Client of {self.address}>"

    def close(self) -> None:
        self.channel.close()

    def describe(self) -> Description:
        """Peers and runs as they are now."""
        with self.translated():
            found: Description = self._runs.Describe(broker_pb2.DescribeRequest(), timeout=CALL_S)
        return found

    def is_open(self, run: str) -> bool:
        """Whether it is a run of this broker that has not ended."""
        return any(s.run == run and s.phase not in ENDED for s in self.describe().runs)

    def names(self) -> dict[str, str]:
        """What people call the peers that have joined, by id."""
        return {p.peer: p.profile.name or p.peer for p in self.describe().peers}

    def submit(
        self,
        job: Job,
        say: Callable[[str], None] = lambda line: None,
        select: Rule | None = None,
    ) -> Run:
        """Captures the job's model, uploads what the peers need, and starts the run.

        `say` gets a line for people before each part that takes time. `select`: a rule for who is
        in a round of federated training, in place of the job's `sync.select` (`Run.select`).
        Raises ValueError for a job that cannot run (SettingsError, ModelError, CaptureError,
        DataError), Refused when the broker does not take it.
        """
        from ..submission import prepare  # needs torch
        from .selecting import rule_of

        if not isinstance(job, Job):
            raise TypeError(f"submit got a {type(job).__name__}: expected shoal.Job(...)")
        check_output(job.output.to)
        check_logs(job)
        can_push(job)
        rule = select or rule_of(job)
        if select is not None:
            name = getattr(select, "__qualname__", type(select).__qualname__)
            job = replace(job, sync=replace(job.sync, select=LIVE + name))
        with prepare(job, say, self._kept_by_peers) as prepared:
            run = self.submit_prepared(prepared, job.output.to, say)
        if rule is not None:
            run.select(rule)
        return run

    def preview(self, job: Job, say: Callable[[str], None] = lambda line: None) -> PreviewAnswer:
        """What would run where if the job were submitted now; starts nothing. Raises as `submit`
        does."""
        from ..submission import draft  # needs torch
        from ..uploading import upload_graph

        spec, graph = draft(job, say, self._kept_by_peers)
        with self.translated():
            upload_graph(self.access, graph)
            found: PreviewAnswer = self._runs.Preview(spec, timeout=PREVIEW_S)
        return found

    def _kept_by_peers(self, data: Data) -> JobData:
        """The manifest of data that peers keep, made by those that have it. Raises Refused for a
        name that nobody here has, and where its owner does not allow it."""
        from ...net.blobs.client import BlobClient
        from ...peer.data.manifest import Manifest
        from ..job_data import JobData
        from ..uploading import transfer

        wanted = broker_pb2.DataRequest(name=data.source, options=data.way)
        with self.translated():
            found = self._runs.Resolve(wanted, timeout=DATA_S)
            hashes = dict.fromkeys((found.manifest.hash, *(ref.hash for ref in found.all)))

            async def fetched(blobs: BlobClient) -> list[bytes]:
                return [await blobs.fetch(hash_) for hash_ in hashes]

            made = tuple(map(Manifest.from_json, transfer(self.access, fetched)))
        return JobData(manifest=made[0], local=tuple(found.local), of_clients=made)

    def submit_prepared(
        self, prepared: Prepared, to: Path | str, say: Callable[[str], None] = lambda line: None
    ) -> Run:
        """Uploads and starts a job that is captured; its outputs go to a folder in `to`."""
        from ..uploading import upload

        with self.translated():
            spec = upload(self.access, prepared, say)
        run = Run(self, self.submit_spec(spec), to)
        with self._cancelled_unless(run):
            prepared.keep(run.folder, run.id)
        return run

    @contextmanager
    def _cancelled_unless(self, run: Run) -> Iterator[None]:
        """Cancels a run of which this machine can keep nothing: whoever is told that it failed
        would start it again, beside itself."""
        try:
            yield
        except OSError:
            with suppress(ClientError):
                run.cancel()
            raise

    def submit_spec(self, spec: RunSpec) -> str:
        """Starts a run whose blobs lie with the broker; returns its id. Raises Refused."""
        with self.translated():
            submitted = self._runs.Submit(spec, timeout=CALL_S)
        return str(submitted.run)

    def run(self, run: str, to: Path | str = "runs/") -> Run:
        """A run by its id; `to` is the folder that holds the runs' folders. Raises Refused when
        the broker does not know it."""
        found = Run(self, run, to)
        found.state()
        return found

    def watch(self, run: str, from_event: int, *, so_far: bool = False) -> Iterator[RunEvent]:
        """One stream of events; ends when the run or the stream ends. See `Run.watch`. `so_far`: it
        ends with the newest event, within SO_FAR_S."""
        wanted = broker_pb2.WatchRequest(run=run, from_event=from_event, so_far=so_far)
        with self.translated():
            stream = self._runs.Watch(wanted, timeout=SO_FAR_S if so_far else None)
            yield from elsewhere(stream, stream.cancel)

    def cancel(self, run: str) -> RunState:
        with self.translated():
            state: RunState = self._runs.Cancel(broker_pb2.RunRequest(run=run), timeout=CALL_S)
        return state

    def pause(self, run: str) -> RunState:
        """Have it stop between two steps and give its peers back. Raises Refused where it cannot be
        paused."""
        with self.translated():
            state: RunState = self._runs.Pause(broker_pb2.RunRequest(run=run), timeout=CALL_S)
        return state

    def unpause(self, run: str) -> RunState:
        """A paused run goes on. Raises Refused for one that is not."""
        with self.translated():
            state: RunState = self._runs.Resume(broker_pb2.RunRequest(run=run), timeout=CALL_S)
        return state

    def finish(self, run: str) -> RunState:
        """Have a run in rounds end early, in good order. Raises Refused as `Run.finish` does."""
        with self.translated():
            state: RunState = self._runs.Finish(broker_pb2.RunRequest(run=run), timeout=CALL_S)
        return state

    def choose(self, run: str, cohort: Cohort) -> RunState:
        """Have the next round that begins be of these clients. Raises Refused where it cannot be,
        or has begun."""
        wanted = broker_pb2.CohortChoice(run=run, cohort=cohort)
        with self.translated():
            state: RunState = self._runs.Choose(wanted, timeout=CALL_S)
        return state

    def recall(self, run: str) -> Recalled:
        """What was submitted, and the newest checkpoint that lies with the broker. Raises Refused
        for another's run."""
        with self.translated():
            found: Recalled = self._runs.Recall(broker_pb2.RunRequest(run=run), timeout=CALL_S)
        return found

    def go_on(
        self,
        source: str,
        changes: Iterable[str] = (),
        job: Job | None = None,
        to: Path | str | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> Run:
        """A new run that goes on from the newest checkpoint of a run, or from one in a folder
        (`source`: an id, or a path or URL), with some keys changed ("train.lr=1e-4"), or with
        another job. Model, data, seed and the division of a batch may not change, and a run here
        must have ended. Of a run that was not submitted from this machine, factory, data and
        outputs are those of `job`: without it there are none here, and outputs go to runs/.

        Raises SettingsError for a key that may not, CheckpointError, Refused.
        """
        from .resume import prepared

        found = prepared(self, source, tuple(changes), job, to, say)
        check_output(found.to)
        run = Run(self, self.submit_spec(found.spec), found.to)
        with self._cancelled_unless(run):
            write_run(run.folder, found.record(run.id))
        return run

    def invite(self, role: str, uses: int, lasts_s: float) -> Invitation:
        """A new token for a "peer", "submitter" or "operator"; for operators. Raises Refused."""
        request = InviteRequest(role=role, uses=uses, lasts_s=lasts_s)
        with self.translated():
            found: Invitation = self._admission.Invite(request, timeout=CALL_S)
        return found

    def kick(self, subject: str) -> str:
        """Refuses a peer or person from now on, for good; returns what it was. For operators.
        Raises Refused."""
        with self.translated():
            kicked = self._admission.Kick(KickRequest(subject=subject), timeout=CALL_S)
        return str(kicked.role)

    def page(self, lasts_s: float) -> PageKey:
        """A key that opens the broker's page for reading, for so long. Raises Refused."""
        with self.translated():
            found: PageKey = self._admission.Page(PageRequest(lasts_s=lasts_s), timeout=CALL_S)
        return found

    @contextmanager
    def translated(self) -> Iterator[None]:
        """gRPC's errors as ours; the only place that knows its status codes."""
        from ...net.blobs.client import BlobTransferError

        try:
            yield
        except grpc.RpcError as error:
            code = error.code().name if isinstance(error, grpc.Call) else "UNKNOWN"
            detail = (error.details() if isinstance(error, grpc.Call) else None) or str(error)
            detail = printable(detail)
            if (translated := self._error(code, detail)) is None:
                raise
            raise translated from None
        except BlobTransferError as error:
            if (translated := self._error(error.code, error.reason)) is None:
                raise
            raise translated from None

    def _error(self, code: str, detail: str) -> ClientError | None:
        """What a gRPC status means to a client; None for what should not happen."""
        if code in ("UNAVAILABLE", "DEADLINE_EXCEEDED"):
            if why := self.access.why_not():
                return BrokerUnreachable(f"no connection to the broker at {self.address}: {why}")
            return BrokerUnreachable(
                f"the broker at {self.address} does not answer ({in_words(detail)}): is it running "
                f"(`shoal broker`), and is the address right{named_in(self.address)}? Another one: "
                "--broker HOST:PORT, or SHOAL_BROKER"
            )
        if code == "UNIMPLEMENTED":
            return Refused(
                f"the broker at {self.address} knows no such call: it was started with --insecure "
                "and has no identities, or it is of another version of shoal"
            )
        if code in REFUSALS:
            return Refused(f"the broker at {self.address} refused: {detail}")
        return None
