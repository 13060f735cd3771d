"""The in-memory twin, where it is itself: what it models besides the links."""

from __future__ import annotations

from shoal.net.links.transport import FrameArrived

MS = 1e-3
FRAME = 100_000  # 1 ms of the world's links


async def test_a_pipe_carries_one_message_at_a_time_after_its_process_stood_still(memory_world):
    """Frozen in a callback, with an answer and then frames to send when it goes on."""
    world = memory_world
    a, b = await world.pair()

    def freezes(event) -> None:
        if isinstance(event, FrameArrived) and not world.network.medium.frozen:
            world.network.freeze("b")
            world.network.medium.held(
                "b", lambda: [b.send("a", FRAME, microbatch=m) for m in range(10)]
            )
            world.after(0.5, lambda: world.network.thaw("b"))

    b.on_event = freezes
    a.send("b", 1000)
    came: list[float] = []
    a.on_event = lambda event: isinstance(event, FrameArrived) and came.append(world.now)
    await world.until(lambda: len(came) == 10)
    assert came[-1] - came[0] > 7 * MS  # small records share messages with frames: not quite 9
