"""Loss, gradient and state of a critic, next to a float64 reference."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import testkit
from testkit.training.training import make_critic, make_value_model, pulled, row_values
from turnstream.errors import InvalidConfigError
from turnstream.types import Ragged, Rows
from turnstream.worker import PulledMiniBatch
from turnstream_server.trainer.critic.critic import with_targets
from turnstream_server.trainer.settings import Layout

TEXTS = ("abCDefG", "xY", "hijKLMnopqR", "a|b", "pqRsT", "uvwxyzABC")
INERT = (False, False, False, True, False, False)
CUTS = [
    ((0, 1, 2, 3, 4, 5),),
    ((5, 0), (3,), (1, 4), (2,)),
]


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("clip", [0.2, None])
def test_critic_loss_and_gradient_agree_with_a_float64_reference(
    layout: Layout, cut: Any, clip: float | None
) -> None:
    expected, clipped, gradients = _reference(_mini_batch(), clip=clip)
    model = make_value_model()
    text = f"learning_rate=1e-9,value_clip={'none' if clip is None else clip}"
    critic = make_critic(model, text=text, layout=layout)

    found = critic.update(_mini_batch(micro_batches=cut))

    assert found["value_loss"] == pytest.approx(expected, rel=1e-5)
    assert found["value_clipped_share"] == pytest.approx(clipped)
    assert (clip is None) == (clipped == 0)
    norm = math.sqrt(sum(float(each.square().sum()) for each in gradients.values()))
    assert found["critic_gradient_norm"] == pytest.approx(norm, rel=1e-5)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        scale = float(gradients[name].abs().max())
        difference = float((parameter.grad.double() - gradients[name]).abs().max())
        assert difference <= 1e-5 * scale, name


def test_rows_of_inert_ones_alone_change_no_weight() -> None:
    rows = testkit.rows("a|b", "a|b", is_padding=[True, True])
    denominators = _mini_batch().info.denominators
    model = make_value_model()
    before = [each.detach().clone() for each in model.parameters()]

    found = make_critic(model).update(
        with_targets(pulled(rows, denominators=denominators), **_targets(rows))
    )

    assert (found["value_loss"], found["critic_gradient_norm"]) == (0.0, 0.0)
    assert all(map(torch.equal, before, model.parameters()))


def test_update_with_an_infinite_gradient_is_skipped_and_counted() -> None:
    mini_batch = _mini_batch()
    targets = _targets(mini_batch.rows)
    targets["returns"].values[:] = np.inf
    model = make_value_model()
    before = [each.detach().clone() for each in model.parameters()]

    found = make_critic(model).update(with_targets(mini_batch, **targets))

    assert found["total_skipped_critic_updates"] == 1
    assert all(map(torch.equal, before, model.parameters()))


def test_checkpoint_of_another_critic_is_refused() -> None:
    critic = make_critic()
    state = critic.state_dict()

    del state["model"]["head.bias"]
    with pytest.raises(InvalidConfigError, match=r"(?s)--critic: .* another model: .*head\.bias"):
        critic.load_state_dict(state)


def _mini_batch(**info: Any) -> PulledMiniBatch:
    """Ragged rows with an inert one, and with targets far from their values."""
    rows = testkit.rows(*TEXTS, is_padding=INERT)
    return with_targets(pulled(rows, **info), **_targets(rows))


def _targets(rows: Rows) -> dict[str, Ragged[Any]]:
    rng = np.random.default_rng(3)
    mask = rows.loss_mask.values
    values, returns = (
        Ragged(np.where(mask, rng.normal(0, 0.7, len(mask)), 0).astype(np.float32), o)
        for o in (rows.loss_mask.offsets, rows.loss_mask.offsets)
    )
    return {"values": values, "returns": returns}


def _reference(
    mini_batch: PulledMiniBatch, *, clip: float | None
) -> tuple[float, float, dict[str, Tensor]]:
    """Return loss, clipped share and gradients: each row alone, token by token, in float64."""
    model = make_value_model().double()
    targets = _targets(mini_batch.rows)
    losses: list[Tensor] = []
    num_clipped = 0
    for row, values_R in enumerate(row_values(model, mini_batch.rows)):
        for token in np.flatnonzero(mini_batch.rows.loss_mask[row]).tolist():
            old, target = (float(targets[name][row][token]) for name in ("values", "returns"))
            loss = (values_R[token] - target) ** 2
            if clip is not None:
                num_clipped += abs(values_R[token].item() - old) > clip
                clipped = values_R[token].clamp(old - clip, old + clip)
                loss = torch.maximum(loss, (clipped - target) ** 2)
            losses.append(loss / 2)
    total = torch.stack(losses).mean()
    total.backward()
    gradients = {n: each.grad for n, each in model.named_parameters() if each.grad is not None}
    assert len(losses) == mini_batch.info.denominators.num_tokens
    return total.item(), num_clipped / len(losses), gradients
