"""Training calls of a hosted model, from its command log to the ranks of its worker."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc.aio
import numpy as np
import pytest

from testkit.services.clusters import Cluster
from testkit.training.operations import make_bodies, make_operation
from turnstream.batching.rows.operations import Operation
from turnstream.errors import (
    BatcherUnavailableError,
    CorruptRecordError,
    InvalidConfigError,
    ReleasedError,
)
from turnstream.records.batches import decode_mini_batch
from turnstream.store.client.connection import connect_async
from turnstream.wire.v1.operations_pb2 import (
    GetOperationsRequest,
    OperationChunk,
    OperationShareHeader,
)
from turnstream.worker.operation_pulls import MAX_DAMAGED, PATH, OperationPuller, PulledOperations
from turnstream.worker.operation_tensors import operation_tensors
from turnstream_server.batcher.assembly.operation_shares import (
    cut_operations,
    encode_operation_share,
)
from turnstream_server.batcher.serving import operations as serving_operations
from turnstream_server.operations.contents import CreateModel
from turnstream_server.operations.keys import model_keys
from turnstream_server.operations.log import ModelLog, Run, submit
from turnstream_server.operations.models import ModelRecord, create_model
from turnstream_server.operations.operation_records import encode_operation
from turnstream_server.operations.results import Failure

_numbers = itertools.count()

PPO = make_operation(3, 8, 2, loss="ppo", clip_low_threshold=0.5, seed=1)
TEXTS = make_operation(5, 1, num_targets=2, seed=2)
OPERATIONS = [PPO, TEXTS, PPO]


async def new_model(cluster: Cluster, operations: Sequence[Operation]) -> tuple[str, Run]:
    """Create a model with these calls in its log; return its id, and what its worker takes."""
    model_id = f"S{next(_numbers)}:train:0"
    async with connect_async(cluster.url) as client:
        record = ModelRecord(model_id, base_model="tiny", owner="o", lora_rank=0)
        await create_model(client, record, CreateModel(path=None, optimizer=False))
        for number, operation in enumerate(operations, start=1):
            content = encode_operation(operation)
            await submit(client, model_id, number, "forward_backward", content)
    log = ModelLog.acquire(cluster.client, model_id, worker="w", lease_s=60)
    log.finish({0: Failure("made", "server")})
    run = log.take()
    assert isinstance(run, Run)
    return model_id, run


def _pull(
    target: str, model_id: str, run: Run, skipped: frozenset[int], **options: Any
) -> list[PulledOperations]:
    with contextlib.closing(OperationPuller(target, **options)) as puller:
        return puller.pull(model_id, first=run.first, last=run.last, skipped=skipped)


async def pull(
    target: str,
    model_id: str,
    run: Run,
    *,
    skipped: frozenset[int] = frozenset(),
    dp_rank: int = 0,
    dp_world_size: int = 1,
    timeout_s: float = 30.0,
) -> list[PulledOperations]:
    options = {"dp_rank": dp_rank, "dp_world_size": dp_world_size, "timeout_s": timeout_s}
    return await asyncio.to_thread(_pull, target, model_id, run, skipped, **options)


def data_of(shares: Sequence[PulledOperations]) -> list[tuple[int, str, int]]:
    """Return row id, request id and datum index of the real rows."""
    found: list[tuple[int, str, int]] = []
    for share in shares:
        rows, columns = share.mini_batch.rows, share.mini_batch.rows.operations
        assert columns is not None
        for row in np.flatnonzero(~rows.is_padding).tolist():
            place = int(columns.datum_index[row])
            found.append((int(rows.row_id[row]), columns.request_id[row], place))
    return sorted(found)


@pytest.mark.parametrize("dp_world_size", [1, 2, 3])
async def test_ranks_pull_each_datum_once_and_compute_it(
    cluster: Cluster, dp_world_size: int
) -> None:
    model_id, run = await new_model(cluster, OPERATIONS)
    replica = await cluster.start_batcher()

    ranks = await asyncio.gather(
        *(
            pull(replica.address, model_id, run, dp_rank=rank, dp_world_size=dp_world_size)
            for rank in range(dp_world_size)
        )
    )

    names = [
        (f"{model_id}:{number}", index)
        for number, operation in zip(run.numbers, OPERATIONS, strict=True)
        for index in range(len(operation.data))
    ]
    assert data_of([share for rank in ranks for share in rank]) == [
        (row_id, *name) for row_id, name in enumerate(names)
    ]
    for rank in ranks:
        losses = [(each.loss, dict(each.settings)) for each in rank]
        assert losses == [("ppo", {"clip_low_threshold": 0.5}), ("cross_entropy", {})]
        for share in rank:
            parts = operation_tensors(share.mini_batch)
            assert sum(len(part.row_ids) for part in parts) == len(share.mini_batch.rows)


async def test_worker_of_an_earlier_release_gets_sha_256(cluster: Cluster) -> None:
    model_id, run = await new_model(cluster, [TEXTS])
    replica = await cluster.start_batcher()
    request = GetOperationsRequest(
        model_id=model_id, first=run.first, last=run.last, dp_world_size=1
    )

    async with grpc.aio.insecure_channel(replica.address) as channel:
        call = channel.unary_stream(
            PATH,
            request_serializer=GetOperationsRequest.SerializeToString,
            response_deserializer=OperationChunk.FromString,
        )
        chunks = [chunk async for chunk in call(request)]

    header, *parts = chunks
    data = b"".join(part.data for part in parts)
    assert len(header.header.content_hash) == 64
    decode_mini_batch(data, expected_hash=header.header.content_hash)


async def test_ranks_share_an_assembly_until_the_last_one_has_its_rows(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_id, run = await new_model(cluster, OPERATIONS)
    replica = await cluster.start_batcher()
    made: list[int] = []
    cut = serving_operations.cut_operations

    def counted(*args: Any, dp_world_size: int, **options: Any) -> Any:
        made.append(dp_world_size)
        return cut(*args, dp_world_size=dp_world_size, **options)

    monkeypatch.setattr(serving_operations, "cut_operations", counted)

    # Rank 0 repeats its call. The call of the last rank drops the rows.
    for ranks in ([0], [0, 1, 2], [1]):
        await asyncio.gather(
            *(pull(replica.address, model_id, run, dp_rank=rank, dp_world_size=3) for rank in ranks)
        )
    await pull(replica.address, model_id, run, dp_rank=0, dp_world_size=2)

    assert made == [3, 3, 2]


async def test_missing_content_and_impossible_rank_are_refused(cluster: Cluster) -> None:
    model_id, run = await new_model(cluster, OPERATIONS)
    replica = await cluster.start_batcher()
    cluster.client.hdel(model_keys(model_id).bodies, "2")

    with pytest.raises(InvalidConfigError, match="dp_rank: 2 is not in a world of 2"):
        OperationPuller(replica.address, dp_rank=2, dp_world_size=2)
    with pytest.raises(ReleasedError, match=f"command 2 of model '{model_id}' has no content"):
        await pull(replica.address, model_id, run)
    with pytest.raises(ReleasedError, match="command 1 of model 'S:train:9' has no content"):
        await pull(replica.address, "S:train:9", run)


@pytest.mark.parametrize(
    "failpoint",
    ["operations.after_header", "operations.after_data", "operations.after_header=stop"],
)
async def test_second_replica_takes_over_in_the_middle_of_an_answer(
    cluster: Cluster, start_batcher_process: Callable[..., Any], failpoint: str
) -> None:
    model_id, run = await new_model(cluster, OPERATIONS)
    dying = await start_batcher_process(failpoint).line()
    replica = await cluster.start_batcher()

    shares = await pull(f"{dying},{replica.address}", model_id, run)

    assert len(data_of(shares)) == sum(len(each.data) for each in OPERATIONS)


async def test_stream_without_a_replica_names_the_commands_and_the_limit(cluster: Cluster) -> None:
    model_id, run = await new_model(cluster, OPERATIONS)
    replica = await cluster.start_batcher()
    await replica.stop()

    with pytest.raises(
        BatcherUnavailableError, match=r"commands 1 to 3 of model .* pulled within 0.5 s"
    ) as caught:
        await pull(replica.address, model_id, run, timeout_s=0.5)

    assert caught.value.reasons


def flipped_share() -> list[bytes]:
    """Return the messages of a share with one wrong bit among its tokens."""
    cut = cut_operations("S:train:0", make_bodies([TEXTS]), first=1, dp_world_size=1)
    share = encode_operation_share(cut, index=0, dp_rank=0)
    data = bytearray(share.data)
    data[bytes(data).index(TEXTS.data[0].model_input.tobytes())] ^= 1
    header = OperationShareHeader(
        num_shares=1, num_bytes=share.num_bytes, content_hash=share.content_hash
    )
    return [
        OperationChunk(header=header).SerializeToString(),
        OperationChunk(data=bytes(data)).SerializeToString(),
    ]


@contextlib.contextmanager
def server_of(answer: Callable[[], list[bytes]]) -> Iterator[str]:
    """Serve these messages to every Get; yield the address."""
    server = grpc.server(ThreadPoolExecutor(2))
    get = grpc.unary_stream_rpc_method_handler(lambda *_: iter(answer()))
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(PATH.split("/")[1], {"Get": get}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0).wait()


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        (flipped_share(), "the content of a mini-batch of .* bytes differs"),
        (flipped_share()[:1], "the messages ended after 0 of 1 parts"),
    ],
)
async def test_damaged_transfer_is_repeated_and_then_an_error(
    messages: list[bytes], problem: str
) -> None:
    num_calls = itertools.count()

    def answer() -> list[bytes]:
        next(num_calls)
        return messages

    with server_of(answer) as address, pytest.raises(CorruptRecordError, match=problem):
        await pull(address, "S:train:0", Run(1, 1, "forward"))

    assert next(num_calls) == MAX_DAMAGED
