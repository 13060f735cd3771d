"""A forward that Python lets do something else in another call is refused, with its line; one whose
state plays no part is not. Either way the module, and all random state, are as they were."""

from __future__ import annotations

import collections
import inspect
import random
import time
import types
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.dag.capture.export import forward_of
from shoal.dag.capture.proof import NONE_ALONE, Alone, Forward, prove
from shoal.dag.capture.reseed import drawn, reseed
from shoal.dag.ir.capture_errors import CaptureError

calls = 0
store = {"calls": 0}


class Net(nn.Module):
    """Two layers around the function under test; some attributes for it to remember things in."""

    shared = 0

    def __init__(self, function: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.m, self.b = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 3)
        self.calls, self.last, self.table = 0, None, None
        self.some, self.queue = types.SimpleNamespace(calls=0), collections.deque(maxlen=3)
        self.average, self.numbers = torch.zeros(16), np.zeros(16, "f4")
        self.random, self.numpys = random.Random(3), np.random.default_rng(4)
        self.torchs = torch.Generator().manual_seed(3)
        self.register_buffer("seen", torch.zeros(()))
        self.function = function

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.b(self.function(self, self.a(x)).relu()), y)


def proved(
    function, *sizes: int, choices: tuple[int, ...] = (), alone: Alone = NONE_ALONE
) -> dict[int, str]:
    module = Net(function)
    inputs = {"x": torch.zeros(4, 8), "y": torch.zeros(4, dtype=torch.long)}
    own = [module.random, module.numpys]
    before = dict(module.__dict__), dict(module._buffers), drawn(own), torch.get_rng_state()
    values = module.average.clone(), module.numbers.copy(), list(module.queue)
    outside = calls, dict(store), Net.shared
    try:
        forward = Forward(module, inputs, None, frozenset())
        return prove(forward, sizes or (2,), choices, alone=alone).wrong
    finally:
        assert module.__dict__.keys() == before[0].keys()
        assert all(module.__dict__[k] is v for k, v in before[0].items())
        assert all(module._buffers[k] is v for k, v in before[1].items())
        assert drawn(own) == before[2]
        assert torch.equal(torch.get_rng_state(), before[3])
        assert torch.equal(module.average, values[0])
        assert (module.numbers == values[1]).all()
        assert list(module.queue) == values[2]
        assert (calls, store, Net.shared) == outside


def counter(self, h):
    self.calls += 1
    return h * min(1.0, self.calls / 16)


def late_counter(self, h):
    self.calls += 1
    return h * (2 if self.calls > 500 else 1)


def every_hundredth(self, h):
    self.calls += 1
    return self.m(h) if self.calls % 100 == 0 else h


def global_counter(self, h):
    global calls
    calls += 1
    return h * (2 if calls > 50 else 1)


def counter_in_a_global(self, h):
    store["calls"] += 1
    return h * (2 if store["calls"] > 50 else 1)


def counter_of_the_class(self, h):
    Net.shared += 1
    return h * (2 if Net.shared > 50 else 1)


def counter_of_an_object(self, h):
    self.some.calls += 1
    return h * (2 if self.some.calls > 50 else 1)


def default_argument(self, h, seen=[]):  # noqa: B006 (as people write it)
    seen.append(1)
    return h * (2 if len(seen) > 50 else 1)


def counter_around() -> Callable[[Net, Tensor], Tensor]:
    n = 0

    def around(self, h):
        nonlocal n
        n += 1
        return h * (2 if n > 50 else 1)

    return around


def assigned_buffer(self, h):
    self.seen = self.seen + 1
    return h / self.seen


def last_call(self, h):
    made = h if self.last is None else h + 0.5 * self.last.mean(0)
    self.last = h.detach()
    return made


def running_average(self, h):
    self.average = 0.9 * self.average + 0.1 * h.detach().mean(0)
    return h - self.average


def running_average_in_place(self, h):
    with torch.no_grad():
        self.average.mul_(0.9).add_(0.1 * h.detach().mean(0))
    return h - self.average


def average_in_numpy(self, h):
    self.numbers += 1
    return h + torch.from_numpy(self.numbers)


def queue(self, h):
    self.queue.append(h.detach().mean(0))
    return h - torch.stack(list(self.queue)).mean(0)


def hidden_state(self, h):
    if self.last is None or self.last.shape != h.shape:
        self.last = torch.zeros_like(h)
    self.last = torch.tanh(self.m(h) + self.last).detach()
    return h + self.last


def layer_drop(self, h):
    return h + self.m(h) if not self.training or random.random() >= 0.01 else h


def branch_in_eval(self, h):
    return h + self.m(h) if self.training or random.random() < 0.5 else h


def numpys_number(self, h):
    return h * np.random.uniform(0.9, 1.1)


def numpys_array(self, h):
    return h + torch.from_numpy(np.random.rand(16).astype("f4"))


def sample(self, h):
    return h[:, random.sample(range(16), 16)]


def own_generator(self, h):
    return h + self.m(h) if self.random.random() > 0.02 else h


def own_numpy_generator(self, h):
    return h + self.m(h) if self.numpys.random() > 0.2 else h


def fresh_generator(self, h):
    return h * np.random.default_rng().random()


def own_torch_generator(self, h):
    return h + torch.rand(16, generator=self.torchs)


def seed_inside(self, h):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        noise = torch.rand(16)
    return h + noise


def clock(self, h):
    return h * time.perf_counter()


ADVICE = "function of the inputs"
REMEMBERS = f"depends on calls before.*{ADVICE}"
DRAWS = "random numbers of Python's or numpy's.*draw with torch"
REFUSED = {
    counter: f"mul gets 0.0625.*0.125.*attribute calls went from 0.*{ADVICE}",
    late_counter: "after 999 calls; attribute calls went",
    every_hundredth: "after 999 calls",
    global_counter: "global calls went from",
    counter_in_a_global: "item calls of global store went",
    counter_of_the_class: r"class attribute Net\.shared went",
    counter_of_an_object: "attribute calls of attribute some went",
    default_argument: "the length of a default argument of default_argument",
    counter_around(): "variable n around around went",
    assigned_buffer: f"an earlier call made .*self.seen = self.seen.*{ADVICE}",
    last_call: r"an earlier call made .*self.last = h.detach\(\)",
    running_average: "an earlier call made",
    running_average_in_place: "an earlier call made",
    average_in_numpy: REMEMBERS,
    queue: "an earlier call made.*the length of attribute queue",
    hidden_state: REMEMBERS,
    layer_drop: DRAWS,
    branch_in_eval: DRAWS,
    numpys_number: DRAWS,
    numpys_array: DRAWS,
    sample: DRAWS,
    own_generator: DRAWS,
    own_numpy_generator: "something else|depends on",
    fresh_generator: "something else each time",
    own_torch_generator: "torch.Generator of its own",
    seed_inside: "has set torch's seed",
    clock: "something else each time.*no clock",
}


@pytest.mark.parametrize("function", REFUSED, ids=lambda f: f.__name__)
def test_what_another_call_would_do_otherwise_is_refused_with_its_line(function) -> None:
    with pytest.raises(CaptureError, match=f"(?s){REFUSED[function]}") as caught:
        proved(function)
    file, number, *_ = str(caught.value).split(":")
    lines, first = inspect.getsourcelines(function)
    assert file == __file__
    assert int(number) in range(first, first + len(lines))


def unread_counter(self, h):
    self.calls += 1
    self.queue.append(self.calls)
    return h


def last_for_people(self, h):
    self.last = h.detach()
    return h


def table_made_once(self, h):
    if self.table is None:
        self.table = torch.arange(16.0)
    return h + self.table.to(h.device)


def unread_draw(self, h):
    self.last = h.mean() if random.random() < 0.5 else None
    return h


def numbers_of_a_seed(self, h):
    return h + torch.from_numpy(np.random.RandomState(0).rand(16).astype("f4"))


def torchs_draws(self, h):
    return F.dropout(h, 0.1, self.training) + torch.rand(16, device=h.device)


def counted_batches(self, h):
    self.seen = self.seen + 1
    return h / h.shape[0]


@pytest.mark.parametrize(
    "function",
    [
        unread_counter, last_for_people, table_made_once, unread_draw, numbers_of_a_seed,
        torchs_draws, counted_batches,
    ],
)  # fmt: skip
def test_state_that_no_result_depends_on_is_no_reason(function) -> None:
    assert proved(function, 1, 3, choices=(2, 8)) == {}


def branch_for_one(self, h):
    return h - h.mean(0) if h.shape[0] > 1 else h


def guarded_deviation(self, h):
    return h / (h.std(0) if len(h) > 1 else torch.ones(16))


def squeezed(self, h):
    return h + h[:, :1].squeeze()[..., None]


def statistics_of_one(self, h):
    return F.batch_norm(h, None, None, training=True)


def loop_over_samples(self, h):
    return h * len(str(h.shape[0]))


def expanded_for_more(self, h):
    places = torch.arange(16.0, device=h.device)[None]
    return h * (places if len(h) == 1 else places.expand(len(h), -1))


def expanded_for_two(self, h):
    places = torch.arange(16.0, device=h.device)[None]
    return h * (places if len(h) == 1 else places.expand(2, -1)).sum()


def expanded_otherwise(self, h):
    places = torch.arange(16.0, device=h.device)[None]
    return h * (places + 1 if len(h) == 1 else places.expand(len(h), -1))


def test_what_is_expanded_to_more_than_one_sample_alone_is_the_same_computation() -> None:
    assert proved(expanded_for_more, 1, 3, choices=(1, 2, 8)) == {}


@pytest.mark.parametrize("function", [expanded_for_two, expanded_otherwise])
def test_an_expansion_that_one_sample_would_not_have_had_is_refused(function) -> None:
    with pytest.raises(CaptureError, match="batch size"):
        proved(function, 1)


@pytest.mark.parametrize(
    ("function", "size", "says"),
    [
        (branch_for_one, 1, "mean is called with 5 samples"),
        (guarded_deviation, 1, "std is called with 5 samples, and ones with one sample"),
        (squeezed, 1, "squeeze"),
        (statistics_of_one, 1, r"Expected more than 1 value.*train\.microbatch to 2"),
        (loop_over_samples, 16, "mul gets other numbers with 16 samples"),
    ],
)
def test_a_batch_size_that_is_another_computation_is_refused_or_not_chosen(
    function, size, says
) -> None:
    with pytest.raises(CaptureError, match=f"(?s)batch size.*{says}"):
        proved(function, size)
    wrong = proved(function, 3, choices=(2, 4, size))
    assert list(wrong) == [size]
    assert says.split(".*")[0] in wrong[size]


def statistics_in_training(self, h):
    return F.batch_norm(h, None, None, training=True) if self.training else h


def test_a_batch_of_one_sample_is_tried_where_there_is_one() -> None:
    """Clients' batches have as many samples as are left, however large microbatches are."""
    trained, evaluated = Alone("ann has 9"), Alone(evaluated="bo holds out 9")
    for function in (branch_for_one, statistics_in_training):
        assert proved(function, 3) == {}
        with pytest.raises(CaptureError, match=r"(?s)batch size.*ann has 9: write.*train\.batch"):
            proved(function, 3, alone=trained)
    with pytest.raises(CaptureError, match="bo holds out 9"):
        proved(branch_for_one, 3, alone=evaluated)
    assert proved(statistics_in_training, 3, alone=evaluated) == {}
    assert proved(expanded_for_more, 3, alone=trained) == {}


def test_a_proof_that_runs_out_of_time_says_so_and_chooses_no_size_that_it_did_not_try(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs = {"x": torch.zeros(4, 8), "y": torch.zeros(4, dtype=torch.long)}
    forward = Forward(Net(squeezed), inputs, None, frozenset())
    calls = asked = 0

    def counted(*arguments):
        nonlocal calls
        calls += 1
        return forward_of(*arguments)

    monkeypatch.setattr("shoal.dag.capture.proof.forward_of", counted)

    def late() -> bool:
        nonlocal asked
        asked += 1
        return asked > most

    for most in range(100):
        calls = asked = 0
        found = prove(forward, (3,), (1, 2), late)
        assert calls == min(most, asked), "each call of forward is asked for"
        if not found.unproved:
            break
        assert asked == most + 1, "the proof ends at once"
        assert found.wrong.keys() >= {1, 2}
        assert "not tried to the end in 60 s" in found.unproved
    assert found.wrong.keys() == {1}
    assert most > 10


@pytest.fixture
def kept() -> Iterator[None]:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


@pytest.mark.usefixtures("kept")
def test_draws_come_to_both_ends_of_their_range() -> None:
    own = random.Random(0)
    for kind, end in (("low", 0.0), ("high", 1.0)):
        reseed([own], kind)
        found = [f() for f in (own.random, random.random, np.random.rand) for _ in range(40)]
        assert np.allclose(found, end, atol=1e-9, rtol=0)
        assert random.randint(0, 9) in range(10)  # which draws until a number fits
