"""The prompts of a run, and the tasks that generators make of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, cast

import redis

from turnstream.batching.config.values import LARGEST_GROUP
from turnstream.errors import InvalidTurnError
from turnstream.store.client import keys
from turnstream.store.client.replies import translating
from turnstream.store.client.run_ids import find_run
from turnstream.store.client.scripts import Command, Script, run_command
from turnstream.store.client.stored_values import parsed_number, reading
from turnstream.store.run.configs import read_revisions
from turnstream.store.run.groups import most_samples
from turnstream.types import GroupOpened, TrajectoryKey
from turnstream.types.names import checked_text, quoted, whole_number

_ADD_PROMPTS = Script("add_prompts", "turnstream.store.run")
_NEXT_TASK = Script("next_task", "turnstream.store.run")

MAX_PROMPTS_PER_CALL: Final = 256
_MAX_BYTES_PER_CALL: Final = 1_000_000
_FIRST_LIMIT: Final = 2**53
"""Limit of the numbers of prompts: the store counts them in floats of 64 bits."""

MAX_PAYLOAD_BYTES: Final = 4 << 20
"""Bytes of the payload of one prompt: the store copies them for each generator that reads it."""

MOST_PASSED: Final = 256
"""Tasks over which idle writers are spread, at most."""

PROMPT_FIELDS: Final = ("added", "next", "done", "filtered")

_LONGEST_SUFFIX: Final = "#" + "9" * 9
"""Longest suffix of a group's name: the number of the visit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt that a generator samples.

    Attributes:
        prompt_uid: its name in the dataset. A group of it is named `<prompt_uid>#<visit>`.
        payload: the generator's input, kept until the prompt is done.
        num_samples: trajectories of its group.
        num_needed: number of them that complete the group; 0 means all.
    """

    prompt_uid: str
    payload: bytes
    num_samples: int
    num_needed: int = 0

    def __post_init__(self) -> None:
        """Raise InvalidTurnError for a wrong field; it names the field and its value."""
        _check_uid(self.prompt_uid)
        if not isinstance(self.payload, bytes):
            raise InvalidTurnError("payload", f"{quoted(self.payload)} is not bytes")
        if len(self.payload) > MAX_PAYLOAD_BYTES:
            message = f"has {len(self.payload)} bytes, more than {MAX_PAYLOAD_BYTES}"
            raise InvalidTurnError("payload", message)
        for field, least in (("num_samples", 1), ("num_needed", 0)):
            whole_number(getattr(self, field), field=field, least=least, limit=LARGEST_GROUP + 1)
        if self.num_needed > self.num_samples:
            raise InvalidTurnError("num_needed", f"{self.num_needed} of {self.num_samples} samples")
        if self.num_samples > (most := most_samples(self.prompt_uid + _LONGEST_SUFFIX)):
            raise InvalidTurnError(
                "num_samples",
                f"{self.num_samples} is above {most}, the most for a prompt_uid of "
                f"{len(self.prompt_uid)} characters",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptCounts:
    """Numbers of the prompts of a run in each state.

    Attributes:
        num_added: prompts ever added to the run.
        num_left: prompts without a group, and those whose group failed.
        num_given: prompts with a group that has not ended: they are being sampled.
        num_trained: prompts in a planned batch.
        num_filtered: prompts whose group carried no signal.
    """

    num_added: int = 0
    num_left: int = 0
    num_given: int = 0
    num_trained: int = 0
    num_filtered: int = 0

    @property
    def is_exhausted(self) -> bool:
        """Whether there were prompts, and all of them are done."""
        return self.num_added > 0 and not self.num_left and not self.num_given


NO_PROMPTS: Final = PromptCounts()


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedTask:
    """The next task, which is not open yet.

    Attributes:
        number: number of its prompt; 0 for a refill of a group without a prompt.
        payload: bytes of the prompt; empty without one.
        trajectory_ids: all samples of a new group, one of a refill.
    """

    group: GroupOpened
    number: int
    payload: bytes
    trajectory_ids: tuple[str, ...]

    @property
    def is_refill(self) -> bool:
        """Whether it is a further attempt of one sample."""
        return keys.parse_trajectory_id(self.trajectory_ids[0]).attempt > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenTask:
    """A task that a writer holds the leases of; `epochs` has the lease epoch of each trajectory."""

    task: OfferedTask
    epochs: dict[TrajectoryKey, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refill:
    """A granted retry of a sample.

    Attributes:
        key: the attempt.
        group: group of the attempt, as it was opened.
    """

    key: TrajectoryKey
    group: GroupOpened


class NoTask(NamedTuple):
    """Reason for having no task yet.

    Attributes:
        wake_id: an entry of the run's wake stream; a newer one may bring a task.
        is_exhausted: every prompt of the run is done.
    """

    wake_id: str
    why: str
    is_exhausted: bool


def add_prompts(
    client: redis.Redis, run: str, prompts: Sequence[Prompt], *, first: int | None = None
) -> int:
    """Append prompts to those of a run, and return the number of prompts ever added.

    A repeated call with the same `first` adds no prompt twice. After an error of the store,
    some prompts may have been added.
    """
    listed, first = checked_prompts(prompts, first=first)
    run = find_run(client, run)
    names = keys.run_keys(run)
    stored = read_revisions(client, run)
    configs = (stored.last.config, stored.revision(stored.in_force).config)
    check_samples(listed, most=min(each.max_samples for each in configs))
    most = max((prompt.num_samples for prompt in listed), default=0)
    number = first or read_prompt_counts(client, run).num_added + 1
    num_added = 0
    for page in _pages(listed):
        where = (names.frontier, names.prompts, names.wake)
        num_added = run_command(client, _ADD_PROMPTS(where, number, most, *page))
        number += len(page)
    return num_added


def read_prompt_counts(client: redis.Redis, run: str) -> PromptCounts:
    """Return the numbers of the prompts of a run; all are 0 for a run without prompts."""
    names = keys.run_keys(find_run(client, run))
    with reading(f"{names.prompts} or {names.retry}"), translating():
        pipeline = client.pipeline(transaction=True)
        pipeline.hmget(names.prompts, PROMPT_FIELDS)
        pipeline.zcard(names.retry)
        found: Any = pipeline.execute()
        return prompt_counts(*found)


def prompt_counts(stored: Sequence[bytes | None], num_again: int) -> PromptCounts:
    """Return the counts from the fields PROMPT_FIELDS of `prompts`, and the size of `again`."""
    added, last, done, filtered = (parsed_number(value or b"0") for value in stored)
    return PromptCounts(
        num_added=added,
        num_left=added - last + num_again,
        num_given=last - num_again - done,
        num_trained=done - filtered,
        num_filtered=filtered,
    )


def tasks_to_pass(chance: float, *, num_lost: int) -> int:
    """Return how many tasks a caller passes over, after it lost `num_lost` in a row to others.

    Idle callers that start at the same time get the same first task. Each loss doubles the range
    over which they are spread. `chance` is a random number from 0 to 1, below 1.

    >>> [tasks_to_pass(0.6, num_lost=lost) for lost in (0, 1, 2, 9)]
    [0, 1, 2, 153]
    """
    return int(chance * min(1 << num_lost, MOST_PASSED))


def next_task_command(run: str, *, refills_only: bool = False, num_passed: int = 0) -> Command:
    """Return the call that reads the next task, or the next refill, after `num_passed` others."""
    names = keys.run_keys(run)
    where = (
        *(names.prompts, names.tasks, names.retry, names.frontier, names.config, names.groups),
        *(names.ledger, names.wake, names.members, names.refills, names.finished_groups),
    )
    return _NEXT_TASK(where, "refill" if refills_only else "", num_passed)


def parse_offer(reply: Sequence[Any]) -> OfferedTask | NoTask:
    """Return the answer of next_task.lua."""
    kind, *words = reply
    if kind != b"TASK":
        wake_id, why = words
        return NoTask(wake_id.decode(), why.decode(), is_exhausted=kind == b"EXHAUSTED")
    number, name, num_samples, num_needed, prompt_uid, payload, refill = words
    group_id = keys.decode_name(name.decode())
    group = GroupOpened(
        group_id=group_id,
        prompt_uid=prompt_uid.decode() if refill else group_id.rpartition("#")[0],
        num_samples=int(num_samples),
        num_needed=int(num_needed),
    )
    samples = [keys.trajectory_id(TrajectoryKey(group_id, i)) for i in range(group.num_samples)]
    return OfferedTask(
        group=group,
        number=int(number),
        payload=payload,
        trajectory_ids=(refill.decode(),) if refill else tuple(samples),
    )


def parse_task(task: OfferedTask, reply: Sequence[Any]) -> TakenTask | NoTask:
    """Return the trajectories of an opened task that the writer holds; or why it must wait."""
    if reply[0] == b"WAIT":
        return NoTask(reply[1].decode(), reply[2].decode(), is_exhausted=False)
    answers = zip(task.trajectory_ids, reply, strict=True)
    epochs = {keys.parse_trajectory_id(i): epoch for i, epoch in answers if isinstance(epoch, int)}
    return TakenTask(task=task, epochs=epochs)


def _check_uid(prompt_uid: str) -> None:
    if not checked_text(prompt_uid, field="prompt_uid"):
        raise InvalidTurnError("prompt_uid", f"{quoted(prompt_uid)} is empty")
    try:
        keys.encode_name(prompt_uid + _LONGEST_SUFFIX)
    except ValueError as error:
        raise InvalidTurnError("prompt_uid", str(error)) from error


def check_samples(prompts: Sequence[Prompt], *, most: int) -> None:
    """Refuse all prompts if one has more samples than `max_samples` of the run."""
    for prompt in prompts:
        if prompt.num_samples > most:
            raise InvalidTurnError(
                "num_samples",
                f"prompt {prompt.prompt_uid!r} has {prompt.num_samples} samples, above "
                f"max_samples={most} of the run: use fewer samples, or revise max_samples",
            )


def checked_prompts(prompts: object, *, first: int | None) -> tuple[list[Prompt], int | None]:
    """Return prompts as a list, and the number of the first; InvalidTurnError for other values."""
    listed = _listed(prompts)
    if first is not None:
        first = whole_number(first, field="first", least=1, limit=_FIRST_LIMIT)
    return listed, first


def _listed(prompts: object) -> list[Prompt]:
    if not isinstance(prompts, Iterable):
        raise InvalidTurnError("prompts", f"{quoted(prompts)} is not a list of Prompt")
    listed = list(cast("Iterable[object]", prompts))
    for position, prompt in enumerate(listed):
        if not isinstance(prompt, Prompt):
            raise InvalidTurnError(f"prompts[{position}]", f"{quoted(prompt)} is not a Prompt")
    return cast("list[Prompt]", listed)


def _record(prompt: Prompt) -> bytes:
    needed = prompt.num_needed or prompt.num_samples
    uid = keys.encode_name(prompt.prompt_uid).encode()
    return b"%d/%d:%s:%s" % (prompt.num_samples, needed, uid, prompt.payload)


def _pages(prompts: Sequence[Prompt]) -> Iterator[list[bytes]]:
    """Yield the records of one call each; at least one page, which may be empty."""
    page: list[bytes] = []
    num_bytes = 0
    for prompt in prompts:
        record = _record(prompt)
        if page and (
            len(page) == MAX_PROMPTS_PER_CALL or num_bytes + len(record) > _MAX_BYTES_PER_CALL
        ):
            yield page
            page, num_bytes = [], 0
        page.append(record)
        num_bytes += len(record)
    yield page
