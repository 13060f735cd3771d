"""One run, seen from a client: followed, waited for, its weights and checkpoints brought home."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ...broker.round_rows import RoundRows
from ...job import LIVE, Job
from ...net.file_names import is_file_name
from ...net.interrupts import uninterrupted
from ...net.web.places import Origin, origin_of
from ...proto import broker_pb2
from ...proto.broker_pb2 import RunState
from ..errors import ClientError, RecordError, Refused, RunFailed
from ..files.hub import push
from ..files.records import Recorder, local_folder, output_of, own_job, read_run, write_run
from .broker_calls import BrokerCalls
from .callbacks import Callbacks, Logs, loggers, on_screen
from .history import History
from .readable import Event, Reached, phase, readable
from .weights import CheckpointWriter

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ...broker.candidates import Rule
    from ...proto.broker_pb2 import RunEvent
    from ..files.exported import ExportedTensors
    from .callbacks import Callback
    from .half import HalfModel

__all__ = ["Run"]


class Run:
    """One run, seen from a client. `folder` holds what this client keeps of it."""

    def __init__(self, client: BrokerCalls, run: str, to: Path | str) -> None:
        if not is_file_name(run):
            raise Refused(f"{run!r:.80} is no id of a run: see shoal runs")
        self.client = client
        self.id = run
        self.folder = local_folder(to) / run
        self._weights: broker_pb2.Weights | None = None

    def __repr__(self) -> str:
        return f"<Run {self.id} at {self.client.address}>"

    def state(self) -> RunState:
        """As it is now. Raises Refused when the broker does not know the run."""
        return self.client.state(self.id)

    def watch(self, from_event: int = 0) -> Iterator[RunEvent]:
        """Every event from a number on, until the run has ended. Raises BrokerUnreachable where the
        broker has not answered for a minute."""
        return self.client.follow(self.id, from_event)

    def so_far(self) -> Iterator[RunEvent]:
        """Every event that is kept, to the newest one. Raises BrokerUnreachable when the stream
        breaks."""
        return self.client.watch(self.id, 0, so_far=True)

    def events(self, *, so_far: bool = False) -> Iterator[Event]:
        """Every event as a record with plain fields (`shoal.client.Step`, `Reached`, …) until the
        run has ended, or to the newest one. Raises BrokerUnreachable."""
        played = RoundRows(keep=False)
        for event in self.so_far() if so_far else self.watch():
            yield readable(event, played.see(event))

    def now(self) -> Reached:
        """Return phase and steps as they are now. Raises Refused when the broker does not know the
        run."""
        return phase(self.state())

    def history(self) -> History:
        """Return the committed steps until now, a row each, with the columns of metrics.jsonl: what
        the folder has, and what the broker still knows."""
        made = History(self.folder)
        for event in self.so_far():
            made.see(event)
        return made

    def wait(self, *callbacks: Callback, bar: bool | None = None) -> Reached:
        """Block until the run has ended, and record its steps in `folder`; return its end. What
        happens is told to `callbacks`, one after the other. bar: whether a progress bar is shown;
        None: on a terminal and in a notebook.

        Raises RunFailed when it failed or was cancelled, and whatever a callback raises.
        """
        shown = [*callbacks]
        if on_screen() if bar is None else bar:
            from .bar import Bar  # which is slow to import, and imports this

            shown.append(Bar())
        told = Callbacks(self, shown)
        try:
            recorder, played = self.recorder(*callbacks), RoundRows(keep=False)
            state = RunState()
            with CheckpointWriter(self.checkpoint_keeper) as keeper:
                try:
                    for event in self.watch():
                        with uninterrupted():
                            if event.HasField("state"):
                                state = event.state
                            round = played.see(event)
                            recorder.see(event, round)
                            keeper.see(event)
                        if shown:
                            told.happened(readable(event, round))
                finally:
                    recorder.close()
            end = phase(state)
            told.ended(end)
        finally:
            told.close()
        self.checked(state)
        return end

    def checked(self, state: RunState) -> RunState:
        """The final state of a run that is done; raises RunFailed for any other."""
        if state.phase != broker_pb2.DONE:
            phase = broker_pb2.Phase.Name(state.phase).lower()
            why = state.reason.text or "no reason was given"
            raise RunFailed(
                f"run {self.id} {phase} after {state.step} of {state.steps} steps: {why}"
            )
        return state

    def recorder(self, *callbacks: Callback) -> Recorder:
        """Writes this run's steps into `folder`; callbacks, and what `[log]` of its job names, get
        the rows."""
        to = Logs(self, loggers(self), callbacks)
        return Recorder(self.folder, int(read_run(self.folder).get("tokens_per_step", 0)), to)

    @property
    def checkpoint_keeper(self) -> Callable[[], str] | None:
        """What keeps a checkpoint of it; None for a mere watcher, whose `folder` does not know
        it."""
        return self.keep_checkpoint if read_run(self.folder) else None

    @property
    def outputs(self) -> str:
        """Where its checkpoints go: `folder`, or a folder at the URL that its job names."""
        to = output_of(read_run(self.folder)).to
        return f"{to.rstrip('/')}/{self.id}" if "://" in to else str(self.folder)

    @property
    def _own_origins(self) -> frozenset[Origin]:
        """Hosts that its job names for weights, where it was said on this machine."""
        job = own_job(read_run(self.folder))
        names = job.model.weight_names if job is not None else ()
        return frozenset(filter(None, map(origin_of, names)))

    def keep_checkpoint(self) -> str:
        """Writes the newest checkpoint into `outputs`, and removes the oldest beyond `output.keep`;
        returns its folder. Raises ClientError, OSError."""
        from . import checkpoints

        found = self.client.recall(self.id)
        if not found.HasField("checkpoint"):
            raise RunFailed(f"run {self.id} has no checkpoint")
        with self.client.translated():
            url = checkpoints.keep(self.client.access, found, self.outputs, self._own_origins)
        checkpoints.forget_old(self.outputs, Job.from_json(found.spec.job).output.keep)
        return url

    def cancel(self) -> RunState:
        """Ends it; returns its state."""
        return self.client.cancel(self.id)

    def finish(self) -> RunState:
        """Have it end early and in good order, as if its job wanted no more rounds: with the round
        under way ("federated"), or the one behind it ("local", "gossip"). Its last version is
        evaluated, saved and exported. Returns its state; asked again, and behind the last round, it
        changes nothing. Raises Refused for a run without rounds, and one that was cancelled or has
        failed."""
        return self.client.finish(self.id)

    def select(self, rule: Rule, say: Callable[[str], None] | None = None) -> None:
        """Have a rule choose the clients of each round to come, in a thread of this process, until
        the run has ended: it gets `shoal.Candidates` when a round has begun, and returns the
        numbers of the next one's clients. What comes too late, is no cohort or raises is said to
        `say` (default: on stderr), and the round is of the clients that its number says; and so are
        all while nobody runs a rule. Raises Refused for a run that was submitted without one."""
        from . import selecting

        selecting.begin(self.client, self.id, rule, say or selecting.to_stderr)

    def weights(self) -> dict[str, Tensor]:
        """The exported weights under the names of the user's own module, all in memory; of a run
        that goes on, once it has ended.

        Raises RunFailed when the run ended without any.
        """
        with self._brought() as found:
            return dict(found)

    @contextmanager
    def _brought(self, *, trained: bool = False) -> Iterator[ExportedTensors]:
        """The exported weights, read as they are asked for; `trained`: without what was frozen.
        Raises RunFailed."""
        from .weights import brought  # needs torch

        exported = self._exported()
        if trained:
            exported = broker_pb2.Weights(step=exported.step, files=exported.files)
        with (
            self.client.translated(),
            brought(self.client.access, exported, self.folder, self._own_origins) as found,
        ):
            yield found

    def adapter(self) -> dict[str, Tensor]:
        """The trained weights of a run with an adapter, under peft's names; the frozen ones are not
        fetched. Raises RunFailed when the run ended without any, RecordError where nothing was
        kept at submission."""
        from ..models.adapters import NAMES, of_adapter

        kept = self.folder / "sidecars" / NAMES
        if not kept.is_file():
            raise RecordError(
                f"there is no {kept}, which says which tensors are the adapter's: export where the "
                'run was submitted from, or with format "safetensors"'
            )
        with self._brought(trained=True) as found:
            return of_adapter(found, json.loads(kept.read_text(encoding="utf-8")))

    def _merged(self) -> nn.Module:
        """The model of a run with an adapter, without it: its weights are merged, by peft's own
        rules, in the module that the job's factory makes here. Raises RecordError for a live
        one."""
        from ..models import models
        from ..models.adapters import merged

        own = own_job(read_run(self.folder))
        if own is None or own.model.factory.startswith(LIVE):
            raise RecordError(
                'format "hf" is the merged model, and nothing here says how to make the module: '
                "load the weights into yours (run.load_into(module)), merge and save it "
                "(merge_and_unload().save_pretrained(folder)); or export the adapter alone, with "
                'format "peft"'
            )
        built = models.build(replace(own, model=replace(own.model, weights="init")))
        self.load_into(built)
        return merged(built)

    def _exported(self) -> broker_pb2.Weights:
        """What the broker says of the run's weights, once it has ended. Raises RunFailed."""
        if self._weights is None:
            for event in self.watch():
                if event.HasField("weights"):
                    self._weights = event.weights
        if self._weights is None:
            self.checked(self.state())
            raise RunFailed(f"run {self.id} has no exported weights")
        return self._weights

    def load_into(self, module: nn.Module) -> None:
        """Copies the weights into a live module, tied ones once; one tensor at a time. Raises
        ModelError when the names do not fit."""
        from ..models.state_dicts import load_named

        with self._brought() as found:
            load_named(module, found)

    def export(
        self, path: Path | str | None = None, format: Literal["", "safetensors", "hf", "peft"] = ""
    ) -> Path:
        """Writes the weights and returns where: a safetensors file, or the index of several where
        one would be too large; with format "hf" a folder that `from_pretrained` takes, in which an
        adapter is merged, or with "peft" one with the adapter alone, as `PeftModel.from_pretrained`
        takes it. Default: into `folder`, in the job's format, and also to the URL that its job
        names, and to the Hub that it wants it pushed to, if it does. Cut off and called again, it
        goes on where it was.

        Raises ExportError for "hf" and "peft" where nothing was kept at submission, and for a path
        among the files that the run began with; PushError where all is written and not pushed.
        """
        from ..files.weight_writer import files_of
        from .weights import check_beside, write

        kind = format or output_of(read_run(self.folder)).format
        target = None if path is None else Path(path)
        if target is not None:
            check_beside(own_job(read_run(self.folder)), target)
        if kind == "peft":
            written = write(self.adapter(), self.folder, target, kind)
        elif kind == "hf" and (self.folder / "sidecars" / "adapter_names.json").is_file():
            model: Any = self._merged()
            written = write(model.state_dict(), self.folder, target, kind)
            if hasattr(model, "config"):
                model.config.save_pretrained(written)
        else:
            with self._brought() as found:
                written = write(found, self.folder, target, kind)
        if path is None and "://" in self.outputs:
            from fsspec.core import url_to_fs

            files, root = url_to_fs(self.outputs)
            files.makedirs(root, exist_ok=True)
            for one in files_of(written):
                files.put(str(one), f"{root}/{one.name}", recursive=one.is_dir())
        if path is None and (to := output_of(read_run(self.folder)).push):
            push(to, files_of(written), f"run {self.id}")
        return written

    def evaluate_half(self) -> HalfModel | None:
        """Held-out loss of the exported weights without every second block that microbatches may
        leave out, computed by the broker's peers in a run of its own; `run.json` of a run that was
        submitted here has it then. None of a run in which they left none out, and of one without
        evaluations. Raises RunFailed without weights, or where no peers were free."""
        from .half import evaluated_half, last_evaluation

        if (whole := last_evaluation([*self.so_far()])) is None:
            return None
        found = evaluated_half(self.client, self.id, self._exported(), whole.loss)
        if record := read_run(self.folder):
            write_run(self.folder, record | {"half_model": asdict(found)})
        return found

    def half_or_reason(self) -> HalfModel | str | None:
        """What `evaluate_half` returns, or in words why it cannot be had."""
        try:
            return self.evaluate_half()
        except (ClientError, ValueError) as error:
            return str(error)

    def evaluate_there(self, batches: int | None = None) -> dict[str, float]:
        """Held-out loss and metrics of the exported weights, computed by the broker's peers in a
        run of its own; nothing of the model comes here. Raises RunFailed without weights, and
        RecordError for a model with running statistics."""
        from .evaluate import evaluated_there

        return evaluated_there(self.client, self.id, self._exported(), batches)

    def evaluate(
        self,
        module: nn.Module | None = None,
        batches: int | None = None,
        job: Job | None = None,
    ) -> dict[str, float]:
        """Held-out loss and metrics of the exported weights, computed here by the plain module:
        `module` (its weights are replaced), or what the factory of `job` makes (default: of the job
        that was submitted from here; of somebody else's run there is none).

        Raises ValueError where nothing says how to make the module, SettingsError for a job of
        another model, data or batch, RunFailed without weights.
        """
        from ..models import models
        from . import evaluate

        job, data = evaluate.evaluated(self.client, self.id, self.folder, module, job)
        if job.data.where == "peer":
            raise RecordError(
                f"the held-out data of run {self.id} stays with its peer: see the evaluations of "
                f"the run itself (`shoal watch {self.id}`)"
            )
        job = replace(job, model=replace(job.model, weights="init"))  # others come in a moment
        built = models.build(job)
        self.load_into(built)
        with self.client.translated():
            plain = models.on_cpu(built)
            return evaluate.held_out(self.client.access, plain, job, data, batches)
