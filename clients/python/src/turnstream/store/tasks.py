"""Prompts that a run carries, and the tasks that generators make of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import redis

from turnstream.batching.config.rules import LARGEST_GROUP
from turnstream.errors import InvalidTurnError
from turnstream.store import keys
from turnstream.store.configs import read_config
from turnstream.store.replies import translating
from turnstream.store.run_ids import find_run
from turnstream.store.scripts import Command, Script, run_command
from turnstream.store.stored import StoredHash, parsed_number, reading
from turnstream.types import GroupOpened, TrajectoryKey
from turnstream.types.names import checked_setting, checked_text, shown
from turnstream.types.scalars import whole_number

_ADD_PROMPTS = Script("add_prompts")
_NEXT_TASK = Script("next_task")

_MAX_PROMPTS_PER_CALL: Final = 256
_MAX_BYTES_PER_CALL: Final = 1_000_000
_FIRST_LIMIT: Final = 2**53
"""Bound of the numbers of prompts: the store counts them in floats of 64 bits."""

_LONGEST_SUFFIX: Final = "#" + "9" * 9
"""Of the name of a group of a prompt: its visits are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Something to be sampled.

    Attributes:
        prompt_uid: the dataset's name of it. A group of it is named `<prompt_uid>#<visit>`.
        payload: whatever a generator needs to begin, kept until the prompt is done.
        num_samples: trajectories of its group.
        num_needed: how many of them decide the group; 0 stands for all of them.
    """

    prompt_uid: str
    payload: bytes
    num_samples: int
    num_needed: int = 0

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            InvalidTurnError: names the field and its value.
        """
        _check_uid(self.prompt_uid)
        if not isinstance(self.payload, bytes):
            raise InvalidTurnError("payload", f"{shown(self.payload)} is not bytes")
        for field, least in (("num_samples", 1), ("num_needed", 0)):
            whole_number(getattr(self, field), field=field, least=least, limit=LARGEST_GROUP + 1)
        if self.num_needed > self.num_samples:
            raise InvalidTurnError("num_needed", f"{self.num_needed} of {self.num_samples} samples")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptCounts:
    """Where the prompts of a run are, as of one moment.

    Attributes:
        num_added: ever given to the run.
        num_left: not given out, or to be given out again.
        num_given: given out, and their groups not over.
        num_trained: in a batch that is planned.
        num_filtered: their groups carried no signal.
    """

    num_added: int
    num_left: int
    num_given: int
    num_trained: int
    num_filtered: int

    @property
    def is_exhausted(self) -> bool:
        """Whether there were prompts, and all of them are done."""
        return self.num_added > 0 and not self.num_left and not self.num_given

    @property
    def sentence(self) -> str:
        """For people."""
        return (
            f"{self.num_added} added, {self.num_left} left, {self.num_given} given out, "
            f"{self.num_trained} trained, {self.num_filtered} filtered"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenTask:
    """What a writer was given to do, and holds the leases of.

    Attributes:
        group: of its trajectories.
        payload: of the prompt; empty where the run was not given this prompt.
        epochs: by trajectory, the lease epoch.
    """

    group: GroupOpened
    payload: bytes
    epochs: dict[TrajectoryKey, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class NoTask:
    """Why there is nothing to do yet.

    Attributes:
        wake_id: of the run's wake stream; there may be something when it is beyond this.
        why: for people.
        is_exhausted: every prompt of the run is done.
    """

    wake_id: str
    why: str
    is_exhausted: bool


def add_prompts(
    client: redis.Redis, run: str, prompts: Sequence[Prompt], *, first: int | None = None
) -> int:
    """Give a run prompts, which are given out in this order, behind those that it has.

    Whoever is not sure whether an earlier call came through sends it again with the same `first`:
    what is there is not added again. A prompt may come as often as it is to be trained.

    Args:
        client: of the store.
        run: name of the run.
        prompts: any number; a large data set is better given in portions, since it is in memory.
        first: number of the first of these, from 1; None for the number behind the newest.

    Returns:
        How many prompts the run was ever given.

    Raises:
        InvalidConfigError: no run can have this name.
        InvalidTurnError: `first` is not a whole number from 1, or a prompt is not a Prompt.
        ConflictError: a number has another prompt already, or the one before is missing.
        EndOfRunError: the run is closed.
        InvalidTurnError: a prompt has more samples than `max_samples` of the run; none was added.
        RunNotFoundError: no such run.
        StoreFullError: the store has no memory left; some may have been added.
        StoreUnavailableError: the store cannot be reached; some may have been added.
    """
    checked_setting(run, field="run")
    listed = _listed(prompts)
    number = None if first is None else _first_number(first)
    run = find_run(client, run)
    names = keys.run_keys(run)
    where = (names.frontier, names.prompts, names.wake, names.config)
    _check_samples(listed, most=read_config(client, run)[1].max_samples)
    if number is None:
        number = read_prompt_counts(client, run).num_added + 1
    num_added: int = run_command(client, _ADD_PROMPTS(where, number))
    for page in _pages(listed):
        num_added = run_command(client, _ADD_PROMPTS(where, number, *page))
        number += len(page)
    return num_added


def read_prompt_counts(client: redis.Redis, run: str) -> PromptCounts:
    """Where the prompts of a run are; all counts are 0 for a run without prompts.

    Raises:
        StoreUnavailableError: the store cannot be reached.
    """
    names = keys.run_keys(find_run(client, run))
    counted = ("added", "next", "done", "filtered")
    with reading(f"{names.prompts} or {names.again}"), translating():
        pipeline = client.pipeline(transaction=True)
        pipeline.hmget(names.prompts, counted)
        pipeline.zcard(names.again)
        found: Any = pipeline.execute()
    stored = StoredHash(
        names.prompts,
        {field.encode(): value or b"0" for field, value in zip(counted, found[0], strict=True)},
    )
    added, last, done, filtered = (stored.needed(field, parsed_number) for field in counted)
    num_again: int = found[1]
    return PromptCounts(
        num_added=added,
        num_left=added - last + num_again,
        num_given=last - num_again - done,
        num_trained=done - filtered,
        num_filtered=filtered,
    )


def next_task_command(run: str, *, writer: str, request: str) -> Command:
    """The call by which a writer takes the next task; nothing is sent. See next_task.lua."""
    return _NEXT_TASK(keys.run_keys(run).of_next_task, writer, request)


def parse_task(reply: Sequence[Any]) -> TakenTask | NoTask:
    """What the store answered; of a task, the trajectories that are the writer's own."""
    kind = reply[0].decode()
    if kind != "TASK":
        _, wake_id, why = (word.decode() for word in reply)
        return NoTask(wake_id=wake_id, why=why, is_exhausted=kind == "EXHAUSTED")
    _, name, num_samples, num_needed, prompt_uid, payload, *flat = reply
    return TakenTask(
        group=GroupOpened(
            group_id=keys.decode_name(name.decode()),
            prompt_uid=prompt_uid.decode(),
            num_samples=num_samples,
            num_needed=num_needed,
        ),
        payload=payload,
        epochs={
            keys.parse_trajectory_id(flat[i].decode()): flat[i + 1]
            for i in range(0, len(flat), 2)
            if isinstance(flat[i + 1], int)
        },
    )


def _check_uid(prompt_uid: object) -> None:
    if not isinstance(prompt_uid, str) or not prompt_uid:
        raise InvalidTurnError("prompt_uid", f"{shown(prompt_uid)} is no text, or empty")
    checked_text(prompt_uid, field="prompt_uid")
    try:
        keys.encode_name(prompt_uid + _LONGEST_SUFFIX)
    except ValueError as error:
        raise InvalidTurnError("prompt_uid", str(error)) from error


def _check_samples(prompts: Sequence[Prompt], *, most: int) -> None:
    """Refuse all prompts where one has too many samples: the store checks page by page."""
    for prompt in prompts:
        if prompt.num_samples > most:
            raise InvalidTurnError(
                "num_samples",
                f"prompt {prompt.prompt_uid!r} has {prompt.num_samples} samples, above "
                f"max_samples={most} of the run: use fewer samples, or revise max_samples",
            )


def _first_number(first: object) -> int:
    return whole_number(first, field="first", least=1, limit=_FIRST_LIMIT)


def _listed(prompts: object) -> list[Prompt]:
    """Return prompts as a list.

    Raises:
        InvalidTurnError: names the first entry that is not a Prompt.
    """
    if not isinstance(prompts, Iterable):
        raise InvalidTurnError("prompts", f"{shown(prompts)} is not a list of Prompt")
    listed = list(cast("Iterable[object]", prompts))
    for position, prompt in enumerate(listed):
        if not isinstance(prompt, Prompt):
            raise InvalidTurnError(f"prompts[{position}]", f"{shown(prompt)} is not a Prompt")
    return cast("list[Prompt]", listed)


def _record(prompt: Prompt) -> bytes:
    uid = prompt.prompt_uid.encode()
    needed = prompt.num_needed or prompt.num_samples
    return b"%d/%d:%d:%s%s" % (prompt.num_samples, needed, len(uid), uid, prompt.payload)


def _pages(prompts: Sequence[Prompt]) -> Iterator[list[bytes]]:
    """Records for one call each."""
    page: list[bytes] = []
    num_bytes = 0
    for prompt in prompts:
        record = _record(prompt)
        if page and (
            len(page) == _MAX_PROMPTS_PER_CALL or num_bytes + len(record) > _MAX_BYTES_PER_CALL
        ):
            yield page
            page, num_bytes = [], 0
        page.append(record)
        num_bytes += len(record)
    if page:
        yield page
