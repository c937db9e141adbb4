import asyncio
import json
import re
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from turnstream.errors import NotReadyError
from turnstream.generator import Publisher
from turnstream.records.figures import shown_figures
from turnstream.testing import group, trajectory, turn
from turnstream.types import DeclaredColumn, VersionRun
from turnstream_server.bus.histories import TrajectoryNotFoundError
from turnstream_server.jobs.batches import (
    batch_json,
    difference_json,
    print_batch,
    write_batch,
)
from turnstream_server.jobs.ledger import history_json, ledger_json

pytestmark = [pytest.mark.redis, pytest.mark.grpc]

EQUAL = (trajectory(sample=0), trajectory(sample=1))


async def ledger(house, run):
    return json.loads(await asyncio.to_thread(ledger_json, house.url, run))


async def history(house, run, trajectory_id):
    return json.loads(await asyncio.to_thread(history_json, house.url, run, trajectory_id))


async def batch(house, run, step):
    return json.loads(await asyncio.to_thread(batch_json, house.url, run, step))


async def test_the_ledger_shows_counts_ages_and_reasons(house):
    run = house.create_run(batch_groups=2, drop_zero_variance=True)
    trainer = house.trainer(await house.start_batcher(), run)
    await house.publish(run, group("a"), group("equal", *EQUAL), group("b"))
    await trainer.start()
    await trainer.stepped(await trainer.get(1))

    seen = await ledger(house, run)

    states = seen["states"]
    assert (seen["accepted"], seen["stepped"]) == (6, 1)
    assert {name: facts["count"] for name, facts in states.items()} == {"stepped": 4, "filtered": 2}
    assert states["filtered"]["reasons"] == {"all rewards are equal": 2}
    assert all(0 <= facts["oldest_age_s"] < 60 for facts in states.values())


async def test_the_history_of_a_trained_trajectory_names_its_batch(house):
    run = house.create_run(batch_groups=2, mini_batch_groups=1)
    trainer = house.trainer(await house.start_batcher(), run)
    await house.publish(run, group("a"), group("b"))
    await trainer.start()
    await trainer.committed(await trainer.stepped(await trainer.get(1)))

    seen = await history(house, run, "b/1/0")

    told = ("state", "step", "mini_batch", "reward", "advantage", "num_turns", "payload_is_kept")
    assert [seen[name] for name in told] == [
        *("committed", 1, 1, 0.0),
        *(pytest.approx(-0.7071, abs=1e-3), 1, True),
    ]
    assert seen["opened_ms"] <= seen["sealed_ms"]
    assert seen["writer"]


async def test_the_history_of_a_trajectory_that_was_given_up_says_why(house):
    run = house.create_run(batch_groups=2)

    def give_up():
        with Publisher(house.url, run) as publisher, publisher.group("a", 1) as opened:
            opened.trajectory(0).abandon("no more time").result(10)

    await asyncio.to_thread(give_up)

    seen = await history(house, run, "a/0/0")

    assert (seen["state"], seen["reason"]) == ("abandoned", "no more time")


@pytest.mark.parametrize("trajectory_id", ["a/7/0", "nonsense"])
async def test_the_history_of_an_unknown_trajectory_is_refused(house, trajectory_id):
    run = house.create_run()
    await house.publish(run, group("a"))

    with pytest.raises(TrajectoryNotFoundError, match=trajectory_id):
        await history(house, run, trajectory_id)


async def test_a_batch_names_its_trajectories_and_denominators(house):
    run = house.create_run(batch_groups=2)
    trainer = house.trainer(await house.start_batcher(), run)
    await house.publish(run, group("a"), group("b"))
    await trainer.start()
    (pulled,) = await trainer.get(1)

    seen = await batch(house, run, 1)

    (mini_batch,) = seen["mini_batches"]
    info = pulled.mini_batch.info
    assert (seen["state"], seen["manifest_hash"]) == ("planned", info.manifest_hash)
    ids = [trajectory["id"] for trajectory in mini_batch["trajectories"]]
    assert ids == pulled.mini_batch.rows.trajectory_id
    assert mini_batch["denominators"] == info.denominators._asdict()


async def test_a_batch_that_is_not_planned_says_how_many_are(house):
    run = house.create_run()

    with pytest.raises(NotReadyError, match="step 3 is not planned; 0 are"):
        await batch(house, run, 3)


async def test_the_difference_of_two_batches_is_what_only_one_of_them_has(house):
    run = house.create_run(batch_groups=1)
    trainer = house.trainer(await house.start_batcher(), run)
    await house.publish(run, group("a"), group("b"))
    await trainer.start()
    await trainer.get(2)

    same = await asyncio.to_thread(difference_json, house.url, run, 1, 1)
    lines = json.loads(await asyncio.to_thread(difference_json, house.url, run, 1, 2))

    assert json.loads(same) == []
    assert [line[:7] for line in lines] == ["- a/0/0", "- a/1/0", "+ b/0/0", "+ b/1/0"]


@pytest.mark.parametrize("dp_rank", [0, 1])
async def test_the_bytes_of_a_batch_are_those_that_its_rank_gets(house, tmp_path: Path, dp_rank):
    run = house.create_run(batch_groups=2, mini_batch_groups=1)
    trainer = house.trainer(await house.start_batcher(), run)
    await house.publish(run, group("a"), group("b"))
    await trainer.start(dp_world_size=2)
    pulled = await trainer.get(1, dp_rank=dp_rank)

    paths = await asyncio.to_thread(
        lambda: write_batch(
            house.url, run, 1, tmp_path / "out.arrow", dp_rank=dp_rank, dp_world_size=2
        )
    )

    assert [path.name for path in paths] == ["out.arrow", "out-1.arrow"]
    assert [path.read_bytes() for path in paths] == [each.data for each in pulled]


async def test_the_bytes_of_a_batch_with_an_extra_column_are_those_of_a_get(house, tmp_path: Path):
    column = DeclaredColumn(name="teacher", per="response_token", dtype="float32", fill=-1.0)
    run = house.create_run(batch_groups=1, extra_columns=(column,))
    trainer = house.trainer(await house.start_batcher(), run)
    members = [
        trajectory(replace(turn("ab", "CD"), extras={"teacher": [-0.5, 0.25]}), sample=sample)
        for sample in range(2)
    ]
    await house.publish(run, group("a", *members))
    await trainer.start()
    (pulled,) = await trainer.get(1)

    (path,) = await asyncio.to_thread(
        lambda: write_batch(house.url, run, 1, tmp_path / "out.arrow", dp_rank=0, dp_world_size=1)
    )

    assert list(pulled.mini_batch.rows.extras) == ["teacher"]
    assert path.read_bytes() == pulled.data


async def test_the_bytes_of_a_batch_with_masked_tokens_are_those_of_a_get(house, tmp_path: Path):
    run = house.create_run(batch_groups=1, max_staleness=1, max_age_policy="mask")
    trainer = house.trainer(await house.start_batcher(), run)
    await trainer.start()
    await trainer.announce_version(0, step=0)
    for step in (1, 2):
        members = [
            trajectory(turn("ab", "CD", version=step - 1), sample=sample, reward=float(sample))
            for sample in range(2)
        ]
        await house.publish(run, group(f"a{step}", *members))
        await trainer.stepped(await trainer.get(step))
        await trainer.announce_version(step, step=step)
    mixed = replace(turn("ab", "CDEF"), version_runs=(VersionRun(0, 1), VersionRun(2, 3)))
    fresh = turn("ab", "GH", version=2)
    await house.publish(
        run, group("b", trajectory(mixed, sample=0), trajectory(fresh, sample=1, reward=0.0))
    )
    (pulled,) = await trainer.get(3)

    (path,) = await asyncio.to_thread(
        lambda: write_batch(house.url, run, 3, tmp_path / "out.arrow", dp_rank=0, dp_world_size=1)
    )

    assert pulled.rows == ["abcDEF", "abGH"]
    assert path.read_bytes() == pulled.data


LABELLED = (
    trajectory(sample=0, tags={"env": "maze"}, metrics={"turns": 2}),
    trajectory(sample=1, reward=0.0, tags={"env": "maze"}, metrics={"turns": 4}),
)


async def test_labels_are_summed_up_once_per_batch_for_workers_and_for_people(house):
    run = house.create_run(batch_groups=2, mini_batch_groups=1)
    trainer = house.trainer(await house.start_batcher(), run)
    await house.publish(run, group("a", *LABELLED), group("b"))
    await trainer.start(dp_world_size=2)

    first, second = await trainer.get(1, dp_rank=1)
    seen = await batch(house, run, 1)
    screen = StringIO()
    await asyncio.to_thread(print_batch, house.url, run, 1, Console(file=screen, width=120))

    figures = first.mini_batch.info.figures
    assert figures.metrics["turns"].mean == 3.0
    assert figures.tags["env"].values["maze"].reward_mean == 0.5
    assert not second.mini_batch.info.figures
    assert seen["figures"] == shown_figures(figures)
    printed = screen.getvalue()
    assert re.search(r"turns +│ +2 +│ +3 +│ +2 +│ +4", printed)
    assert re.search(r"env +│ +maze +│ +2 +│ +0.5", printed)
