"""A damaged counter stops a run with its name in `why`; after its repair nothing is lost."""

from __future__ import annotations

from typing import Any

import pytest

from testkit import group, wait_until_async
from turnstream.errors import CorruptRecordError
from turnstream.store.client import keys
from turnstream.store.waits.wait_reasons import reasons
from turnstream_server.bus.core.frontier import read_frontier
from turnstream_server.bus.queries.run_snapshot import read_snapshot

pytestmark = [pytest.mark.redis, pytest.mark.grpc]

DAMAGE = b"\xc5"


async def until_named(house: Any, run: str, words: str) -> None:
    """Until `turnstream why` says these words, in a reason or as its error."""

    async def is_named() -> bool:
        try:
            found = [reason.sentence for reason in reasons(read_snapshot(house.client, run))]
        except CorruptRecordError as error:
            found = [str(error)]
        return any(words in sentence for sentence in found)

    await wait_until_async(is_named, describe=f"a reason that says {words}")


@pytest.mark.parametrize(("part", "field"), [("counts", "sealed"), ("budget", "stored")])
async def test_step_is_planned_whole_after_a_damaged_counter_is_repaired(
    house: Any, part: str, field: str
) -> None:
    run = house.create_run(batch_groups=1)
    await house.publish(run, group("g0"))
    names = keys.run_keys(run)
    count: Any = house.client.hget(getattr(names, part), field)
    house.client.hset(getattr(names, part), field, DAMAGE)

    trainer = house.trainer(await house.start_batcher(), run)
    await until_named(house, run, f"damaged: {getattr(names, part)}, field '{field}'")
    assert (house.client.xlen(names.plan), read_frontier(house.client, run).planned) == (0, 0)
    house.client.hset(getattr(names, part), field, count)

    await trainer.start()
    (pulled,) = await trainer.get(1, wait_s=30)
    assert {*pulled.mini_batch.rows.trajectory_id} == {"g0/0/0", "g0/1/0"}
