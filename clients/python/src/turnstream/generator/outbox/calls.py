"""The calls that writes become, and the rounds in which calls travel. No I/O, no decisions."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple, cast

from redis.exceptions import ResponseError

from turnstream.errors import InvalidConfigError
from turnstream.generator.outbox.receipts import Delivery
from turnstream.generator.outbox.trajectory_queue import Admission, Lane, RewardPost
from turnstream.records.events import encode_event
from turnstream.store.client import keys
from turnstream.store.client.connection import SETTINGS, unsafe_setting
from turnstream.store.client.replies import error_text
from turnstream.store.client.scripts import Argument, Command, Script, pack
from turnstream.store.run.budget import RESERVE, reserve_command, settled_lease
from turnstream.store.run.configs import read_config_command
from turnstream.store.run.groups import OPEN_GROUP, group_size
from turnstream.store.run.leases import heartbeat_command, take_over_command
from turnstream.store.run.rewards import POST_REWARD, addressed
from turnstream.store.run.runs import close_command
from turnstream.store.run.tasks import OPEN_TASK, open_numbered_command
from turnstream.store.waits.read_waits import READ_WAITS, waits_command
from turnstream.types import TrajectoryAbandoned

_APPEND = Script("append", "turnstream.generator.outbox")
_POST_SEALED = Script("post_sealed", "turnstream.generator.outbox")
_ABANDON = Script("abandon", "turnstream.generator.outbox")
_NOTE_CONFLICT = Script("note_conflict", "turnstream.generator.outbox")
SCRIPTS = (
    OPEN_GROUP,
    OPEN_TASK,
    _APPEND,
    _POST_SEALED,
    _ABANDON,
    close_command("r", "").script,
    read_config_command("r").script,
    _NOTE_CONFLICT,
    RESERVE,
    heartbeat_command("r", ()).script,
    take_over_command("r", "", writer="").script,
    POST_REWARD,
    READ_WAITS,
)
"""Everything that a round may call."""

_FIRST_WORDS: Final[Sequence[Sequence[Argument]]] = (
    *[("SCRIPT", "LOAD", script.source) for script in SCRIPTS],
    ("INFO", "server"),
    ("CONFIG", "GET", *SETTINGS),
)
_RUN_ID = re.compile(rb"\brun_id:(\w+)")


class AdmissionCall(NamedTuple):
    """Ask leave for a group, or for samples of it."""

    admission: Admission


class PayloadCall(NamedTuple):
    """Store the first `num_turns` waiting turns of a lane, and its seal where `seals`."""

    lane: Lane
    num_turns: int
    seals: bool


class SealsCall(NamedTuple):
    """Tell the run that these trajectories are sealed."""

    lanes: Sequence[Lane]


class AbandonCall(NamedTuple):
    """Abandon a trajectory."""

    lane: Lane


class CloseCall(NamedTuple):
    """Close the run to new groups."""

    reason: str
    receipt: Delivery


class ConfigCall(NamedTuple):
    """Ask what the run declares."""

    receipt: Delivery


class WaitsCall(NamedTuple):
    """Ask what the groups that wait for leave may hang on."""


class NoteCall(NamedTuple):
    """Tell the run of a write that was refused for its content."""

    trajectory_id: str
    reason: str
    token: str


class ReserveCall(NamedTuple):
    """Top up what is reserved for open trajectories to so many bytes of each."""

    lanes: Sequence[Lane]
    sizes: Sequence[int]


class HeartbeatCall(NamedTuple):
    """Renew the leases of open trajectories."""

    lanes: Sequence[Lane]


class TakeOverCall(NamedTuple):
    """Take a trajectory over that was this writer's before."""

    lane: Lane


class RewardCall(NamedTuple):
    """Post a reward."""

    post: RewardPost


Call = (
    AdmissionCall
    | PayloadCall
    | SealsCall
    | AbandonCall
    | CloseCall
    | ConfigCall
    | ReserveCall
    | HeartbeatCall
    | TakeOverCall
    | RewardCall
    | NoteCall
    | WaitsCall
)


class Round(NamedTuple):
    """Calls that travel together; none only to see which store answers.

    Attributes:
        loads_scripts: the connection may not know the scripts, nor we which store it is and how
            that syncs.
        is_grouped: all calls are carried out as one write, between whose parts the store neither
            answers nor syncs: one sync to disk for all of them, where it syncs before it answers.
        pointer: a key that is read too, in a round without calls; "" for none.
    """

    calls: Sequence[Call]
    commands: Sequence[Command]
    loads_scripts: bool
    is_grouped: bool = False
    pointer: str = ""

    @property
    def num_replies(self) -> int:
        """How many replies will come."""
        num_others = (2 if self.is_grouped else 0) + (1 if self.pointer else 0)
        return self._num_first + len(self.commands) + num_others

    def pack(self) -> bytes:
        """The bytes to send."""
        words: list[Sequence[Argument]] = [command.words for command in self.commands]
        if self.is_grouped:
            words = [("MULTI",), *words, ("EXEC",)]
        if self.pointer:
            words.append(("GET", self.pointer))
        return pack([*_FIRST_WORDS[: self._num_first], *words])

    def answers(self, replies: Sequence[Any]) -> Iterator[tuple[Call, Any]]:
        """Each call with its reply."""
        answers = replies[self._num_first :]
        if self.pointer:
            answers = answers[:-1]
        if self.is_grouped:
            *queued, answers = answers[1:]
            if not isinstance(answers, list):
                # Nothing was carried out: because of the calls that were refused, if any was.
                answers = [each if isinstance(each, Exception) else answers for each in queued]
        return zip(self.calls, cast("list[Any]", answers), strict=True)

    def is_aborted(self, replies: Sequence[Any]) -> bool:
        """Whether the calls were grouped and, because of one of them, none was carried out."""
        return self.is_grouped and not isinstance(replies[-1], list)

    def trouble(self, replies: Sequence[Any]) -> str:
        """Why the store did not even take the scripts; empty where it did, or was not asked to."""
        first = replies[: self._num_first - 2] if self.loads_scripts else ()
        return next((error_text(r) for r in first if isinstance(r, ResponseError)), "")

    def incarnation(self, replies: Sequence[Any]) -> bytes | None:
        """Return the run id of the server, if scripts are loaded and it is readable."""
        answer = replies[self._num_first - 2]
        found = _RUN_ID.search(answer) if isinstance(answer, bytes) else None
        return found[1] if found else None

    def may_lose_writes(self, replies: Sequence[Any]) -> bool:
        """Whether the store may answer before it syncs to disk; known where `loads_scripts`."""
        return self._settings(replies).get("appendfsync") != "always"

    def syncs_each_write(self, replies: Sequence[Any]) -> bool:
        """Whether the store syncs to disk before it answers; known where `loads_scripts`.

        A store that does not let us ask is taken for one that does.
        """
        is_silent = isinstance(replies[self._num_first - 1], Exception)
        return is_silent or self._settings(replies).get("appendfsync") == "always"

    def refusal_of_store(self, replies: Sequence[Any]) -> InvalidConfigError | None:
        """Why this store may have nothing: it says that it loses more than its mode allows."""
        unsafe = unsafe_setting(self._settings(replies)) if self.loads_scripts else None
        if unsafe is None:
            return None
        return InvalidConfigError(unsafe.setting, f"the store {unsafe.message}")

    def _settings(self, replies: Sequence[Any]) -> dict[str, str]:
        """Return the durability settings of the store; empty if it refuses to report them."""
        answer = replies[self._num_first - 1]
        words = [word.decode() for word in answer] if isinstance(answer, list) else []
        return dict(zip(words[::2], words[1::2], strict=True))

    @property
    def is_heartbeat(self) -> bool:
        """Whether it does nothing but keep leases and room, and ask."""
        return all(isinstance(each, HeartbeatCall | ReserveCall | WaitsCall) for each in self.calls)

    @property
    def _num_first(self) -> int:
        return len(_FIRST_WORDS) if self.loads_scripts else 0


class CommandMaker:
    """Says calls in commands, for one writer of one run.

    Attributes:
        run: id of the run.
    """

    def __init__(self, run: str, writer: str) -> None:
        self.run = run
        self._writer = writer
        names = keys.run_keys(run)
        self._seals_keys = names.of_post_sealed
        self._abandon_keys = (names.ledger, names.counts, names.events, names.leases)

    def command(self, call: Call) -> Command:
        """Return the command of a call."""
        match call:
            case PayloadCall():
                return self._payload(call)
            case SealsCall(lanes):
                return self._seals(lanes)
            case AdmissionCall(admission):
                return self._admission(admission)
            case AbandonCall(lane):
                return self._abandon(lane)
            case RewardCall(post):
                return addressed(post.command, self.run)
            case _:
                return self._rare(call)

    def _rare(
        self,
        call: CloseCall
        | ConfigCall
        | NoteCall
        | ReserveCall
        | HeartbeatCall
        | TakeOverCall
        | WaitsCall,
    ) -> Command:
        match call:
            case CloseCall(reason, _):
                return close_command(self.run, reason)
            case ConfigCall():
                return read_config_command(self.run)
            case NoteCall():
                return _NOTE_CONFLICT((keys.run_keys(self.run).conflicts,), *call)
            case ReserveCall(lanes, sizes):
                wanted = [
                    (lane.trajectory_id, lane.epoch, size)
                    for lane, size in zip(lanes, sizes, strict=True)
                ]
                return reserve_command(self.run, wanted, writer=self._writer)
            case HeartbeatCall(lanes):
                held = [(lane.trajectory_id, lane.epoch) for lane in lanes]
                return heartbeat_command(self.run, held, writer=self._writer)
            case TakeOverCall(lane):
                return take_over_command(self.run, lane.trajectory_id, writer=self._writer)
            case WaitsCall():
                return waits_command(self.run)

    def _admission(self, admission: Admission) -> Command:
        group = admission.group
        arguments = (
            keys.encode_name(group.group_id),
            group_size(group, is_again=admission.is_again),
            self._writer,
            admission.record,
            *[lane.trajectory_id for lane in admission.lanes],
        )
        return open_numbered_command(self.run, admission.prompt_number, *arguments)

    def _payload(self, call: PayloadCall) -> Command:
        lane = call.lane
        records = [sent.turn.record for sent in itertools.islice(lane.pending, call.num_turns)]
        if call.seals:
            records.append(lane.seal_record)
        lease = f"{lane.epoch}{'/' if lane.is_placed else ':'}{self._writer}"
        payload = keys.trajectory_keys(self.run, lane.trajectory_id)
        return _APPEND(payload, lease, lane.num_acknowledged, int(call.seals), *records)

    def _seals(self, lanes: Sequence[Lane]) -> Command:
        arguments: list[Argument] = []
        for lane in lanes:
            lease = settled_lease(
                lane.epoch,
                self._writer,
                awaits_reward=lane.awaits_reward,
                num_bytes=lane.num_bytes + len(lane.seal_record),
            )
            arguments += (lane.trajectory_id, lease, lane.seal_record)
        return _POST_SEALED(self._seals_keys, *arguments)

    def _abandon(self, lane: Lane) -> Command:
        reason = lane.abandon_reason or ""
        record = encode_event(TrajectoryAbandoned(key=lane.key, reason=reason))
        lease = f"{lane.epoch}:{self._writer}"
        return _ABANDON(self._abandon_keys, lane.trajectory_id, lease, reason, record)
