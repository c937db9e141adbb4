"""One mini-batch in all its forms: rows, layouts, cuts, ranks. And its loss in float64.

The reference scores each row alone, without padding, and has formulas of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

import testkit
from testkit.shares import budgeted_passes, rank_share, weighted
from testkit.training.ranks import place_model
from testkit.training.training import pulled
from turnstream.batching.config.values import Aggregation, RowWeights
from turnstream.batching.packing.microbatch import Budget
from turnstream.records.batches import decode_mini_batch, encode_mini_batch
from turnstream.types import MiniBatch, Rows
from turnstream.worker import PulledMiniBatch
from turnstream_server.models.policy import load_policy
from turnstream_server.models.sharding import whole
from turnstream_server.models.spec import SmallModelSpec
from turnstream_server.trainer.engine import Engine
from turnstream_server.trainer.ranks import Ranks
from turnstream_server.trainer.settings import AdamSettings, Layout, Parallel

BEHAVIOUR = -4.9
LENGTH_CONSTANT = 7
LIMIT = 12
TEMPERATURE = 0.8
AGGREGATIONS_OF_RANKS: tuple[Aggregation, ...] = ("token_mean", "rollout_mean")


class Trajectory(NamedTuple):
    """A trajectory: its only row, the row of each turn, its group and its advantage."""

    merged: str
    turns: tuple[str, ...]
    group: str
    advantage: float


TRAJECTORIES = (
    Trajectory("ab|CDefG", ("ab|CD", "abcdef|G"), "g0", 1.0),
    Trajectory("x|YZ", ("x|YZ",), "g0", 0.5),
    Trajectory("hij|KlMNoP", ("hij|K", "hijkl|MN", "hijklmno|P"), "g1", 2.0),
    Trajectory("pqrstuv|WX", ("pqrstuv|WX",), "g1", -0.25),
)


class Case(NamedTuple):
    """A form of the mini-batch.

    Attributes:
        form: "merged" or "step-wise" rows.
        num_trajectories: the first so many. With 2 that are merged, one of three ranks has inert
            rows alone.
        limit: tokens of a pass.
        multiple_of: the rows of all ranks are filled up to a multiple of it.
    """

    form: str
    num_trajectories: int
    aggregation: Aggregation
    layout: Layout
    limit: int
    multiple_of: int = 1


class Found(NamedTuple):
    """The loss of all ranks, and the gradients of all weights, summed over them."""

    loss: float
    gradients: dict[str, Tensor]


def cases(num_ranks: int = 1) -> Iterator[Case]:
    """Yield all forms with each aggregation, and with every cut for one of them.

    Several ranks see an aggregation as a factor of the loss only, and a cut as a number of passes.
    So they have two aggregations, which weigh by token and by trajectory, and the finest cut.
    """
    forms, counts, layouts = ("merged", "step-wise"), (2, 4), get_args(Layout)
    aggregations = get_args(Aggregation) if num_ranks == 1 else AGGREGATIONS_OF_RANKS
    for shape in itertools.product(forms, counts, aggregations, layouts, (LIMIT,)):
        yield Case(*shape)
    for form, layout in itertools.product(forms, layouts):
        yield Case(form, 4, "token_mean", layout, LIMIT, multiple_of=9)
        limits = _limits_of_cuts(_rows(Case(form, 4, "token_mean", layout, 0)))
        for limit in limits if num_ranks == 1 else limits[:1]:
            yield Case(form, 4, "token_mean", layout, limit)


def make_policy(device: str = "cpu") -> PreTrainedModel:
    """Return two layers over the letters, with weights that scores depend on."""
    spec = SmallModelSpec(
        vocab_size=128, hidden_size=16, intermediate_size=16, num_layers=2, num_heads=2, seed=4
    )
    return load_policy(spec, device=device)


def find_all(ranks: Ranks, _: Path) -> dict[Parallel, dict[Case, Found]]:
    """Return loss and gradients of all cases; all ranks call it."""
    kinds: tuple[Parallel, ...] = ("ddp",) if ranks.world_size == 1 else get_args(Parallel)
    found: dict[Parallel, dict[Case, Found]] = {}
    for parallel in kinds:
        engines = {layout: _make_engine(ranks, parallel, layout) for layout in get_args(Layout)}
        chosen = cases(ranks.world_size)
        found[parallel] = {case: find(engines[case.layout], case, ranks) for case in chosen}
    return found


def _make_engine(ranks: Ranks, parallel: Parallel, layout: Layout) -> Engine:
    model = make_policy(ranks.device)
    place_model(model, ranks, parallel)
    adam = AdamSettings(learning_rate=0.0)
    return Engine(model, adam=adam, layout=layout, ranks=ranks, temperature=TEMPERATURE)


def find(engine: Engine, case: Case, ranks: Ranks) -> Found:
    """Return loss and gradients of an engine whose weights stay as they are; all ranks call it."""
    report = engine.forward_backward(share(case, ranks), aggregation=case.aggregation)
    engine.optim_step(AdamSettings(learning_rate=0.0, max_grad_norm=0.0))
    gradients = {
        name: whole(each.grad).cpu().clone()
        for name, each in engine.model.named_parameters()
        if each.grad is not None
    }
    return Found(report.loss, gradients)


def reference(model: PreTrainedModel, case: Case) -> Found:
    """Return loss and gradients of a model in float64."""
    model.zero_grad()
    rows = _row_texts(case)
    trained = [sum(map(str.isupper, text)) for _, text in rows]
    owners = [owner for owner, _ in rows]
    of_owner = {
        each: sum(n for o, n in zip(owners, trained, strict=True) if o == each) for each in owners
    }
    kinds = {
        "per_row": lambda owner, count: 1.0,
        "per_trajectory": lambda owner, count: 1.0 / owners.count(owner),
        "rollout_mean": lambda owner, count: count / of_owner[owner],
    }
    weigh = kinds[_WEIGHTS.get(case.aggregation, "per_row")]
    weights = [weigh(owner, count) for owner, count in zip(owners, trained, strict=True)]
    of_group: dict[str, int] = {}
    for owner, count in of_owner.items():
        group = TRAJECTORIES[owner].group
        of_group[group] = of_group.get(group, 0) + count
    loss = torch.zeros((), dtype=torch.float64)
    for (owner, text), count, weight in zip(rows, trained, weights, strict=True):
        group = of_group[TRAJECTORIES[owner].group]
        divisor = {
            "token_mean": sum(trained),
            "seq_mean_token_sum": sum(weights),
            "seq_mean_token_mean": sum(weights) * count,
            "constant": sum(weights) * LENGTH_CONSTANT,
            "rollout_mean": of_owner[owner] * len(of_owner),
            "prompt_mean": group * len(of_group),
        }[case.aggregation]
        loss = loss + weight * _row_loss(model, text, TRAJECTORIES[owner].advantage) / divisor
    loss.backward()
    gradients = {name: each.grad for name, each in model.named_parameters()}
    return Found(loss.item(), {n: g.clone() for n, g in gradients.items() if g is not None})


def _row_loss(model: PreTrainedModel, text: str, advantage: float) -> Tensor:
    """Return the sum of PPO's clipped losses, with a dual clip, of the capitals of a row."""
    letters = text.replace("|", "")
    ids = torch.tensor([[ord(letter) for letter in letters.lower()]])
    logprobs = (model(input_ids=ids).logits[0] / TEMPERATURE).log_softmax(-1)
    loss = torch.zeros((), dtype=torch.float64)
    for place, letter in enumerate(letters):
        if letter.isupper():
            ratio = (logprobs[place - 1, ids[0, place]] - BEHAVIOUR).exp()
            gain = torch.minimum(ratio * advantage, ratio.clip(0.8, 1.28) * advantage)
            if advantage < 0:
                gain = torch.maximum(gain, torch.tensor(3.0 * advantage))
            loss = loss - gain
    return loss


def _row_texts(case: Case) -> list[tuple[int, str]]:
    """Return the rows with the number of their trajectory."""
    return [
        (number, text)
        for number, each in enumerate(TRAJECTORIES[: case.num_trajectories])
        for text in ((each.merged,) if case.form == "merged" else each.turns)
    ]


_WEIGHTS: dict[Aggregation, RowWeights] = {
    "seq_mean_token_mean": "rollout_mean",
    "seq_mean_token_sum": "per_trajectory",
    "constant": "per_trajectory",
}


def _rows(case: Case) -> Rows:
    texts = _row_texts(case)
    owners = [TRAJECTORIES[owner] for owner, _ in texts]
    built = testkit.rows(
        *(text for _, text in texts),
        group_ids=[each.group for each in owners],
        advantages=[each.advantage for each in owners],
        logprobs=BEHAVIOUR,
    )
    names = [f"t{owner}" for owner, _ in texts]
    trained = [int(row.sum()) for row in built.loss_mask]
    by_name = {
        name: sum(n for n, own in zip(trained, names, strict=True) if own == name) for name in names
    }
    named = replace(
        built,
        trajectory_id=names,
        trajectory_num_tokens=np.array([by_name[name] for name in names], np.int64),
    )
    return weighted(named, _WEIGHTS.get(case.aggregation, "per_row"))


def share(case: Case, ranks: Ranks) -> PulledMiniBatch:
    """Return the share of a rank as it arrives: cut, filled up, encoded and decoded."""
    rows = _rows(case)
    place = {"dp_rank": ranks.rank, "dp_world_size": ranks.world_size}
    cut: dict[str, Any] = {
        **place,
        "multiple_of": case.multiple_of,
        "budget": Budget(limit=case.limit, model=case.layout),
    }
    own = rank_share(rows, step=1, mini_batch=0, pad_token_id=0, **cut)
    denominators = testkit.mini_batch_info(rows).denominators
    made = pulled(
        own,
        denominators=denominators._replace(length_constant=LENGTH_CONSTANT),
        micro_batches=budgeted_passes(rows, **cut),
        **place,
    )
    sent = encode_mini_batch(MiniBatch(rows=made.rows, info=made.info))
    arrived = decode_mini_batch(sent.data)
    return replace(made, rows=arrived.rows, info=arrived.info)


def _limits_of_cuts(rows: Rows) -> list[int]:
    """Return the least limit of each cut of the rows into passes of one rank."""
    found: dict[Any, int] = {}
    for limit in range(1, int(rows.input_ids.offsets[-1]) + 1):
        for model in get_args(Layout):
            budget = Budget(limit=limit, model=model)
            passes = budgeted_passes(rows, dp_rank=0, dp_world_size=1, budget=budget)
            found.setdefault((model, passes), limit)
    return sorted({*found.values()})
