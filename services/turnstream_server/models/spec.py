"""Source of a policy: a Hugging Face model folder, or the sizes of a new small model.

Without torch, so that the process that starts a job does not load it.
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
        weight_std: standard deviation of the random weights. Models this narrow learn several times
            faster with 0.1 than with 0.02, the usual value of wide ones.
        seed: seed of the random weights; equal specs have equal weights.
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
    """Return a folder, or the SmallModelSpec of a JSON file; InvalidConfigError for others."""
    if path.is_dir():
        return path
    try:
        return SmallModelSpec(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise InvalidConfigError("policy", f"{path} is no model folder or spec: {error}") from error
