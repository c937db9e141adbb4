r"""Conversations as token ids, in ChatML: every message is encoded separately.

::

    <|im_start|>ROLE\nTEXT<|im_end|>\n

Both marks are special tokens, so no token spans two messages. Joined encodings of messages equal
the encoding of the joined text, and a conversation of T turns costs O(T).
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from turnstream.errors import InvalidConfigError
from turnstream.types import Turn
from turnstream_server.generators.recordings import Message, Recording

START = "<|im_start|>"
END = "<|im_end|>"
REPLY_HEADER = f"{START}assistant\n"


class ChatTokenizer:
    """Encodes recordings as the token ids of a generator."""

    def __init__(self, tokenizer: Tokenizer, *, pad_token_id: int) -> None:
        self._tokenizer = tokenizer
        self.pad_token_id = pad_token_id

    @classmethod
    def load(cls, folder: Path) -> ChatTokenizer:
        """Return the tokenizer of a model folder; InvalidConfigError without ChatML tokens."""
        tokenizer = load_tokenizer(folder)
        for token in (START, END):
            if tokenizer.token_to_id(token) is None:
                message = f"{folder}/tokenizer.json has no token {token}, so it cannot write ChatML"
                raise InvalidConfigError("--tokenizer", message)
        return cls(tokenizer, pad_token_id=_pad_token_id(folder, tokenizer))

    @property
    def vocab_size(self) -> int:
        """One above the largest token id: the rows of an embedding table for all of them."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def encode_turns(self, recording: Recording) -> list[Turn]:
        """Return every turn with its full prompt.

        The prompt is the conversation so far and the header of a reply. The response is the reply
        and its end mark, encoded separately, as a model samples it. If that differs from the same
        text inside the next prompt, the turns do not join.
        """
        if not recording.turns:
            return []
        context = recording.messages[: recording.turns[-1]]
        replies = [recording.messages[turn].text + END for turn in recording.turns]
        *messages, header = self._encode([*map(_written, context), REPLY_HEADER])
        return [
            Turn(prompt_ids=np.concatenate([*messages[:turn], header]), response_ids=response)
            for turn, response in zip(recording.turns, self._encode(replies), strict=True)
        ]

    def _encode(self, texts: list[str]) -> list[NDArray[np.int32]]:
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]


def load_tokenizer(folder: Path) -> Tokenizer:
    """Return the `tokenizer.json` of a model folder; InvalidConfigError if it cannot be read."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise InvalidConfigError("--tokenizer", f"{folder} has no tokenizer.json")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises Exception itself
        raise InvalidConfigError("--tokenizer", f"{path} is no tokenizer: {error}") from error


def _written(message: Message) -> str:
    return f"{START}{message.role}\n{message.text}{END}\n"


def _pad_token_id(folder: Path, tokenizer: Tokenizer) -> int:
    """Return the id of the configured padding token; 0 without one."""
    path = folder / "tokenizer_config.json"
    token = json.loads(path.read_text("utf-8")).get("pad_token") if path.is_file() else None
    if isinstance(token, dict):
        token = token.get("content")
    return tokenizer.token_to_id(token or "") or 0
