"""Tokens as letters: one per token, a capital where the token is trained."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from turnstream.types import Rows, Sequence


def ids(text: str) -> NDArray[np.int32]:
    """int32 (len(text),), the code of every letter; "a" and "A" are the same token."""
    return np.array([ord(letter) for letter in text.lower()], np.int32)


def mask(text: str) -> NDArray[np.uint8]:
    """uint8 (len(text),), 1 where the letter is a capital."""
    return np.array([letter.isupper() for letter in text], np.uint8)


def spell(rows: Rows | Iterable[Sequence]) -> list[str]:
    """Every row as text: the prompt and observed tokens small, the trained ones as capitals."""
    if isinstance(rows, Rows):
        columns = zip(rows.input_ids, rows.prompt_length.tolist(), rows.loss_mask, strict=True)
        return [_spell(*row) for row in columns]
    return [_spell(row.input_ids, row.prompt_length, row.loss_mask) for row in rows]


def _spell(input_ids: NDArray[np.int32], prompt_length: int, loss_mask: NDArray[np.uint8]) -> str:
    letters = [chr(token) for token in input_ids.tolist()]
    response = letters[prompt_length:]
    trained = zip(response, loss_mask.tolist(), strict=True)
    prompt = "".join(letters[:prompt_length])
    return prompt + "".join(letter.upper() if on else letter for letter, on in trained)
