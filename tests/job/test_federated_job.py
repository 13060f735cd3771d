"""[sync] kind = "federated" and [data.partition] of a job."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from shoal.job import Job, SettingsError, Training
from shoal.job.clients.client_options import FedBuffOptions, share_of
from shoal.job.clients.client_privacy import ClientPrivacy
from shoal.job.clients.local_work import LocalWork
from shoal.job.rounds import method_of


def job(**tables: Any) -> Job:
    found: dict[str, Any] = {
        "model": {"factory": "m.py:f"},
        "data": {"kind": "arrays", "source": "x.npz", "partition": {"kind": "iid", "clients": 40}},
        "sync": {"kind": "federated"},
        "plan": {"replicas": 3},
    }
    for key, table in tables.items():
        found[key] = {**found.get(key, {}), **table}
    train = found.pop("train", {"rounds": 5})
    return Job(train={"batch": 8, **train}, **found)


def test_cohorts_follow_from_the_tables() -> None:
    found = job(sync={"per_round": "30%", "local": {"steps": 3}, "weight": "equal"})
    assert found.rounds is not None
    cohorts = found.rounds.cohorts
    assert cohorts is not None
    assert (cohorts.clients, cohorts.per_round, cohorts.labels) == (40, 12, "y")
    assert (cohorts.local.steps, cohorts.local.passes, cohorts.weight) == (3, 0, "equal")
    assert Job.from_json(found.to_json()) == found.without_places()
    assert found.training.batch == 8, "a client's"
    assert job(sync={"per_round": 7}).rounds.cohorts.per_round == 7  # type: ignore[union-attr]


def test_a_buffer_is_a_number_or_a_share_of_those_that_train_at_a_time() -> None:
    assert FedBuffOptions(buffer="30%").wanted(12) == 4, "rounded up"
    assert FedBuffOptions(buffer=12).wanted(12) == 12
    found = job(sync=BUFFERED)
    assert Job.from_json(found.to_json()) == found.without_places()
    assert method_of(found.sync.chosen).buffered


@pytest.mark.parametrize("text", ["0.1%", "0.05%", "33.3%", "12.000001%", "100.0%", "7%"])
def test_a_share_of_clients_is_exact_and_rounded_up(text: str) -> None:
    wanted = Fraction(text.removesuffix("%")) / 100
    for clients in (1, 12, 1000, 99_999, 10_000_000):
        found = share_of(text, clients)
        assert found >= wanted * clients > found - 1


@pytest.mark.parametrize(
    "text", ["0.0%", "100.1%", "1e1%", "1/2%", ".5%", "5.%", "-1%", "9" * 5000 + "%", "٣%"]
)
def test_what_is_no_share_of_clients_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="a share such as"):
        share_of(text, 100)


@pytest.mark.parametrize("key", ["passes", "steps"])
def test_no_client_works_for_longer_than_its_batches_fit_into_memory(key: str) -> None:
    assert job(sync={"local": {key: 2**20}}).sync.local == LocalWork(**{key: 2**20})
    with pytest.raises(SettingsError, match=rf"sync.local.{key}.*expected at most {2**20}"):
        job(sync={"local": {key: 2**40}})


def test_rounds_are_steps_of_the_run() -> None:
    by_rounds, by_steps = job(train={"rounds": 7}), job(train={"steps": 7})
    assert by_rounds.resolved(by_rounds.train.known_steps or 0) == by_steps.resolved(7)
    assert Job.from_json(by_rounds.to_json()) == by_rounds.without_places()


def test_an_aggregate_says_how_many_clients_may_be_wrong() -> None:
    krum = {"aggregate": "krum", "weight": "equal", "per_round": 20}
    found = job(sync=krum)
    assert found.rounds is not None
    cohorts = found.rounds.cohorts
    assert cohorts is not None
    assert (cohorts.byzantine, cohorts.by_client, cohorts.chooses) == (4, True, True)
    assert Job.from_json(found.to_json()) == found.without_places()
    nine = job(sync={**krum, "aggregate": "trimmed-mean", "byzantine": 9}).rounds
    assert nine is not None
    assert nine.cohorts is not None
    assert (nine.cohorts.byzantine, nine.cohorts.chooses) == (9, False)
    flag = job(sync=FLAG).rounds
    assert flag is not None
    assert flag.cohorts is not None
    assert (flag.cohorts.byzantine, flag.cohorts.by_client, flag.cohorts.chooses) == (0, True, True)
    # Of 20 clients what was taken down, came and is put side by side; the result; the version.
    assert found.rounds.exchange_bytes == 20 * (4 + 4 + 4) + 4 + 4


def test_what_clients_send_follows_from_the_tables() -> None:
    assert job().rounds.cohorts.sends.sparse is False  # type: ignore[union-attr]
    links = {"up": "normal:1Mbit,0.2Mbit", "latency": "50ms"}
    options = {"gamma": 3, "overlap_degree": 2, "alpha": 0.5}
    found = job(
        sync={
            "compression": "bcrs+opwa",
            "compression_options": options,
            "client_links": links,
        }
    )
    assert found.rounds is not None
    assert found.rounds.overlap == (3.0, 2)
    assert found.rounds.codec == "nonzero"
    assert Job.from_json(found.to_json()) == found.without_places()
    with_one_row = job(sync={"compression": "topk", "client_links": links}).rounds
    assert with_one_row is not None
    assert with_one_row.overlap is None
    assert found.rounds.exchange_bytes > with_one_row.exchange_bytes


def test_virtual_data_goes_to_peers_with_cohorts() -> None:
    found = job(sync={"virtual_data": "vhl", "vhl": {"l1": 0.5, "calibrate": {"steps": 9}}})
    assert found.rounds is not None
    assert found.rounds.cohorts is not None
    vhl = found.rounds.cohorts.vhl
    assert vhl is not None
    assert (vhl.alpha, vhl.l1, vhl.l2, vhl.temperature) == (1.0, 0.5, 0.1, 0.07)
    assert (vhl.calibrate.steps, vhl.calibrate.passes) == (9, 0)
    assert Training.from_json(found.training.to_json()) == found.training
    assert Job.from_json(found.to_json()) == found.without_places()
    without = job().rounds
    assert without is not None
    assert without.cohorts is not None
    assert without.cohorts.vhl is None


def test_what_one_of_many_is_planned_as_has_no_clients() -> None:
    whole = job(sync={"method": "fedadam", "options": {"lr": 0.1}})
    assert whole.decided("local", 1).rounds is not None
    assert whole.decided("local", 1).rounds.cohorts == whole.rounds.cohorts, "a run of one replica"
    one = whole.one_of_many
    assert one.rounds is not None
    assert one.rounds.cohorts is None
    assert one.data.partition is None


KRUM = {"aggregate": "krum", "weight": "equal", "per_round": 10}
FLAG = {"aggregate": "flag", "weight": "equal", "per_round": 10}
BUDGET = {"clip": 1.0, "epsilon": 8.0, "delta": 1e-5}
PRIVATE = {"weight": "equal", "privacy": BUDGET}
SHARES = {**BUDGET, "where": "distributed"}
MASKED = {"secure": True, "per_round": 5}
MASKED_TOP = {**MASKED, "compression": "topk"}
IN_SHARES = {"weight": "equal", "privacy": SHARES, "secure": True, "per_round": 5}
BUFFERED = {"method": "fedbuff", "per_round": "30%", "options": {"buffer": 4}}


def test_clients_are_hidden_by_the_same_numbers_everywhere() -> None:
    found = job(sync=PRIVATE)
    assert found.rounds is not None
    privacy = found.rounds.privacy
    assert privacy is not None
    assert (privacy.clip, privacy.epsilon, privacy.delta, privacy.noise) == (1.0, 8.0, 1e-5, 0.0)
    assert Job.from_json(found.to_json()) == found.without_places()
    assert not found.rounds.keeps_given, "no contribution without noise is in a snapshot"
    plain = job(sync={"weight": "equal"}).rounds
    assert plain is not None
    assert plain.keeps_given
    assert plain.privacy is None


def test_shares_of_noise_are_for_the_fewest_that_may_be_in_a_sum() -> None:
    found = job(sync=IN_SHARES)
    assert found.rounds is not None
    assert found.rounds.cohorts is not None
    assert found.rounds.privacy is not None
    assert (found.rounds.privacy.where, found.rounds.cohorts.fewest) == ("distributed", 3)
    assert Job.from_json(found.to_json()) == found.without_places()
    for fewest in (3, 5):
        hidden = ClientPrivacy(**{**SHARES, "clip": 0.5, "noise": 4.0, "fewest": fewest})
        all_but_one = (fewest - 1) * hidden.share**2
        assert all_but_one == pytest.approx((4.0 * 0.5) ** 2), "who knows its own has less"
        assert hidden.step == hidden.share / 2**24
    plain = job(sync={"per_round": 5}).rounds
    assert plain is not None
    assert plain.cohorts is not None
    assert plain.cohorts.fewest == 1


def test_with_masks_all_send_the_same_numbers_and_the_last_move_is_kept() -> None:
    found, plain = job(sync=MASKED_TOP).rounds, job(sync=MASKED).rounds
    assert found is not None
    assert plain is not None
    assert found.cohorts is not None
    assert (found.cohorts.shares_positions, found.cohorts.own_positions) == (True, False)
    assert found.codec == "none"
    assert found.kept_bytes == plain.kept_bytes + 4
    apart = job(sync={"compression": "topk"}).rounds
    assert apart is not None
    assert apart.cohorts is not None
    assert (apart.cohorts.shares_positions, apart.cohorts.own_positions) == (False, True)
    assert (apart.codec, apart.results) == ("nonzero", "")
    back = job(sync={"compression": "topk"}, codec={"sync": "int8"}).rounds
    assert back is not None
    assert (back.codec, back.results) == ("nonzero", "int8")


def test_what_is_masked_is_in_no_snapshot_and_takes_more_room() -> None:
    found, plain = (
        job(sync={"secure": True, "per_round": 3}).rounds,
        job(sync={"per_round": 3}).rounds,
    )
    assert found is not None
    assert plain is not None
    assert (found.secure, found.keeps_given) == (True, False)
    assert (plain.secure, plain.keeps_given) == (False, True)
    assert found.exchange_bytes == plain.exchange_bytes + 16
    assert found.cohorts is not None
    assert replace(found, cohorts=replace(found.cohorts, secure=False)) == plain


@pytest.mark.parametrize(
    ("tables", "key", "words"),
    [
        ({"sync": {"every": 3}}, "sync.every", "leave it out"),
        ({"train": {"rounds": 5, "steps": 5}}, "train.rounds", "exactly one of"),
        ({"train": {"rounds": 0}}, "train.rounds", "1 or more"),
        ({"sync": {"per_round": 0}}, "sync.per_round", "at least 1"),
        ({"sync": {"over_select": 0.9}}, "sync.over_select", "at least 1"),
        ({"sync": {"over_select": float("nan")}}, "sync.over_select", "at least 1"),
        ({"sync": {"over_select": 1.2}}, "sync.over_select", "by turns"),
        ({"sync": {"kind": "local", "over_select": 2}}, "sync.over_select", 'for kind = "fed'),
        ({"sync": {"per_round": "some"}}, "sync.per_round", "a share such as"),
        ({"sync": {"aggregate": "median"}}, "sync.weight", 'expected "equal"'),
        ({"sync": {"aggregate": "mode", "weight": "equal"}}, "sync.aggregate", "multi-krum"),
        ({"sync": {"aggregate": "flag"}}, "sync.weight", 'expected "equal"'),
        ({"sync": {**FLAG, "byzantine": 2}}, "sync.byzantine", "leaves nobody out"),
        ({"sync": {**FLAG, "privacy": BUDGET}}, "sync.aggregate", "not bounded by clip"),
        ({"sync": {**FLAG, "secure": True}}, "sync.secure", "nobody sees one"),
        ({"sync": FLAG, "codec": {"sync": "bf16"}}, "codec.sync", "not supported yet"),
        (
            {"sync": {**FLAG, "method": "fednova"}, "train": {"steps": 5, "optimizer": "sgd"}},
            *("sync.method", "a mean of scaled moves"),
        ),
        ({"sync": {"byzantine": 2}}, "sync.byzantine", "leaves nobody out"),
        ({"sync": {**KRUM, "byzantine": "half"}}, "sync.byzantine", "a share such as"),
        ({"sync": {**KRUM, "per_round": 6, "byzantine": 2}}, "sync.byzantine", "needs 7 of them"),
        ({"sync": KRUM, "codec": {"sync": "bf16"}}, "codec.sync", "not supported yet"),
        (
            {"sync": {**KRUM, "method": "fednova"}, "train": {"steps": 5, "optimizer": "sgd"}},
            "sync.method",
            "a mean of scaled moves",
        ),
        ({"sync": {"kind": "local", "aggregate": "krum"}}, "sync.aggregate", 'for kind = "fed'),
        ({"sync": {"privacy": BUDGET}}, "sync.weight", "no client may count for more"),
        ({"sync": {**KRUM, "privacy": BUDGET}}, "sync.aggregate", "not bounded by clip"),
        ({"sync": {**PRIVATE, "privacy": {**BUDGET, "clip": 0}}}, "sync.privacy.clip", "above 0"),
        ({"sync": {**PRIVATE, "privacy": {**BUDGET, "epsilon": -1.0}}}, "privacy.epsilon", "above"),
        ({"sync": {**PRIVATE, "privacy": {**BUDGET, "delta": 1.0}}}, "privacy.delta", "in (0, 1)"),
        ({"sync": {**PRIVATE, "privacy": {**BUDGET, "noise": -1.0}}}, "privacy.noise", "0 or more"),
        ({"sync": {**PRIVATE, "privacy": {"clip": 1.0, "delta": 0.1}}}, "epsilon", "missing"),
        (
            {"sync": {**PRIVATE, "per_round": 2, "privacy": {**BUDGET, "noise": 999.0}}},
            *("privacy.epsilon", "more clients in a round"),
        ),
        ({"sync": PRIVATE, "output": {"every": 2}}, "output.every", "a new budget"),
        ({"sync": PRIVATE, "codec": {"sync": "bf16"}}, "codec.sync", "rounds what was clipped"),
        (
            {"sync": {**PRIVATE, "method": "fednova"}, "train": {"steps": 5, "optimizer": "sgd"}},
            *("sync.method", "which no noise hides"),
        ),
        (
            {
                "sync": PRIVATE,
                "data": {"partition": {"kind": "iid", "clients": 9, "held_out": 0.2}},
            },
            *("data.partition.held_out", "without noise"),
        ),
        (
            {"sync": PRIVATE, "data": {"where": "peer", "partition": None}},
            *("data.holdout", "without noise"),
        ),
        (
            {"sync": {"kind": "local", "privacy": BUDGET}, "train": {"steps": 5}}
            | {"data": {"partition": None}},
            *("sync.privacy", 'for kind = "fed'),
        ),
        (
            {"sync": {**PRIVATE, "virtual_data": "vhl"}},
            *("sync.virtual_data", "further classes too, which no export has"),
        ),
        ({"sync": {**IN_SHARES, "secure": False}}, "sync.privacy.where", "that one's share"),
        ({"sync": {**PRIVATE, "privacy": {**BUDGET, "where": "here"}}}, "privacy.where", "central"),
        (
            {"sync": {**PRIVATE, "privacy": {**BUDGET, "fewest": 4}}},
            *("sync.privacy.fewest", "added once"),
        ),
        (
            {"sync": {**IN_SHARES, "privacy": {**SHARES, "fewest": 2}}},
            *("sync.privacy.fewest", "3 or more"),
        ),
        (
            {"sync": {**IN_SHARES, "privacy": {**SHARES, "fewest": 6}}},
            *("sync.per_round", "fewest = 6"),
        ),
        (
            {
                "sync": {**IN_SHARES, "privacy": {**SHARES, "fewest": 5}},
                "plan": {"replicas": 4},
            },
            *("plan.replicas", "5 or more"),
        ),
        (
            {"sync": {**IN_SHARES, "privacy": {**SHARES, "noise": 1e-13}}},
            *("sync.privacy.noise", "64 bits"),
        ),
        ({"sync": {**KRUM, "secure": True}}, "sync.secure", "nobody sees one"),
        (
            {"sync": {**MASKED, "compression": "bcrs", "client_links": {"up": "1Mbit"}}},
            *("sync.secure", "as its link carries"),
        ),
        ({"sync": {**MASKED_TOP, "client_feedback": "ef"}}, "sync.secure", "what a client keeps"),
        (
            {"sync": {**MASKED_TOP, "compression_options": {"explore": 0.0}}},
            *("sync.compression_options.explore", "in (0, 1]"),
        ),
        (
            {"sync": {"compression": "topk", "compression_options": {"explore": 0.4}}},
            *("sync.compression_options.explore", "secure = false"),
        ),
        ({"sync": {**MASKED_TOP, "virtual_data": "vhl"}}, "sync.virtual_data", "no plain loop"),
        (
            {"sync": {**MASKED_TOP, "weight": "equal", "privacy": BUDGET}},
            *("sync.compression", "no noise hides"),
        ),
        (
            {
                "sync": {**MASKED_TOP, "method": "fednova"},
                "train": {"steps": 5, "optimizer": "sgd"},
            },
            *("sync.method", "scales moves by itself"),
        ),
        ({"sync": {"secure": True}, "codec": {"sync": "bf16"}}, "codec.sync", "64 bits"),
        ({"sync": {"secure": True}, "plan": {"replicas": 2}}, "plan.replicas", "3 or more"),
        ({"sync": {"secure": True, "per_round": 2}}, "sync.per_round", "the other's part"),
        ({"sync": {"kind": "local", "secure": True}}, "sync.secure", 'for kind = "federated"'),
        ({"sync": {"local": {"passes": 1, "steps": 2}}}, "sync.local", "exactly one"),
        ({"sync": {"vhl": {"alpha": 2.0}}}, "sync.vhl", 'virtual_data = "vhl"'),
        ({"sync": {"virtual_data": "noise"}}, "sync.virtual_data", "vhl"),
        *(
            ({"sync": {"virtual_data": "vhl", "vhl": {key: value}}}, f"sync.vhl.{at}", words)
            for key, value, at, words in (
                ("alpha", -1.0, "alpha", "expected 0 or more"),
                ("l2", float("inf"), "l2", "finite"),
                ("temperature", 0.0, "temperature", "more than 0"),
                ("per_class", 0, "per_class", "1 or more"),
                ("batch", 1 << 17, "batch", "at most"),
                ("noise", [3, 0], "noise[1]", "at least 1"),
                ("calibrate", {"passes": 1, "steps": 1}, "calibrate", "exactly one"),
            )
        ),
        (
            {"sync": {"virtual_data": "vhl"}, "model": {"dtype": "bf16"}},
            "model.dtype",
            '"fp32" is, with sync.virtual_data',
        ),
        (
            {"sync": {"kind": "local", "virtual_data": "vhl"}, "data": {"partition": None}},
            "sync.virtual_data",
            'kind = "federated"',
        ),
        ({"sync": {"method": "diloco"}}, "sync.method", 'of kind "local"'),
        ({"sync": {"method": "fedavg", "options": {"lr": 1.0}}}, "sync.options.lr", "not a known"),
        ({"sync": {"method": "fedadam", "options": {"eps": 0.0}}}, "sync.options.eps", "more than"),
        ({"sync": {"method": "fednova"}}, "train.optimizer", "SGD"),
        *(
            ({"sync": {**BUFFERED, **tables}}, key, words)
            for tables, key, words in (
                ({"options": {"buffer": 13}}, "sync.options.buffer", "12 clients train at a time"),
                ({"options": {"buffer": 0}}, "sync.options.buffer", "at least 1"),
                ({"options": {"buffer": "half"}}, "sync.options.buffer", "a share such as"),
                ({"options": {"max_staleness": -1}}, "sync.options.max_staleness", "0 or more"),
                ({"options": {"lr": 0.0}}, "sync.options.lr", "more than 0"),
                ({"options": {"momentum": 0.9}}, "sync.options.momentum", "not a known"),
                ({**KRUM, "per_round": 12}, "sync.aggregate", "not all begin with one version"),
                ({"compression": "topk"}, "sync.compression", "a cohort that ends together"),
                (PRIVATE, "sync.privacy", "as many as come"),
                ({"secure": True}, "sync.secure", "may be for a later round"),
                ({"quorum": "80%"}, "sync.quorum", "options.buffer says"),
                ({"virtual_data": "vhl"}, "sync.virtual_data", "no plain loop"),
            )
        ),
        (
            {"data": {"where": "peer", "partition": None}}
            | {"sync": {"method": "fedbuff", "over_select": 1.5}},
            *("sync.over_select", "counts for a later version"),
        ),
        ({"sync": {"compression": "top"}}, "sync.compression", '"topk"'),
        ({"sync": {"compression": "bcrs"}}, "sync.client_links", "is missing"),
        ({"sync": {"client_feedback": "ef"}}, "sync.client_feedback", "where clients send all"),
        (
            {"sync": {"compression_options": {"least_ratio": 0.5}}},
            "sync.compression_options",
            "leave it out",
        ),
        (
            {"sync": {"compression": "topk", "compression_options": {"alpha": 0.5}}},
            "sync.compression_options.alpha",
            'of "bcrs"',
        ),
        (
            {
                "sync": {
                    "compression": "bcrs",
                    "client_links": {"up": "1Mbit"},
                    "compression_options": {"gamma": 2.0},
                }
            },
            "sync.compression_options.gamma",
            'of "bcrs+opwa"',
        ),
        (
            {"sync": {"compression": "topk", "compression_options": {"least_ratio": 0.0}}},
            "sync.compression_options.least_ratio",
            "a share in (0, 1]",
        ),
        ({"sync": {"client_links": {"up": "1"}}}, "sync.client_links.up", "no unit"),
        ({"sync": {"client_links": {"up": "0Mbit"}}}, "sync.client_links.up", "above 0"),
        ({"sync": {"client_links": {"up": "normal:1Mbit"}}}, "sync.client_links.up", "two"),
        (
            {"sync": {"client_links": {"up": "uniform:2Mbit,1Mbit"}}},
            "sync.client_links.up",
            "the smaller one first",
        ),
        (
            {"data": {"where": "peer", "partition": None}}
            | {"sync": {"compression": "bcrs", "client_links": {"up": "1Mbit"}}},
            *("sync.client_links", "the measured link of its host"),
        ),
        (
            {"sync": {**KRUM, "compression": "topk"}},
            *("sync.aggregate", 'with sync.compression = "topk"'),
        ),
        (
            {"sync": {"method": "fednova", "compression": "topk"}}
            | {"train": {"rounds": 5, "optimizer": "sgd"}},
            *("sync.method", 'with sync.compression = "topk": fednova scales moves'),
        ),
        (
            {"sync": {"kind": "local", "compression": "topk"}},
            "sync.compression",
            'for kind = "federated"',
        ),
        ({"data": {"partition": {"kind": "dirichlet", "clients": 4}}}, "data.partition.alpha", ""),
        ({"data": {"partition": {"kind": "by-peer"}}}, "data.partition.kind", "not supported yet"),
        (
            {"data": {"where": "peer", "partition": None}, "sync": {"method": "fednova"}}
            | {"train": {"rounds": 5, "optimizer": "sgd"}},
            *("sync.method", "no host knows"),
        ),
        ({"data": {"where": "peer"}}, "data.partition", "each host that has the data is a client"),
        ({"data": {"kind": "text"}}, "data.kind", "not supported yet"),
        ({"plan": {"pipelines": 2}}, "plan.pipelines", "a client is trained by one"),
        ({"train": {"passes": 3}}, "train.passes", "expected rounds"),
        ({"train": {"tokens": 3}}, "train.tokens", "expected rounds"),
        ({"sync": {"collective": "ring"}}, "sync.collective", "no stage of a client"),
        ({"sync": {"client_links": {"up": "1Mbit"}}}, "sync.client_links", "leave them out"),
        (
            {"data": {"targets": "", "partition": {"kind": "shards", "clients": 4}}},
            *("data.partition.kind", "no labels to divide by"),
        ),
        *(
            (
                {"data": {"partition": {"kind": "iid", "clients": 4, "held_out": 0.2}, **data}}
                | {"train": {"rounds": 5, **train}},
                *("data.partition.held_out", "without evaluations"),
            )
            for data, train in (
                ({"holdout": 0.0}, {}),
                ({}, {"eval_every": 0}),
                ({}, {"eval_batches": 0}),
            )
        ),
        ({"sync": {"kind": "local"}, "plan": {"replicas": 2}}, "train.rounds", "not supported"),
        (
            {"sync": {"kind": "local"}, "train": {"steps": 5}, "plan": {"replicas": 2}},
            *("data.partition", "not supported"),
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(tables: Any, key: str, words: str) -> None:
    with pytest.raises(SettingsError) as error:
        job(**tables)
    assert key in str(error.value)
    assert words in str(error.value)


def test_more_clients_in_a_round_than_there_are() -> None:
    with pytest.raises(SettingsError, match="there are 40 clients"):
        job(sync={"per_round": 41})


def test_without_a_partition_it_is_said_what_is_missing() -> None:
    with pytest.raises(SettingsError, match=r"data\.partition"):
        Job(model="m.py:f", train={"steps": 5}, data={"kind": "arrays"}, sync={"kind": "federated"})
