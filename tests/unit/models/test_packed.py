from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import testkit
from turnstream.errors import InvalidConfigError
from turnstream.worker.layouts import packed_to_torch
from turnstream.worker.tensors import to_torch
from turnstream_server.models import packed
from turnstream_server.models.logprobs import response_logprobs
from turnstream_server.models.packed import enable_packing

ModelOf = Callable[[str], PreTrainedModel]
TEXTS = ("abcDEfG", "aB", "abcdefghIJ", "xyZ")


@pytest.mark.parametrize("architecture", ["qwen2", "llama", "gpt2", "gemma2", "mistral"])
@pytest.mark.parametrize("alignment", [1, 4])
def test_packed_rows_score_as_each_alone(
    model_of: ModelOf, architecture: str, alignment: int
) -> None:
    model = _model(architecture, model_of)
    expected = [_scores_alone(model, text) for text in TEXTS]

    own = model.config._attn_implementation or "eager"
    enable_packing(model)
    chosen = model.config._attn_implementation
    actual = _scores_packed(model, *TEXTS, alignment=alignment)
    again = _scores_alone(model, TEXTS[2])
    model.set_attn_implementation(own)

    assert chosen == ("eager" if architecture == "gemma2" else "turnstream_by_row")
    torch.testing.assert_close(actual, torch.cat(expected), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(again, expected[2], rtol=1e-5, atol=1e-6)


def test_attention_is_as_long_as_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model("llama", None)
    enable_packing(model)
    _scores_packed(model, *TEXTS)
    lengths: list[tuple[int, bool]] = []
    attend = packed.sdpa_attention_forward

    def note(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **rest: Any) -> Any:
        lengths.append((key.shape[2], mask is None))
        return attend(module, query, key, value, mask, **rest)

    monkeypatch.setattr(packed, "sdpa_attention_forward", note)
    _scores_packed(model, *TEXTS)

    assert lengths == [(len(text), True) for text in TEXTS] * model.config.num_hidden_layers


def test_model_that_carries_state_across_rows_is_refused() -> None:
    config = AutoConfig.for_model(
        "rwkv", vocab_size=128, hidden_size=16, num_hidden_layers=2, attention_hidden_size=16
    )
    model = AutoModelForCausalLM.from_config(config).eval()

    with pytest.raises(InvalidConfigError, match="layout: packed rows of a rwkv model"):
        enable_packing(model)


def _model(architecture: str, model_of: ModelOf | None) -> PreTrainedModel:
    """A model; mistral has a window of three tokens, so that longer rows need a mask."""
    if model_of is not None and architecture != "mistral":
        return model_of(architecture)
    sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.5}
    window = {"sliding_window": 3} if architecture == "mistral" else {}
    config = AutoConfig.for_model(architecture, **sizes, **heads, **window)
    return AutoModelForCausalLM.from_config(config).eval()


@torch.no_grad()
def _scores_alone(model: PreTrainedModel, text: str) -> Tensor:
    rows = to_torch(testkit.mini_batch(text))
    scores_BR = response_logprobs(model, rows, mask_BR=rows.loss_mask_BR, temperature=0.7)
    return scores_BR[rows.loss_mask_BR]


@torch.no_grad()
def _scores_packed(model: PreTrainedModel, *texts: str, alignment: int = 1) -> Tensor:
    (rows,) = packed_to_torch(testkit.mini_batch(*texts), alignment=alignment)
    scores_N = response_logprobs(model, rows, mask_BR=rows.loss_mask_N, temperature=0.7)
    assert not scores_N[~rows.loss_mask_N].any()
    return scores_N[rows.loss_mask_N]
