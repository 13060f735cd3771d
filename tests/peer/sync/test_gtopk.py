"""Global Top-K among devices equals a plain tree of merges that knows who gave what."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shoal.dag.exchange import engine
from shoal.dag.exchange.collective import Members
from shoal.dag.exchange.collectives import COLLECTIVES
from shoal.dag.exchange.wiring import Exchange
from shoal.dag.plan.action import ExchangeContent
from shoal.dag.plan.strategies import parse_strategy
from shoal.peer.compute.records import take_records
from shoal.peer.sync import gtopk

from .conftest import STEPS
from .loops import flat, loop, parted

NAMES = "a b c d e f g h i"


def merged(i, given, k):
    """The k largest of what holder i and those below it have: place -> (sum, who is in it)."""
    found = {}
    below = [merged(c, given, k) for c in (2 * i + 1, 2 * i + 2) if c < len(given)]
    for part in ({p: (v, {i}) for p, v in given[i].items()}, *below):
        for place, (value, who) in part.items():
            had, before = found.get(place, (torch.tensor(0.0), set()))
            found[place] = had + value, before | who
    largest = sorted(found, key=lambda p: -abs(float(found[p][0])))[:k]
    return {place: found[place] for place in largest}


class GTopK:
    def __init__(self, names, holders, ratio):
        self.names, self.ratio = names, ratio
        self.errors = [0.0] * holders
        self.pairs = {}

    def __call__(self, step, owns):
        a = [flat(own, self.names) + e for own, e in zip(owns, self.errors, strict=True)]
        k = max(1, round(a[0].numel() / self.ratio))
        given = [{int(i): x[i] for i in x.abs().topk(k).indices} for x in a]
        self.pairs, total = merged(0, given, k), torch.zeros_like(a[0])
        for place, (value, _) in self.pairs.items():
            total[place] = value
        for r, x in enumerate(a):
            self.errors[r] = x.clone()
            for place, (_, who) in self.pairs.items():
                if r in who:
                    self.errors[r][place] = 0.0
        return owns[0] | parted(total, owns[0], self.names)


@pytest.mark.parametrize("holders", [2, 3, 4, 5, 8])
def test_holders_equal_a_loop_and_nothing_is_lost(net, exchanging, watched, holders):
    made, names = net(batch=10), NAMES.split()[:holders]
    world = made.world(exchanging(made.plan(1, [" ".join(names)]), "gtopk:ratio=10"))
    assert watched(world, STEPS) < 1e-5, "conserved at every step"
    parameters = [n for n, _ in made.module.named_parameters()]
    method = GTopK(parameters, holders, 10)
    losses, weights = loop(made.module, made.train, made.reader(), holders, method)
    assert [o.loss for o in world.outcomes] == pytest.approx(losses, rel=1e-4)
    got = world.weights()
    assert all(torch.allclose(got[n], weights[n], atol=1e-4) for n in weights)
    one, *others = (take_records(world.devices[p]._work, STEPS) for p in names)
    shared = [n for n in one if not n.startswith("own/")]
    assert all(torch.equal(one[n], o[n]) for n in shared for o in others), "bit for bit"


def test_with_all_numbers_it_is_the_exact_sum(net, exchanging):
    made = net()
    exact = made.world(made.plan(2, ["a b c", "d e"])).run(STEPS)
    world = made.world(exchanging(made.plan(2, ["a b c", "d e"]), "gtopk:ratio=1"))
    assert world.run(STEPS) == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize("holders", range(1, 10))
def test_no_selected_mass_is_lost(net, exchanging, holders):
    """Twenty random vectors of 256 numbers, 32 of each: the authors' code loses 2.2 % of what is
    selected with 4 holders and 5.4 % with 8. Here all is in the sum or still with who gave it."""
    made, names = net(), NAMES.split()[:holders]
    plan = exchanging(made.plan(1, [" ".join(names)]), f"gtopk:ratio={468 / 32}")
    built = made.world(plan).devices
    of = {p: d._work.held[0].strategy for p, d in built.items()}
    if holders == 1:  # whom a plan would leave with the plain mean
        text = plan.exchanges[0].strategy
        of = {p: gtopk.GTopK(replace(s.holder, choice=parse_strategy(text))) for p, s in of.items()}
    members = Members(tuple(names), tuple(names))
    exchange = Exchange(ExchangeContent.GRADIENT, 0, members, COLLECTIVES["tree"])
    pruned_somewhere = 0
    for seed in range(20):
        torch.manual_seed(seed)
        given = {}
        for peer, strategy in of.items():
            strategy.errors = {}
            for p in strategy.trained.values():
                p.grad = torch.randn_like(p)
            given[peer] = flat({n: p.grad for n, p in strategy.trained.items()}, strategy.trained)
            strategy.on_gradient(0)
        if holders == 1:
            alone = of[names[0]]
            alone.take(0, alone.space(()).add([alone.message(0)]))
        else:
            passed(exchange, of)
        sums = [flat({n: p.grad for n, p in s.trained.items()}, s.trained) for s in of.values()]
        left = {p: flat(s._left, s.trained) for p, s in of.items()}
        assert all(torch.equal(sums[0], s) for s in sums), "the same pairs everywhere"
        assert int((sums[0] != 0).sum()) == of[names[0]].count
        total = sum(g.double() for g in given.values())
        kept = sum(e.double() for e in left.values())
        assert torch.allclose(sums[0].double() + kept, total, atol=1e-5)
        if holders == 1:
            top = given[names[0]].abs().topk(of[names[0]].count).indices
            assert torch.equal(sums[0].nonzero().view(-1), top.sort().values), "Top-K"
        # What a place of the sum lacks of the sum of all, where somebody had selected it.
        at = sums[0] != 0
        for peer in names:
            selected = given[peer].abs() >= least(given[peer], of)
            pruned_somewhere += int((selected & at & (left[peer] != 0)).sum())
    assert (pruned_somewhere > 0) == (holders > 3), "the case that is hard is there"


def least(vector, of):
    return vector.abs().topk(next(iter(of.values())).count).values[-1]


def passed(exchange, of):
    """Carries an exchange out among strategies."""
    sent = {}
    for phase in range(exchange.last + 1):
        for peer, strategy in of.items():
            found = exchange.phases(peer).get(phase)
            if found is None:
                continue
            space = strategy.space(())
            taken = [(hop, sent[hop]) for hop in found.takes]
            if phase == exchange.last:
                strategy.take(0, engine.take(taken, space))
                continue
            own = strategy.message(0) if phase == 0 else None
            given = (
                engine.give(exchange, lambda hop, own=own: own, space)
                if phase == 0
                else engine.pass_on(taken, space)
            )
            sent |= {hop: given(hop) for hop in found.gives}
