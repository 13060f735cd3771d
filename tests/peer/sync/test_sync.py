"""What holders exchange at the end of a step."""

from __future__ import annotations

import math

import pytest
import torch

from shoal.dag.ir.graph import TensorSpec
from shoal.peer.sync import norm
from shoal.peer.sync.gradient_vector import Layout, TensorSpace, add, grads_of, vector_of
from shoal.peer.sync.statistics import Statistics

CPU = torch.device("cpu")
LAYOUT = Layout(
    (
        ("a", TensorSpec((2, 3), "float32")),
        ("b", TensorSpec((), "float32")),
        ("c", TensorSpec((5,), "float32")),
    )
)


def grads(seed, missing=()):
    g = torch.Generator().manual_seed(seed)
    found = {n: torch.randn(s.sizes, generator=g) for n, s in LAYOUT.parameters}
    return {n: None if n in missing else t for n, t in found.items()}


def reduced(holders, shards):
    """Each with each, in so many shards: the gradients that each ends with."""
    bounds = [LAYOUT.elements * i // shards for i in range(shards + 1)]
    space = TensorSpace(bounds, CPU)
    given = [space.cut(vector_of(LAYOUT, g, CPU)) for g in holders]
    sums = [space.add([own[j] for own in given]) for j in range(shards)]
    return [grads_of(LAYOUT, space.join(sums)) for _ in holders]


@pytest.mark.parametrize("count", [1, 2, 3, 7, 20])
def test_all_holders_end_with_the_same_bits_of_the_sum(count):
    own = [grads(i) for i in range(count)]
    found = reduced(own, count)
    for name, _ in LAYOUT.parameters:
        plain = own[0][name].clone()
        for other in own[1:]:
            plain += other[name]
        assert all(torch.equal(f[name], plain) for f in found)


def test_a_parameter_that_nobody_reached_stays_without_gradient():
    found = reduced([grads(0, missing="ab"), grads(1, missing="a")], 2)
    assert found[0]["a"] is None
    assert torch.equal(found[0]["b"], grads(1)["b"])


def test_shards_put_together_can_be_split():
    space, vector = TensorSpace((0, 2, 2, 7, 12), CPU), torch.arange(12.0)
    shards = space.cut(vector)
    assert [len(s) for s in shards] == [2, 0, 5, 5]
    some = space.concat([shards[3], shards[0]])
    assert [s.tolist() for s in space.split(some, [3, 0])] == [[7, 8, 9, 10, 11], [0, 1]]
    assert torch.equal(space.join(shards), vector)


def test_a_result_is_nobody_elses():
    """Whoever sends a total keeps it, and an update divides gradients in place."""
    total = torch.ones(3)
    TensorSpace((0, 3), CPU).join([total]).div_(2)
    assert total.tolist() == [1, 1, 1]


def test_sums_of_doubles_stay_doubles():
    layout = Layout((("a", TensorSpec((2,), "float64")), ("b", TensorSpec((1,), "float32"))))
    own = {"a": torch.tensor([1 / 3, 1e-12], dtype=torch.float64), "b": torch.ones(1)}
    found = grads_of(layout, add([vector_of(layout, own, CPU)] * 2))
    assert torch.equal(found["a"], own["a"] * 2)
    assert found["b"].dtype == torch.float32


def test_adding_changes_no_part():
    parts = [torch.ones(3), torch.ones(3)]
    assert add(parts).tolist() == [2, 2, 2]
    assert parts[0].tolist() == [1, 1, 1]


def test_statistics_come_back_as_they_were_sent():
    statistics = Statistics(
        (("mean", TensorSpec((3,), "float32")), ("var", TensorSpec((3,), "float32")))
    )
    sent = [{"mean": torch.randn(3), "var": torch.rand(3)} for _ in range(4)]
    vector = statistics.pack(sent, CPU)
    assert TensorSpec(tuple(vector.shape), "float64") == statistics.spec(4)
    for one, other in zip(sent, statistics.unpack(vector, 4), strict=True):
        for name in one:
            assert torch.equal(one[name].double(), other[name])
    assert statistics.pack([], CPU).shape == (0,)


def test_the_norm_is_the_single_process_norm():
    g = torch.Generator().manual_seed(0)
    parts = [torch.randn(1000, generator=g) * 10**i for i in range(3)]
    vectors = [norm.pack(norm.square_of(p), [], CPU) for p in parts[1:]]
    vectors.insert(0, norm.pack(norm.square_of(parts[0]), [(1.0, 4.0)], CPU))
    total = norm.combine([([0], vectors[0]), ([], vectors[1]), ([], vectors[2])], 0, squares=True)
    plain = torch.linalg.vector_norm(torch.cat(parts) / 4)
    assert total.norm == pytest.approx(float(plain), rel=1e-6)


def test_results_are_weighted_means_in_microbatch_order():
    one = norm.pack(None, [(2.0, 1.0, 10.0), (4.0, 3.0, 20.0)], CPU)
    two = norm.pack(None, [(torch.tensor(8.0), torch.tensor(4), torch.tensor(30.0))], CPU)
    total = norm.combine([((0, 2), one), ((1,), two)], 1, squares=False)
    assert total.weight == 8
    assert total.loss == (2 + 32 + 12) / 8
    assert total.metrics == ((10 + 120 + 60) / 8,)
    assert norm.ScoreTotals.unpack(total.pack(CPU)) == total
    assert norm.scores_spec(2, 1, squares=False) == TensorSpec(tuple(one.shape), "float64")


def test_a_microbatch_without_weight_has_no_say():
    vector = norm.pack(torch.tensor(4.0), [(math.nan, 0.0), (3.0, 2.0)], CPU)
    total = norm.combine([((0, 1), vector)], 0, squares=True)
    assert (total.loss, total.weight, total.norm) == (3.0, 2.0, 1.0)
    empty = norm.combine([((0,), norm.pack(None, [(math.nan, 0.0)], CPU))], 0, squares=False)
    assert empty.weight == 0
    assert math.isnan(empty.loss)
