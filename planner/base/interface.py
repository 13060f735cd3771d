"""What a planner gets and gives; every scheduler stands behind this page.

A planner is a pure function: the same request gives the same plan, and a search counts iterations,
never seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ...dag.analysis.beside import beside_data
from ...dag.cost.cost import OperatorCost, cost
from ...dag.cost.network import Network, uniform
from ...dag.cost.speed import Speeds
from ...dag.ir.graph import Graph, OperatorSet
from ...dag.plan.plan import PeerId, Plan, ScheduleName
from ...dag.plan.report import PlanWithReport

__all__ = [
    "CODED_ROLES",
    "DEFAULT_FLOPS_PER_S",
    "UNKNOWN_BYTES_PER_S",
    "UNKNOWN_LATENCY_S",
    "CodecOptions",
    "NoPlan",
    "PeerOffer",
    "PlanRequest",
    "Planner",
    "PlannerOptions",
    "without_last_digits",
]

CODED_ROLES = ("activation", "activation_grad", "sync")
"""Roles of frames whose codecs are part of a plan."""
DEFAULT_FLOPS_PER_S = 1e10
"""What a peer is taken for that says nothing of its speed: one old CPU core."""
UNKNOWN_LATENCY_S = 0.02
UNKNOWN_BYTES_PER_S = 1.25e7
"""What links are taken for while none is known: 100 Mbit/s within a continent."""


class NoPlan(ValueError):  # noqa: N818 (an answer: there is none)
    """Raised where peers cannot run a job. The text names the resource that is short, and by
    how much.

    `code`: "memory" and "peers" can be healed by more or other peers, "model" and "plan" cannot.
    `short_bytes`: of device memory, the least that more peers would have to bring; 0: not known.
    """

    def __init__(self, reason: str, code: str = "plan", short_bytes: int = 0) -> None:
        super().__init__(reason)
        self.reason = reason
        self.code = code
        self.short_bytes = short_bytes


@dataclass(frozen=True, slots=True)
class PeerOffer:
    """A peer that a plan may use, in the order of joining."""

    peer: PeerId
    name: str = ""
    place: str = ""
    device_memory_bytes: int = 0
    host_memory_bytes: int = 0
    flops_per_s: float = 0.0
    """Measured or stated speed in fp32; 0: unknown."""
    operator_set: OperatorSet = "full"
    reachable: bool = True
    """Whether other peers can dial it."""
    speeds: Speeds | None = None
    """By class of work; None: only `flops_per_s` is known."""
    learned: float = 1.0
    """In `speeds`: how many times slower than it says, as steps have shown."""
    host: str = ""
    """The same for peers on one machine, which share its cores; empty: alone."""
    cores: float = 0.0
    """What the CPU cores of the machine compute together, counted in threads alone on it;
    0: unknown, or it does not compute on them."""
    threads: int = 0
    """CPU threads of one action; 0: it does not compute on the CPU."""
    accelerator: bool = False
    """Whether the device's memory is its own: what rounds keep is in the host's then."""
    manifests: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Manifests of its own data, by hash, each with the inputs of the model that it keeps."""
    blended: frozenset[str] = frozenset()
    """Those of which sums with products may leave (dag/analysis/beside.py)."""

    def keeps(self, manifest: str) -> tuple[str, ...] | None:
        """The inputs whose data stays with it; None: it does not have that data."""
        return dict(self.manifests).get(manifest)

    @property
    def pace(self) -> Speeds:
        """Speeds of the peer, as far as they are known."""
        return self.speeds or Speeds.of_flops(self.flops_per_s or DEFAULT_FLOPS_PER_S)

    def __str__(self) -> str:
        return self.name or self.peer


@dataclass(frozen=True, kw_only=True, slots=True)
class CodecOptions:
    """The part of a job's `[codec]` that a planner reads. By role "none", "adatopk", "auto" or the
    text of a codec for all links."""

    activation: str = "none"
    activation_grad: str = "none"
    sync: str = "none"
    """Of parameter gradients, among holders of a stage and of a tied parameter."""
    ratio: float = 100.0
    """How many times fewer bytes "adatopk" sends on the slowest link."""
    error_budget: float = 0.0
    """Relative L2 error that "auto" may make in a tensor that crosses a link."""
    feedback: str = "ef"
    """Lossy codecs of `sync` keep what they did not send for the next step ("ef"), of momentum
    ("dgc") or updates ("ahead") in place of gradients, or not ("none"); or they send changes
    against what both ends have ("ef21")."""

    def of(self, role: str) -> str:
        """Return what is asked for a role of the wire; "none" for one that a plan has no
        say in."""
        return str(getattr(self, role)) if role in CODED_ROLES else "none"

    @property
    def asked(self) -> bool:
        """Whether anything may be encoded."""
        return (self.activation, self.activation_grad, self.sync) != ("none",) * 3


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannerOptions:
    """The part of a job's `[plan]`, `[train]` and `[codec]` that a planner reads."""

    scheduler: str = "auto"
    """Name of the planner."""
    stages: int | None = None
    """Number of stages of each pipeline; None: the planner chooses."""
    pipelines: int | None = None
    """Number of pipelines; None: the planner chooses."""
    schedule: ScheduleName | Literal["auto"] = "auto"
    """Order of forward and backward; "auto": the planner chooses."""
    in_flight: int | None = None
    """Microbatches that a holder keeps at once, forward begun to backward ended; None: the planner
    chooses, by memory."""
    recompute: bool | None = None
    """Whether stages compute their forward again; None: the planner chooses, stage by stage."""
    swaps: bool = False
    """Whether stages change places (`planner/schedulers/swapped.py`)."""
    skip: float | None = 0.0
    """The most of the model's blocks that a microbatch leaves out, 0 to 0.5; None: the planner
    chooses (`planner/skipping/`)."""
    reorder: bool = False
    """Whether neighbouring stages may change places in a microbatch."""
    full_steps: tuple[int, int] | None = None
    """(before, since): steps of the run below the one and from the other on visit all stages in
    order, whatever `skip` and `reorder` say; None: none do."""
    stochastic_depth: bool = False
    """Whether what a stage adds is scaled by how often it is visited."""
    optimizer_slots: int = 2
    """Numbers of optimizer state per trainable number, at most: AdamW 2, SGD with momentum 1."""
    state_bytes: int = 8
    """Bytes of them, and of what else is kept: AdamW in fp32 8, in bf16 4, in 8 bits 2."""
    in_8_bits: bool = False
    """Whether moments are, with scales beside them, and those of small parameters not."""
    whole_parameters: bool = False
    """Whether the optimizer has to have parameters whole, so that the head is not split."""
    round_bytes: int = 0
    """Bytes of each trained number that rounds between replicas keep on the device beside that."""
    exchange_bytes: int = 0
    """Bytes of each while a round is exchanged and no step is made; 0: there are none."""
    norm: bool = True
    """Whether a step has to know the global norm of its gradients, or to end for all at once: they
    are clipped by it, a step whose gradients overflow is skipped by all, or a lost stage may be
    made from what others have after the same step."""
    collective: str = "auto"
    """By what the holders of a stage add up gradients; "auto": the planner chooses."""
    strategy: str = "mean"
    """What they make of them before and after, as plans name it, where the job names a method."""
    codecs: CodecOptions = CodecOptions()
    """What may be compressed, and how."""

    @property
    def reroutes(self) -> bool:
        """Whether microbatches may take other routes than all stages in order."""
        return self.skip != 0 or self.reorder

    @property
    def standing_bytes(self) -> int:
        """Bytes of each trained number beside itself and its gradient, while steps are made."""
        return self.state_bytes + self.round_bytes


@dataclass(frozen=True, eq=False)
class PlanRequest:
    """`graph` is bound to `microbatch_size`; `evaluation_microbatches` 0: no evaluation."""

    graph: Graph
    offers: tuple[PeerOffer, ...]
    microbatches: int
    microbatch_size: int
    evaluation_microbatches: int = 0
    options: PlannerOptions = field(default_factory=PlannerOptions)
    links: Network | None = None
    """Between the offers, in their order; None: nothing is known."""
    known_costs: tuple[OperatorCost, ...] | None = None
    """Of the graph's operators; None: found from it."""
    head_parts: int = 0
    """Column blocks that the vocabulary head of `graph` is split into
    (dag/transforms/vocabulary.py)."""
    local: tuple[str, ...] = ()
    """Inputs of the model whose data stays with `holders`."""
    holders: frozenset[PeerId] = frozenset()
    """Offers that have that data."""
    blended: bool = False
    """Whether the owners of that data all let sums with products leave (dag/analysis/beside.py)."""
    running: Plan | None = None
    """What the run goes by, or went by until now; its peers may be gone. A planner may begin from
    it."""
    others: tuple[PlanRequest, ...] = ()
    """The same request in other forms that the planner may take: with other microbatch sizes, or
    with the head split."""

    @cached_property
    def costs(self) -> tuple[OperatorCost, ...]:
        """The cost of every operator, for one microbatch."""
        return self.known_costs or cost(self.graph)

    def form(self, microbatch_size: int, head_parts: int) -> PlanRequest | None:
        """The form of the request that a plan of such microbatches and such a head is for, by
        itself; None: it has no such form."""
        for one in (self, *self.others):
            if (one.microbatch_size, one.head_parts) == (microbatch_size, head_parts):
                return replace(one, known_costs=one.costs, others=())
        return None

    def form_of(self, plan: Plan) -> PlanRequest:
        """The form of the request that a plan was made for, which is one of the request's."""
        form = self.form(plan.microbatch_size, plan.head_parts)
        assert form is not None, "the plan is one of the request's"
        return form

    @cached_property
    def beside(self) -> tuple[int, ...]:
        """Operators that must run on one of `holders`."""
        return beside_data(self.graph, self.local, blended=self.blended)

    @cached_property
    def network(self) -> Network:
        """Between the offers, in their order; unknown links are taken for ordinary ones."""
        if self.links is not None:
            return self.links
        return uniform([o.peer for o in self.offers], UNKNOWN_LATENCY_S, UNKNOWN_BYTES_PER_S)


Planner = Callable[[PlanRequest], PlanWithReport]
"""Raises NoPlan."""


# What a plan is found from must not differ between processors: one plan, everywhere.
#
# Additions, products and square roots are the same on each of them. Logarithms, exponentials and
# what BLAS and LAPACK do are not: NumPy and OpenBLAS choose code by the processor, and the last
# digits differ. A search amplifies that: with and without AVX-512, one and the same job on twenty
# peers got plans of 15.8 and 17.0 s a step.

Floats = NDArray[np.float64]

_BITS = 20


def without_last_digits(values: Floats) -> Floats:
    """Return the numbers to a millionth, by exact operations. What differs by less than that lies
    between the same two neighbours, nearly always, and becomes equal; infinities and NaN stay."""
    fraction, exponent = np.frexp(values)
    found: Floats = np.ldexp(np.rint(np.ldexp(fraction, _BITS)), exponent - _BITS)
    return found
