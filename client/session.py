"""The Python client: submit a job, follow it, take its weights home.

    with shoal.connect("127.0.0.1:7077") as client:
        run = client.submit(shoal.Job(model=module, steps=300))
        run.wait()
        run.load_into(module)

A run goes on when the client leaves. Every call raises BrokerUnreachable when the broker does not
answer, and Refused when it says no.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

import grpc

from ..job import Job
from ..job.settings import plain
from ..net.identity.enroll import BrokerAwayError
from ..proto import broker_pb2
from ..proto.admission_pb2 import (
    Invitation,
    InviteRequest,
    KickRequest,
    PageKey,
    PageRequest,
)
from ..proto.admission_pb2_grpc import AdmissionStub
from ..proto.broker_pb2 import (
    Description,
    PreviewAnswer,
    Recalled,
    RunEvent,
    RunState,
)
from ..proto.broker_pb2_grpc import RunsStub
from .access import AccessError, access_to, find_address, login
from .keeper import Keeper
from .records import Recorder, files_of, local_folder, read_run, write_run

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..job.tables import Data
    from .submission import JobData, Prepared

__all__ = [
    "BrokerUnreachable",
    "Client",
    "ClientError",
    "Refused",
    "Run",
    "RunFailed",
    "connect",
    "login",
]

PATIENCE_S = 60.0
"""How long a stream that broke is dialled again before the broker counts as gone."""
CALL_S = 30.0
"""Deadline of one short call."""
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
ENDED = (broker_pb2.DONE, broker_pb2.FAILED, broker_pb2.CANCELLED)


class ClientError(Exception):
    """What a client cannot change by trying again. The subclasses say whose doing it was."""


class BrokerUnreachable(ClientError, ConnectionError):  # noqa: N818 (says what happened)
    """Nobody answers at the address, or no longer."""


class Refused(ClientError):  # noqa: N818 (says what happened)
    """The broker understood and said no; the message is its reason."""


class RunFailed(ClientError):  # noqa: N818 (says what happened)
    """The run ended without its result; the message is the broker's reason."""


class RecordError(ValueError):
    """What this machine kept of a run is not there."""


def connect(address: str | None = None) -> Client:
    """A client of the broker at `address` (default: see `find_address`).

    Raises BrokerUnreachable when nobody answers there, Refused without a credential for it.
    """
    client = Client(find_address(address))
    try:
        client.describe()
    except BaseException:
        client.close()
        raise
    return client


class Client:
    """A connection to one broker. `connect` makes one; a context manager closes it."""

    def __init__(self, address: str) -> None:
        self.address = address
        try:
            self.access = access_to(address)
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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

    def submit(self, job: Job, say: Callable[[str], None] = lambda line: None) -> Run:
        """Captures the job's model, uploads what the peers need, and starts the run.

        `say` gets a line for people before each part that takes time. Raises ValueError for a job
        that cannot run (SettingsError, ModelError, CaptureError, DataError), Refused when the
        broker does not take it.
        """
        from .submission import prepare  # needs torch

        with prepare(job, say, self._kept_by_peers) as prepared:
            return self.submit_prepared(prepared, job.output.to, say)

    def preview(self, job: Job, say: Callable[[str], None] = lambda line: None) -> PreviewAnswer:
        """What would run where if the job were submitted now; starts nothing. Raises as `submit`
        does."""
        from .submission import draft, upload_graph  # needs torch

        spec, graph = draft(job, say, self._kept_by_peers)
        with self.translated():
            upload_graph(self.access, graph)
            found: PreviewAnswer = self._runs.Preview(spec, timeout=PREVIEW_S)
        return found

    def _kept_by_peers(self, data: Data) -> JobData:
        """The manifest of data that peers keep, made by those that have it. Raises Refused for a
        name that nobody here has, and where its owner does not allow it."""
        from ..peer.data.manifest import Manifest
        from .submission import JobData, transfer

        wanted = broker_pb2.DataRequest(name=data.source, options=json.dumps(plain(data)))
        with self.translated():
            found = self._runs.Resolve(wanted, timeout=DATA_S)
            text = transfer(self.access, lambda blobs: blobs.fetch(found.manifest.hash))
        return JobData(manifest=Manifest.from_json(text), local=tuple(found.local))

    def submit_prepared(
        self, prepared: Prepared, to: Path | str, say: Callable[[str], None] = lambda line: None
    ) -> Run:
        """Uploads and starts a job that is captured; its outputs go to a folder in `to`."""
        files_of(str(to))
        from .submission import upload

        with self.translated():
            spec = upload(self.access, prepared, say)
            submitted = self._runs.Submit(spec, timeout=CALL_S)
        run = Run(self, submitted.run, to)
        prepared.keep(run.folder, run.id)
        return run

    def run(self, run: str, to: Path | str = "runs/") -> Run:
        """A run by its id; `to` is the folder that holds the runs' folders. Raises Refused when
        the broker does not know it."""
        found = Run(self, run, to)
        found.state()
        return found

    def watch(self, run: str, from_event: int) -> Iterator[RunEvent]:
        """One stream of events; ends when the run or the stream ends. See `Run.watch`."""
        with self.translated():
            yield from self._runs.Watch(broker_pb2.WatchRequest(run=run, from_event=from_event))

    def cancel(self, run: str) -> RunState:
        with self.translated():
            state: RunState = self._runs.Cancel(broker_pb2.RunRequest(run=run), timeout=CALL_S)
        return state

    def pause(self, run: str) -> RunState:
        """It stops between two steps and gives its peers back. Raises Refused where it cannot be
        paused."""
        with self.translated():
            state: RunState = self._runs.Pause(broker_pb2.RunRequest(run=run), timeout=CALL_S)
        return state

    def unpause(self, run: str) -> RunState:
        """A paused run goes on. Raises Refused for one that is not."""
        with self.translated():
            state: RunState = self._runs.Resume(broker_pb2.RunRequest(run=run), timeout=CALL_S)
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
        must have ended.

        Raises SettingsError for a key that may not, CheckpointError, Refused.
        """
        from .resume import prepared

        spec, job, tokens = prepared(
            self, source, tuple(changes), job, local_folder(to or "runs"), say
        )
        with self.translated():
            submitted = self._runs.Submit(spec, timeout=CALL_S)
        run = Run(self, submitted.run, to or job.output.to)
        record = {
            "run": run.id,
            "job": plain(job),
            "folder": str(job.folder.resolve()),
            "tokens_per_step": tokens,
            "data": spec.data.hash,
            "from": {"run": spec.resumed.run, "step": spec.resumed.step},
        }
        write_run(run.folder, record)
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
        from ..net.blobs_client import BlobTransferError

        try:
            yield
        except grpc.RpcError as error:
            code = error.code().name if isinstance(error, grpc.Call) else "UNKNOWN"
            detail = (error.details() if isinstance(error, grpc.Call) else None) or str(error)
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
            return BrokerUnreachable(
                f"the broker at {self.address} does not answer ({detail}): is it running "
                "(`shoal broker`), and is the address right?"
            )
        if code == "UNIMPLEMENTED":
            return Refused(
                f"the broker at {self.address} knows no such call: it was started with --insecure "
                "and has no identities, or it is of another version of shoal"
            )
        if code in REFUSALS:
            return Refused(f"the broker at {self.address} refused: {detail}")
        return None


class Run:
    """One run, seen from a client. `folder` holds what this client keeps of it."""

    def __init__(self, client: Client, run: str, to: Path | str) -> None:
        self.client = client
        self.id = run
        self.folder = local_folder(to) / run
        self._weights: list[broker_pb2.WeightFile] | None = None

    def __repr__(self) -> str:
        return f"<Run {self.id} at {self.client.address}>"

    def state(self) -> RunState:
        """As it is now. Raises Refused when the broker does not know the run."""
        for state in self.client.describe().runs:
            if state.run == self.id:
                return state
        raise Refused(
            f'the broker at {self.client.address} knows no run "{self.id}": see shoal runs'
        )

    def watch(self, from_event: int = 0) -> Iterator[RunEvent]:
        """Every event from a number on, until the run has ended.

        A stream that breaks is opened again from the event after the last one, for PATIENCE_S
        without any event; then BrokerUnreachable is raised.
        """
        gone_since: float | None = None
        pause_s = 0.2
        while True:
            try:
                for event in self.client.watch(self.id, from_event):
                    from_event, gone_since, pause_s = event.number + 1, None, 0.2
                    yield event
                if self.state().phase in ENDED:  # the broker ends the stream of an ended run
                    return
            except BrokerUnreachable:
                gone_since = gone_since or time.monotonic()
                if time.monotonic() - gone_since > PATIENCE_S:
                    raise
            time.sleep(pause_s)  # a client waits for people's sake, not for the protocol's
            pause_s = min(2.0, 2 * pause_s)

    def wait(self) -> RunState:
        """Blocks until the run has ended, and records its steps in `folder`.

        Raises RunFailed when it failed or was cancelled.
        """
        recorder = self.recorder()
        state = RunState()
        with Keeper(self) as keeper:
            try:
                for event in self.watch():
                    if event.HasField("step"):
                        recorder.add(event.step)
                    elif event.HasField("state"):
                        state = event.state
                    keeper.see(event)
            finally:
                recorder.close()
        return self.checked(state)

    def checked(self, state: RunState) -> RunState:
        """The final state of a run that is done; raises RunFailed for any other."""
        if state.phase != broker_pb2.DONE:
            phase = broker_pb2.Phase.Name(state.phase).lower()
            why = state.reason.text or "no reason was given"
            raise RunFailed(
                f"run {self.id} {phase} after {state.step} of {state.steps} steps: {why}"
            )
        return state

    def recorder(self) -> Recorder:
        """Writes this run's steps into `folder`."""
        return Recorder(self.folder, int(read_run(self.folder).get("tokens_per_step", 0)))

    @property
    def submitted_here(self) -> bool:
        """Whether `folder` knows it; a mere watcher gets no checkpoints."""
        return bool(read_run(self.folder))

    @property
    def outputs(self) -> str:
        """Where its checkpoints go: `folder`, or a folder at the URL that its job names."""
        to = read_run(self.folder).get("job", {}).get("output", {}).get("to", "")
        return f"{to.rstrip('/')}/{self.id}" if "://" in to else str(self.folder)

    def keep_checkpoint(self) -> str:
        """Writes the newest checkpoint into `outputs`, and removes the oldest beyond `output.keep`;
        returns its folder. Raises ClientError, OSError."""
        from . import checkpoints

        found = self.client.recall(self.id)
        if not found.HasField("checkpoint"):
            raise RunFailed(f"run {self.id} has no checkpoint")
        record = read_run(self.folder)
        with self.client.translated():
            url = checkpoints.keep(
                self.client.access, found, self.outputs, str(record.get("folder", "."))
            )
        checkpoints.forget_old(self.outputs, json.loads(found.spec.job)["output"]["keep"])
        return url

    def cancel(self) -> RunState:
        """Ends it; returns its state."""
        return self.client.cancel(self.id)

    def weights(self) -> dict[str, Tensor]:
        """The exported weights under the names of the user's own module.

        Raises RunFailed when the run ended without any.
        """
        from .weights import fetch  # needs torch

        if self._weights is None:
            for event in self.watch():
                if event.HasField("weights"):
                    self._weights = list(event.weights.files)
        if self._weights is None:
            self.checked(self.state())
            raise RunFailed(f"run {self.id} has no exported weights")
        with self.client.translated():
            return fetch(self.client.access, self._weights)

    def load_into(self, module: nn.Module) -> None:
        """Copies the weights into a live module, tied ones once. Raises ModelError when the names
        do not fit."""
        from .models import load_named

        load_named(module, self.weights())

    def export(
        self, path: Path | str | None = None, format: Literal["", "safetensors", "hf"] = ""
    ) -> Path:
        """Writes the weights and returns where: one safetensors file, or with format "hf" a folder
        that `from_pretrained` takes. Default: into `folder`, in the job's format, and also to the
        URL that its job names, if it does.

        Raises ExportError for "hf" where nothing was kept at submission.
        """
        from .weights import write

        chosen = format or read_run(self.folder).get("job", {}).get("output", {}).get("format", "")
        target = None if path is None else Path(path)
        written = write(
            self.weights(), self.folder, target, "hf" if chosen == "hf" else "safetensors"
        )
        if path is None and "://" in self.outputs:
            from fsspec.core import url_to_fs

            files, root = url_to_fs(self.outputs)
            files.makedirs(root, exist_ok=True)
            files.put(str(written), f"{root}/{written.name}", recursive=written.is_dir())
        return written

    def evaluate(
        self, module: nn.Module | None = None, batches: int | None = None
    ) -> dict[str, float]:
        """Held-out loss and metrics of the exported weights, computed here by the plain module:
        `module` (its weights are replaced), or what the job's factory makes.

        Raises ValueError where this run was not submitted from `folder`, RunFailed without weights.
        """
        from . import evaluate, models

        record = read_run(self.folder)
        if not record:
            raise RecordError(
                f"there is no {self.folder}/run.json: evaluate where the run was submitted from, "
                "or pass the folder that holds the runs' folders (--to)"
            )
        job = Job(**record["job"], module=module, folder=record["folder"])
        if job.data.where == "peer":
            raise RecordError(
                f"the held-out data of run {self.id} stays with its peer: see the evaluations of "
                f"the run itself (`shoal watch {self.id}`)"
            )
        job = replace(job, model=replace(job.model, weights="init"))  # others come in a moment
        built = models.build(job)
        models.load_named(built, self.weights())
        with self.client.translated():
            return evaluate.held_out(self.client.access, built, job, record["data"], batches)
