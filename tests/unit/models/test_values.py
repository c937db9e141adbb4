"""Values before each token: layouts, slots, gradients and types."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import testkit
from testkit.training.training import make_model, make_value_model
from turnstream.errors import InvalidConfigError
from turnstream.worker.layouts import packed_to_torch
from turnstream.worker.tensors import to_torch
from turnstream_server.trainer.critic.critic import ValueModel, response_values

TEXTS = ("abcDEfG", "aB", "abcdefghIJ")


@pytest.mark.parametrize("architecture", ["qwen2", "gpt2", "gemma2"])
def test_values_are_read_from_the_hidden_state_before_each_token(
    model_of: Callable[[str], PreTrainedModel], architecture: str
) -> None:
    model = make_value_model(copy.deepcopy(model_of(architecture)))
    tensors = to_torch(testkit.mini_batch(*TEXTS))

    values_BR = response_values(model, tensors, mask_BR=tensors.loss_mask_BR)

    for row, text in enumerate(TEXTS):
        actual = values_BR[row][tensors.loss_mask_BR[row]]
        torch.testing.assert_close(actual, _values_alone(model, text), rtol=1e-4, atol=1e-5)
    assert not values_BR[~tensors.loss_mask_BR].any()
    assert values_BR[0][tensors.loss_mask_BR[0]].unique().numel() == 3


def test_packed_rows_have_the_values_of_padded_ones() -> None:
    model = make_value_model()
    mini_batch = testkit.mini_batch(*TEXTS)
    padded = to_torch(mini_batch)
    (packed,) = packed_to_torch(mini_batch, alignment=4)

    expected = response_values(model, padded, mask_BR=padded.loss_mask_BR)
    actual = response_values(model, packed, mask_BR=packed.loss_mask_N)

    torch.testing.assert_close(
        actual[packed.loss_mask_N], expected[padded.loss_mask_BR], rtol=1e-5, atol=1e-6
    )


def test_first_values_are_0_and_only_the_head_learns_at_first() -> None:
    model = make_value_model(head_std=0.0)
    tensors = to_torch(testkit.mini_batch(*TEXTS))

    values_BR = response_values(model, tensors, mask_BR=tensors.loss_mask_BR)
    (values_BR - 1).square().sum().backward()

    assert not values_BR.any()
    learning = {name for name, each in model.named_parameters() if _has_gradient(each)}
    assert learning == {"head.weight", "head.bias"}


def test_empty_mask_gives_zeros_with_a_gradient_of_0() -> None:
    model = make_value_model()
    tensors = to_torch(testkit.mini_batch("ab|c", "a|b"))

    values_BR = response_values(model, tensors, mask_BR=tensors.loss_mask_BR)
    values_BR.sum().backward()

    assert not values_BR.any()
    assert not any(_has_gradient(each) for each in model.parameters())


def test_head_computes_in_float32_under_autocast() -> None:
    model = make_value_model()
    tensors = to_torch(testkit.mini_batch(*TEXTS))
    model.backbone.forward = lambda **_: _Hidden(torch.full((3, 10, 16), 1.0))  # pyright: ignore[reportAttributeAccessIssue]

    with torch.autocast("cpu", dtype=torch.bfloat16):
        values_BR = response_values(model, tensors, mask_BR=tensors.loss_mask_BR)

    expected = (model.head.weight.sum() + model.head.bias).item()
    assert values_BR.dtype == torch.float32
    assert values_BR[1, -1].item() == pytest.approx(expected, rel=1e-6)


def test_unembedding_is_no_part_of_a_value_model() -> None:
    policy = make_model()
    num_unembedding = 128 * 16

    model = make_value_model(policy)

    num_weights = sum(each.numel() for each in model.parameters())
    num_policy = sum(each.numel() for each in policy.parameters())
    assert num_weights == num_policy - num_unembedding + 16 + 1


def test_model_without_separate_layers_is_refused() -> None:
    config = AutoConfig.for_model(
        "qwen2", vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    layers = AutoModelForCausalLM.from_config(config).base_model

    with pytest.raises(InvalidConfigError, match="--critic: a qwen2 model has no layers without"):
        ValueModel(layers)


class _Hidden:
    """Output of layers."""

    def __init__(self, hidden_BTH: Tensor) -> None:
        self.last_hidden_state = hidden_BTH


def _values_alone(model: ValueModel, text: str) -> Tensor:
    """Return the values before the capital letters, from the whole row without padding."""
    ids = torch.from_numpy(testkit.ids(text)).long()
    hidden_TH = model.backbone(input_ids=ids[None]).last_hidden_state[0]
    wanted = [position - 1 for position, letter in enumerate(text) if letter.isupper()]
    return model.head(hidden_TH[wanted])[:, 0]


def _has_gradient(parameter: Tensor) -> bool:
    return parameter.grad is not None and bool(parameter.grad.any())
