"""Stop strings in a stream of tokens, whose borders are not those of characters or words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tokenizers import Tokenizer

_CONTEXT_TOKENS: Final = 8
"""Prompt tokens in front of the stream. Some tokenizers drop a space at the start of a text."""
_TOKENS_PER_CHARACTER: Final = 4
"""A character has at most 4 bytes in UTF-8, and a token has at least one byte."""


class StopStringMatcher:
    """Reads sampled tokens one by one until a stop string is complete.

    A match may begin and end inside of tokens. Text of the prompt does not count. Only the last
    tokens are decoded, so a token costs the same at every length.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop_strings: Sequence[str], *, prompt_ids: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._stop_strings = stop_strings
        self._overlap = max(map(len, stop_strings)) - 1
        self._window = _CONTEXT_TOKENS + _TOKENS_PER_CHARACTER * (self._overlap + 1)
        self._ids = list(prompt_ids[-_CONTEXT_TOKENS:])
        self._text = decode(tokenizer, self._ids)
        self._prompt_end = len(self._text)

    def add(self, token_id: int) -> bool:
        """Add a token; return whether it completes a stop string."""
        if len(self._ids) >= 2 * self._window:
            self._ids = self._ids[-self._window :]
            self._text = decode(self._tokenizer, self._ids)
            self._prompt_end = 0
        self._ids.append(token_id)
        before, self._text = self._text, decode(self._tokenizer, self._ids)
        # A token that completes a character changes the text before it: search all of the window.
        is_longer = self._text.startswith(before)
        begin = max(self._prompt_end, len(before) - self._overlap if is_longer else 0)
        return first_end(self._text, self._stop_strings, begin=begin) is not None


def decode(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """Return the text of tokens, with special tokens."""
    return tokenizer.decode(list(token_ids), skip_special_tokens=False)


def first_end(text: str, stop_strings: Sequence[str], *, begin: int = 0) -> int | None:
    """Return the end of the stop string that is complete first, or None."""
    found = [(text.find(each, begin), len(each)) for each in stop_strings]
    return min((at + length for at, length in found if at >= 0), default=None)
