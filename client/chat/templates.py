"""Ids and labels of messages, by a tokenizer of transformers and its chat template, which runs in
the sandbox of jinja that transformers makes for it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from ...peer.data.manifest import DataError
from .record_files import Messages

__all__ = ["IGNORED", "Template", "TemplateError", "loaded_tokenizer"]

IGNORED = -100
"""The label of a token that is not learned."""


class TemplateError(ValueError):
    """Messages of which the template makes nothing."""


def loaded_tokenizer(found: Any) -> Any:
    """The tokenizer of a folder, or a copy of a live one. Raises DataError."""
    if not isinstance(found, Path):
        return copy.deepcopy(found)
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(found, local_files_only=True)
    except Exception as error:  # each kind of file has errors of its own
        raise DataError(f"{found} has no tokenizer that transformers load: {error}") from error


class Template:
    """A tokenizer, of a folder or live, with a template. loss_on: as in [data]. Raises DataError
    for a folder that has no tokenizer, and for one without a template where no other (`template`,
    its text) is given."""

    def __init__(self, found: Any, template: str | None, loss_on: str) -> None:
        self.tokenizer: Any = loaded_tokenizer(found)
        self.folder = folder = self.tokenizer.name_or_path or type(self.tokenizer).__name__
        self.loss_on = loss_on
        if template is not None:
            self.tokenizer.chat_template = template
        if not isinstance(self.tokenizer.chat_template, str):
            raise DataError(
                f"the tokenizer of {folder} has no chat template: name a file with one, such as "
                'data.template = "chat.jinja"'
            )
        if loss_on == "assistant" and not self.tokenizer.is_fast:
            raise DataError(
                f"the tokenizer of {folder} does not say where its tokens lie in the text: "
                'expected one with a tokenizer.json, or loss_on = "all"'
            )
        self.marked = "generation" in self.tokenizer.chat_template.replace(
            "add_generation_prompt", ""
        )

    def ids(self, messages: Messages) -> tuple[list[int], list[int]]:
        """The ids of messages, and as many labels: the ids again, or IGNORED. Raises TemplateError.
        What the assistant says is what the template marks ({% generation %}), else what comes to
        the text by its messages, behind the prompt for them."""
        if self.loss_on == "all":
            ids = self._encoded(self._text(messages))["input_ids"]
            return ids, list(ids)
        ids, learned = self._marked(messages) if self.marked else self._by_prefix(messages)
        return ids, [
            i if is_learned else IGNORED for i, is_learned in zip(ids, learned, strict=True)
        ]

    def _marked(self, messages: Messages) -> tuple[list[int], list[bool]]:
        found = self._applied(messages, return_dict=True, return_assistant_tokens_mask=True)
        return found["input_ids"], [bool(m) for m in found["assistant_masks"]]

    def _by_prefix(self, messages: Messages) -> tuple[list[int], list[bool]]:
        text, spans = self._text(messages), []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            if not number:
                raise TemplateError(
                    "the chat begins with the assistant, so nothing says where that begins: put a "
                    "message in front, or give a template that marks the assistant's "
                    '({% generation %}), or loss_on = "all"'
                )
            before = self._text(messages[:number], prompt=True)
            after = self._text(messages[: number + 1])
            if not after.startswith(before) or not text.startswith(after):
                raise TemplateError(
                    f"the chat template writes message {number} otherwise when others follow, so "
                    "nothing says which tokens are the assistant's: give a template that marks "
                    'them ({% generation %}), or loss_on = "all"'
                )
            spans.append((len(before), len(after)))
        found = self._encoded(text)
        places = found["offset_mapping"]
        return found["input_ids"], [
            any(begin < place[1] and place[0] < end for begin, end in spans) for place in places
        ]

    def _text(self, messages: Messages, *, prompt: bool = False) -> str:
        text = self._applied(messages, tokenize=False, add_generation_prompt=prompt)
        assert isinstance(text, str), "tokenize=False gives text"
        return text

    def _applied(self, messages: Messages, **how: bool) -> Any:
        try:
            return self.tokenizer.apply_chat_template(messages, **how)
        except Exception as error:  # a template raises what it wants
            raise TemplateError(f"the chat template fails: {error}") from error

    def _encoded(self, text: str) -> Any:
        return self.tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=self.tokenizer.is_fast
        )
