"""Settings of the broker's decisions."""

from __future__ import annotations

from dataclasses import dataclass, fields

__all__ = ["BrokerOptions"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BrokerOptions:
    """Every wait of the broker ends by one of these (I9). All in seconds unless said otherwise."""

    lease_s: float = 10.0
    """Silence after which a peer counts as lost: five heartbeats, and the default of files.md."""
    heartbeat_s: float = 2.0
    """How often a peer shall speak."""
    hello_s: float = 10.0
    """How long a new stream may stay without a Hello."""
    drained_s: float = 120.0
    """How long a peer may take to give up a run after Leave: its longest kernel and cleaning up."""
    build_s: float = 1800.0
    """How long fetching and building may take: 2 GB of weights over 10 Mbit/s; more of them get as
    much more time."""
    first_step_s: float = 600.0
    """Allowance without progress before a step was measured: warm-up, first data, slow links."""
    step_floor_s: float = 60.0
    """Least allowance without progress, whatever the median step says."""
    step_factor: float = 20.0
    """Allowance without progress, in medians of the measured steps (evaluations included)."""
    export_s: float = 3600.0
    """How long the upload of the weights may take: 4 GB over 10 Mbit/s; more as above."""
    takeovers: int = 3
    """How often one identity may change hands between live processes within the window."""
    takeover_window_s: float = 60.0
    """The window, and how long an identity is refused after it."""
    most_lead: int = 1024
    """Steps that a report may lie ahead of the last commit. Peers stay within a step or
    two of each other, but not their reports: those of one whose way to the broker is held up come
    as late as its lease allows, or all that it keeps at once (PeerOptions.reports)."""
    most_streams: int = 10_000
    """Streams at once."""
    most_waiting: int = 1_000
    """Runs that have not ended, at once."""
    most_waiting_of_one: int = 100
    """Of these, of one submitter: a search over a hundred settings, and nine others have room."""
    kept_events: int = 50_000
    """Events kept per run for watchers that come late."""
    kept_runs: int = 100
    """Ended runs that can still be watched and described; of more, the oldest of the submitter
    who has most of them goes."""
    subject_bytes: int = 128 << 20
    """What the runs of one subject may take of memory and journal, open and ended ones: specs,
    plans and histories. A spec has 2 to 20 KB and a day of steps about 10 MB."""
    kept_bytes: int = 1 << 30
    """The same of all runs together: eight such subjects. A journal has at most twice as much."""
    relays: bool = False
    """Whether peers that cannot be dialled are reached through the broker."""
    identities: bool = True
    """Whether peers have certificates; without them no sum can be masked."""
    data_s: float = 600.0
    """How long a peer may take to make the manifest of its own data: reading and hashing 100 GB."""
    probe_s: float = 5.0
    """How long a plan waits, after the last peer joined, for links to be measured; 0: no link ever
    is."""
    probe_bytes: int = 512 << 20
    """What probes may cost a peer's uplink in an hour, bytes: sixteen of the largest ones; a slow
    uplink has less (`broker/links/probing.py`)."""

    def __post_init__(self) -> None:
        if not self.probe_s >= 0:
            raise ValueError(f"broker option probe_s is {self.probe_s}: expected >= 0")
        for field in fields(self):
            if (
                field.name not in ("probe_s", "relays", "identities")
                and not getattr(self, field.name) > 0
            ):
                raise ValueError(
                    f"broker option {field.name} is {getattr(self, field.name)}: expected > 0"
                )
        if self.lease_s < 2 * self.heartbeat_s:
            raise ValueError(
                f"lease {self.lease_s} s with a heartbeat every {self.heartbeat_s} s: one late "
                "heartbeat would lose the peer; expected a lease of at least two heartbeats"
            )
