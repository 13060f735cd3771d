"""What one simulated run came to, as data; the JSON for programs has the same names."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ...net.finite import finite

__all__ = ["Summary", "names_of", "to_json", "unigram_entropy", "write_json", "write_whole"]


@dataclass(kw_only=True)
class Summary:
    """What one run measured. Losses in nats per token, times in seconds, sizes in bytes."""

    name: str
    world: str
    """In which world it ran, e.g. "real processes, loopback"."""
    seed: int
    job: Mapping[str, Any] = field(default_factory=dict)
    """As it was run, with the scenario's overrides."""
    setting: str = ""
    """SHA-256 of job, scenario, world and seed."""
    run: str = ""
    exit: int = 0
    error: str = ""
    peers: int = 0
    replicas: int = 1
    """That train apart, and meet in rounds."""
    stages: int = 0
    """Of a replica; of the one with the most."""
    holders: int = 0
    """Peers that hold a stage."""
    spares: tuple[str, ...] = ()
    params: int = 0
    operators: int = 0
    steps: int = 0
    loss_first: float | None = None
    loss_last: float | None = None
    eval_loss: float | None = None
    half_loss: float | None = None
    """Where microbatches left stages out: held-out loss of the model without `half_without`, at the
    end, beside `eval_loss`."""
    half_without: tuple[str, ...] = ()
    """Every second block that they may leave out."""
    half_missing: str = ""
    """Why peers could not compute that; empty: they did, or there was nothing to compute."""
    unigram_entropy: float | None = None
    max_loss_difference: float | None = None
    """Largest |loss - loss of the plain loop| over all steps; None when not verified."""
    verified_against: str = ""
    codecs: tuple[str, ...] = ()
    """The codecs of the plan, each once."""
    lossy: tuple[str, ...] = ()
    """Codecs of the plan that do not give back every bit, and strategies that take something else
    than the sum of gradients: with them the losses are not meant to equal those of the plain
    loop."""
    loss_ratio: float | None = None
    """With lossy codecs and verified: mean loss of the last tenth of the steps over that of the
    plain loop."""
    tokens_per_s: float = 0.0
    tokens: int = 0
    """Trained on, in the steps that counted."""
    price: float | None = None
    """The price of the peers' hours, in the scenario's currency, as it says when they come and go;
    None: it names no price."""
    step_s: float = 0.0
    """Median over all steps but the first; of several replicas each one's own, and the mean over
    the steps that they made. `predicted_step_s` likewise."""
    cores: int = 0
    compute_share: float = 0.0
    """Computing time of all peers over cores times elapsed time, between 0 and 1."""
    predicted_step_s: float = 0.0
    """What the plan expected of a step; 0: nothing."""
    bubble: float = 0.0
    """Mean over peers of the share of a step in which they do not compute, as the plan expected."""
    bottlenecks: tuple[str, ...] = ()
    """What the predicted step hangs on, the heaviest first."""
    against: dict[str, float] = field(default_factory=dict)
    """Predicted step seconds of what the plan was compared with, by name; 0: out of memory."""
    predicted_batch_s: float = 0.0
    """Of several replicas, what was predicted of a batch of all of them, exchanges included; what
    they are compared with takes as long for a batch. 0: of one replica, or not known."""
    against_measured: dict[str, float] = field(default_factory=dict)
    """The same, measured in this run; a name that is in both is shown as measured."""
    held_back_by: str = ""
    """What the time hangs on, as the trace has it."""
    bubble_measured: float | None = None
    """As `bubble`, of the trace's typical steps."""
    goodput: float | None = None
    """Share of the time, from the first step's begin, that went into steps that counted; 0 to 1."""
    bytes_on_wire: int = 0
    """Encoded bytes of the frames of all steps between peers, the whole run."""
    bytes_beside: Mapping[str, int] = field(default_factory=dict)
    """By role, those of frames that are no step's: snapshots and probes."""
    links: tuple[Mapping[str, Any], ...] = ()
    """What compression did, by link, role and codec, what saved most first: source, destination,
    role, codec, bytes, dense_bytes (the whole run), saved_s (as predicted), encode_s (of both
    ends), error (relative L2, the mean of the samples). Empty: nothing was compressed."""
    busiest_link: str = ""
    busiest_link_use: float | None = None
    """What crossed it over what it could carry in the typical steps, 0 to 1."""
    retransmitted_bytes: int | None = None
    oversubscribed: float | None = None
    """Seconds of computing that the processes wanted over what the cores had."""
    timing_valid: bool | None = None
    """Whether times of this run are measurements; None: they are modelled, or nobody checked."""
    timing_reason: str = ""
    """Why they are none."""
    checks: int | None = None
    """How often an invariant was looked at."""
    violations: int = 0
    rerouted: bool = False
    """Whether microbatches leave stages out or visit them in another order: the plain loop does
    not."""
    visits: tuple[int, ...] = ()
    """Where they do: by stage, microbatches of a step that visit it."""
    skipped_steps: int = 0
    """Under fp16: steps whose gradients overflowed, so that nothing was updated; of federated
    training, clients' own."""
    loss_scale: float = 0.0
    """Of the last step; 0: losses are not scaled."""
    inexact_from: int = 0
    """The first step after a lost stage was made anew from its neighbours, or after which
    microbatches take other routes; 0: none."""
    faults_injected: int | None = None
    faults_fired: int = 0
    detect_s: float | None = None
    """From a loss to when the broker knew; the mean, as the next two."""
    restore_s: float | None = None
    """From then to when all holders stood again."""
    replay_s: float | None = None
    """Spent on steps, or parts of them, that had been done before."""
    samples_lost: int | None = None
    samples_doubled: int | None = None
    event_log: str = ""
    """SHA-256 of the trace."""
    virtual_s: float | None = None
    """How long the run took in the world's own time, where that is virtual."""
    losses: tuple[float, ...] = ()
    """The loss of every step; of several replicas none, as each makes its own (`rounds`)."""
    evaluations: tuple[tuple[int, float], ...] = ()
    """(step, held-out loss)."""
    rounds: tuple[Mapping[str, Any], ...] = ()
    """Of several replicas, each round that was committed: round, attempt, members and left_out
    (replica, steps, samples, loss: the mean of its local steps), joined, step, samples,
    samples_committed, loss, drift, sent_bytes, waited_s (the longest that a replica did behind its
    last local step), exchange_s (of that, the exchange; 0: not known), seconds. Of federated
    training also clients_asked, clients_came and clients_lost, clients_moved (root mean square of
    the 2-norm of a client's move), mean_moved, and alike: the latter by the former; staleness, of
    clients that may begin with older versions, as pairs of versions made since and clients;
    chosen_by, of a job with a rule for who is in a round: "rule", or "run" where it had said
    nothing; skipped, under fp16, local steps of clients that overflowed, where some did;
    where noise hides clients clients_moved is 0, alike None, and mean_moved of the noisy mean, and
    there are noisy_sums, made until then, and the epsilon that they come to."""
    local_losses: Mapping[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)
    """By number of a replica: (samples that were committed then, loss) of each local step that
    counted."""
    held_out: tuple[tuple[int, float], ...] = ()
    """Of several replicas: (samples in the version, held-out loss)."""
    course: tuple[Mapping[str, float | int | None], ...] = ()
    """What the run had come to at every step or round, and what that had taken (`Course`)."""
    clients: tuple[Mapping[str, float | int], ...] = ()
    """Of each version that was evaluated on clients' own held-out samples: `round`, how many
    `clients`, and of the loss and each metric `clients_NAME` over all samples, and as
    `clients_NAME_least`, `_median` and `_most` those of the clients' own means."""
    baselines: tuple[Mapping[str, float | int | str], ...] = ()
    """Of federated training what it is held against, as `client_baselines` gives it: `name`, and
    numbers as in `clients`."""
    step_seconds: tuple[float, ...] = ()
    """The seconds of every step."""
    memory: tuple[Mapping[str, Any], ...] = ()
    """By peer: peer, predicted_bytes, peak_bytes, limit_bytes; 0: not known."""
    places: tuple[Mapping[str, Any], ...] = ()
    """name, at (latitude and longitude in degrees, or None), peers (names)."""
    seconds: float = 0.0
    """From the first process's start to the last one's end."""
    again: str = ""
    weights: str = ""
    report: str = ""
    """Path of the page."""


def unigram_entropy(pieces: Iterable[bytes]) -> float:
    """Entropy in nats of the byte frequencies: what a model without context reaches at best."""
    counts: Counter[int] = Counter()
    for piece in pieces:
        counts.update(piece)
    total = sum(counts.values())
    return -sum(n / total * math.log(n / total) for n in counts.values())


def names_of(found: Mapping[str, Any]) -> dict[str, str]:
    """Return which numbers one of `Summary.clients` or `Summary.baselines` has, what they are
    called by their keys."""
    return {key: key.removeprefix("clients_") for key in found if f"{key}_least" in found}


def to_json(s: Summary) -> str:
    """The figures as one JSON object; null for what is no finite number."""
    return json.dumps(finite(asdict(s)), indent=1, allow_nan=False)


def write_json(s: Summary, path: Path) -> None:
    """Writes a summary as JSON to a file, which is there whole or not at all."""
    write_whole(to_json(s) + "\n", path)


def write_whole(text: str, path: Path) -> None:
    """Writes a file, which is there whole or not at all."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)
