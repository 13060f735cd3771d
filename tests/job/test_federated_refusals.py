"""What a job of clients cannot be is refused by its key, with what to write instead."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.job import Job, SettingsError

from .federated_jobs import (
    BUDGET,
    BUFFERED,
    FLAG,
    IN_SHARES,
    KRUM,
    MASKED,
    MASKED_TOP,
    PRIVATE,
    SHARES,
    job,
)


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
