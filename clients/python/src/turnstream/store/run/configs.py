"""The configs of a run: the one in force, and revisions with the step from which on they apply."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import redis
import redis.asyncio

from turnstream.batching.config import BatchingConfig
from turnstream.batching.config.rules import check_revision
from turnstream.errors import CorruptRecordError, InvalidConfigError, RunNotFoundError
from turnstream.records.configs import decode_config, encode_config
from turnstream.store.client import keys
from turnstream.store.client.replies import translating
from turnstream.store.client.run_ids import find_run, no_such_run
from turnstream.store.client.scripts import Command, Script, run_command, run_command_async
from turnstream.store.client.stored_values import parsed_number, reading
from turnstream.types.names import RunId, checked_setting

_READ_CONFIG = Script("read_config", "turnstream.store.run")
_REVISE_CONFIG = Script("revise_config", "turnstream.store.run")


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """A config of a run.

    Attributes:
        number: from 1.
        from_step: the first batch that is planned with it, unless a later revision has that step.
        announced_at: id of the event that put it in force; "0-0" of the first, and before that.
    """

    number: int
    from_step: int
    config: BatchingConfig
    announced_at: str = "0-0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Revisions:
    """All configs of a run.

    Attributes:
        in_force: number of the one that admission, leases and deadlines go by now.
    """

    in_force: int
    stored: tuple[Revision, ...]

    @property
    def last(self) -> Revision:
        """Return the newest stored revision; it may not be in force yet."""
        return self.stored[-1]

    @property
    def pending(self) -> tuple[Revision, ...]:
        """Revisions that are not in force yet, in order."""
        return tuple(each for each in self.stored if each.number > self.in_force)

    def due(self, *, step: int) -> Revision | None:
        """Return the revision that takes effect before this step is planned, or None."""
        due = [each for each in self.pending if each.from_step <= step]
        return due[-1] if due else None

    def revision(self, number: int) -> Revision:
        """Return the revision of this number."""
        found = next((each for each in self.stored if each.number == number), None)
        if found is None:
            raise RunNotFoundError(f"the run has no config revision {number}")
        return found

    def put_in_force_by(self, event_id: str) -> Revision | None:
        """Return the revision that this event announced, or None."""
        return next((each for each in self.stored if each.announced_at == event_id), None)

    def was_put_in_force(self, number: int, event_id: str) -> bool:
        """Return whether this event put a revision in force."""
        announced = self.put_in_force_by(event_id)
        return announced is not None and announced.number == number <= self.in_force


def read_config(client: redis.Redis, run: str) -> tuple[int, BatchingConfig]:
    """Return the revision in force and its config."""
    with reading(keys.run_keys(run).config):
        return parse_config(run_command(client, read_config_command(run)), run=run)


async def read_config_async(client: redis.asyncio.Redis, run: str) -> tuple[int, BatchingConfig]:
    """Return the same as `read_config`, for asyncio."""
    with reading(keys.run_keys(run).config):
        return parse_config(await run_command_async(client, read_config_command(run)), run=run)


def open_run(client: redis.Redis, run: str) -> RunId:
    """Return the id of the run that has this name now, also if its config is damaged."""
    run_id = find_run(client, run)
    with contextlib.suppress(RunNotFoundError, CorruptRecordError):
        read_config(client, run_id)
    return run_id


async def check_format(client: redis.asyncio.Redis, run: str) -> None:
    """Check a run's format like `open_run`, for asyncio and a run whose id is known."""
    with contextlib.suppress(RunNotFoundError, CorruptRecordError):
        await read_config_async(client, run)


def read_config_command(run: str) -> Command:
    """Return the call that reads the config in force; nothing is sent."""
    checked_setting(run, field="run")
    return _READ_CONFIG((keys.run_keys(run).config,))


def parse_config(reply: Sequence[bytes], *, run: str) -> tuple[int, BatchingConfig]:
    """Return the revision and the config of the reply."""
    revision, text = reply
    return int(revision), decode_config(text, run=run)


def revise_config(client: redis.Redis, run: str, config: BatchingConfig, *, from_step: int) -> int:
    """Change the config of a run from an unplanned step on; return the number of the revision.

    It comes into force when the step before is planned. An equal revision changes nothing.
    """
    check_step(from_step)
    run = find_run(client, run)
    last = read_revisions(client, run).last
    check_revision(last.config, config)
    _check_prompts(client, run, config)
    names = keys.run_keys(run)
    # A config of another release is equal if its settings are.
    text = stored_config(client, run, last.number) if last.config == config else ""
    command = _REVISE_CONFIG(
        (names.frontier, names.config, names.wake),
        text or encode_config(config),
        from_step,
        last.number,
    )
    revision: int = run_command(client, command)
    return revision


def check_step(from_step: int) -> None:
    """Raise InvalidConfigError for a number that no step has."""
    if from_step < 1:
        raise InvalidConfigError("from_step", f"{from_step} is no step: steps count from 1")


def _check_prompts(client: redis.Redis, run: str, config: BatchingConfig) -> None:
    """Refuse a `max_samples` below that of a prompt that is not done."""
    prompts = keys.run_keys(run).prompts
    with reading(prompts), translating():
        found: Any = client.hmget(prompts, ("added", "done", "most_samples"))
        added, done, most = (parsed_number(value or b"0") for value in found)
    if added > done and most > config.max_samples:
        raise InvalidConfigError(
            "max_samples",
            f"{config.max_samples} is below the {most} samples of a prompt of the run: finish its "
            f"{added - done} prompts first, or use at least {most}",
        )


def read_revisions(client: redis.Redis, run: str) -> Revisions:
    """Return all configs of a run."""
    run = find_run(client, run)
    with translating():
        fields: Any = client.hgetall(keys.run_keys(run).config)
    return parse_revisions(run, fields)


def stored_config(client: redis.Redis, run: str, revision: int) -> bytes:
    """Return the stored JSON of one revision."""
    with translating():
        text: Any = client.hget(keys.run_keys(run).config, str(revision))
    return text or b""


def parse_revisions(run: str, fields: dict[bytes, bytes]) -> Revisions:
    """Return the configs of a run from the fields of its key `config`."""
    if b"newest" not in fields:
        raise no_such_run(run)
    numbers = sorted(int(name) for name in fields if name.isdigit())
    return Revisions(
        in_force=int(fields[b"newest"]),
        stored=tuple(
            Revision(
                number=number,
                from_step=int(fields.get(b"from:%d" % number, 1)),
                config=decode_config(fields[b"%d" % number], run=run),
                announced_at=fields.get(b"at:%d" % number, b"0-0").decode(),
            )
            for number in numbers
        ),
    )
