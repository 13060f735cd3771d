"""Counter-based masks: exact rate, no correlation, and nothing but the counters decides them."""

import gc
import itertools
import math
import weakref

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from shoal.dag.ir import random
from shoal.dag.ir.random import step_key

N = 1 << 18
KEY = step_key(0, 0, 0)


def dropped(p: float, operator: int = 0, key: int = KEY, n: int = N) -> torch.Tensor:
    return random.dropout(torch.ones(n), p, operator, key=key) == 0


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.double() - a.double().mean(), b.double() - b.double().mean()
    return float((a * b).mean() / (a.std() * b.std()))


def test_what_masks_are_made_of_is_kept_as_long_as_somebody_holds_it() -> None:
    """It may take 512 MiB, and a process outlives its runs."""
    gc.collect()
    assert not random._tables, "no test before this one has kept it"
    one, other = random.table(), random.table()
    assert one is other
    dropped(0.5)
    kept = weakref.ref(one.words[torch.device("cpu")])
    del one
    dropped(0.5)
    assert kept() is other.words[torch.device("cpu")]
    del other
    assert kept() is None
    dropped(0.5)
    assert not random._tables, "without a holder nothing is kept"


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_the_rate_is_exact_over_many_keys(p: float) -> None:
    draws = [dropped(p, key=step_key(1, s, 0)).double().mean() for s in range(16)]
    deviation = math.sqrt(p * (1 - p) / (16 * N))
    assert abs(float(sum(draws)) / 16 - p) < 5 * deviation + 2**-17


@pytest.mark.parametrize("distance", [1, 2, 3, 4, 7, 8, 16, 64, 255, 256, 1024, 4096])
def test_neighbours_are_uncorrelated(distance: int) -> None:
    drop = dropped(0.5)
    assert abs(correlation(drop[:-distance], drop[distance:])) < 5 / math.sqrt(N)


def test_masks_differ_by_seed_step_microbatch_and_operator() -> None:
    keys = [step_key(s, t, m) for s, t, m in itertools.product(range(2), repeat=3)]
    masks = [dropped(0.3, operator, key) for key in keys for operator in (0, 1, 2)]
    for a, b in itertools.combinations(masks, 2):
        assert abs(correlation(a, b)) < 5.5 / math.sqrt(N)


def test_the_bits_of_an_element_are_equally_likely() -> None:
    low = dropped(2**-8).double().mean()
    assert abs(float(low) - 2**-8) < 5 * math.sqrt(2**-8 / N)


def test_equal_counters_give_equal_masks_whatever_else_was_drawn() -> None:
    first = dropped(0.2, n=1001)
    dropped(0.2, n=N)  # the kept prefix grows
    assert torch.equal(first, dropped(0.2, n=1001))
    assert torch.equal(first, dropped(0.2, n=5000)[:1001])


def test_keys_are_frozen_for_ever() -> None:
    """Peers of different versions must agree: these numbers never change."""
    assert step_key(7, 3, 1) == step_key(7, 3, 1) != step_key(7, 1, 3)
    assert 0 <= step_key(-1, 2**40, 0) < 2**63
    bits = dropped(0.5, operator=3, key=12345, n=32)
    assert int(sum(int(b) << i for i, b in enumerate(bits))) == 3973644097


def test_dropout_scales_what_it_keeps_and_its_gradient_alike() -> None:
    x = torch.randn(6, 7, requires_grad=True)
    y = random.dropout(x, 0.4, 0, key=KEY)
    y.sum().backward()
    kept = y != 0
    torch.testing.assert_close(y[kept], x[kept] / 0.6)
    torch.testing.assert_close(x.grad, kept.float() / 0.6)


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_dropping_nothing_and_everything(p: float) -> None:
    x = torch.randn(3, 4)
    assert torch.equal(random.dropout(x, p, 0, key=KEY), x * (1 - p))
    y = random.feature_dropout(x[..., None], p, 0, key=KEY)
    assert torch.equal(y, x[..., None] * (1 - p))


def test_feature_dropout_drops_whole_maps() -> None:
    y = random.feature_dropout(torch.ones(64, 32, 3, 3), 0.25, 0, key=KEY)
    flat = y.flatten(2)
    assert torch.equal(flat.amin(-1), flat.amax(-1))
    assert abs(float((flat[..., 0] == 0).double().mean()) - 0.25) < 0.05


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", [None, "bool", "float"])
def test_attention_without_dropout_is_attention(causal: bool, mask: str | None) -> None:
    if causal and mask:
        pytest.skip("torch refuses both")
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    given = None if mask is None else torch.randn(2, 1, 5, 5)
    given = given > -1 if mask == "bool" else given
    ours = random.attention(q, k, v, given, 0.0, causal, 0.3, True, 0, key=KEY)
    theirs = F.scaled_dot_product_attention(
        q, k, v, given, is_causal=causal, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(ours, theirs)


@given(
    st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=3, max_size=3),
    st.booleans(),
    st.sampled_from([0.0, 0.4]),
)
def test_rows_that_may_attend_to_nothing_are_as_in_torch(
    allow: list[list[bool]], additive: bool, p: float
) -> None:
    torch.manual_seed(0)
    mask = torch.tensor(allow)
    if additive:
        mask = torch.zeros(3, 4).masked_fill(~mask, -math.inf)
    leaves = [torch.randn(2, 3, n, 4, requires_grad=True) for n in (3, 4)]
    weights_of = torch.eye(4).expand(2, 3, 4, 4)  # as values: the result is the weights
    plain = F.scaled_dot_product_attention(*leaves, weights_of, mask)
    plain = random.dropout(plain, p, 0, key=KEY)
    ours = random.attention(*leaves, weights_of, mask, p, False, None, False, 0, key=KEY)
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(
        torch.autograd.grad(ours.square().sum(), leaves),
        torch.autograd.grad(plain.square().sum(), leaves),
    )


def test_attention_drops_weights_and_keeps_their_mean() -> None:
    q = torch.zeros(1, 64, 128, 2)
    ours = random.attention(q, q, q + 1, None, 0.3, False, None, False, 0, key=KEY)
    assert abs(float(ours.mean()) - 1) < 0.01
    assert float(ours.std()) > 0.01


def test_uniform_and_normal_have_their_moments() -> None:
    u = random.rand((N,), 0, key=KEY).double()
    n = random.randn((N,), 1, key=KEY).double()
    e = random.exponential((N,), 2.0, 2, key=KEY).double()
    assert float(u.min()) >= 0
    assert float(u.max()) < 1
    for draws, mean, var in ((u, 0.5, 1 / 12), (n, 0.0, 1.0), (e, 0.5, 0.25)):
        assert abs(float(draws.mean()) - mean) < 6 * math.sqrt(var / N)
        assert abs(float(draws.var()) - var) < 0.02 * max(var, 0.1)
    assert float(e.min()) > 0
    assert abs(correlation(u[:-1], u[1:])) < 5 / math.sqrt(N)
    assert abs(float((n**4).mean()) - 3) < 0.1


def test_bernoulli_follows_its_probabilities() -> None:
    p = torch.linspace(0, 1, N)
    draws = random.bernoulli_like(p, 0, key=KEY).double()
    half = N // 2
    assert abs(float(draws[:half].mean()) - 0.25) < 0.01
    assert abs(float(draws[half:].mean()) - 0.75) < 0.01
    assert abs(float(random.bernoulli((N,), 0.9, 0, key=KEY).mean()) - 0.9) < 0.01


@settings(max_examples=40)
@given(
    shape=st.lists(st.integers(0, 5), max_size=4),
    p=st.floats(0, 1),
    operator=st.integers(0, 2**20),
    key=st.integers(0, 2**63 - 1),
)
def test_any_shape_and_key_works_and_on_meta_too(shape, p, operator, key) -> None:
    x = torch.ones(shape)
    y = random.dropout(x, p, operator, key=key)
    assert y.shape == x.shape
    assert torch.equal(y, random.dropout(x, p, operator, key=key))
    shown = random.dropout(x.to("meta"), p, operator, key=key)
    assert shown.is_meta
    assert shown.shape == x.shape


def test_shapes_can_be_inferred_after_and_before_real_masks() -> None:
    dropped(0.5, n=64)
    with FakeTensorMode():
        x = torch.ones(4096)
        assert random.dropout(x, 0.5, 0, key=KEY).shape == (4096,)
        assert random.dropout(x[:64], 0.5, 0, key=KEY).shape == (64,)
    assert torch.equal(dropped(0.5, n=64), dropped(0.5, n=8192)[:64])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(N,), (1,), (5, 7, 11), (0, 3), (33, 1023)])
@pytest.mark.parametrize("p", [0.3, 0.0001, 0.99999])
def test_dropout_is_the_same_on_a_gpu(dtype: torch.dtype, shape: tuple[int, ...], p: float) -> None:
    values, grad = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    for turned in (False, True):  # other strides, the same positions
        found = {}
        for device in ("cpu", "cuda"):
            leaf = values.to(device, copy=True).requires_grad_()
            x = leaf.mT.contiguous().mT if turned and leaf.dim() > 1 else leaf
            made = random.dropout(x, p, 5, key=KEY)
            made.backward(grad.to(device))
            assert leaf.grad is not None
            found[device] = made.detach().cpu(), leaf.grad.cpu()
        assert all(map(torch.equal, found["cpu"], found["cuda"]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_dropout_is_one_launch_on_a_gpu_with_triton() -> None:
    pytest.importorskip("triton")
    x = torch.ones(N, device="cuda")
    random.dropout(x, 0.3, 5, key=KEY)
    with torch.profiler.profile(acc_events=True) as seen:
        random.dropout(x, 0.3, 5, key=KEY)
    assert any(e.name == "_dropout_kernel" for e in seen.events())
