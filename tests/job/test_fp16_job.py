"""What a job may ask for beside fp16."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.job import Job, SettingsError, Training
from shoal.planner.requests.requirements import read_spec
from shoal.proto.broker_pb2 import RunSpec

FP16 = {"factory": "a:b", "dtype": "fp16"}


def test_losses_are_scaled_under_fp16_alone_and_peers_are_told() -> None:
    for dtype, scaled in (("fp16", True), ("bf16", False), ("fp32", False)):
        training = Job(model={**FP16, "dtype": dtype}, steps=3).training
        assert training.scales_loss is scaled
        assert Training.from_json(training.to_json()) == training
    scale = Job(model=FP16, steps=3).train.loss_scale
    assert (scale.init_scale, scale.growth_interval) == (65536.0, 2000), "as GradScaler has them"


def test_a_step_under_fp16_always_has_a_norm() -> None:
    """By which everybody knows whether gradients overflowed anywhere."""
    for dtype, norm in (("fp16", True), ("fp32", False)):
        job = Job(model={**FP16, "dtype": dtype}, steps=3, batch=4, clip=0.0)
        spec = RunSpec(
            version=1, name="r", job=job.to_json(), steps=3, microbatches=4, microbatch_size=1
        )
        spec.graph.hash = spec.data.hash = "0" * 64
        assert read_spec(spec).options.norm is norm


@pytest.mark.parametrize(
    ("key", "tables"),
    [
        ("sync.method", {"sync": {"method": "powersgd"}}),
        ("recovery.ladder", {"recovery": {"ladder": ["neighbour"]}}),
        ("codec.activation_grad", {"codec": {"activation_grad": "topk:ratio=10"}}),
        ("codec.activation", {"codec": {"activation": "delta+int8"}}),
        ("codec.grad", {"codec": {"grad": "ef+int8", "feedback": "none"}}),
        ("codec.default", {"codec": {"default": "adatopk"}}),
        ("codec.feedback", {"codec": {"default": "int8"}}),
        ("codec.feedback", {"codec": {"grad": "auto"}}),
    ],
)
def test_what_would_remember_a_skipped_step_is_refused(key: str, tables: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=r'with model\.dtype = "fp16"') as caught:
        Job(model=FP16, steps=3, **tables)
    assert caught.value.key == key
    train = {"train": {"steps": 3}, **tables}
    Job(model={**FP16, "dtype": "bf16"}, **train)


@pytest.mark.parametrize("method", ["fednova", "scaffold", "fedimpro", "fedavg"])
def test_clients_whose_steps_are_counted_do_not_skip_any(method: str) -> None:
    partition = {"kind": "iid", "clients": 4}
    table: dict[str, Any] = {
        "version": 1,
        "name": method,
        "model": FP16,
        "data": {"kind": "arrays", "source": "x.npz", "partition": partition},
        "sync": {"kind": "federated", "method": method, "local": {"steps": 2}},
        "train": {"rounds": 2, "batch": 4, "optimizer": "sgd"},
    }
    if method == "fedavg":
        assert Job.from_table(table).training.scales_loss
        return
    with pytest.raises(SettingsError, match=r'with model\.dtype = "fp16"') as caught:
        Job.from_table(table)
    assert caught.value.key == "sync.method"


@pytest.mark.parametrize("sync", [{"kind": "local"}, {"kind": "auto"}, {"kind": "gossip"}], ids=str)
def test_replicas_that_train_apart_may_scale_losses(sync: dict[str, Any]) -> None:
    replicas = "auto" if sync["kind"] == "auto" else 2
    job = Job(model=FP16, steps=3, sync=sync, plan={"replicas": replicas})
    assert job.train.loss_scale.init_scale == 65536.0


@pytest.mark.parametrize(
    "codec",
    [
        {"default": "lossless"},
        {"default": "fp16", "feedback": "none"},
        {"activation_grad": "int8:block=64", "activation": "auto"},
    ],
)
def test_codecs_that_bear_an_overflow_may_be(codec: dict[str, Any]) -> None:
    assert Job(model=FP16, steps=3, codec=codec).training.scales_loss


@pytest.mark.parametrize(
    ("loss_scale", "says"),
    [
        ({"init_scale": 1000}, "`train.loss_scale.init_scale` is 1000: expected a power of two"),
        ({"init_scale": 0}, "expected a power of two"),
        ({"init_scale": -2}, "expected a power of two"),
        ({"init_scale": 2.0**128}, "expected 1.17549e-38 to"),
        ({"growth_interval": 0}, "`train.loss_scale.growth_interval` is 0: expected 1 or more"),
        ({"backoff": 0.5}, "is not a known key"),
    ],
)
def test_a_scale_is_read_strictly(loss_scale: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        Job(model=FP16, steps=3, loss_scale=loss_scale)


def test_a_scale_is_with_fp16() -> None:
    with pytest.raises(SettingsError, match=r'it is with model\.dtype = "fp16", here "bf16"'):
        Job(model={**FP16, "dtype": "bf16"}, steps=3, loss_scale={"init_scale": 2})


def test_weights_are_kept_in_bf16_under_bf16_alone() -> None:
    with pytest.raises(SettingsError, match='Expected dtype = "bf16" with it'):
        Job(model={**FP16, "frozen_dtype": "bf16"}, steps=3)
