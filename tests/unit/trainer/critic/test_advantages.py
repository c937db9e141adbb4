"""Advantages of a step from rewards, KL and values, next to a float64 reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import testkit
from testkit.training.training import make_critic, make_engine, make_model, make_value_model, pulled
from testkit.training.training import row_values as values_of
from turnstream.batching.layouts.outputs import join_by_row_id
from turnstream.types import Ragged, Rows
from turnstream.worker import PulledMiniBatch
from turnstream_server.trainer.critic.config import GaeSettings
from turnstream_server.trainer.critic.critic import Critic, ValueModel, with_advantages
from turnstream_server.trainer.engine import Engine
from turnstream_server.trainer.objectives.config import ObjectiveConfig
from turnstream_server.trainer.objectives.objective import Objective
from turnstream_server.trainer.ranks import ONE_RANK
from turnstream_server.trainer.settings import Layout

FIRST, SECOND = ("abCDefG", "xY", "a|b", "hijKLMnopqR"), ("pqRsT", "uvwxyzABC")
CUTS: list[tuple[Any, Any]] = [
    (((0, 1, 2, 3),), ((0, 1),)),
    (((3,), (2, 0), (1,)), ((1,), (0,))),
]
REWARDS = (1.0, -0.5, 9.0, 0.25), (2.0, 0.0)
BEHAVIOUR = -4.5
KL = "k1:coefficient=0.3,place=reward"


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(
    ("text", "kl"),
    [
        ("lam=0.95", None),
        ("gamma=0.9,lam=0.8,whiten=false", KL),
        ("length_alpha=0.7,value_lam=1", KL),
    ],
    ids=["default", "KL in the reward", "VAPO"],
)
def test_advantages_and_returns_agree_with_a_float64_reference(
    layout: Layout, cut: Any, text: str, kl: str | None
) -> None:
    step = _step(cut)
    critic = make_critic(text=text, layout=layout)
    expected = _reference([each.rows for each in step], critic.settings, kl=0.3 if kl else 0.0)
    engine = _engine(critic, kl=kl, layout=layout)

    found = _ready(engine, step)

    advantages, returns = (np.concatenate(column) for column in zip(*found, strict=True))
    np.testing.assert_allclose(advantages, expected[0], rtol=2e-4, atol=2e-5)
    np.testing.assert_allclose(returns, expected[1], rtol=1e-4, atol=1e-5)
    if critic.settings.whiten == "true":
        assert advantages.mean() == pytest.approx(0.0, abs=1e-6)
        assert advantages.std() == pytest.approx(1.0, rel=1e-5)


def test_statistics_of_the_step_describe_all_its_mini_batches() -> None:
    critic = make_critic()
    step = _step(CUTS[0])
    _, expected = _reference([each.rows for each in step], critic.settings)
    values = np.concatenate([_trained(each.rows, critic.values(each)) for each in step])

    _ready(_engine(critic), step)

    assert critic.step_statistics == {
        "value_mean": pytest.approx(values.mean(), rel=1e-5),
        "return_mean": pytest.approx(expected.mean(), rel=1e-5),
        "explained_variance": pytest.approx(1 - (expected - values).var() / expected.var(), 1e-4),
    }
    report = critic.update(next(iter(_scored(_engine(critic), step)))[0])
    assert report.items() > critic.step_statistics.items()


def test_targets_stay_fixed_in_later_epochs() -> None:
    critic = make_critic()
    engine = _engine(critic)
    step = _step(CUTS[0])
    epochs = [*step, *[replace(each, epoch=1) for each in step]]
    seen: list[PulledMiniBatch] = []

    for mini_batch, old in _scored(engine, epochs):
        engine.update(mini_batch, aggregation="token_mean", old=old)
        critic.update(mini_batch)
        seen.append(mini_batch)

    assert [(each.info.mini_batch, each.epoch) for each in seen] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    for first, later in zip(seen[:2], seen[2:], strict=True):
        testkit.assert_same(first.rows, later.rows)


def test_kl_of_rows_without_logprobs_is_that_of_the_current_policy() -> None:
    known = _step(CUTS[0])[0]
    engine = _engine(make_critic(), kl=KL)
    logprobs = join_by_row_id([engine.forward(known)], known.rows)
    with_own = replace(known, rows=replace(known.rows, logprobs=logprobs))
    without = replace(known, rows=replace(known.rows, logprobs=None))

    expected, found = (engine.token_penalties(each, None) for each in (with_own, without))

    assert expected is not None
    assert found is not None
    for row, penalties in expected.items():
        np.testing.assert_allclose(found[row], penalties, rtol=1e-5, atol=1e-6)
        assert np.any(penalties)


def test_recomputed_old_policy_is_the_one_of_the_kl() -> None:
    (mini_batch, _) = _step(CUTS[0])
    engine = _engine(make_critic(), kl=KL, proximal="recompute")
    [(_, old), *_] = engine.with_old_logprobs(iter([mini_batch]))
    assert old is not None
    reference = make_engine(make_model(seed=3)).forward(mini_batch)
    own = engine.forward(mini_batch)

    found = engine.token_penalties(mini_batch, old)

    assert found is not None
    for row, penalties in found.items():
        np.testing.assert_allclose(penalties, 0.3 * (own[row] - reference[row]), atol=1e-5)


def test_kl_coefficient_of_the_reward_adapts_to_its_target() -> None:
    engine = _engine(make_critic(), kl=f"{KL},target=1e-6,horizon=4")
    step = _step(CUTS[0])[:1]
    before = engine.token_penalties(step[0], None)

    report = engine.update(step[0], aggregation="token_mean")

    after = engine.token_penalties(step[0], None)
    num_trajectories = step[0].info.denominators.num_trajectories
    assert report.statistics["kl_coefficient"] == 0.3
    assert before is not None
    assert after is not None
    for row, penalties in before.items():
        growth = 1 + 0.2 * num_trajectories / 4 * np.sign(report.statistics["kl_reference"])
        np.testing.assert_allclose(after[row], penalties * growth, rtol=1e-5)


def _engine(
    critic: Critic, *, kl: str | None = None, proximal: str | None = None, layout: Layout = "padded"
) -> Engine:
    objective = Objective(ObjectiveConfig.parse(kl=kl, proximal=proximal))
    reference = None if kl is None else make_model(seed=3)
    return make_engine(objective=objective, reference=reference, critic=critic, layout=layout)


def _step(cut: Any) -> list[PulledMiniBatch]:
    """Two mini-batches; the first has an inert row with a reward."""
    first = testkit.rows(
        *FIRST,
        rewards=REWARDS[0],
        is_padding=[False, False, True, False],
        logprobs=BEHAVIOUR,
    )
    second = testkit.rows(*SECOND, rewards=REWARDS[1], logprobs=BEHAVIOUR, first_row_id=4)
    return [
        pulled(rows, mini_batch=number, num_mini_batches=2, micro_batches=passes)
        for number, (rows, passes) in enumerate(zip((first, second), cut, strict=True))
    ]


def _scored(engine: Engine, step: Sequence[PulledMiniBatch]) -> Any:
    assert engine.critic is not None
    return with_advantages(
        engine.with_old_logprobs(step),
        critic=engine.critic,
        source="outcome",
        penalties=engine.token_penalties,
        ranks=ONE_RANK,
    )


def _ready(engine: Engine, step: Sequence[PulledMiniBatch]) -> list[tuple[Any, Any]]:
    """Return advantages and returns of the trained tokens of each mini-batch."""
    found: list[tuple[Any, Any]] = []
    for mini_batch, _ in _scored(engine, step):
        rows = mini_batch.rows
        is_trained = rows.loss_mask.values.astype(bool)
        returns = rows.extras["critic.return"].values.values
        assert not rows.advantages.values[~is_trained].any()
        found.append((rows.advantages.values[is_trained], returns[is_trained]))
    return found


def _trained(rows: Rows, column: Ragged[Any]) -> Any:
    return column.values[rows.loss_mask.values.astype(bool)]


def _reference(step: Sequence[Rows], settings: GaeSettings, *, kl: float = 0.0) -> tuple[Any, Any]:
    """Return advantages and returns of all trained tokens: token by token, in float64."""
    model, policy = make_value_model().double(), make_model(seed=3).double()
    found = [_row(*each, settings, kl) for rows in step for each in _tokens(rows, model, policy)]
    advantages, returns = (np.concatenate(column) for column in zip(*found, strict=True))
    if settings.whiten == "true":
        advantages = (advantages - advantages.mean()) / np.sqrt(advantages.var() + 1e-8)
    return advantages, returns


def _tokens(
    rows: Rows, model: ValueModel, policy: PreTrainedModel
) -> list[tuple[list[float], list[float], float]]:
    """Return values and KL of the trained tokens of each real row, and its reward."""
    found: list[tuple[list[float], list[float], float]] = []
    with torch.no_grad():
        for row, values_R in enumerate(values_of(model, rows)):
            if rows.is_padding[row]:
                continue
            trained = np.flatnonzero(rows.loss_mask[row]).tolist()
            logprobs_R = _logprobs(policy, rows.input_ids[row])[int(rows.prompt_length[row]) - 1 :]
            kl = [BEHAVIOUR - float(logprobs_R[token]) for token in trained]
            found.append(([float(values_R[t]) for t in trained], kl, float(rows.reward[row])))
    return found


def _logprobs(policy: PreTrainedModel, ids: Any) -> Tensor:
    ids_T = torch.from_numpy(ids.astype(np.int64))
    scores_TV = policy(input_ids=ids_T[None]).logits[0].log_softmax(-1)
    return scores_TV[:-1].gather(1, ids_T[1:, None])[:, 0]


def _row(
    values: list[float], kl: list[float], reward: float, settings: GaeSettings, coefficient: float
) -> tuple[list[float], list[float]]:
    lam = settings.lam
    value_lam = lam if settings.value_lam is None else settings.value_lam
    if settings.length_alpha:
        lam = 1 - 1 / max(1.0, settings.length_alpha * len(values))
    rewards = [-coefficient * each for each in kl]
    rewards[-1] += reward
    advantages = _gae(values, rewards, settings.gamma, lam)
    returns = _gae(values, rewards, settings.gamma, value_lam)
    return advantages, [a + v for a, v in zip(returns, values, strict=True)]


def _gae(values: list[float], rewards: list[float], gamma: float, lam: float) -> list[float]:
    found: list[float] = []
    ahead = value_ahead = 0.0
    for value, reward in zip(values[::-1], rewards[::-1], strict=True):
        ahead = reward + gamma * value_ahead - value + gamma * lam * ahead
        value_ahead = value
        found.append(ahead)
    return found[::-1]
