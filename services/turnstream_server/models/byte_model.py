"""A small model with random weights whose tokens are bytes, to try things out.

The token ids 0 to 255 are the bytes of a text in UTF-8. The five ids after them are special tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from turnstream_server.models.folders import new_folder
from turnstream_server.models.policy import load_policy
from turnstream_server.models.spec import SmallModelSpec

SPECIAL_TOKENS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
"""Tokens after the bytes; the first one ends a text."""

_NUM_BYTES: Final = 256

_CHAT_TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_byte_model(folder: Path, spec: SmallModelSpec | None = None) -> None:
    """Write a model and its tokenizer into a new folder, in Hugging Face layout."""
    model: Any = load_policy(spec or byte_model_spec())
    model.config.eos_token_id = model.generation_config.eos_token_id = _NUM_BYTES
    with new_folder(folder) as written:
        model.save_pretrained(written)
        byte_tokenizer().save_pretrained(written)


def byte_model_spec(*, hidden_size: int = 64, num_layers: int = 2, seed: int = 0) -> SmallModelSpec:
    """Return the sizes of a model that trains in seconds on one core."""
    return SmallModelSpec(
        vocab_size=_NUM_BYTES + len(SPECIAL_TOKENS),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_layers=num_layers,
        max_positions=4096,
        seed=seed,
    )


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer of the bytes and the special tokens."""
    vocabulary = {character: byte for byte, character in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=SPECIAL_TOKENS[0], chat_template=_CHAT_TEMPLATE
    )
