"""Hosted models in tests: their commands, their results, and workers that run them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Iterator, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Final, NamedTuple
from unittest.mock import patch

import redis
import redis.asyncio
import torch
from safetensors.torch import load_file
from torch import Tensor

from testkit.services.processes import FORKING
from testkit.training.operations import make_operation
from testkit.waiting import TIMEOUT_S
from turnstream.batching.packing.microbatch import Budget
from turnstream.batching.rows.operations import Operation
from turnstream.records.batches import decode_mini_batch
from turnstream.store.client.connection import connect, connect_async
from turnstream.worker.operation_pulls import PulledOperations
from turnstream_server import failpoints
from turnstream_server.batcher.assembly import operation_shares
from turnstream_server.batcher.assembly.operation_shares import (
    cut_operations,
    encode_operation_share,
)
from turnstream_server.engine.host import Host, Lockstep, Outputs, ReadShares
from turnstream_server.engine.hosted_base import OPTIMIZER, EngineSettings, HostedBase
from turnstream_server.engine.loop import EngineLoop
from turnstream_server.engine.options import EngineOptions
from turnstream_server.engine.service import run_engine, sessions_at
from turnstream_server.operations.checkpoints import CheckpointPath, folder_of
from turnstream_server.operations.contents import (
    CONTENT_TYPES,
    Content,
    CreateModel,
    OptimStep,
    SaveWeights,
    encode_content,
)
from turnstream_server.operations.keys import ALIVE, model_keys
from turnstream_server.operations.log import Run, submit
from turnstream_server.operations.models import BaseModel, ModelRecord, create_model
from turnstream_server.operations.operation_records import encode_operation
from turnstream_server.operations.results import Answer, Failure, Result, decode_result
from turnstream_server.operations.sessions import add_member, close_silent
from turnstream_server.trainer.ranks import ONE_RANK, Ranks

torch.set_num_threads(1)

OWNER: Final = "owner-a"
NEW: Final = CreateModel(path=None, optimizer=False)
STEP: Final = OptimStep(learning_rate=0.05)

_numbers = itertools.count()


class Forward(NamedTuple):
    """A training call that adds no gradient."""

    operation: Operation


Command = Operation | Forward | Content


class ModelHost(NamedTuple):
    """A base model of its own in a store, and the shared folder `root` of its workers."""

    url: str
    name: str
    base: Path
    root: Path
    batcher: str = ""

    def make(self, *commands: Command, create: CreateModel = NEW, **fields: Any) -> HostedClient:
        """Create a model with these commands, from number 1 on."""
        model_id = f"{self.name}x{next(_numbers)}:train:0"
        values = {"owner": OWNER, "lora_rank": 4, "lora_seed": 3, **fields}
        record = ModelRecord(model_id=model_id, base_model=self.name, **values)
        made = HostedClient(self, record)
        made.create(create)
        made.submit(*commands)
        return made

    def run(self, *models: HostedClient, **options: Any) -> None:
        """Run a worker in this process until all commands of some models have results."""
        serve(self, ONE_RANK, models=models, **options)

    def start(self, failpoint: str = "", *, checkpoint_every: int = 2) -> ForkServerProcess:
        """Start a worker as a process."""
        process = FORKING.Process(target=_work, args=(self, failpoint, checkpoint_every))
        process.start()
        return process


class HostedClient:
    """A client of one model; `num_operations` counts its creation too."""

    def __init__(self, model_host: ModelHost, record: ModelRecord) -> None:
        self.model_host = model_host
        self.record = record
        self.num_operations = 1

    def create(self, content: CreateModel) -> None:
        """Create the model."""
        self._call(lambda client: create_model(client, self.record, content))

    def submit(self, *commands: Command) -> None:
        """Submit commands with the next numbers."""

        async def call(client: redis.asyncio.Redis) -> None:
            for command in commands:
                kind, content = _encoded(command)
                number = self.num_operations
                await submit(client, self.record.model_id, number, kind, content)
                self.num_operations += 1

        self._call(call)

    def end_session(self) -> None:
        """Close the session of the model, as a gateway does after a silence."""

        async def call(client: redis.asyncio.Redis) -> None:
            await client.zadd(ALIVE, {self.session: 0})
            await add_member(client, self.session, self.record.model_id)
            await close_silent(client, silence_s=3600)

        self._call(call)

    @property
    def session(self) -> str:
        """The id of its session."""
        return self.record.model_id.partition(":")[0]

    def results(self) -> dict[int, Result]:
        """Return the results so far by number."""
        return {number: decode_result(data) for number, data in self.stored_results().items()}

    def stored_results(self) -> dict[int, bytes]:
        """Return the bytes of the results so far by number."""
        with connect(self.model_host.url) as client:
            found: Any = client.hgetall(model_keys(self.record.model_id).results)
        return {int(number): data for number, data in found.items()}

    def answer(self, number: int) -> Answer:
        """Return the answer of a command that must not have failed."""
        result = self.results()[number]
        assert isinstance(result, Answer), result
        return result

    def failure(self, number: int) -> Failure:
        """Return the failure of a command."""
        result = self.results()[number]
        assert isinstance(result, Failure), result
        return result

    def path(self, name: str) -> CheckpointPath:
        """Return the path of a saved checkpoint."""
        return CheckpointPath(self.record.model_id, "weights", name)

    def saved(self, name: str) -> dict[str, Tensor]:
        """Return weights and moments of a saved checkpoint."""
        folder = self.model_host.root / folder_of(self.path(name))
        tensors: dict[str, Tensor] = {}
        for file in folder.glob("*.safetensors"):
            tensors |= load_file(file)
        state: Any = torch.load(folder / OPTIMIZER, weights_only=True)["optimizer"]
        tensors["steps"] = torch.tensor(state["num_steps"])
        for number, own in state["adamw"]["state"].items():
            tensors |= {f"{number}/{kind}": value for kind, value in own.items()}
        return tensors

    def _call(self, call: Any) -> None:
        async def connected() -> None:
            async with connect_async(self.model_host.url) as client:
                await call(client)

        asyncio.run(connected())


class Undisturbed(NamedTuple):
    """Results and final weights of a model whose worker was not disturbed."""

    results: dict[int, bytes]
    weights: dict[str, Tensor]

    @classmethod
    def of(cls, model: HostedClient, run: str = "") -> Undisturbed:
        """Return those of a model; its run and its session are named as those of all models."""
        session, name = model.session.encode(), run.encode() or b"no run"
        results = {
            number: data.replace(session, b"S").replace(name, b"run")
            for number, data in model.stored_results().items()
        }
        return cls(results, model.saved("end"))

    def require(self, model: HostedClient, run: str = "") -> None:
        """Require equal results and bit-equal weights of another model."""
        found = Undisturbed.of(model, run)
        assert found.results == self.results
        assert_equal(found.weights, self.weights)


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """Require bit-equal weights."""
    assert one.keys() == other.keys()
    assert [name for name, value in one.items() if not torch.equal(value, other[name])] == []


def save(name: str, *, overwrite: bool = False) -> SaveWeights:
    """Return a save that is kept."""
    return SaveWeights(name=name, ttl_seconds=None, overwrite=overwrite, user_metadata={})


def datums(seed: int, *lengths: int, loss: str = "cross_entropy") -> Operation:
    """Return a training call of these lengths."""
    return make_operation(*lengths or (5, 3), loss=loss, seed=seed)


@contextlib.contextmanager
def passes_of_models() -> Iterator[list[str]]:
    """Yield the id of the model of each forward pass over training calls in the block."""
    train, passes = Host.train, list[str]()

    def recorded(host: Host, model_id: str, *, adds_gradient: bool) -> Outputs | None:
        passes.append(model_id)
        return train(host, model_id, adds_gradient=adds_gradient)

    recorded.__name__ = "train"  # `Lockstep` calls it by its name
    with patch.object(Host, "train", recorded):
        yield passes


def new_model_host(url: str, base: Path, root: Path) -> ModelHost:
    """Return a cluster with a new base model."""
    return ModelHost(url, f"tiny{next(_numbers)}", base, root)


def serve(
    model_host: ModelHost,
    ranks: Ranks,
    *,
    models: Sequence[HostedClient],
    checkpoint_every: int = 2,
    until: Any = None,
    **settings: Any,
) -> None:
    """Run a worker, or its other ranks, until all commands of some models have results.

    `until` is another condition of the end.
    """
    deadline_s = time.monotonic() + TIMEOUT_S

    def is_done() -> bool:
        assert time.monotonic() < deadline_s, [each.stored_results().keys() for each in models]
        if until is not None:
            return until()
        return all(len(each.stored_results()) == each.num_operations for each in models)

    base = HostedBase(
        model_host.name, model_host.base, settings=EngineSettings(**settings), ranks=ranks
    )
    with connect(model_host.url) as client, contextlib.ExitStack() as stack:
        host = Host(
            {model_host.name: base},
            read_shares=shares_of(client, ranks),
            open_stream=sessions_at(model_host.batcher, ranks),
            ranks=ranks,
        )
        stack.callback(host.close)
        call = Lockstep(host, ranks)
        if not ranks.is_first:
            call.follow()
            return
        served = BaseModel(model_host.name, base.context_length, base.vocab_size, "", base.max_rank)
        options = _options(model_host, checkpoint_every=checkpoint_every, gap_s=0.5)
        loop = EngineLoop(client, [served], call=call, options=options)
        loop.run(is_done)
        call.stop()


def serve_ranks(
    model_host: ModelHost,
    models: Sequence[HostedClient],
    ranks: Ranks,
    _folder: Path,
    *,
    budget: Budget,
) -> None:
    """Run a worker of several ranks, as a job of `run_ranks`.

    `budget` is that of a forward pass.
    """
    with patch.object(operation_shares, "_BUDGET", budget):
        serve(model_host, ranks, models=models)


def shares_of(client: redis.Redis, ranks: Ranks) -> ReadShares:
    """Return a reader of the rows of a rank that cuts them as a batcher does."""

    def read(model_id: str, run: Run, skipped: frozenset[int]) -> list[PulledOperations]:
        keys = model_keys(model_id)
        numbers = [each for each in run.numbers if each not in skipped]
        found: Any = client.hmget(keys.bodies, [*map(str, numbers)])
        bodies = dict(zip(numbers, found, strict=True))
        size = ranks.world_size
        cut = cut_operations(model_id, bodies, first=run.first, dp_world_size=size)
        return [
            PulledOperations(
                decode_mini_batch(encode_operation_share(cut, index=k, dp_rank=ranks.rank).data),
                each.loss,
                each.settings,
            )
            for k, each in enumerate(cut.passes)
        ]

    return read


def _work(model_host: ModelHost, failpoint: str, checkpoint_every: int) -> None:
    torch.set_num_threads(1)
    failpoints.arm(failpoint)
    options = _options(model_host, checkpoint_every=checkpoint_every)
    with connect(model_host.url) as client:
        run_engine(options, make_read_shares=lambda _, ranks: shares_of(client, ranks))


def _options(model_host: ModelHost, **options: Any) -> EngineOptions:
    return EngineOptions(
        base_model=[f"{model_host.name}={model_host.base}"],
        folder=model_host.root,
        redis_url=model_host.url,
        batcher_target=model_host.batcher,
        worker="w",
        **options,
    )


def _encoded(command: Command) -> tuple[Any, bytes]:
    if isinstance(command, Operation):
        return "forward_backward", encode_operation(command)
    if isinstance(command, Forward):
        return "forward", encode_operation(command.operation)
    (kind,) = [kind for kind, each in CONTENT_TYPES.items() if isinstance(command, each)]
    return kind, encode_content(command)
