"""Small worlds of peers that only have a transport: on the in-memory twin, on gRPC, and on gRPC
with mutual TLS.

`world` runs a test on all three. A test says what happens, `await world.until(...)` waits for it;
no test sleeps: the memory world runs its queue, the gRPC worlds wait for the next event.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import AsyncIterator, Callable

import pytest

from .grpc_world import GrpcWorld, Signed
from .memory_world import MemoryWorld
from .worlds import World


@pytest.fixture(scope="session")
def signed() -> Signed:
    return Signed()


WORLDS: dict[str, Callable[[Signed], World]] = {
    "memory": lambda signed: MemoryWorld(),
    "grpc": lambda signed: GrpcWorld(),
    "mtls": lambda signed: GrpcWorld(ChainMap({}, signed)),
}


@pytest.fixture(params=WORLDS)
async def world(request: pytest.FixtureRequest, signed: Signed) -> AsyncIterator[World]:
    world = WORLDS[request.param](signed)
    yield world
    await world.close()


@pytest.fixture(params=["grpc", "mtls"])
async def grpc_world(request: pytest.FixtureRequest, signed: Signed) -> AsyncIterator[GrpcWorld]:
    world = WORLDS[request.param](signed)
    yield world
    await world.close()


@pytest.fixture
async def mtls_world(signed: Signed) -> AsyncIterator[GrpcWorld]:
    world = WORLDS["mtls"](signed)
    yield world
    await world.close()


@pytest.fixture
async def memory_world() -> AsyncIterator[MemoryWorld]:
    world = MemoryWorld()
    yield world
    await world.close()
