"""Objectives on a small model: independent of cuts and ranks, and equal to a slow reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from testkit.training.training import make_engine, make_mini_batch, make_model
from turnstream.errors import InvalidConfigError
from turnstream.worker import PulledMiniBatch
from turnstream.worker.tensors import to_torch
from turnstream_server.trainer.engine import Engine
from turnstream_server.trainer.metrics import UpdateReport
from turnstream_server.trainer.objectives.config import ObjectiveConfig
from turnstream_server.trainer.objectives.objective import Objective
from turnstream_server.trainer.objectives.scores import KnownPart, token_scores


def _objective(**options: Any) -> Objective:
    return Objective(ObjectiveConfig.parse(**options))


def _engine(*, layout: str = "padded", **options: Any) -> Engine:
    reference = make_model(seed=3) if "kl" in options else None
    objective = _objective(**options)
    return make_engine(objective=objective, reference=reference, layout=layout, max_grad_norm=0.0)


def _old(mini_batch: PulledMiniBatch, engine: Engine) -> list[Tensor] | None:
    """The numbers of other weights, as at the start of a step that has moved them since."""
    if engine._objective.config.proximal == "rollout":
        return None
    return make_engine(make_model(seed=2), layout=engine._passes.layout).logprobs(mini_batch)


def _trained(mini_batch: PulledMiniBatch, **options: Any) -> tuple[UpdateReport, Tensor]:
    """Return the report of an update, and its gradient."""
    engine = _engine(**options)
    report = engine.update(mini_batch, aggregation="token_mean", old=_old(mini_batch, engine))
    gradients = [each.grad for each in engine.model.parameters() if each.grad is not None]
    return report, torch.cat([each.flatten() for each in gradients])


OBJECTIVES: list[dict[str, Any]] = [
    {
        "loss": "kl_cov:share=0.3",
        "corrections": ["tis:cap=3", "mis:low=0.5,high=1.2", "opsm:delta=0.1", "rescaled"],
        "kl": "k3:coefficient=0.5",
        "entropy_bonus": 0.3,
    },
    {"loss": "gspo:clip_low=0.2,clip_high=0.1"},
    {
        "loss": "sapo",
        "corrections": ["icepop:low=0.5,high=1.2"],
        "denominators": "recount",
        "kl": "k1:coefficient=0.5,place=advantage",
    },
]


@pytest.mark.parametrize("options", OBJECTIVES, ids=lambda each: " ".join(map(str, each.values())))
def test_objective_does_not_depend_on_micro_batches_and_layout(options: dict[str, Any]) -> None:
    expected, expected_gradient = _trained(make_mini_batch(), **options)

    for layout, cut in [
        ("padded", ((0, 1), (2, 3))),
        ("padded", ((3,), (1, 0), (2,))),
        ("packed", ((2, 0, 3, 1),)),
        ("packed", ((3,), (1, 0), (2,))),
    ]:
        mini_batch = make_mini_batch(micro_batches=cut)
        report, gradient = _trained(mini_batch, layout=layout, **options)

        assert report.loss == pytest.approx(expected.loss, rel=1e-5, abs=1e-7)
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-6)
        assert dict(report.statistics) == pytest.approx(dict(expected.statistics), abs=1e-6)
    assert expected_gradient.norm() > 1e-4


def _numbers(mini_batch: PulledMiniBatch, engine: Engine) -> dict[str, np.ndarray]:
    """Mask, advantages and log-probabilities before an update, float64."""
    tensors = to_torch(mini_batch)
    reference, old = (make_engine(make_model(seed=seed)) for seed in (3, 2))
    assert tensors.logprobs_BR is not None
    columns = {
        "mask": tensors.loss_mask_BR,
        "advantages": tensors.advantages_BR,
        "behaviour": tensors.logprobs_BR,
        "current": engine.logprobs(mini_batch)[0],
        "old": old.logprobs(mini_batch)[0],
        "reference": reference.logprobs(mini_batch)[0],
    }
    return {name: values.double().numpy() for name, values in columns.items()}


def test_statistics_of_the_parts_are_means_over_trained_tokens() -> None:
    options: Any = {
        "loss": "ppo_clip",
        "corrections": ["tis:cap=1.1", "mis:low=0.5,high=1.4"],
        "kl": "k2:coefficient=0.5",
        "entropy_bonus": 0.5,
    }
    mini_batch = make_mini_batch()
    n = _numbers(mini_batch, _engine(**options))
    gaps = (n["old"] - n["behaviour"])[n["mask"] > 0]
    ratios = np.exp(gaps)
    moves = (n["current"] - n["reference"])[n["mask"] > 0]

    report, _ = _trained(mini_batch, **options)

    is_dropped = (ratios < 0.5) | (ratios > 1.4)
    assert 0 < is_dropped.sum() < 9
    assert report.statistics["weight_tis"] == pytest.approx(ratios.clip(0, 1.1).mean(), rel=1e-5)
    assert report.statistics["masked_share_mis"] == pytest.approx(is_dropped.mean())
    assert report.statistics["logprob_gap"] == pytest.approx(np.abs(gaps).mean(), rel=1e-5)
    assert report.statistics["logprob_gap_max"] == pytest.approx(np.abs(gaps).max(), rel=1e-5)
    assert report.statistics["kl_reference"] == pytest.approx((moves**2 / 2).mean(), rel=1e-4)
    assert report.statistics["kl_coefficient"] == 0.5
    assert 4.0 < report.statistics["entropy"] < math.log(128)


def test_adaptive_coefficient_follows_the_target_and_survives_a_restart() -> None:
    # Four trajectories of a horizon of eight: the coefficient moves by 10 %.
    engine = _engine(kl="k3:coefficient=0.5,target=1e-6,horizon=8")
    infinite = make_mini_batch(advantages=[math.inf, 1.0, 1.0, 1.0])
    assert not engine.update(infinite, aggregation="token_mean").is_applied  # it changes nothing
    before = [
        engine.update(make_mini_batch(), aggregation="token_mean").statistics["kl_coefficient"]
        for _ in range(2)
    ]
    restored = _engine(kl="k3:coefficient=0.9,target=1e9,horizon=8")
    fixed = _engine(kl="k3:coefficient=0.9")
    for other in (restored, fixed):
        other.load_state_dict(engine.state_dict())

    after = restored.update(make_mini_batch(), aggregation="token_mean")

    assert before == pytest.approx([0.5, 0.55])
    assert after.statistics["kl_coefficient"] == pytest.approx(0.605)
    assert restored._objective.kl_coefficient == pytest.approx(0.605 * 0.9)
    assert fixed._objective.kl_coefficient == 0.9


def test_kl_without_a_reference_policy_is_refused() -> None:
    with pytest.raises(InvalidConfigError, match="--kl: there is no reference policy"):
        make_engine(objective=_objective(kl="k3"))


def test_rollout_objective_pulls_one_mini_batch_at_a_time() -> None:
    pulled: list[int] = []

    def mini_batches():
        for number in range(2):
            pulled.append(number)
            yield make_mini_batch(mini_batch=number)

    first, old = next(_engine().with_old_logprobs(mini_batches()))

    assert (first.info.mini_batch, old, pulled) == (0, None, [0])


@pytest.mark.parametrize(
    ("loss", "find"),
    [
        ("ppo_clip:clip_low=0.3,clip_high=0.1", lambda u: (u < 0.7, u > 1.1)),
        ("cispo:clip_low=0.3,clip_high=0.1", lambda u: (u < 0.7, u > 1.1)),
        ("gmpo:clip_low=0.3,clip_high=0.1", lambda u: (np.log(u) < -0.3, np.log(u) > 0.1)),
        ("sapo", lambda u: (u < 0, u < 0)),
    ],
)
def test_clipped_shares_count_ratios_on_either_side(
    loss: str, find: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
) -> None:
    mini_batch = make_mini_batch()
    n = _numbers(mini_batch, _engine(loss=loss))
    below, above = find(np.exp(n["current"] - n["behaviour"])[n["mask"] > 0])

    report, _ = _trained(mini_batch, loss=loss)

    assert report.statistics["clipped_low_share"] == pytest.approx(below.mean())
    assert report.statistics["clipped_high_share"] == pytest.approx(above.mean())
    assert report.statistics["clipped_share"] == pytest.approx((below | above).mean())


def test_row_without_logprobs_is_weighed_by_rescaling_alone() -> None:
    mini_batch = make_mini_batch()
    part = to_torch(mini_batch)
    assert part.logprobs_BR is not None
    logprobs_BR = part.logprobs_BR.clone()
    logprobs_BR[0, 0] = math.nan  # one trained token of the first row
    part = replace(part, logprobs_BR=logprobs_BR)
    old_BR = torch.full_like(logprobs_BR, -1.0)  # far from the others
    scores, missing_B = token_scores(KnownPart(part, old_BR, None), old_BR)
    objective = _objective(corrections=["mis:low=0.5,high=1.2", "rescaled"])

    (prepared,) = objective.prepare([part], [scores], rows=mini_batch.rows, seed=0)

    masked_BR, scale_BR = (each[0][part.trained_tokens[0]] for each in prepared.weights)
    assert missing_B.tolist() == [True, False, False, False]
    assert masked_BR.tolist() == [1.0] * 3
    assert scale_BR.tolist() == [3.0] * 3  # the other six of nine trained tokens are dropped
