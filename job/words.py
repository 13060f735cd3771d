"""Lists and numbers of things as people read them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__all__ = [
    "ELSEWHERE",
    "WRONG_CHOICE",
    "columns",
    "count_of",
    "counted_in",
    "loss_text",
    "size_text",
    "some_of",
]

WRONG_CHOICE = "the wrong choice"
"""Said of a plan, or of replicas, that something else would clearly outrun: whoever shows the
sentence shows it first."""

ELSEWHERE: Mapping[str, str] = {
    **dict.fromkeys(("learning_rate",), "train.lr"),
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs"), "train.passes"),
    **dict.fromkeys(("num_steps", "max_steps"), "train.steps"),
    **dict.fromkeys(("batch_size", "global_batch_size"), "train.batch"),
    **dict.fromkeys(("micro_batch_size", "per_device_train_batch_size"), "train.microbatch"),
    "gradient_accumulation_steps": "train.batch",
    **dict.fromkeys(("warmup_steps", "warmup_ratio"), "train.warmup"),
    **dict.fromkeys(("lr_scheduler", "lr_scheduler_type"), "train.schedule"),
    **dict.fromkeys(("max_grad_norm", "gradient_clipping"), "train.clip"),
    "optim": "train.optimizer",
    "adam_epsilon": "train.eps",
    "eval_steps": "train.eval_every",
    **dict.fromkeys(("base_model", "model_name_or_path"), "model.factory"),
    **dict.fromkeys(("adapter", "peft_config", "lora_r", "lora_alpha"), "model.lora"),
    **dict.fromkeys(("lora_dropout", "lora_target_modules"), "model.lora"),
    **dict.fromkeys(("load_in_8bit", "quantization_config"), "model.frozen_dtype"),
    **dict.fromkeys(("bf16", "fp16", "torch_dtype"), "model.dtype"),
    "merge_adapter": "output.format",
    "output_dir": "output.to",
    "save_steps": "output.every",
    "save_total_limit": "output.keep",
    **dict.fromkeys(("datasets", "train_file"), "data.source"),
    "val_set_size": "data.holdout",
    **dict.fromkeys(("sequence_len", "max_seq_length", "block_size"), "data.length"),
    "gradient_checkpointing": "plan.recompute",
}
"""What other programs call keys of a job, and where they are in ours."""


def count_of(count: int, what: str) -> str:
    """As "1 peer", "2 peers", "3 microbatches"."""
    plural = "es" if what.endswith("ch") else "s"
    return f"{count} {what}{'' if count == 1 else plural}"


def counted_in(job: Mapping[str, Any]) -> str:
    """What a step of a job, as a table, has so many of: "tokens" or "samples"."""
    return "samples" if job.get("data", {}).get("kind") == "arrays" else "tokens"


def loss_text(loss: float, weight: float) -> str:
    """A mean loss for people; without any weight there is nothing that it is the mean of."""
    return f"{loss:.4f}" if weight or loss == loss else "none, nothing counts"


def some_of(names: Sequence[str], most: int = 4, between: str = ", ") -> str:
    """The first of the names, and how many more there are: "a, b, c, d and 3 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return between.join(names[:most]) + more


def columns(lines: Sequence[Sequence[str]]) -> Iterator[str]:
    """Cells below each other: the first at the left, all others at the right."""
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    for first, *others in lines:
        cells = [first.ljust(widths[0])]
        cells += [c.rjust(w) for c, w in zip(others, widths[1:], strict=True)]
        yield "  ".join(cells).rstrip()


def size_text(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"
