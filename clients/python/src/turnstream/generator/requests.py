"""The requests of a generator to the store, as values; a script carries out each of them.

A publisher on Redis sends the call itself, and most later turns without the script
(`AppendTurns.direct_words`). A publisher on HTTP sends the request to a gateway, as a message of
the wire (`transport/messages.py`), and the gateway of any release sends its own call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from turnstream.records.events import encode_event
from turnstream.store.client import keys
from turnstream.store.client.scripts import Argument, Command, Script
from turnstream.store.run.configs import read_config_command
from turnstream.store.run.groups import (
    OPEN_GROUP,
    RESERVE,
    adopt_command,
    group_size,
    heartbeat_command,
    list_lapsed_command,
    read_group_command,
    reserve_command,
    settled_lease,
)
from turnstream.store.run.rewards import POST_REWARD, post_reward_command
from turnstream.store.run.runs import close_command
from turnstream.store.run.tasks import OfferedTask, next_task_command
from turnstream.store.waits.read_waits import READ_WAITS, waits_command
from turnstream.types import GroupOpened, Leftover, TrajectoryAbandoned

_APPEND = Script("append", "turnstream.generator.outbox")
_POST_SEALED = Script("post_sealed", "turnstream.generator.outbox")
_ABANDON = Script("abandon", "turnstream.generator.outbox")
_NOTE_CONFLICT = Script("note_conflict", "turnstream.generator.outbox")


class OpenGroup(NamedTuple):
    """Request the admission of a group, and leases of these samples.

    The reply has one entry per sample: its lease epoch, or a refusal.

    Attributes:
        prompt_number: number of the prompt of a task; 0 for another group.
        is_again: the group was open before a restart of the store.
        is_exclusive: a sample that the writer has opened before is refused.
    """

    run: str
    writer: str
    group: GroupOpened
    trajectory_ids: Sequence[str]
    prompt_number: int = 0
    is_again: bool = False
    is_exclusive: bool = False

    @property
    def command(self) -> Command:
        """Return the call of the script."""
        size = group_size(
            self.group,
            is_again=self.is_again,
            is_exclusive=self.is_exclusive,
            prompt_number=self.prompt_number,
        )
        name = keys.encode_name(self.group.group_id)
        where = keys.run_keys(self.run).of_open_group
        record = encode_event(self.group)
        return OPEN_GROUP(where, name, size, self.writer, record, *self.trajectory_ids)


def open_task(run: str, task: OfferedTask, *, writer: str, is_exclusive: bool = False) -> OpenGroup:
    """Return the request that opens an offered task.

    If it is exclusive, the task is opened by one call only. Else a repeat by the same writer has
    the same reply.
    """
    return OpenGroup(
        run,
        writer,
        task.group,
        task.trajectory_ids,
        prompt_number=task.number,
        is_exclusive=is_exclusive,
    )


class AppendTurns(NamedTuple):
    """Store turns of a trajectory, and its seal if `is_sealed`.

    The reply is the number of records that the store did not have.

    Attributes:
        is_placed: the store has created the stream of the trajectory.
        records: encoded turns; the last is the seal if `is_sealed`.
        bytes_before: bytes of the turns before `first`; 0 if they are not known.
        is_direct: `direct_words` may be sent in place of the script; a gateway sends the script.
    """

    run: str
    writer: str
    trajectory_id: str
    epoch: int
    is_placed: bool = False
    first: int = 0
    records: Sequence[bytes] = ()
    is_sealed: bool = False
    bytes_before: int = 0
    is_direct: bool = False

    @property
    def command(self) -> Command:
        """Return the call of the script."""
        lease = f"{self.epoch}{'/' if self.is_placed else ':'}{self.writer}"
        payload = keys.trajectory_keys(self.run, self.trajectory_id)
        first = f"{self.first}/{self.bytes_before}" if self.bytes_before else self.first
        return _APPEND(payload, lease, first, int(self.is_sealed), *self.records)

    @property
    def direct_words(self) -> Sequence[Argument]:
        """Return the words that append the one turn; the reply is the id of its entry, or None."""
        payload = keys.trajectory_keys(self.run, self.trajectory_id)
        return ("XADD", payload.turns, "NOMKSTREAM", f"0-{self.first + 1}", "r", self.records[0])


class PostedSeal(NamedTuple):
    """The seal of one trajectory.

    Attributes:
        num_bytes: bytes of all its records; None if they are not known.
    """

    trajectory_id: str
    epoch: int
    awaits_reward: bool
    num_bytes: int | None
    record: bytes


class PostSeals(NamedTuple):
    """Post stored seals to the run. The reply has an answer for each."""

    run: str
    writer: str
    seals: Sequence[PostedSeal]

    @property
    def command(self) -> Command:
        """Return the call of the script."""
        arguments: list[Argument] = []
        for trajectory_id, epoch, awaits_reward, num_bytes, record in self.seals:
            lease = settled_lease(
                epoch, self.writer, awaits_reward=awaits_reward, num_bytes=num_bytes
            )
            arguments += (trajectory_id, lease, record)
        return _POST_SEALED(keys.run_keys(self.run).of_post_sealed, *arguments)


class Abandon(NamedTuple):
    """Abandon a trajectory, whose group is decided without it."""

    run: str
    writer: str
    trajectory_id: str
    epoch: int
    reason: str

    @property
    def command(self) -> Command:
        """Return the call of the script."""
        names = keys.run_keys(self.run)
        key = keys.parse_trajectory_id(self.trajectory_id)
        record = encode_event(TrajectoryAbandoned(key=key, reason=self.reason))
        where = (names.ledger, names.counts, names.events, names.leases)
        lease = f"{self.epoch}:{self.writer}"
        return _ABANDON(where, self.trajectory_id, lease, self.reason, record)


class CountConflict(NamedTuple):
    """Count a write that was refused for its content."""

    run: str
    trajectory_id: str
    reason: str

    @property
    def command(self) -> Command:
        """Return the call of the script."""
        where = (keys.run_keys(self.run).conflicts,)
        return _NOTE_CONFLICT(where, self.trajectory_id, self.reason)


class PostReward(NamedTuple):
    """Post the reward of a trajectory that was sealed without one; the reply is the outcome."""

    run: str
    trajectory_id: str
    record: bytes

    @property
    def command(self) -> Command:
        """Return the call of the script."""
        return post_reward_command(self.run, self.trajectory_id, self.record)


class CloseRun(NamedTuple):
    """Close the run to new groups."""

    run: str
    reason: str
    leftover: Leftover | None = None

    @property
    def command(self) -> Command:
        """Return the call of the script."""
        return close_command(self.run, self.reason, leftover=self.leftover)


class ReadConfig(NamedTuple):
    """Read the config in force; the reply has its revision and its JSON."""

    run: str

    @property
    def command(self) -> Command:
        """Return the call of the script."""
        return read_config_command(self.run)


class Lease(NamedTuple):
    """The lease of an open trajectory."""

    trajectory_id: str
    epoch: int


class RenewLeases(NamedTuple):
    """Renew leases. The reply has the milliseconds of a lease, and "OK" or a refusal for each."""

    run: str
    writer: str
    leases: Sequence[Lease]

    @property
    def command(self) -> Command:
        """Return the call of the script."""
        return heartbeat_command(self.run, self.leases, writer=self.writer)


class Reservation(NamedTuple):
    """The bytes that a trajectory needs for its records."""

    trajectory_id: str
    epoch: int
    num_bytes: int


class Reserve(NamedTuple):
    """Reserve bytes for growing trajectories. The reply has the reserved bytes of each."""

    run: str
    writer: str
    reservations: Sequence[Reservation]

    @property
    def command(self) -> Command:
        """Return the call of the script."""
        return reserve_command(self.run, self.reservations, writer=self.writer)


class Adopt(NamedTuple):
    """Adopt a lapsed trajectory. The reply has its lease epoch and the size of its group."""

    run: str
    writer: str
    trajectory_id: str

    @property
    def command(self) -> Command:
        """Return the call of the script."""
        return adopt_command(self.run, self.trajectory_id, writer=self.writer)


class ListLapsed(NamedTuple):
    """List trajectories that may be adopted. The reply has the id and the ledger entry of each."""

    run: str

    @property
    def command(self) -> Command:
        """Return the call of the script."""
        return list_lapsed_command(self.run)


class ReadGroup(NamedTuple):
    """Read the progress of the samples of a group."""

    run: str
    group_id: str
    num_samples: int

    @property
    def command(self) -> Command:
        """Return the call of the script."""
        return read_group_command(self.run, self.group_id, self.num_samples)


class NextTask(NamedTuple):
    """Read the next task of the run; nothing is opened.

    Attributes:
        refills_only: read the next sample to try again, and no prompt.
        num_passed: tasks to pass over, because other writers take the same ones.
    """

    run: str
    refills_only: bool = False
    num_passed: int = 0

    @property
    def command(self) -> Command:
        """Return the call of the script."""
        return next_task_command(
            self.run, refills_only=self.refills_only, num_passed=self.num_passed
        )


class ReadWaits(NamedTuple):
    """Read the state of the run from which the reasons for waiting follow."""

    run: str

    @property
    def command(self) -> Command:
        """Return the call of the script."""
        return waits_command(self.run)


class ReadTurns(NamedTuple):
    """Read the stored records of a trajectory, then who holds it.

    The reply has the list of records, the lease epoch, and "1" if the last record is the seal. It
    is no script: the records of a trajectory may have 48 MB.
    """

    run: str
    trajectory_id: str


class AwaitWake(NamedTuple):
    """Wait until the run's wake stream is beyond this id, for at most `timeout_ms`."""

    run: str
    wake_id: str
    timeout_ms: int


ScriptRequest = (
    OpenGroup
    | AppendTurns
    | PostSeals
    | Abandon
    | CountConflict
    | PostReward
    | CloseRun
    | ReadConfig
    | RenewLeases
    | Reserve
    | Adopt
    | ListLapsed
    | ReadGroup
    | NextTask
    | ReadWaits
)
Request = ScriptRequest | ReadTurns | AwaitWake

SCRIPTS: Final = (
    OPEN_GROUP,
    _APPEND,
    _POST_SEALED,
    _ABANDON,
    CloseRun("r", "").command.script,
    ReadConfig("r").command.script,
    _NOTE_CONFLICT,
    RESERVE,
    RenewLeases("r", "", ()).command.script,
    Adopt("r", "", "").command.script,
    POST_REWARD,
    READ_WAITS,
)
"""Scripts that a publisher calls again and again; a new connection loads them."""

SINGLE_SCRIPTS: Final = (
    ListLapsed("r").command.script,
    ReadGroup("r", "g", 1).command.script,
    NextTask("r").command.script,
)
"""The other scripts of requests."""
