"""Loss and gradients by layout, type and micro-batches, next to a float64 reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import testkit
from testkit.training import make_engine, pulled
from turnstream.types import Ragged
from turnstream.worker import PulledMiniBatch
from turnstream_server.models.policy import recompute_layers
from turnstream_server.trainer.settings import Layout

TEXTS = ("abCDefG", "xY", "hijKLMnopqR", "a|b", "pqRsT", "uvwxyzABC")
INERT = (False, False, False, True, False, False)
CUTS = [
    ((0, 1, 2, 3, 4, 5),),
    ((5, 0), (3,), (1, 4), (2,)),
    tuple((row,) for row in range(6)),
]
TEMPERATURE = 0.8


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_layouts_and_cuts_agree_with_a_float64_reference(architecture: str) -> None:
    expected_loss, expected = _reference(_model(architecture), _mini_batch())

    for layout in ("padded", "packed"):
        for cut in CUTS:
            model = _model(architecture)
            loss, gradients = _loss_and_gradients(model, layout, _mini_batch(micro_batches=cut))
            assert loss == pytest.approx(expected_loss, rel=1e-5)
            _assert_close(gradients, expected)


def test_rows_without_logprobs_have_equal_gradients_in_both_layouts() -> None:
    rows = _mini_batch().rows
    assert rows.logprobs is not None
    values = rows.logprobs.values.copy()
    values[: len(rows.loss_mask[0])] = np.nan
    mini_batch = _mini_batch()
    logprobs = Ragged(values, rows.logprobs.offsets)
    mini_batch = replace(mini_batch, rows=replace(mini_batch.rows, logprobs=logprobs))

    padded_loss, padded = _loss_and_gradients(_model("llama"), "padded", mini_batch)
    packed_loss, packed = _loss_and_gradients(_model("llama"), "packed", mini_batch)

    assert packed_loss == pytest.approx(padded_loss, rel=1e-5)
    _assert_close(packed, padded)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_bfloat16_is_close_and_keeps_float32_weights(layout: Layout) -> None:
    model = _model("llama")
    _, expected = _loss_and_gradients(_model("llama"), layout, _mini_batch())

    _, actual = _loss_and_gradients(model, layout, _mini_batch(), dtype=torch.bfloat16)

    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    one, other = (torch.cat([g.flatten() for g in each.values()]) for each in (actual, expected))
    assert not torch.equal(one, other)
    assert float(torch.cosine_similarity(one, other, dim=0)) > 0.995


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_layers_computed_again_give_the_same_gradients(layout: Layout) -> None:
    model = _model("llama")
    plain_loss, plain = _loss_and_gradients(_model("llama"), layout, _mini_batch())
    calls: list[int] = []
    recompute_layers(model)
    model.get_submodule("model.layers.1.self_attn").register_forward_hook(
        lambda *_: calls.append(1)
    )
    engine = make_engine(model, layout=layout, temperature=TEMPERATURE)
    calls.clear()

    report = engine.forward_backward(_mini_batch(), aggregation="token_mean")

    assert report.loss == plain_loss
    again = {name: w.grad for name, w in model.named_parameters() if w.grad is not None}
    assert all(torch.equal(gradient, again[name]) for name, gradient in plain.items())
    assert len(calls) == 4  # two for the trial of the head, the pass and the gradient


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_forward_returns_logprobs_by_row_and_keeps_gradients(layout: Layout) -> None:
    engine = make_engine(_model("llama"), layout=layout, temperature=TEMPERATURE)
    engine.forward_backward(_mini_batch(), aggregation="token_mean")
    gradients = [each.grad.clone() for each in engine.model.parameters() if each.grad is not None]
    expected = make_engine(_model("llama"), temperature=TEMPERATURE).forward(_mini_batch())

    values = engine.forward(_mini_batch(micro_batches=CUTS[1]))

    assert sorted(values) == [0, 1, 2, 4, 5]
    for row_id, logprobs in values.items():
        np.testing.assert_allclose(logprobs, expected[row_id], rtol=1e-5, atol=1e-6)
    after = [each.grad for each in engine.model.parameters() if each.grad is not None]
    assert all(torch.equal(*pair) for pair in zip(gradients, after, strict=True))


def _model(architecture: str) -> PreTrainedModel:
    """Two layers; two query heads share a key head."""
    torch.manual_seed(1)
    config = AutoConfig.for_model(
        architecture,
        vocab_size=128,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    return AutoModelForCausalLM.from_config(config).eval()


def _mini_batch(**info: Any) -> PulledMiniBatch:
    """Ragged rows of uneven weights, as trajectory weights make them, and an inert one."""
    rows = testkit.rows(
        *TEXTS,
        is_padding=INERT,
        advantages=[1.0, -0.5, 0.25, 0.0, -1.5, 2.0],
        logprobs=-4.5,
    )
    weights = np.array([0.5, 1.0, 1.0, 0.0, 0.25, 2.0], np.float32)
    return pulled(replace(rows, weight=weights), **info)


def _loss_and_gradients(
    model: PreTrainedModel, layout: Layout, mini_batch: PulledMiniBatch, **options: Any
) -> tuple[float, dict[str, Tensor]]:
    engine = make_engine(model, layout=layout, temperature=TEMPERATURE, **options)
    report = engine.forward_backward(mini_batch, aggregation="token_mean")
    return report.loss, {name: w.grad for name, w in model.named_parameters() if w.grad is not None}


def _reference(model: PreTrainedModel, mini_batch: PulledMiniBatch) -> tuple[float, dict[str, Any]]:
    """Return the clipped loss, and its gradients: each row alone, all logits, in float64."""
    model = model.double()
    rows, total = mini_batch.rows, torch.zeros((), dtype=torch.float64)
    for index in range(len(TEXTS)):
        ids = torch.from_numpy(rows.input_ids[index].astype(np.int64))
        trained = torch.from_numpy(rows.loss_mask[index].astype(np.bool_))
        logits_TV = model(input_ids=ids[None], use_cache=False).logits[0] / TEMPERATURE
        scores = torch.log_softmax(logits_TV, -1)[:-1].gather(1, ids[1:, None])[:, 0]
        ratio = (scores[len(scores) - len(trained) :][trained] + 4.5).exp()
        advantage = float(rows.advantage[index])
        loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
        if advantage < 0:
            loss = loss.clamp(max=-3.0 * advantage)
        total = total + float(rows.weight[index]) * loss.sum()
    total = total / mini_batch.info.denominators.num_tokens
    total.backward()
    return total.item(), {name: weight.grad for name, weight in model.named_parameters()}


def _assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare within 1e-5 of the largest value of each gradient."""
    assert actual.keys() == expected.keys()
    for name, gradient in actual.items():
        scale = float(expected[name].abs().max())
        difference = float((gradient.double() - expected[name].double()).abs().max())
        assert difference <= 1e-5 * scale, (name, difference, scale)
