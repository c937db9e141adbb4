"""Policies: Hugging Face causal language models in a folder, or small ones made from a spec."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from turnstream.errors import InvalidConfigError
from turnstream_server.models.folders import new_folder
from turnstream_server.models.spec import PolicySource, SmallModelSpec

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def load_policy(source: PolicySource, *, device: torch.device | str = "cpu") -> PreTrainedModel:
    """Return the model, float32, in evaluation mode (no dropout). Only local files are read.

    Raises:
        InvalidConfigError: the folder holds no model, or the spec is not one of transformers.
    """
    try:
        if isinstance(source, SmallModelSpec):
            made = _make(source)
        else:
            made = AutoModelForCausalLM.from_pretrained(source, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise InvalidConfigError("policy", f"{source} does not load: {error}") from error
    made.requires_grad_(True)
    return cast(PreTrainedModel, made.to(device=device, dtype=torch.float32).eval())  # pyright: ignore[reportCallIssue]


def save_policy(model: PreTrainedModel, folder: Path) -> None:
    """Write weights (safetensors) and configuration in Hugging Face layout, in one rename."""
    with new_folder(folder) as written:
        model.save_pretrained(written)


def _make(spec: SmallModelSpec) -> PreTrainedModel:
    config = AutoConfig.for_model(
        spec.architecture,
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_heads,
        max_position_embeddings=spec.max_positions,
        initializer_range=spec.weight_std,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        return AutoModelForCausalLM.from_config(config)
