"""The leadership of a run, a lease with a fencing number, and the writes that are decided under it.

Leaders and trainer sessions write by one script, which compares and writes, all or nothing. A
decision is a pure function from facts to `Changes`. The facts were read before, and may be old: the
changes name those that must still hold. The script compares them and writes in one step, so that
nothing is written where one differs. The caller then reads again and decides again.

A repeated call must change nothing. So one of the expected facts is different after the write.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

import redis.asyncio

from turnstream.errors import FencedError, StoreUnavailableError
from turnstream.store.client import keys
from turnstream.store.client.replies import translating
from turnstream.store.client.scripts import (
    Argument,
    Command,
    Script,
    run_command_async,
    run_commands_async,
)
from turnstream_server.ledger.core.scan import RunScript

_ACQUIRE = RunScript("acquire_leader", "leadership", "frontier leader")


class Position(NamedTuple):
    """The last entries of `events` and `wake` that a planner has read; "0-0" before the first."""

    event_id: str
    wake_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Leadership:
    """The current leader of a run.

    Attributes:
        epoch: fencing number of the leader; every script of the planner takes it.
        parked: the position up to which a parked run was read; None if it is not parked.
    """

    is_ours: bool
    epoch: int
    owner: str
    lease_left_s: float
    parked: Position | None = None


@dataclass(frozen=True, slots=True)
class RunClient:
    """A run, and a client of its store."""

    client: redis.asyncio.Redis
    run: str


@dataclass(frozen=True, slots=True)
class Term(RunClient):
    """A replica's term as leader of a run.

    Each read and write of an earlier term than the current one raises FencedError.
    """

    epoch: int


async def acquire_leadership(
    client: redis.asyncio.Redis,
    run: str,
    *,
    owner: str,
    lease_s: float,
    leads_parked: bool = True,
) -> Leadership:
    """Acquire or keep the leadership of a run; the same owner keeps its epoch.

    The name of the owner is unique also among its restarts. With `leads_parked` also a parked run
    is led.
    """
    words = (owner, max(1, round(lease_s * 1000)), int(not leads_parked), "")
    leads, epoch, leader, left_ms, parked = await _ACQUIRE.call_async(client, run, *words)
    return Leadership(
        is_ours=bool(leads),
        epoch=epoch,
        owner=leader.decode(),
        lease_left_s=left_ms / 1000,
        parked=Position(*parked.decode().split()) if parked else None,
    )


def renew_command(run: str, *, owner: str, epoch: int, lease_s: float) -> Command:
    """Return the call that renews a leadership; it replies (is it ours, its epoch, its owner)."""
    return _ACQUIRE(run, owner, max(1, round(lease_s * 1000)), 0, epoch)


_SCRIPT: Final = Script("leader_write", "turnstream_server.ledger.leadership")

MAX_WORDS: Final = 1_000
"""Words of one command: Lua passes a few thousand values to a call. Even, for pairs."""

MAX_TRIES: Final = 100
"""Decisions of one write whose facts change each time, before an error is raised."""

_Facts = TypeVar("_Facts")
_Result = TypeVar("_Result")


class Difference(NamedTuple):
    """A fact that no longer holds: the key, the field, and its value now or None."""

    key: str
    field: str
    value: bytes | None


class Changes:
    """Commands to write together, and the facts on which they were decided.

    Keys have their names in `RunKeys`.

    Attributes:
        is_part: whether more of the same decision is left to write after them.
        awaits: the key in which another caller writes facts that may not hold yet; "" for none.

    >>> changes = Changes()
    >>> changes.expect("groups", "g", b"8:open")
    >>> changes.write("HSET", "groups", "g", "8:decided")
    >>> list(changes.calls())
    [('FIELDS', 'groups', ('g', b'=8:open')), ('HSET', 'groups', ('g', '8:decided'))]
    """

    def __init__(self) -> None:
        self.is_part = False
        self.awaits = ""
        self._fields: dict[str, list[Argument]] = {}
        self._facts: list[tuple[str, str, tuple[Argument, ...]]] = []
        self._writes: list[tuple[str, str, tuple[Argument, ...]]] = []
        self._sums: Counter[tuple[str, str]] = Counter()

    def expect(self, key: str, field: str, value: bytes | None) -> None:
        """Expect a field of a hash to have this value, or None to be missing."""
        self._fields.setdefault(key, []).extend((field, b"" if value is None else b"=" + value))

    def expect_prefix(self, key: str, prefix: str, fields: Sequence[str]) -> None:
        """Expect the value of each of these fields of a hash to begin with `prefix`."""
        if fields:
            self._facts.append(("PREFIX", key, (prefix, *fields)))

    def expect_least(self, key: str, number: int, fields: Sequence[str]) -> None:
        """Expect each of these fields of a hash to have at least this whole number."""
        self._facts.append(("LEAST", key, (number, *fields)))

    def expect_hash(self, key: str, fields: Mapping[bytes, bytes]) -> None:
        """Expect a hash to have these fields alone."""
        self.expect_size(key, len(fields))
        for name, value in fields.items():
            self.expect(key, name.decode(), value)

    def expect_size(self, key: str, number: int) -> None:
        """Expect a hash to have this number of fields."""
        self._facts.append(("SIZE", key, ("HLEN", number)))

    def expect_empty(self, key: str) -> None:
        """Expect a sorted set to have no member."""
        self._facts.append(("SIZE", key, ("ZCARD", 0)))

    def expect_score(self, key: str, member: str, score: bytes) -> None:
        """Expect a member of a sorted set to have this score, as a reply has it."""
        self._facts.append(("SCORE", key, (member, score)))

    def expect_newest(self, key: str, entry_id: str) -> None:
        """Expect a stream to end with this entry; "0-0" for an empty one."""
        self._facts.append(("NEWEST", key, (entry_id,)))

    def write(self, command: str, key: str, *words: Argument) -> None:
        """Add a command on one key."""
        self._writes.append((command, key, words))

    def write_each(self, command: str, key: str, words: Sequence[Argument]) -> None:
        """Add a command that takes any number of words, such as HDEL; none where there are none."""
        for start in range(0, len(words), MAX_WORDS):
            self._writes.append((command, key, tuple(words[start : start + MAX_WORDS])))

    def write_entry(
        self, stream: str, record: bytes, *, noted_in: tuple[str, str] | None = None
    ) -> None:
        """Add an entry with this record to a stream; a field of a hash gets its id."""
        self.write("XADD", stream, "*", "r", record)
        if noted_in is not None:
            key, field = noted_in
            self.write("ENTRY", key, field)

    def extend_each(self, key: str, values: Mapping[str, bytes]) -> None:
        """Add bytes to the end of fields of a hash; a missing field is empty."""
        words = [word for pair in values.items() for word in pair]
        if words:
            self.write("EXTEND", key, *words)

    def wake(self) -> None:
        """Wake the processes that wait for a change of the run."""
        self.write("XADD", "wake", "MAXLEN", 1, "*", "w", "")

    def add(self, key: str, field: str, number: int) -> None:
        """Add a whole number to a field of a hash."""
        self._sums[key, field] += number

    def calls(self) -> Iterator[tuple[str, str, tuple[Argument, ...]]]:
        """Yield the facts and then the commands, each as its name, key and words."""
        for key, words in self._fields.items():
            yield "FIELDS", key, tuple(words)
        yield from self._facts
        yield from self._writes
        for (key, field), number in self._sums.items():
            if number:
                yield "HINCRBY", key, (field, number)


def write_command(term: RunClient, changes: Changes) -> Command:
    """Return the call that writes changes; nothing is sent."""
    names = {"leader": 1}
    words: list[Argument] = []
    for name, key, some in changes.calls():
        words += (name, names.setdefault(key, len(names) + 1), len(some), *some)
    known = keys.run_keys(term.run)
    epoch = term.epoch if isinstance(term, Term) else ""
    return _SCRIPT([getattr(known, each) for each in names], epoch, *words)


async def write(term: Term, changes: Changes) -> list[Any] | Difference:
    """Write changes if their facts hold; return the replies of the commands, or a difference.

    Raises:
        CorruptRecordError: a counter is damaged: nothing was written.
    """
    (outcome,) = await write_all(term, [changes])
    return outcome


async def write_without_facts(term: Term, changes: Changes) -> list[Any]:
    """Write changes that expect nothing; return the replies of the commands."""
    replies = await write(term, changes)
    assert not isinstance(replies, Difference), "no fact can differ"
    return replies


async def write_all(term: RunClient, changes: Sequence[Changes]) -> list[list[Any] | Difference]:
    """Write several changes in one round trip, each all or nothing; see `write`."""
    commands = [write_command(term, each) for each in changes]
    replies = await run_commands_async(term.client, commands) if commands else []
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
    return [_outcome(reply) for reply in replies]


async def write_decision(
    term: Term,
    read: Callable[[], Awaitable[_Facts]],
    decide: Callable[[_Facts], Changes | None],
) -> list[Any] | None:
    """Read facts, decide and write, again where a fact has changed in between.

    Returns:
        The replies of the commands; None where `decide` returned None: nothing is to be written.

    Raises:
        StoreUnavailableError: the facts changed each time.
    """

    def decide_all(facts: _Facts) -> list[Changes]:
        changes = decide(facts)
        return [] if changes is None else [changes]

    written = await write_decisions(term, read, decide_all)
    return written[0] if written else None


async def write_decisions(
    term: Term,
    read: Callable[[], Awaitable[_Facts]],
    decide: Callable[[_Facts], Sequence[Changes]],
) -> list[list[Any]]:
    """Write several changes like `write_decision`, in order and in one round trip."""
    _, found = await write_result(term, read, lambda facts: (None, decide(facts)))
    return [each for each in found if not isinstance(each, Difference)]


async def write_result(
    term: RunClient,
    read: Callable[[], Awaitable[_Facts]],
    decide: Callable[[_Facts], tuple[_Result, Sequence[Changes]]],
) -> tuple[_Result, Sequence[list[Any] | Difference]]:
    """Write like `write_decisions`; return the result of the decision, and those of `write_all`.

    A difference remains where changes await another caller: see `Changes.awaits`.

    Raises:
        FencedError: another planner leads the run.
        StoreUnavailableError: the facts changed each time.
    """
    known = keys.run_keys(term.run)
    found: Sequence[list[Any] | Difference] = ()
    for _ in range(MAX_TRIES):
        result, changes = decide(await read())
        found = await write_all(term, changes)
        if all(
            not isinstance(reply, Difference) or reply.key == getattr(known, each.awaits, "")
            for reply, each in zip(found, changes, strict=True)
        ):
            return result, found
    raise StoreUnavailableError(f"run {term.run}: {found} changed in each of {MAX_TRIES} tries")


async def read_together(
    term: RunClient, *commands: tuple[str, str, *tuple[Argument, ...]]
) -> list[Any]:
    """Return the time of the store in ms, and the replies of commands that read at this time.

    Each command is its name, the name of its key in `RunKeys`, and its words.
    """
    changes = Changes()
    for command in commands:
        changes.write(*command)
    return await run_command_async(term.client, write_command(term, changes))


async def read_facts(term: Term, *commands: Sequence[Argument]) -> list[Any]:
    """Return the replies of commands that read, in order.

    Not as of one moment: a full server refuses transactions, and the write compares anyway.
    """
    pipeline = term.client.pipeline(transaction=False)
    pipeline.execute_command("HGET", keys.run_keys(term.run).leader, "epoch")
    for words in commands:
        pipeline.execute_command(*words)
    with translating():
        epoch, *replies = await pipeline.execute()
    if epoch != b"%d" % term.epoch:
        raise FencedError(f"another planner leads the run, not epoch {term.epoch}")
    return replies


def time_ms(reply: Sequence[Any]) -> int:
    """Return the time in a reply of the command TIME, in ms.

    >>> time_ms([b"12", b"345678"])
    12345
    """
    return int(reply[0]) * 1_000 + int(reply[1]) // 1_000


def _outcome(reply: Sequence[Any]) -> list[Any] | Difference:
    is_written, *replies = reply
    if is_written:
        return replies
    key, field, value = replies
    return Difference(key.decode(), field.decode(errors="replace"), value)
