"""Policies: Hugging Face causal language models in a folder, or small ones made from a spec."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

import torch
import transformers
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from turnstream.errors import InvalidConfigError
from turnstream_server.models.folders import is_adapter_folder, new_folder
from turnstream_server.models.spec import PolicySource, SmallModelSpec

if TYPE_CHECKING:
    from turnstream_server.models.adapters import Adapter

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


ADAPTER: Final = "default"
"""Name of the adapter of a policy that has one."""


def load_policy(
    source: PolicySource,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> PreTrainedModel:
    """Return the model, in evaluation mode (no dropout). Only local files are read.

    The folder of an adapter gives its base model with the adapter.

    Args:
        source: folder or spec.
        device: device of the weights.
        dtype: type of the weights; those of an adapter are float32.

    Raises:
        InvalidConfigError: the folder holds no model, or the spec is not one of transformers.
    """
    if isinstance(source, Path) and is_adapter_folder(source):
        return load_adapter(source, device=device, dtype=dtype).model
    try:
        if isinstance(source, SmallModelSpec):
            made = _make(source)
        else:
            made = AutoModelForCausalLM.from_pretrained(source, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise InvalidConfigError("policy", f"{source} does not load: {error}") from error
    made.requires_grad_(True)
    model = cast(PreTrainedModel, made.to(device=device, dtype=torch.float32).eval())  # pyright: ignore[reportCallIssue]
    if dtype != torch.float32:
        for weight in model.parameters():  # alone: the frequencies of positions stay float32
            weight.data = weight.data.to(dtype)
    return model


def load_adapter(
    folder: Path, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Adapter:
    """Return the active adapter of a folder, on the base model that the folder names."""
    from turnstream_server.models.adapters import Adapters, base_folder

    base = base_folder(folder)
    adapters = Adapters(load_policy(base, device=device, dtype=dtype), base)
    return adapters.load(ADAPTER, folder)


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


def recompute_layers(model: PreTrainedModel) -> None:
    """Keep only the input of each layer for the gradient (arXiv:1604.06174).

    transformers does so in training mode alone, which would switch dropout on. This works in
    evaluation mode too. InvalidConfigError if the model has no such layers.
    """
    layers = [each for each in model.modules() if isinstance(each, GradientCheckpointingLayer)]
    if not layers:
        message = f"a {model.config.model_type} model has no layers to compute again"
        raise InvalidConfigError("gradient_checkpointing", message)
    for layer in layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
