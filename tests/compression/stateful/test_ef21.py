"""EF21 is what the codec `delta` does: the mean of what is decoded converges where a plain sparse
codec stalls."""

from __future__ import annotations

import pytest
import torch

from shoal.compression.codec import Stream, parse
from shoal.compression.echo import shape_of
from shoal.planner.base.interface import CodecOptions
from shoal.planner.codecs.codecs import codec_of

CLIENTS, N, STEPS, RATE = 4, 64, 600, 0.05


def descend(text: str) -> tuple[float, float]:
    """Gradient descent on the mean of quadratics that pull to different places: the distance to
    where it ends, and the most that the server's g differed from the mean of all g."""
    torch.manual_seed(0)
    centres = 5 * torch.randn(CLIENTS, N)
    scales = 0.5 + torch.rand(CLIENTS, N)
    optimum = (scales * centres).sum(0) / scales.sum(0)
    streams = [(Stream(parse(text)), Stream(parse(text))) for _ in range(CLIENTS)]
    x, worst = torch.zeros(N), 0.0
    for step in range(STEPS):
        decoded = []
        for i, (here, there) in enumerate(streams):
            gradient = scales[i] * (x - centres[i])
            encoded = here.encode(gradient, step)
            data = memoryview(bytearray().join(encoded.buffers))
            decoded.append(there.decode(shape_of(gradient), encoded.header, data))
            if "held" in here.state:
                worst = max(worst, float((decoded[-1] - here.state["held"]).abs().max()))
        x = x - RATE * torch.stack(decoded).mean(0)
    return float((x - optimum).norm()), worst


def test_it_converges_where_a_plain_sparse_codec_stalls() -> None:
    plain, _ = descend("topk:ratio=8,values=fp32")
    found, apart = descend("delta+topk:ratio=8,values=fp32")
    exact, _ = descend("raw")
    assert apart == 0.0, "both ends hold the same g, bit for bit"
    assert plain > 1.0
    assert found < 1e-2
    assert exact < 1e-4


def test_with_a_codec_that_loses_nothing_it_is_gradient_descent() -> None:
    assert descend("delta+raw")[0] == pytest.approx(descend("raw")[0], abs=1e-5)


@pytest.mark.parametrize(
    ("feedback", "wanted"),
    [("ef", "ef+topk"), ("dgc", "ef+topk"), ("ef21", "delta+topk"), ("none", "topk")],
)
def test_a_job_names_it(feedback: str, wanted: str) -> None:
    options = CodecOptions(sync="topk", feedback=feedback)
    assert codec_of("topk", "sync", options) == wanted
    assert codec_of("bf16", "activation", options) == "bf16"
