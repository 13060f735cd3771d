"""What a small model of a task of transformers takes: its config, and a batch of noise for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.benchmarks.people.shrink import FIRST_WORD, WORDS, shrunk

__all__ = ["BATCH", "OTHERS", "Problem", "problem_of"]

BATCH, LENGTH, LABELS = 2, 16, 3

_FAMILIES = {
    "masked-lm": """albert bert camembert convbert deberta-v2 distilbert electra ernie
        modernbert mpnet roberta xlm xlm-roberta""",
    "sequence-classification": """albert bert deberta-v2 distilbert electra gemma gpt2 llama mistral
        modernbert mpnet qwen2 qwen3 roberta xlm-roberta xlnet""",
    "token-classification": """albert bert deberta-v2 distilbert electra llama modernbert qwen2
        roberta""",
    "question-answering": "albert bert distilbert electra qwen2 roberta",
    "multiple-choice": "albert bert distilbert roberta",
    "seq2seq-lm": """bart blenderbot longt5 m2m_100 marian mbart mt5 pegasus switch_transformers
        t5""",
    "image-classification": """beit convnext convnextv2 dinov2 focalnet ijepa
        poolformer pvt regnet resnet segformer swin swinv2 vit vit_msn""",
}
OTHERS: Mapping[str, Sequence[str]] = {task: names.split() for task, names in _FAMILIES.items()}
"""Families that are tried besides causal language models, by task."""

_FOUR = {"depths": [1] * 4, "hidden_sizes": [16, 16, 32, 32], "num_attention_heads": [1, 1, 2, 2]}
_TWO = {"depths": [1, 1], "hidden_sizes": [16, 32], "embedding_size": 16}
_WINDOWS = {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}
_OF_PICTURES: Mapping[str, Mapping[str, Any]] = {
    "convnext": {"depths": [1, 1], "hidden_sizes": [16, 32], "num_stages": 2},
    "convnextv2": {"depths": [1, 1], "hidden_sizes": [16, 32], "num_stages": 2},
    "cvt": {"embed_dim": [16, 32, 32], "num_heads": [1, 2, 2], "depth": [1, 1, 1]},
    "focalnet": {"embed_dim": 16, "depths": [1, 1], "patch_size": 4},
    "levit": {"hidden_sizes": [32, 48, 64], "num_attention_heads": [2] * 3, "depths": [1] * 3},
    "poolformer": {"depths": [1] * 4, "hidden_sizes": [16, 16, 32, 32]},
    "pvt": {**_FOUR, "patch_sizes": [4, 2, 2, 2]},
    "regnet": {**_TWO, "groups_width": 8},
    "resnet": _TWO,
    "segformer": _FOUR,
    "swin": {**_WINDOWS, "patch_size": 4},
    "swinv2": {**_WINDOWS, "patch_size": 4},
}
"""By family: sizes that differ from stage to stage."""


@dataclass(frozen=True)
class Problem:
    """A task, and the small config of a family."""

    task: str
    config: Any

    @property
    def args(self) -> dict[str, Any]:
        """What a job says of it."""
        return {"task": self.task}

    def batch(self, step: int) -> dict[str, Tensor]:
        """Return the batch of a step: BATCH samples of noise, and their labels."""
        random = torch.Generator().manual_seed(step)

        def drawn(least: int, most: int, *shape: int) -> Tensor:
            return torch.randint(least, most, shape, generator=random)

        if self.task == "image-classification":
            side, channels = self.config.image_size, self.config.num_channels
            pictures = torch.randn(BATCH, channels, side, side, generator=random)
            return {"pixel_values": pictures, "labels": drawn(0, LABELS, BATCH)}
        ids = drawn(FIRST_WORD, WORDS, BATCH, LENGTH)
        if self.task == "multiple-choice":
            ids = drawn(FIRST_WORD, WORDS, BATCH, LABELS, LENGTH)
        if self.task == "question-answering":
            begin, end = drawn(0, LENGTH, BATCH), drawn(0, LENGTH, BATCH)
            return {"input_ids": ids, "start_positions": begin, "end_positions": end}
        return {"input_ids": ids, "labels": self._labels(ids, drawn)}

    def _labels(self, ids: Tensor, drawn: Any) -> Tensor:
        match self.task:
            case "causal-lm":
                return ids.clone()  # the model shifts them
            case "masked-lm":
                return torch.where(drawn(0, 3, *ids.shape) > 0, -100, ids)
            case "seq2seq-lm":
                return drawn(FIRST_WORD, WORDS, BATCH, LENGTH // 2)  # type: ignore[no-any-return]
            case "token-classification":
                labels = drawn(0, LABELS, *ids.shape)
                return torch.where(drawn(0, 3, *ids.shape) > 1, -100, labels)
            case _:
                return drawn(0, LABELS, BATCH)  # type: ignore[no-any-return]


def problem_of(name: str) -> Problem:
    """Return the problem of "FAMILY", a causal language model, or of "TASK/FAMILY"."""
    from transformers import CONFIG_MAPPING

    task, _, family = name.rpartition("/")
    config = shrunk(CONFIG_MAPPING[family]) if task != "image-classification" else None
    if not task:
        return Problem("causal-lm", config)
    if config is None:
        sizes = {"patch_size": 8} | dict(_OF_PICTURES.get(family, {})) | {"image_size": 32}
        config = shrunk(CONFIG_MAPPING[family], {family: sizes})
        config.image_size = 32
    more: dict[str, Any] = {"classifier_dropout": 0.0, "classifier_dropout_prob": 0.0}
    more |= {"num_labels": LABELS} if "classification" in task else {}
    for key, value in (*more.items(), ("pad_token_id", 0), ("decoder_start_token_id", 0)):
        if key in more or getattr(config, key, None) is None:
            setattr(config, key, value)
    return Problem(task, config)
