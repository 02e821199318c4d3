"""The tokenizer of a decode folder: prompts to ids, chat templates, and which tokens end a text."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pdconvert.errors import InputError
from pdconvert.runtime.detokenize import Detokenizer, decode


class Tokenizer:
    """A Hugging Face tokenizer, loaded from local files without running code from them.

    The chat template is transformers' choice: `chat_template.jinja` where there is one, else the
    `chat_template` of `tokenizer_config.json`.

    Raises:
        InputError: there is no tokenizer, or one that needs remote code.
    """

    def __init__(self, folder: Path):
        from transformers import AutoTokenizer

        self.folder = folder
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                str(folder), trust_remote_code=False, local_files_only=True
            )
        except (OSError, ValueError, ImportError, KeyError) as error:
            reason = textwrap.shorten(str(error), 200)
            raise InputError(f"{folder}: its tokenizer cannot be loaded: {reason}") from error

    @property
    def eos_id(self) -> int | None:
        """The tokenizer's own end-of-text token."""
        return self._tokenizer.eos_token_id

    def encode(self, prompt: str, *, chat: bool = False) -> list[int]:
        """Token ids of a prompt.

        A beginning-of-text token stands at the start exactly once where the tokenizer or the template
        puts one, whichever of them does, or both; models trained without one get none. An end-of-text
        token that the tokenizer puts after plain text is left out, since the text is to go on.

        Args:
            prompt: the text, or the user's message.
            chat: put the message into the chat template, with the opening of the model's answer.

        Raises:
            InputError: an empty prompt, one that is not UTF-8, or no chat template.
        """
        if not prompt:
            raise InputError("the prompt is empty; give at least one character with --prompt")
        if any("\ud800" <= character <= "\udfff" for character in prompt):
            raise InputError("the prompt holds bytes that are not UTF-8; give it as UTF-8 text")
        added = self._tokenizer.encode("")
        adds_bos = self._tokenizer.bos_token_id is not None and added[:1] == [self._tokenizer.bos_token_id]
        if chat:
            ids = self._tokenizer.encode(self._render(prompt), add_special_tokens=False)
        else:
            ids = self._tokenizer.encode(prompt)
            if len(added) > adds_bos and added[-1] == ids[-1] == self.eos_id:
                ids = ids[:-1]
        ids = one_bos(ids, self._tokenizer.bos_token_id, adds_bos)
        if not ids:
            raise InputError("the prompt is empty: the tokenizer makes no token of it; give another --prompt")
        return ids

    def decode(self, ids: list[int]) -> str:
        """The text of tokens; special ones give none."""
        return decode(self._tokenizer, ids)

    def detokenizer(self) -> Detokenizer:
        """A new stream from ids to text."""
        return Detokenizer(self._tokenizer)

    def _render(self, prompt: str) -> str:
        from jinja2 import TemplateError

        if not self._tokenizer.chat_template:
            raise InputError(f"{self.folder}: the model has no chat template; run it without --chat")
        messages = [{"role": "user", "content": prompt}]
        try:
            return self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            reason = textwrap.shorten(str(error), 200)
            raise InputError(
                f"{self.folder}: its chat template fails: {reason}; run it without --chat"
            ) from error


def one_bos(ids: list[int], bos_id: int | None, adds_bos: bool) -> list[int]:
    """Ids with one beginning-of-text token where there were several, or none although one belongs there.

    Args:
        ids: a tokenized prompt.
        bos_id: the token, if there is one.
        adds_bos: whether the tokenizer puts it before plain text.
    """
    rest = ids
    while bos_id is not None and rest[:1] == [bos_id]:
        rest = rest[1:]
    return [bos_id, *rest] if bos_id is not None and (adds_bos or len(rest) < len(ids)) else ids


def eos_token_ids(
    config: Mapping[str, Any], generation_config: Mapping[str, Any], tokenizer_eos: int | None
) -> frozenset[int]:
    """Every token that ends a text.

    The rule is the union: a checkpoint often names the end of a turn in one place and the end of a text
    in another, and each of them means that the answer is over.

    Args:
        config: content of config.json; its `eos_token_id` is an integer, a list of them, or absent.
        generation_config: content of generation_config.json, with the same key.
        tokenizer_eos: the tokenizer's own, if it has one.

    Raises:
        InputError: an `eos_token_id` of another type.
    """
    found: set[int] = set() if tokenizer_eos is None else {tokenizer_eos}
    for name, content in (("config.json", config), ("generation_config.json", generation_config)):
        value = content.get("eos_token_id")
        for item in value if isinstance(value, list) else [] if value is None else [value]:
            if not isinstance(item, int) or isinstance(item, bool):
                raise InputError(
                    f"{name}: eos_token_id is {value!r}, expected an integer or a list of integers"
                )
            found.add(item)
    return frozenset(found)
