"""Buffers are used again when nothing refers to them, and never before."""

from __future__ import annotations

import torch

from shoal.net.links.buffers import Buffers

MIB = 1 << 20


def address(buffer):
    return torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()


def test_a_free_buffer_is_used_again_for_its_size():
    buffers = Buffers()
    first = buffers.take(MIB)
    where = address(first)
    assert first.nbytes == MIB
    del first
    assert address(buffers.take(MIB)) == where
    assert address(buffers.take(MIB - 7)) == where  # of the same pages
    assert buffers.size_bytes == MIB


def test_a_buffer_in_which_a_tensor_lives_is_never_given_again():
    buffers = Buffers()
    tensor = torch.frombuffer(buffers.take(MIB), dtype=torch.float32).view(512, 512)
    weight = torch.randn(512, 512, requires_grad=True)
    loss = (tensor @ weight).sum()
    where = tensor.data_ptr()
    del tensor  # autograd keeps it for the gradient of weight
    assert address(buffers.take(MIB)) != where
    loss.backward()
    del loss
    taken = [buffers.take(MIB) for _ in range(2)]
    assert where in [address(b) for b in taken]
    assert buffers.size_bytes == 2 * MIB


def test_a_part_of_a_buffer_keeps_all_of_it():
    buffers = Buffers()
    part = buffers.take(MIB)[10:20]
    assert part.nbytes == 10
    buffers.take(MIB)
    assert buffers.size_bytes == 2 * MIB


def test_free_buffers_of_other_sizes_are_kept_up_to_the_limit():
    buffers = Buffers(keep_bytes=3 * MIB)
    for n in range(1, 10):
        buffers.take(MIB + n * 4096)
    assert buffers.size_bytes <= 3 * MIB + 2 * MIB
    held = [buffers.take(MIB) for _ in range(8)]
    assert buffers.size_bytes >= 8 * MIB
    del held
    buffers.trim()
    assert buffers.size_bytes == 0
    assert repr(buffers) == "<Buffers 0 bytes in 0 sizes, 0 free>"


def test_small_and_empty_buffers_are_not_kept():
    buffers = Buffers()
    assert buffers.take(0).nbytes == 0
    assert buffers.take(1000).nbytes == 1000
    assert buffers.size_bytes == 0
