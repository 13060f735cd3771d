"""The gRPC service Admission: what `broker/access/admission.py` decides, for callers on the
network."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import grpc
import grpc.aio

from ...dag.plan.plan import PeerId
from ...net.identity.names import Party, PartyRole
from ...net.printable import printable
from ...proto.admission_pb2 import (
    Admitted,
    Invitation,
    InviteRequest,
    JoinRequest,
    Kicked,
    KickRequest,
    PageKey,
    PageRequest,
    RenewRequest,
)
from ..access.admission import Admission, AdmissionError
from ..access.guard import Guard
from ..events import PeerKicked
from .calls import unary_handler
from .shell import Shell

__all__ = ["DOOR_OPTIONS", "add_admission", "add_door"]

DOOR_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", 16 * 1024),  # a request has under 1 KiB
    ("grpc.max_concurrent_streams", 4),
    ("grpc.max_connection_age_ms", 30_000),
    ("grpc.max_connection_age_grace_ms", 5_000),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.so_reuseport", 0),
)
"""For the server that strangers reach."""

log = logging.getLogger(__name__)


def add_admission(
    server: grpc.aio.Server,
    shell: Shell,
    admission: Admission,
    guard: Guard,
    found: Callable[[], Invitation],
    page: Callable[[Party, float], PageKey],
) -> None:
    """Registers what needs a certificate. `found`: the part of an invitation that says where others
    find the broker. `page` makes a key for somebody, for so many seconds."""
    service = _AdmissionService(shell, admission, guard, found)

    async def page_key(request: PageRequest, caller: Party | None) -> PageKey:
        assert caller is not None, "the guard lets people have keys"
        return page(caller, request.lasts_s)

    unary = partial(unary_handler, guard)
    methods = {
        "Renew": unary("Admission.Renew", service.renew, RenewRequest, Admitted),
        "Invite": unary("Admission.Invite", service.invite, InviteRequest, Invitation),
        "Kick": unary("Admission.Kick", service.kick, KickRequest, Kicked),
        "Page": unary("Admission.Page", page_key, PageRequest, PageKey),
    }
    handler = grpc.method_handlers_generic_handler("shoal.v1.Admission", methods)
    server.add_generic_rpc_handlers((handler,))


def add_door(server: grpc.aio.Server, shell: Shell, admission: Admission, guard: Guard) -> None:
    """Registers joining, and nothing else."""
    service = _AdmissionService(shell, admission, guard)
    join = unary_handler(guard, "Admission.Join", service.join, JoinRequest, Admitted)
    handler = grpc.method_handlers_generic_handler("shoal.v1.Admission", {"Join": join})
    server.add_generic_rpc_handlers((handler,))


class _AdmissionService:
    def __init__(
        self,
        shell: Shell,
        admission: Admission,
        guard: Guard,
        found: Callable[[], Invitation] = Invitation,
    ) -> None:
        self._shell = shell
        self._guard = guard
        self._found = found
        self._admission = admission

    async def join(self, request: JoinRequest, _: Party | None) -> Admitted:
        try:
            admitted = self._admission.join(request, time.time())
        except AdmissionError as error:
            invitation = request.invitation[:8].hex()
            log.warning("join_refused invitation=%s why=%s", invitation, error)
            raise
        self._guard.renewed(admitted.subject, admitted.certificate)
        log.info("joined subject=%s invitation=%s", admitted.subject, request.invitation.hex())
        return admitted

    async def renew(self, request: RenewRequest, caller: Party | None) -> Admitted:
        assert caller is not None, "the guard lets nobody without a certificate renew one"
        admitted = self._admission.renew(caller, request.request, time.time())
        self._guard.renewed(admitted.subject, admitted.certificate)
        return admitted

    async def invite(self, request: InviteRequest, caller: Party | None) -> Invitation:
        assert caller is not None, "the guard lets operators invite"
        role = _role(request.role)
        try:
            lasts = timedelta(seconds=request.lasts_s)
        except (OverflowError, ValueError):
            lasts = timedelta(0)
        now_s = time.time()
        token = self._admission.invite(role, request.uses, lasts, caller.subject, now_s)
        log.info(
            "invited role=%s uses=%d lasts_s=%.0f by=%s invitation=%s",
            *(role.value, request.uses, request.lasts_s, caller.subject, token.name),
        )
        invitation = Invitation(token=str(token), ends_s=now_s + request.lasts_s)
        invitation.MergeFrom(self._found())
        return invitation

    async def kick(self, request: KickRequest, caller: Party | None) -> Kicked:
        assert caller is not None, "the guard lets operators kick"
        role = self._admission.kick(request.subject, time.time())
        log.warning("kicked subject=%s by=%s", request.subject, caller.subject)
        if role is PartyRole.PEER:
            self._shell.post(PeerKicked(PeerId(request.subject)))
        return Kicked(role=role.value)


def _role(text: str) -> PartyRole:
    try:
        return PartyRole(text)
    except ValueError:
        shown = printable(text, 40)
        raise AdmissionError(
            "INVALID_ARGUMENT", f'"{shown}" is no role: expected peer, submitter or operator'
        ) from None
