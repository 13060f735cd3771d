"""Which failures are of one peer, and which would come again wherever the run goes on."""

from __future__ import annotations

import pytest
import torch

from shoal.broker.runs.losses import FAULTS_OF_ONE
from shoal.dag.ir.graph import GraphError
from shoal.net.blobs.client import BlobTransferError
from shoal.peer.blobs.cache import BlobMismatchError
from shoal.peer.core.snapshots import SnapshotError
from shoal.peer.data import DataError
from shoal.peer.shell.workbench import code_of

OF_ONE = [
    (OSError(28, "No space left on device"), "host"),
    (PermissionError(13, "Permission denied"), "host"),
    (MemoryError(), "memory"),
    (torch.OutOfMemoryError(), "memory"),
    (SnapshotError("damaged"), "snapshot"),
    (BlobMismatchError("it came with other content"), "blob"),
    (BlobTransferError("UNAVAILABLE", "nobody answers"), "blob"),
]
OF_ALL = [GraphError("no such operator"), DataError("3 samples for batches of 4"), KeyError("x")]


@pytest.mark.parametrize(("error", "code"), OF_ONE, ids=[type(e).__name__ for e, _ in OF_ONE])
def test_what_another_peer_need_not_have_costs_one_peer(error: Exception, code: str) -> None:
    assert code_of(error, "build") == code_of(error, "data") == code
    assert code in FAULTS_OF_ONE


@pytest.mark.parametrize("error", OF_ALL, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("otherwise", ["build", "data"])
def test_what_every_peer_would_have_ends_the_run(error: Exception, otherwise: str) -> None:
    wanted = "data" if isinstance(error, DataError) else otherwise
    assert code_of(error, otherwise) == wanted
    assert otherwise not in FAULTS_OF_ONE
