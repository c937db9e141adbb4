import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

import testkit
from testkit.training.training import make_engine, make_mini_batch, make_model, pulled
from turnstream.types import Ragged
from turnstream.worker.tensors import to_torch
from turnstream_server.models.logprobs import response_logprobs
from turnstream_server.models.policy import recompute_layers
from turnstream_server.trainer.engine import Engine
from turnstream_server.trainer.settings import AdamSettings, Layout


def test_a_mini_batch_of_inert_rows_alone_changes_nothing() -> None:
    engine = make_engine()
    before = _weights(engine)
    rows = testkit.rows("a|b", is_padding=[True])

    report = engine.update(pulled(rows), aggregation="token_mean")

    assert (report.loss, report.gradient_norm) == (0.0, 0.0)
    assert torch.equal(_weights(engine), before)


def test_statistics_of_the_loss_are_means_over_trained_tokens() -> None:
    engine = make_engine()
    mini_batch = make_mini_batch(logprobs=-4.5)
    tensors = to_torch(mini_batch)
    mask_BR = tensors.loss_mask_BR
    current = response_logprobs(engine.model, tensors, mask_BR=mask_BR)[mask_BR].detach().numpy()
    ratios = np.exp(current + 4.5)

    report = engine.update(mini_batch, aggregation="token_mean")

    assert report.statistics["ratio"] == pytest.approx(ratios.mean(), rel=1e-5)
    assert report.statistics["kl"] == pytest.approx((ratios - 1 - np.log(ratios)).mean(), rel=1e-4)
    assert report.statistics["clipped_share"] == ((ratios < 0.8) | (ratios > 1.28)).mean()
    assert report.statistics["logprob"] == pytest.approx(current.mean(), rel=1e-5)
    assert 0 < report.statistics["clipped_share"] < 1


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_rows_without_logprobs_take_those_before_the_update_and_are_counted(
    layout: Layout,
) -> None:
    engine = make_engine(layout=layout)
    absent = engine.update(make_mini_batch(logprobs=None), aggregation="token_mean")
    mixed = make_mini_batch()
    assert mixed.rows.logprobs is not None
    values = mixed.rows.logprobs.values.copy()
    first = mixed.rows.loss_mask[0]
    values[: len(first)][first == 1] = np.nan
    logprobs = Ragged(values, mixed.rows.logprobs.offsets)
    mixed = replace(mixed, rows=replace(mixed.rows, logprobs=logprobs))

    report = make_engine(layout=layout).update(mixed, aggregation="token_mean")

    weights = [1.0] * 3 + [-0.5] + [0.25] * 3 + [-1.5] * 2
    assert absent.num_recomputed_rows == 4
    assert absent.statistics["ratio"] == 1.0
    assert absent.loss == pytest.approx(-sum(weights) / 9, rel=1e-5)
    assert report.num_recomputed_rows == 1
    assert math.isfinite(report.loss)
    assert report.is_applied


def test_two_mini_batches_before_a_step_add_their_gradients() -> None:
    engine, other = make_engine(), make_engine()
    engine.forward_backward(make_mini_batch(), aggregation="token_mean")
    single = _gradients(engine).clone()

    engine.forward_backward(make_mini_batch(), aggregation="token_mean")
    summed = _gradients(engine).clone()
    engine.optim_step(AdamSettings(learning_rate=0.0))
    report = engine.update(make_mini_batch(), aggregation="token_mean")

    torch.testing.assert_close(summed, 2 * single)
    expected = other.update(make_mini_batch(), aggregation="token_mean")
    assert report.gradient_norm == pytest.approx(expected.gradient_norm, rel=1e-6)


def test_step_without_a_gradient_has_gradient_zero() -> None:
    engine, zero = make_engine(), make_engine()
    for each in (engine, zero):
        each.update(make_mini_batch(), aggregation="token_mean")
    zero.forward_backward(make_mini_batch(), aggregation="token_mean")
    for parameter in zero.model.parameters():
        assert parameter.grad is not None
        parameter.grad.zero_()

    report = engine.optim_step(AdamSettings(learning_rate=0.1))
    expected = zero.optim_step(AdamSettings(learning_rate=0.1))

    assert report == expected
    assert report.gradient_norm == 0
    assert torch.equal(_weights(engine), _weights(zero))


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_bfloat16_is_close_and_keeps_float32_weights(layout: Layout) -> None:
    engine, exact = (
        make_engine(layout=layout, dtype=each) for each in (torch.bfloat16, torch.float32)
    )

    for each in (engine, exact):
        each.forward_backward(make_mini_batch(), aggregation="token_mean")

    assert {weight.dtype for weight in engine.model.parameters()} == {torch.float32}
    one, other = _gradients(engine), _gradients(exact)
    assert not torch.equal(one, other)
    assert float(torch.cosine_similarity(one, other, dim=0)) > 0.995


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_layers_computed_again_give_the_same_gradients(layout: Layout) -> None:
    plain, model = make_engine(layout=layout), make_model()
    calls: list[int] = []
    recompute_layers(model)
    model.get_submodule("model.layers.0.self_attn").register_forward_hook(
        lambda *_: calls.append(1)
    )
    engine = make_engine(model, layout=layout)
    calls.clear()

    reports = [
        each.forward_backward(make_mini_batch(), aggregation="token_mean")
        for each in (engine, plain)
    ]

    assert reports[0].loss == reports[1].loss
    assert torch.equal(_gradients(engine), _gradients(plain))
    assert len(calls) == 4  # two for the trial of the head, the pass and the gradient


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_forward_returns_logprobs_by_row_and_keeps_gradients(layout: Layout) -> None:
    engine = make_engine(layout=layout, temperature=0.8)
    engine.forward_backward(make_mini_batch(), aggregation="token_mean")
    gradients = _gradients(engine)
    expected = make_engine(temperature=0.8).forward(make_mini_batch())

    values = engine.forward(make_mini_batch(micro_batches=((3, 0), (1,), (2,))))

    assert sorted(values) == [0, 1, 2, 3]
    for row_id, logprobs in values.items():
        np.testing.assert_allclose(logprobs, expected[row_id], rtol=1e-5, atol=1e-6)
    assert torch.equal(_gradients(engine), gradients)


def _weights(engine: Engine) -> Tensor:
    return torch.cat([p.detach().flatten() for p in engine.model.parameters()])


def _gradients(engine: Engine) -> Tensor:
    return torch.cat([p.grad.flatten() for p in engine.model.parameters() if p.grad is not None])
