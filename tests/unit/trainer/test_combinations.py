"""Every pair of settings of an objective is equal to a slow reference, or refused."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, get_args

import numpy as np
import pytest
import torch

import testkit
from testkit.training.objective_reference import Token, reference_loss
from testkit.training.training import pulled
from turnstream.errors import InvalidConfigError
from turnstream.types import Aggregation, Denominators, Ragged
from turnstream.worker.layouts import packed_to_torch
from turnstream.worker.tensors import RowTensors, to_torch
from turnstream_server.trainer.combinations import check_critic
from turnstream_server.trainer.objectives.config import ObjectiveConfig
from turnstream_server.trainer.objectives.objective import Objective
from turnstream_server.trainer.objectives.parameters import CORRECTIONS, KL_ESTIMATES, LOSSES
from turnstream_server.trainer.objectives.scores import TokenScores

# Trajectory "t0" has two rows; the last row is inert. Trained tokens: 3, 2, 1, 4, 2 and 0.
_TRAINED = (3, 2, 1, 4, 2)
_NUM_TOKENS = sum(_TRAINED)
_CONSTANT = 7
_RNG = np.random.default_rng(5)
_TEXTS = ("a|BCD", "aBCDe|FG", "x|Y", "h|IjKLM", "q|RS", "a|b")
_ROWS = replace(
    testkit.rows(
        *_TEXTS,
        group_ids=["g0", "g0", "g0", "g1", "g1", "g1"],
        advantages=[1.0, 1.0, -0.5, -1.5, 0.75, 0.0],
        is_padding=[False] * 5 + [True],
    ),
    trajectory_id=["t0", "t0", "t1", "t2", "t3", ""],
    weight=np.array([0.5, 0.5, 1.0, 1.0, 1.0, 0.0], np.float32),
    trajectory_num_tokens=np.array([5, 5, 1, 4, 2, 0]),
    group_num_tokens=np.array([6, 6, 6, 6, 6, 0]),
    token_weights=Ragged.from_rows(
        [testkit.mask(text.split("|")[1]) * _RNG.uniform(0.5, 2) for text in _TEXTS], np.float32
    ),
)
_MINI_BATCH = pulled(
    _ROWS,
    denominators=Denominators(_NUM_TOKENS, 5, 4, 2, 4.0, _CONSTANT),
    micro_batches=((4, 0), (5, 1, 2), (3,)),
)
_PARTS: Sequence[RowTensors] = [*to_torch(_MINI_BATCH).micro_batches()]
_PACKED: Sequence[RowTensors] = packed_to_torch(_MINI_BATCH)
_BEHAVIOUR = -_RNG.exponential(1.0, _NUM_TOKENS) - 0.1
_RECOMPUTED = np.minimum(_BEHAVIOUR + _RNG.normal(0, 0.3, _NUM_TOKENS), -0.01)
_CURRENT = np.minimum(_RECOMPUTED + _RNG.normal(0, 0.25, _NUM_TOKENS), -0.01)
_REFERENCE = _RECOMPUTED + _RNG.normal(0, 0.3, _NUM_TOKENS)
_ENTROPY = _RNG.uniform(0.5, 2, _NUM_TOKENS)

Features = Mapping[str, Any]

_LOSSES = [
    *("ppo_clip:clip_high=0.28,dual_clip=3", "gspo:clip_low=0.1,clip_high=0.1", "cispo"),
    *("decoupled_ppo:behaviour_cap=1.3", "dppo:threshold=0.02"),
    *("dppo:divergence=kl,threshold=0.01", "sapo", "gmpo:clip_low=0.1,clip_high=0.1"),
    *("clip_cov:share=1,low=-0.1,high=1", "kl_cov:share=0.3", "cross_entropy"),
]
_CORRECTIONS = [
    *("tis:cap=1.1", "tis:level=sequence", "icepop:low=0.8,high=1.2"),
    *("mis:low=0.8,high=1.2", "mis:level=geometric,low=0.9,high=1.1", "row_veto:low=0.7"),
    *("seq_mask_tis:low=0.9,high=1.1", "opsm:delta=0.05"),
]
_RATIOS = ("tis", "icepop", "seq_mask_tis", "decoupled_ppo", "dppo")
FEATURES: list[Features] = [
    *({"loss": each} for each in _LOSSES),
    *({"corrections": [each]} for each in _CORRECTIONS),
    {"corrections": ["mis:low=0.8,high=1.2", "rescaled"]},
    {"corrections": ["mis:low=0.8,high=1.2"], "denominators": "recount"},
    {
        "corrections": ["mis:level=sequence,low=0,high=inf,veto_below=0.6"],
        "denominators": "recount",
    },
    *(
        {"kl": f"{name}:coefficient=0.5,place={place}"}
        for name in KL_ESTIMATES
        for place in ("loss", "advantage", "reward")
    ),
    {"kl": "k2:coefficient=0"},
    *({"entropy_bonus": 0.3}, {"critic": True}),
    *({"proximal": each} for each in ("rollout", "recompute")),
    *({"aggregation": each} for each in get_args(Aggregation)),
]


def _pairs() -> Iterator[dict[str, Any]]:
    """Yield every feature and every pair of features that fit one command line."""
    for first, second in itertools.chain(
        ((each, {}) for each in FEATURES), itertools.combinations(FEATURES, 2)
    ):
        shared = first.keys() & second.keys() - {"corrections"}
        if all(first[name] == second[name] for name in shared):
            joined = [*first.get("corrections", ()), *second.get("corrections", ())]
            unique = sorted(dict.fromkeys(joined), key=lambda name: name == "rescaled")
            yield {**first, **second, **({"corrections": unique} if unique else {})}


def _expected_refusal(options: Features) -> str:
    """Return the option that a pair is refused for; empty if it is valid."""
    loss = options.get("loss", "ppo_clip").partition(":")[0]
    corrections = options.get("corrections", [])
    names = [each.partition(":")[0] for each in corrections]
    kl = options.get("kl", "")
    of_ratio = [name for name in (loss, *names) if name in _RATIOS]
    is_recount = options.get("denominators") == "recount"
    is_off_loss = "place=advantage" in kl or "place=reward" in kl
    if len(of_ratio) > 1:
        return "--correction"
    if is_recount and "rescaled" in names:
        return "--denominators"
    if kl == "k1:coefficient=0.5,place=loss":
        return "--kl"
    if options.get("proximal") == "rollout" and {*names, loss} & {*_RATIOS[:4], "mis", "row_veto"}:
        return "--proximal"
    if loss == "cross_entropy" and is_off_loss:
        return "--kl"
    if loss == "cross_entropy" and "opsm" in names:
        return "--correction"
    if options.get("proximal") == "recompute" and loss in ("cross_entropy", "dppo"):
        return "" if names or is_off_loss else "--proximal"
    if "place=reward" in kl and not options.get("critic"):
        return "--kl"
    return "--critic" if options.get("critic") and loss == "cross_entropy" else ""


def _parsed(options: Features) -> ObjectiveConfig:
    named = {key: value for key, value in options.items() if key not in ("critic", "aggregation")}
    config = ObjectiveConfig.parse(**named)
    check_critic(config, has_critic=options.get("critic", False))
    return config


def _refusal(options: Features) -> str:
    """Return the option that is refused; empty if none is."""
    try:
        _parsed(options)
    except InvalidConfigError as error:
        return error.field
    return ""


def _spread(values: torch.Tensor, parts: Sequence[RowTensors] = _PARTS) -> list[torch.Tensor]:
    """Return values of the trained tokens at their places in each micro-batch; NaN elsewhere."""
    by_row = dict(enumerate(values.split(_TRAINED)))
    spread: list[torch.Tensor] = []
    for part in parts:
        empty_BR = torch.full(part.trained_tokens.shape, math.nan, dtype=torch.float64)
        own = [by_row[row] for row in part.row_id_B.tolist() if row >= 0]
        spread.append(empty_BR.masked_scatter(part.trained_tokens, torch.cat(own)))
    return spread


def _found(
    config: ObjectiveConfig, aggregation: Any, parts: Sequence[RowTensors]
) -> tuple[float, np.ndarray]:
    """Return loss and gradients of current log-probabilities and entropies, by the trainer."""
    old = _BEHAVIOUR if config.proximal == "rollout" else _RECOMPUTED
    current, entropy = (torch.tensor(each, requires_grad=True) for each in (_CURRENT, _ENTROPY))
    columns = {
        "current_BR": _spread(current, parts),
        "old_BR": _spread(torch.from_numpy(old), parts),
        "behaviour_BR": _spread(torch.from_numpy(_BEHAVIOUR), parts),
        "reference_BR": _spread(torch.from_numpy(_REFERENCE), parts),
        "entropies_BR": _spread(entropy, parts),
    }
    scores = [
        TokenScores(**{name: column[i] for name, column in columns.items()})
        for i in range(len(parts))
    ]
    objective = Objective(config)
    prepared = objective.prepare(parts, scores, rows=_ROWS, seed=0)
    losses = [
        objective.loss(ready, score, aggregation=aggregation)[0]
        for ready, score in zip(prepared, scores, strict=True)
    ]
    return _with_gradient(torch.stack(losses).sum(), current, entropy)


def _expected(config: ObjectiveConfig, aggregation: str) -> tuple[float, np.ndarray]:
    """Return the same by the reference."""
    old = _BEHAVIOUR if config.proximal == "rollout" else _RECOMPUTED
    current, entropy = (torch.tensor(each, requires_grad=True) for each in (_CURRENT, _ENTROPY))
    rows = [row for row, count in enumerate(_TRAINED) for _ in range(count)]
    masks = _ROWS.loss_mask.values.astype(bool)
    assert _ROWS.token_weights is not None
    tokens = [
        Token(
            row=row,
            trajectory=_ROWS.trajectory_id[row],
            group=_ROWS.group_id[row],
            row_weight=float(_ROWS.weight[row]),
            weight=float(_ROWS.token_weights.values[masks][i]),
            current=current[i],
            entropy=entropy[i],
            old=float(old[i]),
            behaviour=float(_BEHAVIOUR[i]),
            reference=float(_REFERENCE[i]),
            advantage=float(_ROWS.advantage[row]),
        )
        for i, row in enumerate(rows)
    ]
    loss = reference_loss(config, tokens, aggregation=aggregation, length_constant=_CONSTANT)
    return _with_gradient(loss, current, entropy)


def _with_gradient(loss: torch.Tensor, *leaves: torch.Tensor) -> tuple[float, np.ndarray]:
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    gradients = [torch.zeros(_NUM_TOKENS) if each is None else each for each in found]
    return loss.item(), torch.cat(gradients).numpy()


def _assert_equals_reference(
    config: ObjectiveConfig,
    *,
    aggregation: str = "token_mean",
    parts: Sequence[RowTensors] = _PARTS,
) -> None:
    loss, gradient = _found(config, aggregation, parts)
    expected, expected_gradient = _expected(config, aggregation)

    assert math.isfinite(loss), str(config)
    assert loss == pytest.approx(expected, rel=1e-5, abs=1e-7), str(config)
    np.testing.assert_allclose(
        gradient, expected_gradient, rtol=1e-4, atol=1e-7, err_msg=str(config)
    )


def test_pair_of_settings_is_equal_to_its_reference_or_refused() -> None:
    """Takes more than 5 s: each pair of settings trains, and so does its slow reference."""
    num_equal = 0
    for options in _pairs():
        expected = _expected_refusal(options)
        assert _refusal(options) == expected, options
        if not expected:
            aggregation = options.get("aggregation", "token_mean")
            _assert_equals_reference(_parsed(options), aggregation=aggregation)
            if options in FEATURES:
                _assert_equals_reference(_parsed(options), aggregation=aggregation, parts=_PACKED)
            num_equal += 1

    assert num_equal > 500


_EXTREMES = ("inf", "-inf", "nan", "1e300", "-1e300", "1e39", "1e-300", "0", "1", "1e9", "-1")


def test_extreme_parameter_is_equal_to_its_reference_or_refused() -> None:
    options = {"--loss": "loss", "--correction": "corrections", "--kl": "kl"}
    num_equal = 0
    for kind in (*LOSSES.values(), *CORRECTIONS.values(), *KL_ESTIMATES.values()):
        place = ",place=advantage" if kind.option == "--kl" else ""
        target = ",target=0.1" if kind.option == "--kl" else ""
        numbers = [each.name for each in fields(kind) if "bounds" in each.metadata]
        for key, value in itertools.product(numbers, _EXTREMES):
            extra = place + (target if key == "horizon" else "")
            text = f"{kind.name}:{key}={value}{extra}"
            if kind.name == "clip_cov":  # it must select all candidates, or there is none
                text = f"{text},{'low=50,high=60' if key == 'share' else 'share=1'}"
            named = {options[kind.option]: [text] if kind.option == "--correction" else text}
            if not _refusal(named):
                _assert_equals_reference(_parsed(named))
                num_equal += 1

    assert num_equal > 50


def test_correction_changes_no_token_where_trainer_and_generator_agree() -> None:
    tokens_BR = _spread(torch.from_numpy(_BEHAVIOUR))
    for text in (*_CORRECTIONS, *CORRECTIONS.keys() - {"rescaled"}):
        objective = Objective(ObjectiveConfig.parse(corrections=[text]))
        for part, same_BR in zip(_PARTS, tokens_BR, strict=True):
            scores = TokenScores(current_BR=same_BR, old_BR=same_BR, behaviour_BR=same_BR)
            [weight_BR] = objective.prepare_alone(part, scores).weights
            assert (weight_BR[part.trained_tokens] == 1).all(), text
