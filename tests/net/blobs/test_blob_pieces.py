"""Pieces are packed and unpacked as protobuf does it, without copying what is in them."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from shoal.net.blobs.pieces import packed, unpacked
from shoal.proto.broker_pb2 import BlobPiece
from shoal.proto.common_pb2 import BlobRef

REFS = st.none() | st.builds(BlobRef, hash=st.text(max_size=70), size_bytes=st.integers(0, 2**63))
DATA = st.binary(max_size=300)


@given(offset=st.integers(0, 2**64 - 1), data=DATA, ref=REFS)
def test_the_bytes_are_those_of_the_message(offset: int, data: bytes, ref: BlobRef | None) -> None:
    whole = BlobPiece(ref=ref, offset=offset, data=data)
    wire = packed(offset, data, ref)
    assert BlobPiece.FromString(wire) == whole
    for message in (wire, whole.SerializeToString()):
        piece, content = unpacked(message)
        assert (piece.offset, bytes(content)) == (offset, data)
        assert (piece.ref, piece.HasField("ref")) == (whole.ref, ref is not None)
        assert not piece.data


@given(message=st.binary(max_size=60) | st.lists(DATA.map(lambda d: packed(1, d))).map(b"".join))
def test_whatever_comes_is_read_as_protobuf_reads_it(message: bytes) -> None:
    """Fields in another order, twice, unknown ones, and garbage."""
    try:
        wanted = BlobPiece.FromString(message)
    except DecodeError:
        with pytest.raises(DecodeError):
            unpacked(message)
        return
    piece, content = unpacked(message)
    assert bytes(content) == wanted.data
    assert (piece.offset, piece.ref) == (wanted.offset, wanted.ref)


def test_what_is_in_it_is_not_copied() -> None:
    message = packed(7, bytes(1000))
    _, content = unpacked(message)
    assert content.obj is message
