"""Announcements of a replica that has not yet read a rollback of the trainer."""

import pytest

from testkit import group
from turnstream.store.client.connection import connect_async
from turnstream.wire.v1 import batches_pb2 as wire
from turnstream_server.batcher.planner.runs import RunView
from turnstream_server.batcher.serving.servicer import BatchesServicer
from turnstream_server.bus.core.frontier import read_frontier_async
from turnstream_server.bus.sessions.versions import newest_version

pytestmark = [pytest.mark.redis, pytest.mark.grpc]


async def test_a_replica_that_is_behind_announces_in_the_lineage_of_the_store(house):
    run, trainer = await house.started(
        group("g1"), group("g2"), batch_groups=1, retain_checkpoints=5
    )
    tokens = [await trainer.stepped(await trainer.get(step)) for step in (1, 2)]

    async with connect_async(house.url) as client:
        before = await read_frontier_async(client, run)
        views = {run: RunView(client, run, frontier=before, on_stepped=lambda _: None)}
        await trainer.start("back", token=str(tokens[0]))
        request = wire.AnnounceVersionRequest(
            run=run, version=5, step=1, session_epoch=trainer.session_epoch
        )

        async def find(run: str) -> RunView:
            return views[run]

        await BatchesServicer(client, find).announce_version(request)

        announced = await newest_version(client, run)

    assert before.lineage == "main"
    assert announced is not None
    assert (announced.version, announced.lineage) == (5, "main-1")
