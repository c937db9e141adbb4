"""Small models of several families, made once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from turnstream_server.models.policy import load_policy
from turnstream_server.models.spec import SmallModelSpec

torch.set_num_threads(1)  # tiny tensors: a second thread would only wait for the first

VOCAB_SIZE = 128


@cache
def make_model(architecture: str) -> PreTrainedModel:
    """A model of two layers; its logits are far from uniform."""
    if architecture == "gemma2":  # caps its logits, which no spec can say
        config = AutoConfig.for_model(
            "gemma2",
            vocab_size=VOCAB_SIZE,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=16,
            initializer_range=0.5,
            final_logit_softcapping=2.0,
        )
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    return load_policy(
        SmallModelSpec(
            architecture=architecture, vocab_size=VOCAB_SIZE, hidden_size=32, weight_std=0.5
        )
    )


@pytest.fixture(scope="session")
def model_of() -> Callable[[str], PreTrainedModel]:
    """The maker `make_model`."""
    return make_model
