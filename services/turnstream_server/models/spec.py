"""Source of a policy: a Hugging Face model folder, or the sizes of a new small model. Adapters.

Without torch, so that the process that starts a job does not load it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from turnstream.errors import InvalidConfigError

LAYERS: Final = ("attention", "mlp", "unembedding")
"""Kinds of layers that an adapter can update."""

LARGEST_TEMPERATURE: Final = 1000.0
LEAST_TEMPERATURE: Final = 1e-4
"""Logits over a smaller sampling temperature leave float32."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """LoRA (arXiv:2106.09685): low-rank updates of a frozen base model.

    Attributes:
        rank: inner size of the two factors of each update; at least 1.
        alpha: an update is scaled by alpha / rank; above 0.
        seed: seed of the first factors; the second ones begin with zeros.
        train_attention, train_mlp, train_unembedding: layers that are updated; at least one.
    """

    rank: int
    alpha: float = 32.0
    seed: int = 0
    train_attention: bool = True
    train_mlp: bool = True
    train_unembedding: bool = False

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise InvalidConfigError("lora_rank", f"{self.rank} is below 1")
        if not 0 < self.alpha < float("inf"):
            raise InvalidConfigError("lora_alpha", f"{self.alpha} is not above 0")
        if not self.layers:
            raise InvalidConfigError("lora_layers", f"none of {', '.join(LAYERS)} is trained")

    @property
    def layers(self) -> tuple[str, ...]:
        """The kinds of layers that are updated, by their names in `LAYERS`."""
        return tuple(name for name in LAYERS if getattr(self, f"train_{name}"))


def layer_switches(text: str) -> dict[str, bool]:
    """Return the switches of `AdapterConfig` for names with commas between them.

    >>> layer_switches("attention,mlp")
    {'train_attention': True, 'train_mlp': True, 'train_unembedding': False}
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in LAYERS:
            raise InvalidConfigError("lora_layers", f"{name!r} is not one of {', '.join(LAYERS)}")
    return {f"train_{layer}": layer in names for layer in LAYERS}


def parse_base(text: str) -> tuple[str, Path]:
    """Return name and folder of a base model. The default name is that of the folder.

    >>> parse_base("tiny/byte=/models/byte"), parse_base("/models/byte")[0]
    (('tiny/byte', PosixPath('/models/byte')), 'byte')
    """
    name, mark, path = text.partition("=")
    if not mark:
        name, path = Path(text).name, text
    if not name or not path:
        message = f"{text!r} is not NAME=PATH or PATH, such as tiny/byte=/models/byte"
        raise InvalidConfigError("--base-model", message)
    return name, Path(path)


def parse_bases(texts: Sequence[str]) -> dict[str, Path]:
    """Return the folder of each base model by its name, in this order.

    Raises:
        InvalidConfigError: there is none, or two have one name.
    """
    bases = dict(map(parse_base, texts))
    if not bases or len(bases) < len(texts):
        names = [parse_base(each)[0] for each in texts]
        raise InvalidConfigError("--base-model", f"{names}: one or more names are needed, once")
    return bases


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
