"""A chat file through a whole run, against a plain loop of transformers in one process."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shoal.client.chat.samples import PACKS, read_records
from shoal.job import Job

from ..files.test_pretrained import Lab, lab  # noqa: F401 (a fixture)
from .chats import CHATS, MARKED, messages, tokenizer, write_chats, write_model

STEPS, LR, LENGTH = 3, 0.5, 64


def job_of(folder: Path, batch: int, microbatch: int = 1, pipelines: int = 1, **data: Any) -> Job:
    return Job(
        model={"factory": "hf:model"},
        data={"kind": "chat", "source": "*.jsonl", "length": LENGTH, "holdout": 0.0} | data,
        train={"steps": STEPS, "batch": batch, "microbatch": microbatch, "optimizer": "sgd"}
        | {"lr": LR, "momentum": 0.0, "weight_decay": 0.0, "schedule": "constant", "warmup": 0}
        | {"clip": 0.0},
        plan={"scheduler": "uniform", "stages": 2, "pipelines": pipelines},
        output={"to": str(folder / "runs")},
        folder=folder,
    )


def plain_losses(model: Any) -> list[float]:
    """Each chat by itself, the labels by the template's own marks, one mean over all counted."""
    own, losses = tokenizer(MARKED), []
    for _ in range(STEPS):
        total, count = torch.zeros(()), 0
        for chat in CHATS:
            found = own.apply_chat_template(
                messages(chat), return_dict=True, return_assistant_tokens_mask=True
            )
            ids = torch.tensor(found["input_ids"])[: LENGTH + 1]
            mask = torch.tensor(found["assistant_masks"])[1 : LENGTH + 1].bool()
            logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0]
            total = total + F.cross_entropy(logits[mask], ids[1:][mask], reduction="sum")
            count += int(mask.sum())
        loss = total / count
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= LR * parameter.grad
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize(
    ("kind", "pack", "pipelines"),
    [
        ("llama", True, 1),
        *(
            pytest.param(kind, True, 1, marks=pytest.mark.slow)
            for kind in sorted(PACKS - {"llama"})
        ),
        *(
            pytest.param("llama", *each, marks=pytest.mark.slow)
            for each in [(False, 1), (False, 2)]
        ),
        pytest.param("llama", True, 2, marks=pytest.mark.slow),
    ],
)
async def test_losses_are_those_of_a_plain_loop(
    lab: Lab,  # noqa: F811
    tmp_path: Path,
    kind: str,
    pack: bool,
    pipelines: int,
) -> None:
    """Of several pipelines each has microbatches with other numbers of counted tokens."""
    model = write_model(tmp_path / "model", kind)
    write_chats(tmp_path / "chats.jsonl")
    read = read_records(job_of(tmp_path, 1, pack=pack), tmp_path / "there", lambda line: None)
    batch = read["manifest"].total
    assert (batch < len(CHATS)) is pack
    await asyncio.gather(*(lab.join(f"p{i}") for i in range(2 * pipelines)))
    job = job_of(tmp_path, batch, 1 if pack else pipelines, pipelines, pack=pack)
    losses = await lab.train(job)
    assert losses == pytest.approx(plain_losses(model), rel=1e-5)
    assert losses[-1] < losses[0]
