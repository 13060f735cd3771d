"""`shoal sim`: a job in one of the three worlds, then a report.

real      the daemons as processes of this machine       cluster.py, shaped/
virtual   their machines and real tensors, modelled time sim/modelled/modelled.py
ghost     the same with hashes instead of tensors        sim/modelled/modelled.py
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from ..broker.events import PreviewWanted
from ..broker.membership.speeds import speeds_of
from ..client.front import SimulationFront
from ..dag.ir.graph import Graph
from ..job.settings import plain
from ..job.words import counted_in
from ..net.interrupts import uninterrupted
from ..peer.host.profile import speeds_to_proto
from ..planner.answers.preview import preview_wanted
from ..planner.base.interface import PeerOffer
from ..proto.broker_pb2 import PeerState, PreviewAnswer, Profile, RunSpec
from ..proto.graph_pb2 import CORE, FULL
from .cluster import run_cluster
from .live import LiveState, LiveView, mode
from .modelled.modelled import run_modelled
from .options import Setting, SimOptions
from .processes import ClusterError
from .report import Summary, measured_summary, render, to_json, write_json, write_report
from .scenario.mishaps import Expectations
from .scenario.scenario import Scenario
from .shaped.run import run_shaped
from .trace import Trace

__all__ = ["SimOptions", "missed", "preview_cluster", "simulate", "simulated"]

STDOUT = Path("-")
"""As the file for JSON: it is printed in place of the text."""
LOOPBACK = "real processes, loopback"
WORLDS = {
    "real": "real processes, shaped links",
    "virtual": "virtual time, real tensors",
    "ghost": "virtual time, hashes for tensors",
}


def simulate(options: SimOptions, front: SimulationFront) -> int:
    """Runs it and prints the report; returns the exit code. Else as `simulated`."""
    summary = simulated(options, front)
    print(to_json(summary) if options.json == STDOUT else render(summary))
    return summary.exit


def simulated(options: SimOptions, front: SimulationFront) -> Summary:
    """Runs it and writes the files that were asked for; returns what it came to. Leaves no process
    and no file behind but these, also when KeyboardInterrupt ends it. Raises ValueError for a
    scenario or a job that cannot run, OSError for a file that cannot be read or written."""
    options = options.completed()
    setting = Setting.of(options)
    summary = Summary(
        name=setting.name,
        world=WORLDS[setting.world] if setting.scenario is not None else LOOPBACK,
        seed=setting.seed,
        job=plain(setting.job),
        setting=setting.digest(),
        peers=setting.peers,
        cores=os.cpu_count() or 1,
        again=options.again(),
    )
    began = time.monotonic()
    for path in (options.json, options.report and options.report / "summary.json"):
        if path is not None and path != STDOUT:  # better now than after the run
            _check_writable(path)
    how = mode(quiet=options.quiet, json=False, terminal=sys.stderr.isatty())
    trace, report = Trace(), None
    with ExitStack() as cleanup:
        folder = options.keep
        if folder is None:
            with uninterrupted():
                folder = Path(tempfile.mkdtemp(prefix="shoal-sim-"))
                cleanup.callback(_remove, folder)
        title = f"{setting.name} · seed {setting.seed} · {summary.world}"
        learns = setting.world != "ghost"
        state = LiveState(title, learns=learns, counted=counted_in(summary.job))
        shown = cleanup.enter_context(LiveView(state, how))
        try:
            if setting.scenario is None:
                run_cluster(setting, options, front, folder, summary, shown)
            else:
                if setting.scenario.left_out:
                    shown.say(setting.scenario.left_out)
                run = run_shaped if setting.world == "real" else run_modelled
                trace, report = run(setting, options, front, folder, summary, shown)
        except (ClusterError, ConnectionError) as error:
            summary.exit, summary.error = 1, str(error)
    summary = _judged(setting, summary, trace)
    summary.seconds = time.monotonic() - began
    if options.report is not None:
        summary.report = str(options.report / "report.html")
        network = None if setting.scenario is None else setting.scenario.network()
        write_report(options.report, summary, trace, report, network, names=shown.view.names)
    if options.json is not None and options.json != STDOUT:
        write_json(summary, options.json)
    return summary


def _judged(setting: Setting, summary: Summary, trace: Trace) -> Summary:
    """The summary with what the trace knows, and against what the scenario expects."""
    scenario = setting.scenario
    if scenario is not None:
        members: dict[str, list[str]] = {}
        for peer in scenario.peers:
            members.setdefault(peer.place, []).append(peer.name)
        places = scenario.places
        summary.places = tuple(
            {"name": name, "at": places[name].at if name in places else None, "peers": peers}
            for name, peers in members.items()
        )
    if trace.spans:
        network = None if scenario is None else scenario.network()
        summary = measured_summary(summary, trace, network)
    if scenario is not None and not summary.exit:
        expect = scenario.expect
        if setting.world == "ghost":  # hashes: no losses, and one that is wrong has failed already
            expect = replace(expect, loss_below=None, max_loss_difference=None)
        short = "; ".join(missed(expect, summary))
        summary.exit, summary.error = int(bool(short)), short
    return summary


def _check_writable(path: Path) -> None:
    """Raises OSError when no file can be written there; makes its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    problem = errno.EISDIR if path.is_dir() else errno.EACCES
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise OSError(problem, os.strerror(problem), str(path))


def _remove(folder: Path) -> None:
    with uninterrupted():
        shutil.rmtree(folder, ignore_errors=True)


# The preview over a scenario's peers and links, without a broker.


def preview_cluster(scenario: Scenario, spec: RunSpec, graph: Graph) -> PreviewAnswer:
    """What would run where if the peers of the scenario had joined: a speed that no device has is
    clamped and noted as for a peer that reports it."""
    network = scenario.network()
    states, offers, notes = [], [], list[str]()
    for offer, up, down in zip(scenario.offers(), network.up, network.down, strict=True):
        profile = _profile(offer, float(up), float(down))
        speeds, unlikely = speeds_of(profile)
        notes += unlikely
        offers.append(replace(offer, speeds=speeds, flops_per_s=speeds.product))
        states.append(PeerState(peer=offer.peer, profile=profile, membership="pool"))
    wanted = PreviewWanted(spec, tuple(states), tuple(offers), network, tuple(notes))
    return preview_wanted(wanted, graph)


def _profile(offer: PeerOffer, up: float, down: float) -> Profile:
    return Profile(
        name=offer.name,
        place=offer.place,
        device_memory_bytes=offer.device_memory_bytes,
        host_memory_bytes=offer.host_memory_bytes,
        flops_per_s=offer.flops_per_s,
        operator_set=CORE if offer.operator_set == "core" else FULL,
        speeds=None if offer.speeds is None else speeds_to_proto(offer.speeds),
        up_bytes_per_s=up,
        down_bytes_per_s=down,
    )


# Whether a simulation reached what its scenario expects.


def missed(expect: Expectations, summary: Summary) -> Iterator[str]:
    """A sentence for each expectation that was not met, with what came instead."""
    error = None
    if summary.step_s and summary.predicted_step_s:
        error = abs(summary.predicted_step_s / summary.step_s - 1)
    for name, came, most in (
        ("loss_below", summary.loss_last, True),
        ("max_loss_difference", summary.max_loss_difference, True),
        ("step_time_error_at_most", error, True),
        ("goodput_at_least", summary.goodput, False),
    ):
        wanted = getattr(expect, name)
        if wanted is None:
            continue
        if came is None:
            yield f"[expect] {name} = {wanted:g}, and nothing measured it"
        elif not (came <= wanted if most else came >= wanted) or (
            name == "loss_below" and came == wanted
        ):
            yield f"[expect] {name} = {wanted:g}, and it came to {came:.4g}"
