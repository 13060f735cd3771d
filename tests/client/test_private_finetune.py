"""An adapter of a model for which no peer has room, tuned over ids that one of them keeps."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from shoal.broker.events import PeerSaid
from shoal.client.job_data import read_data, resolved
from shoal.client.models import models
from shoal.dag.ir.recipe import make
from shoal.dag.schedule.flow import Role
from shoal.job import Job
from shoal.net.links.connection import Connection
from shoal.net.links.frame import FrameHeader
from shoal.net.links.link import Link
from shoal.net.links.messages import Announcement
from shoal.peer.data.reader import Reader
from shoal.sim.plain import oracle

from .test_private_data import Lab, contents, lab, losses

__all__ = ["lab"]

WORDS, LENGTH, WIDTH = 700, 12, 32
WINDOW = 5
"""So many ids in a row are never there by chance."""
ROOM = 0.75
"""What each peer lends, over the weights of the model."""


def folder_of_model(folder: Path) -> tuple[Path, int]:
    """Write a small Llama; return its folder and the bytes of its weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=8,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder / "llama")
    return folder / "llama", sum(p.nbytes for p in model.parameters())


@dataclass
class Seen:
    """What crossed between peers and came to the broker. headers: of frames, whole."""

    messages: list[bytes] = field(default_factory=list)
    headers: list[FrameHeader] = field(default_factory=list)

    def watch(self, lab: Lab, patch: pytest.MonkeyPatch) -> None:
        receive, take, handle = Connection.receive, Link.receive, lab.broker.shell.machine.handle

        def received(connection: Connection, message: bytes, now: float) -> None:
            self.messages.append(message)
            receive(connection, message, now)

        def taken(link: Link, record: Any, now: float) -> Any:
            if isinstance(record, (Announcement, FrameHeader)):
                self.headers.append(getattr(record, "header", record))
            return take(link, record, now)

        def handled(event: Any, now: float) -> Any:
            if isinstance(event, PeerSaid):
                self.messages.append(event.message.SerializeToString())
            return handle(event, now)

        patch.setattr(Connection, "receive", received)
        patch.setattr(Link, "receive", taken)
        patch.setattr(lab.broker.shell.machine, "handle", handled)


def found(ids: np.ndarray, data: list[bytes]) -> Counter[str]:
    """How many windows of the ids stand in these bytes, by the type that they are written in."""
    windows = [ids[i : i + WINDOW] for i in range(0, len(ids) - WINDOW, WINDOW)]
    kinds = ("uint16", "int32", "int64", "float16", "float32", "float64")
    whole = b"\0".join(data)
    return Counter(k for k in kinds for w in windows if w.astype(k).tobytes() in whole)


def plain_losses(job: Job, folder: Path, model: Path) -> list[float]:
    """The losses of one process with transformers and peft."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    data = read_data(job, folder / "plain", lambda line: None, None)
    train, size, count = (
        resolved(job, data.manifest).train,
        job.train.microbatch_size,
        job.train.microbatches,
    )
    reader = Reader(data.manifest, data.shards.__getitem__, seed=job.seed, microbatches=count)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapted: Any = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **job.model.lora))
    recipe = models.outline(job).recipe
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad:
                begins = recipe.tensors[name.removeprefix("base_model.model.")]
                parameter.copy_(make(begins, recipe.seed))

    class Loss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = adapted

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            logits = self.model(input_ids=x, use_cache=False).logits
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())

    steps = train.known_steps or 0
    loop = oracle.train(
        Loss(), lambda s, m: reader.batch(s, m, size), train, steps=steps, microbatches=count
    )
    return loop.losses


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of peft
@pytest.mark.timeout(600)
@pytest.mark.slow  # by day: tests/dag/analysis/test_beside.py, tests/client/test_private_data.py
async def test_neither_ids_nor_labels_leave_the_peer_that_has_them(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    model, weight_bytes = folder_of_model(lab.folder)
    ids = np.random.default_rng(1).integers(300, WORDS, 400).astype(np.int32)
    np.save(lab.folder / "notes.npy", ids)
    job = Job(
        model={
            "factory": f"hf:{model}",
            "lora": {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]},
        },
        data={"kind": "tokens", "source": str(lab.folder / "notes.npy"), "length": LENGTH},
        train={
            **{"steps": 4, "batch": 2, "microbatch": 1, "lr": 2e-2, "eval_every": 2},
            **{"eval_batches": 1},
        },
        output={"to": str(lab.folder / "runs"), "format": "peft"},
    )
    private = replace(
        job, data=replace(job.data, where="peer", source="notes", keep_local="labels")
    )
    own = {"notes": {"path": str(lab.folder / "notes.npy"), "blends_leave": True}}
    room = int(ROOM * weight_bytes)
    await lab.join("clinic", data=own, memory_bytes=room)
    for name in ("ann", "ben"):
        await lab.join(name, memory_bytes=room)
    before, seen = contents(lab.broker.blobs.folder), Seen()
    with monkeypatch.context() as patch:
        seen.watch(lab, patch)
        steps, plan = await lab.train(private)
    clinic = next(w.me.peer for w in lab.workers if w.config.name == "clinic")
    holders = [[*s.holders] for s in plan.stages]
    assert holders[0] == holders[-1] == [clinic], "reads ids and labels"
    assert any(h != [clinic] for h in holders), "the middle is lent to others"

    stored = [d for n, d in contents(lab.broker.blobs.folder).items() if n not in before]
    assert len(seen.messages) > 100
    assert not found(ids, [*seen.messages, *stored])
    kinds = {h.spec.dtype for h in seen.headers if h.key.role is not Role.SNAPSHOT}
    assert kinds <= {"float32", "float64", "bool"}, "numbers, and masks that need no data"
    assert not any(WORDS in h.spec.shape for h in seen.headers), "nothing of each word: no logits"
    assert {Role.ACTIVATION, Role.ACTIVATION_GRAD} <= {h.key.role for h in seen.headers}
    table = load_file(model / "model.safetensors")["model.embed_tokens.weight"].numpy()
    assert not any(row.tobytes() in message for row in table for message in seen.messages), "no row"

    assert losses(steps)[:4] == pytest.approx(plain_losses(job, lab.folder, model), rel=1e-5)
    for kind in ("uint16", "int64", "float32"):  # what would be found
        assert found(ids, [b"before" + ids[60:90].astype(kind).tobytes()])[kind] > 1
