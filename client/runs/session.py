"""The Python client: submit a job, follow it, take its weights home.

    with shoal.connect("127.0.0.1:7077") as client:
        run = client.submit(shoal.Job(model=module, steps=300))
        run.wait()
        run.load_into(module)

A run goes on when the client leaves. Every call raises BrokerUnreachable when the broker does not
answer, and Refused when it says no.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...job import LIVE, Job
from ...net.identity.credential import Credential
from ...proto import broker_pb2
from ...proto.broker_pb2 import PreviewAnswer
from ..access import find_address, login
from ..errors import ClientError
from ..files.outside import check_outside
from ..files.records import check_output, write_run
from .broker_calls import BrokerCalls
from .run import Run

if TYPE_CHECKING:
    from ...broker.candidates import Rule
    from ...job.tables import Data
    from ..job_data import JobData
    from ..prepared import Prepared

__all__ = ["Client", "connect", "login"]

PREVIEW_S = 600.0
"""Deadline of a preview: it waits its turn behind the plans of runs."""
DATA_S = 660.0
"""Deadline of asking peers for their data: the broker waits for them for ten minutes."""


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


class Client(BrokerCalls):
    """A connection to one broker. `connect` makes one; a context manager closes it."""

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
        check_outside(job)
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
        from ...dag.ir.convert import graph_to_bytes
        from ..submission import draft  # needs torch
        from ..uploading import transfer

        spec, graph = draft(job, say, self._kept_by_peers)
        with self.translated():
            transfer(self.access, lambda blobs: blobs.store(graph_to_bytes(graph)))
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

    def run(self, run: str, to: Path | str = "runs/") -> Run:
        """A run by its id; `to` is the folder that holds the runs' folders. Raises Refused when
        the broker does not know it."""
        found = Run(self, run, to)
        found.state()
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
            if found.sidecars is not None:
                shutil.copytree(found.sidecars, run.folder / "sidecars")
        return run
