"""A config that comes into force at a step: stored once, refused where it comes too late."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import redis

from testkit import config
from testkit.runs.scripts import script
from turnstream.errors import ConflictError, InvalidConfigError
from turnstream.records.configs import encode_config
from turnstream.store.client import keys
from turnstream.store.client.scripts import run_command
from turnstream.store.run.configs import read_config, read_revisions, revise_config
from turnstream.store.run.runs import create_run

pytestmark = pytest.mark.redis

CONFIG = config(2)
TIGHT = replace(CONFIG, max_staleness=0, max_planned_ahead=0)
LOOSE = replace(CONFIG, max_staleness=9)


@pytest.fixture
def run(client: redis.Redis, new_run: Callable[..., str]) -> str:
    return new_run(client, batch_groups=2)


def test_revision_is_stored_once_with_its_step_and_not_in_force(
    client: redis.Redis, run: str
) -> None:
    assert revise_config(client, run, CONFIG, from_step=5) == 1  # the config that the run has
    number = revise_config(client, run, LOOSE, from_step=5)

    revisions, before = read_revisions(client, run), client.hgetall(keys.run_keys(run).config)
    assert number == 2
    assert [(each.number, each.from_step) for each in revisions.stored] == [(1, 1), (2, 5)]
    assert revisions.last.config == LOOSE
    assert (revisions.in_force, revisions.pending) == (1, (revisions.last,))
    assert read_config(client, run) == (1, CONFIG)
    assert client.hget(keys.run_keys(run).frontier, "next_revision") == b"5"
    for planned in (0, 7):
        client.hset(keys.run_keys(run).frontier, "planned", planned)
        assert revise_config(client, run, LOOSE, from_step=5) == 2
        assert client.hgetall(keys.run_keys(run).config) == before


def test_planned_step_is_refused_with_the_first_possible_step(
    client: redis.Redis, run: str
) -> None:
    client.hset(keys.run_keys(run).frontier, "planned", 7)

    with pytest.raises(ConflictError, match="step 7 is planned; the first that is not is step 8"):
        revise_config(client, run, LOOSE, from_step=7)

    assert len(read_revisions(client, run).stored) == 1
    assert revise_config(client, run, LOOSE, from_step=8) == 2


def test_later_revision_replaces_one_at_its_step_and_precedes_none(
    client: redis.Redis, run: str
) -> None:
    revise_config(client, run, LOOSE, from_step=5)

    with pytest.raises(ConflictError, match="revision 2 takes effect at step 5"):
        revise_config(client, run, TIGHT, from_step=4)
    with pytest.raises(ConflictError, match="revision 2 is this config, from step 5 on"):
        revise_config(client, run, LOOSE, from_step=6)
    number = revise_config(client, run, CONFIG, from_step=5)

    revisions = read_revisions(client, run)
    due = revisions.due(step=5)
    assert number == 3
    assert due is not None
    assert (revisions.due(step=4), due.number) == (None, 3)
    assert client.hget(keys.run_keys(run).frontier, "next_revision") == b"5"


def test_second_of_two_revisions_at_once_gets_an_error(client: redis.Redis, run: str) -> None:
    names = keys.run_keys(run)
    revise_config(client, run, LOOSE, from_step=5)
    where = (names.frontier, names.config, names.wake)
    command = script("revise_config")(where, encode_config(TIGHT), 5, 1)

    with pytest.raises(ConflictError, match="revision 2 was stored since, from step 5 on"):
        run_command(client, command)

    assert client.hget(names.config, "last") == b"2"


def test_unchangeable_setting_is_refused_before_any_write(client: redis.Redis, run: str) -> None:
    with pytest.raises(InvalidConfigError, match="aggregation: it cannot be revised"):
        revise_config(client, run, replace(CONFIG, aggregation="prompt_mean"), from_step=5)
    with pytest.raises(InvalidConfigError, match="from_step: 0 is no step"):
        revise_config(client, run, LOOSE, from_step=0)

    assert len(read_revisions(client, run).stored) == 1


def test_revised_run_is_found_with_its_original_config(client: redis.Redis, run: str) -> None:
    revise_config(client, run, LOOSE, from_step=1)
    client.hset(keys.run_keys(run).config, "newest", 2)

    assert create_run(client, run, CONFIG) == 2
    assert create_run(client, run, LOOSE) == 2
    with pytest.raises(ConflictError):
        create_run(client, run, TIGHT)
