"""Text from tokens as they come: whole characters only, and exactly the text of all tokens in the end."""

from __future__ import annotations

import re
from typing import Any

REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Detokenizer:
    """Turns a stream of token ids into pieces of text.

    A token can hold a part of a character: three byte tokens make one kana. `push` gives text only when
    the tokens so far end in a whole character, else "". Each new piece is the difference between the text
    of a short window of tokens with and without the new ones, so that spaces which depend on the token
    before come out right and the cost of a token does not grow with the text.

    A run of byte-fallback tokens (`<0xE3>`) is held until it ends: tokenizers decode such a run as a whole,
    so a part of it can still change. A special token between two runs gives no text and does not end one.

    Args:
        tokenizer: a transformers tokenizer. Special tokens give no text.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)
        self._ids: list[int] = []
        self._context = 0
        self._done = 0
        self._length = 0

    def push(self, token_id: int) -> str:
        """Adds a token; returns the text that became certain, often a word, sometimes ""."""
        self._ids.append(token_id)
        token = self._tokenizer.convert_ids_to_tokens(token_id) or ""
        if token_id in self._special or _BYTE_TOKEN.fullmatch(token):
            return ""
        before = self._decode(self._ids[self._context : self._done])
        text = self._decode(self._ids[self._context :])
        if not text.startswith(before) or len(text) == len(before) or text.endswith(REPLACEMENT):
            return ""
        self._context, self._done = self._done, len(self._ids)
        self._length += len(text) - len(before)
        return text[len(before) :]

    def finish(self) -> str:
        """The rest of the text; bytes that make no character come out as U+FFFD."""
        piece = self._decode(self._ids)[self._length :]
        self._length += len(piece)
        self._context = self._done = len(self._ids)
        return piece

    def _decode(self, ids: list[int]) -> str:
        return decode(self._tokenizer, ids)


def decode(tokenizer: Any, ids: list[int]) -> str:
    """The text of tokens without special ones, spaces as the tokens have them."""
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
