"""How a policy is named: a Hugging Face model folder, or the measures of a small model to make.

Without torch, so that whoever only starts the processes of a job does not load it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from turnstream.errors import InvalidConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallModelSpec:
    """A small transformer with random weights, for environments that need no pretraining.

    Attributes:
        architecture: model type of transformers, such as "qwen2" or "llama".
        vocab_size: token ids below this exist.
        max_positions: longest row, in tokens.
        weight_std: of the random weights. Models this narrow learn several times faster with
            0.1 than with the 0.02 that is usual in wide ones.
        seed: of the random weights; the same spec always gives the same weights.
    """

    architecture: str = "qwen2"
    vocab_size: int
    hidden_size: int = 64
    intermediate_size: int = 128
    num_layers: int = 2
    num_heads: int = 4
    max_positions: int = 512
    weight_std: float = 0.1
    seed: int = 0


PolicySource = Path | SmallModelSpec
"""A folder in Hugging Face layout, or a spec to make a model from."""


def read_policy_source(path: Path) -> PolicySource:
    """The policy a path names: a folder itself, or the SmallModelSpec whose fields a JSON file has.

    Raises:
        InvalidConfigError: neither a folder nor a readable JSON file of such fields.
    """
    if path.is_dir():
        return path
    try:
        return SmallModelSpec(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise InvalidConfigError("policy", f"{path} is no model folder or spec: {error}") from error
