"""Round trips to the store of the calls of a trainer."""

import asyncio
import contextlib
from collections import defaultdict
from typing import Any, cast

import pytest

from turnstream.errors import NotReadyError
from turnstream.types import RecoveryToken
from turnstream.wire.v1 import batches_pb2 as wire
from turnstream_server.batcher.planner.runs import RunView
from turnstream_server.batcher.serving.get import admit
from turnstream_server.batcher.serving.servicer import BatchesServicer
from turnstream_server.ledger.core.frontier import read_frontier_async


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """An entry for each message that an asyncio client sends to a store."""
    found: list[None] = []
    write = asyncio.StreamWriter.writelines

    def write_counted(writer: asyncio.StreamWriter, *words: Any) -> None:
        found.append(None)
        write(writer, *words)

    monkeypatch.setattr(asyncio.StreamWriter, "writelines", write_counted)
    return found


async def count_trips(run: Any, sent: list[None], *, num_ranks: int) -> dict[str, list[int]]:
    """Return the round trips of each call of two steps; a step before them loads the scripts."""
    await run.plan_steps(3)
    session = await run.start("s", dp_world_size=num_ranks)
    frontier = await read_frontier_async(run.client, run.name)
    view = RunView(run.client, run.name, frontier=frontier, on_stepped=lambda _: None)
    calls, found = BatchesServicer(run.client, cast("Any", None)), defaultdict[str, list[int]](list)
    own: Any = {"run": run.name, "session_epoch": session.session_epoch, "session": "s"}

    async def call(name: str, step: int, dp_rank: int) -> None:
        of: Any = {**own, "dp_rank": dp_rank}
        hashes = {each: run.manifests[each].hash for each in (1, 2, 3)}
        token = RecoveryToken(lineage="main", step=step, chain_hash=hashes[step])
        if name == "get":
            before = {"previous_hash": hashes.get(step - 1, ""), "dp_world_size": num_ranks}
            await admit(run.client, view, wire.GetRequest(**of, step=step, **before), wait_s=1.0)
        elif name == "stepped":
            await calls.stepped(wire.SteppedRequest(**of, step=step, manifest_hash=hashes[step]))
        elif name == "committed":
            await calls.committed(wire.CommittedRequest(**of, recovery_token=str(token)))
        else:
            await calls.announce_version(
                wire.AnnounceVersionRequest(**own, version=step, step=step)
            )

    for step in (1, 2, 3):
        for name in ("get", "stepped", "announced", "committed"):
            for dp_rank in range(1 if name == "announced" else num_ranks):
                before = len(sent)
                with contextlib.suppress(NotReadyError):  # not all ranks have stepped
                    await call(name, step, dp_rank)
                if step > 1:
                    found[name].append(len(sent) - before)
    return found


async def test_calls_of_a_step_need_few_round_trips(run: Any, sent: list[None]) -> None:
    assert await count_trips(run, sent, num_ranks=1) == {
        "get": [3, 3],
        "stepped": [2, 2],
        "announced": [2, 2],
        "committed": [2, 2],
    }


async def test_calls_of_two_ranks_need_few_round_trips(run: Any, sent: list[None]) -> None:
    assert await count_trips(run, sent, num_ranks=2) == {
        "get": [5, 4, 5, 4],  # the first rank reads the manifest, too
        "stepped": [2, 2, 2, 2],
        "announced": [2, 2],
        "committed": [2, 2, 2, 2],
    }
