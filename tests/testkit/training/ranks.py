"""Ranks of a trainer as processes over gloo, and updates that they make together."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from transformers import PreTrainedModel

import testkit
from testkit.services.processes import FORKING
from testkit.shares import budgeted_passes, rank_share
from testkit.training.training import make_critic, make_engine, make_model, make_value_model, pulled
from turnstream.batching.packing.microbatch import Budget
from turnstream.errors import InvalidConfigError
from turnstream.types import RecoveryToken, Rows
from turnstream.worker import PulledMiniBatch
from turnstream.worker.launch import Launch
from turnstream_server.embedded import free_port
from turnstream_server.models.adapters import Adapters
from turnstream_server.models.logprobs import head_is_linear
from turnstream_server.models.policy import recompute_layers
from turnstream_server.models.sharding import shard, whole, whole_weights
from turnstream_server.models.spec import AdapterConfig
from turnstream_server.trainer.checkpoint import Checkpoints
from turnstream_server.trainer.critic.critic import with_advantages, with_targets
from turnstream_server.trainer.engine import Engine
from turnstream_server.trainer.metrics import LossReport
from turnstream_server.trainer.objectives.config import ObjectiveConfig
from turnstream_server.trainer.objectives.objective import Objective
from turnstream_server.trainer.ranks import Ranks, join_ranks
from turnstream_server.trainer.settings import Layout, Parallel

ALL_PARTS: dict[str, Any] = {
    "loss": "kl_cov:share=0.2",
    "corrections": ["tis", "mis:low=0.1,high=9"],
    "kl": "k3:coefficient=0.05",
    "entropy_bonus": 0.01,
    "denominators": "recount",
}
RESCALED: dict[str, Any] = {
    "loss": "clip_cov:share=0.3,low=-0.1,high=1",
    "corrections": ["mis:low=0.5,high=1.2", "rescaled"],
}
_Result = TypeVar("_Result")
WORLD_SIZES = (2, 3)
KL_IN_REWARD = "k1:coefficient=0.1,place=reward"
_BUDGET = Budget(limit=12)
_TEXTS = ("abCDefG", "xY", "hijKLMnopqR", "pqRsT", "uvwxyzABC")


class Updated(NamedTuple):
    """One update of a new engine: its report, the summed gradients, and the weights after it."""

    report: LossReport
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


class Resumed(NamedTuple):
    """Weights in a checkpoint, after an update with and without it, and for other ranks."""

    saved: dict[str, Tensor]
    expected: dict[str, Tensor]
    actual: dict[str, Tensor]
    restored: dict[str, Tensor] | None


class Outcome(NamedTuple):
    """Results of one rank.

    Attributes:
        updates: updates of one or three ranks; empty for two.
        sharded: the same, where each rank has a shard of each weight.
        sums: summed gradients; all ranks have the first, rank 0 the second, none the third.
        random: numbers after a checkpoint was saved, and after it was restored.
        resumed: training of sharded models over a checkpoint; empty for one rank.
    """

    updates: dict[str, Updated]
    sharded: dict[str, Updated]
    sums: list[Tensor | None]
    refusal: str
    random: tuple[Tensor, Tensor]
    resumed: dict[str, Resumed]


def outcome(ranks: Ranks, folder: Path) -> Outcome:
    """Make each update with new engines; every rank calls it."""
    updates = {} if ranks.world_size == 2 else _updates(ranks, parallel="ddp")
    sharded = _updates(ranks, parallel="fsdp2") if ranks.world_size == 3 else updates
    resumed = {} if ranks.world_size == 1 else _resume(ranks, folder)
    return Outcome(updates, sharded, _sums(ranks), _refusal(ranks), _random(ranks, folder), resumed)


def sharded_folder(folder: Path, name: str, size: int) -> Path:
    """Return the folder of the checkpoints of a case of `Outcome.resumed`."""
    return folder / f"{size}-{name}"


def _updates(ranks: Ranks, *, parallel: Parallel) -> dict[str, Updated]:
    many, few = _rows(5), _rows(2)
    return {
        "padded": _update(ranks, many, parallel=parallel),
        "clipped": _update(ranks, many, max_grad_norm=1e-3, parallel=parallel),
        "recomputed layers": _update(ranks, many, recompute=True, parallel=parallel),
        "adapter": _update_adapter(ranks, many, parallel=parallel),
        "adapter packed": _update_adapter(ranks, few, layout="packed", parallel=parallel),
        "all parts": _update(
            ranks,
            few,
            config=ObjectiveConfig.parse(**ALL_PARTS),
            reference=make_model(seed=3),
            parallel=parallel,
        ),
        "rescaled": _update(
            ranks, many, config=ObjectiveConfig.parse(**RESCALED), parallel=parallel
        ),
        "critic": _update_critic(ranks, many, few, parallel=parallel),
        "critic, a row without logprobs": _update_critic(
            ranks, _without_logprobs(many), few, parallel=parallel
        ),
        "critic packed": _update_critic(ranks, few, many, layout="packed", parallel=parallel),
        "infinite": _update(ranks, _rows(5, advantage=float("inf")), parallel=parallel),
    }


def run_ranks(
    world_sizes: Sequence[int],
    folder: Path,
    job: Callable[[Ranks, Path], _Result],
    *,
    device: str = "cpu",
) -> dict[int, list[_Result]]:
    """Return what `job` returns on all ranks, by world size. The same processes serve all sizes."""
    ports = {size: free_port() for size in world_sizes}
    processes = [
        FORKING.Process(target=_run, args=(rank, ports, folder, job, device))
        for rank in range(max(world_sizes))
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * len(processes)
    return {
        size: [torch.load(_file(folder, size, rank), weights_only=False) for rank in range(size)]
        for size in world_sizes
    }


def _run(
    rank: int, ports: dict[int, int], folder: Path, job: Callable[[Ranks, Path], Any], device: str
) -> None:
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["LOCAL_RANK"] = str(rank)
    for size, port in ports.items():
        if rank < size:
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            with join_ranks(Launch(rank, size, "")) as ranks:
                result = job(ranks, folder / f"{size}")
            torch.save(result, _file(folder, size, rank))


def _file(folder: Path, size: int, rank: int) -> Path:
    return folder / f"{size}-{rank}.pt"


def _rows(num_rows: int, *, advantage: float = 1.0) -> Rows:
    """Rows of uneven lengths and weights; the first one has this advantage."""
    built = testkit.rows(
        *_TEXTS[:num_rows],
        rewards=[1.0, -0.5, 0.25, 2.0, 0.0][:num_rows],
        group_ids=["g0", "g0", "g1", "g1", "g1"][:num_rows],
        advantages=[advantage, -0.5, 0.25, -1.5, 2.0][:num_rows],
        logprobs=-4.5,
    )
    weights = np.array([0.5, 1.0, 1.0, 0.25, 2.0], np.float32)[:num_rows]
    return replace(built, weight=weights)


def _without_logprobs(rows: Rows) -> Rows:
    """Return the rows; the first one has no log-probabilities, so one rank alone has such a row."""
    assert rows.logprobs is not None
    values = rows.logprobs.values.copy()
    first = slice(0, len(rows.logprobs[0]))
    values[first][rows.loss_mask[0] == 1] = np.nan
    return replace(rows, logprobs=replace(rows.logprobs, values=values))


_MAKE: dict[str, Callable[[], dict[str, Any]]] = {
    "all weights": lambda: {"model": make_model(seed=5)},
    "adapter": lambda: _adapter_options(seed=5),
    "critic": lambda: {"model": make_model(seed=5), "values": make_value_model()},
}


def _resume(ranks: Ranks, folder: Path) -> dict[str, Resumed]:
    """Save sharded models and resume. Rank 0 publishes the weights too."""
    return {name: _resume_case(ranks, folder.parent, name) for name in _MAKE}


def _resume_case(ranks: Ranks, folder: Path, name: str) -> Resumed:
    own = sharded_folder(folder, name, ranks.world_size)
    mini_batch = _share(_rows(5), ranks)
    engine, checkpoints = _sharded_engine(ranks, name), Checkpoints(own, ranks=ranks)
    for _ in range(2):
        _train(engine, mini_batch)
    saved = _weights(engine)
    checkpoint = checkpoints.save(engine, RecoveryToken(lineage="main", step=2, chain_hash="ab"))
    write = engine.gather_weights()
    if ranks.is_first:
        (own / "published").mkdir()
        write(own / "published")
    _train(engine, mini_batch)
    expected = _weights(engine)
    resumed = _sharded_engine(ranks, name)
    checkpoints.restore(checkpoint, resumed)
    _train(resumed, mini_batch)
    return Resumed(saved, expected, _weights(resumed), _restored(ranks, folder, name))


def _restored(ranks: Ranks, folder: Path, name: str) -> dict[str, Tensor] | None:
    first = min(WORLD_SIZES)
    if ranks.world_size == first:
        return None
    checkpoints = Checkpoints(sharded_folder(folder, name, first), ranks=ranks)
    newest = checkpoints.newest()
    assert newest is not None
    engine = _sharded_engine(ranks, name)
    checkpoints.restore(newest, engine)
    return _weights(engine)


def _sharded_engine(ranks: Ranks, name: str) -> Engine:
    options = _MAKE[name]()
    place_model(options["model"], ranks, "fsdp2")
    values = options.pop("values", None)
    if values is None:
        return make_engine(ranks=ranks, **options)
    place_model(values, ranks, "fsdp2")
    return make_engine(ranks=ranks, critic=make_critic(values, ranks=ranks), **options)


def _weights(engine: Engine) -> dict[str, Tensor]:
    return whole_weights(
        (f"{owner}/{name}", each)
        for owner, optimizer in engine.optimizers.items()
        for name, each in optimizer.shards().items()
        if name.startswith("weight/")
    )


def _train(engine: Engine, mini_batch: PulledMiniBatch) -> None:
    """Update the model, and its critic by made-up targets."""
    engine.update(mini_batch, aggregation="token_mean")
    if engine.critic is not None:
        returns = mini_batch.rows.rewards
        engine.critic.update(with_targets(mini_batch, values=returns, returns=returns))


def _share(rows: Rows, ranks: Ranks, *, mini_batch: int = 0) -> PulledMiniBatch:
    """Return the share of this rank, as the batcher cuts it."""
    place = {"dp_rank": ranks.rank, "dp_world_size": ranks.world_size}
    own = rank_share(rows, step=1, mini_batch=mini_batch, pad_token_id=0, budget=_BUDGET, **place)
    passes = budgeted_passes(rows, budget=_BUDGET, **place)
    info = {"denominators": testkit.mini_batch_info(rows).denominators, "mini_batch": mini_batch}
    return pulled(own, micro_batches=passes, **info, **place)


def place_model(model: nn.Module, ranks: Ranks, parallel: Parallel) -> None:
    """Shard the weights of a model for fsdp2."""
    if parallel == "fsdp2":
        if isinstance(model, PreTrainedModel):
            head_is_linear(model)
        shard(model, ranks.mesh())


def _update(
    ranks: Ranks,
    rows: Rows,
    *,
    parallel: Parallel,
    config: ObjectiveConfig | None = None,
    recompute: bool = False,
    **options: Any,
) -> Updated:
    objective = Objective(config or ObjectiveConfig(), gather=ranks.gather)
    options = {"model": make_model(), **options}
    if recompute:
        recompute_layers(options["model"])
    for name in {"model", "reference"} & options.keys():
        place_model(options[name], ranks, parallel)
    trained = options.get("adapter") or options["model"]
    options = {"max_grad_norm": 0.0, **options}
    engine = make_engine(objective=objective, ranks=ranks, **options)
    report = engine.update(_share(rows, ranks), aggregation="seq_mean_token_mean")
    named = dict(trained.named_parameters())
    gradients = {
        name: whole(each.grad).clone() for name, each in named.items() if each.grad is not None
    }
    return Updated(report, gradients, whole_weights(named.items()))


def _update_adapter(ranks: Ranks, rows: Rows, *, parallel: Parallel, **options: Any) -> Updated:
    return _update(ranks, rows, parallel=parallel, **_adapter_options(), **options)


def _adapter_options(*, seed: int = 0) -> dict[str, Any]:
    config = AdapterConfig(rank=4, seed=1)
    adapter = Adapters(make_model(seed=seed), Path()).add("default", config)
    return {"model": adapter.model, "adapter": adapter}


def _update_critic(
    ranks: Ranks, first: Rows, second: Rows, *, parallel: Parallel, layout: Layout = "padded"
) -> Updated:
    """Update the policy and a critic by the first of two mini-batches of a step."""
    model, reference, values = make_model(), make_model(seed=3), make_value_model()
    for each in (model, reference, values):
        place_model(each, ranks, parallel)
    critic = make_critic(values, ranks=ranks, layout=layout)
    objective = Objective(ObjectiveConfig.parse(kl=KL_IN_REWARD), gather=ranks.gather)
    options = {"objective": objective, "reference": reference, "layout": layout}
    engine = make_engine(model, max_grad_norm=0, ranks=ranks, critic=critic, **options)
    scored = [(_share(rows, ranks, mini_batch=n), None) for n, rows in enumerate((first, second))]
    mini_batch, _ = next(
        with_advantages(
            scored,
            critic=critic,
            source="outcome",
            penalties=engine.token_penalties,
            ranks=ranks,
        )
    )
    report = engine.update(mini_batch, aggregation="seq_mean_token_mean")
    statistics = {**report.statistics, **critic.update(mini_batch)}
    weights: dict[str, Tensor] = {}
    gradients: dict[str, Tensor] = {}
    for owner, model in (("policy", engine.model), ("critic", critic.model)):
        for name, each in model.named_parameters():
            weights[f"{owner}.{name}"] = whole(each.detach())
            if each.grad is not None:
                gradients[f"{owner}.{name}"] = whole(each.grad).clone()
    return Updated(replace(report, statistics=statistics), gradients, weights)


def _sums(ranks: Ranks) -> list[Tensor | None]:
    parameters = [Parameter(torch.zeros(2)) for _ in range(3)]
    parameters[0].grad = torch.full((2,), 1.0 + ranks.rank)
    if ranks.is_first:
        parameters[1].grad = torch.tensor([5.0, 7.0])
    ranks.sum_gradients(parameters)
    return [each.grad for each in parameters]


def _refusal(ranks: Ranks) -> str:
    is_last = ranks.rank == ranks.world_size - 1
    ranks.require_equal([Parameter(torch.ones(2))])
    try:
        ranks.require_equal([Parameter(torch.tensor([1.0, 1.0 + 1e-6 * is_last]))])
    except InvalidConfigError as error:
        return str(error)
    return ""


def _random(ranks: Ranks, folder: Path) -> tuple[Tensor, Tensor]:
    torch.manual_seed(ranks.rank)
    checkpoints = Checkpoints(folder, ranks=ranks)
    engine = make_engine(ranks=ranks)
    checkpoints.save(engine, RecoveryToken(lineage="main", step=1, chain_hash="ab"))
    expected = torch.rand(3)
    newest = checkpoints.newest()
    assert newest is not None
    checkpoints.restore(newest, engine)
    return expected, torch.rand(3)
