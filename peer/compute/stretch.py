"""A device that takes longer than it needs: a slow one, emulated by a fast one.

    a job takes  stretch · (CPU time of its thread)  seconds, or as long as it really took

CPU time, not time on the wall: while other processes have the core a thread's CPU time stands
still, so what it lost to them is taken out of the wait that follows. Peers of unequal speeds can
share a few cores this way, as long as each gets its turn before its emulated time is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from ...dag.schedule.schedule import Action
from ...net.identity.statements import MemberOfNetwork
from ...net.links.frame import Arrived, FrameKey, Payload
from ..core.events import Result
from ..federated.client_states import ClientStates
from ..secure.masked_sums import MemberOf
from .device import TorchDevice

__all__ = ["StretchedDevice"]


class StretchedDevice(TorchDevice):
    """Computes and codes `stretch` times as slowly as a TorchDevice on the CPU; it waits in the
    thread that called. What handling a frame takes besides is not the device's, and stays.

    `wall` and `cpu` give seconds, of the world and of the calling thread; `wait` lets some pass.
    Raises ValueError for a device whose work is not the calling thread's.
    """

    def __init__(
        self,
        device: str | torch.device = "cpu",
        *,
        stretch: float,
        wall: Callable[[], float] = time.perf_counter,
        cpu: Callable[[], float] = time.thread_time,
        wait: Callable[[float], None] = time.sleep,
        member_of: MemberOf | None = None,
        clients: ClientStates | None = None,
        identity_of: MemberOfNetwork | None = None,
    ) -> None:
        super().__init__(
            device, clock=wall, member_of=member_of, clients=clients, identity_of=identity_of
        )
        if self.device.type != "cpu":
            raise ValueError(
                f"device {self.device} cannot be stretched: expected cpu, where the work shows in "
                "the CPU time of a thread"
            )
        self.stretch = stretch
        self._wall, self._cpu, self._wait = wall, cpu, wait

    def compute(self, step: int, action: Action) -> Result:
        began = self._wall()
        with self._stretched():
            result = super().compute(step, action)
        return replace(result, seconds=self._wall() - began)

    def accept(self, arrived: Arrived) -> None:
        with self._stretched():
            super().accept(arrived)

    def payload(self, key: FrameKey) -> Payload:
        with self._stretched():
            return super().payload(key)

    @contextmanager
    def _stretched(self) -> Iterator[None]:
        began, computed = self._wall(), self._cpu()
        yield
        left = began + self.stretch * (self._cpu() - computed) - self._wall()
        if left > 0:
            self._wait(left)
