"""The calls that writes become, their rounds, and their run. No I/O, no decisions."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple, cast

from redis.exceptions import ResponseError

from turnstream.errors import TurnstreamError
from turnstream.generator.outbox.trajectory_queue import Admission, Lane
from turnstream.records.events import encode_event
from turnstream.store.client import keys
from turnstream.store.client.replies import Refusal, error_text, parse_refusal, translate
from turnstream.store.client.run_ids import is_id, no_such_run, parse_incarnation
from turnstream.store.client.scripts import Argument, Command, Script, pack
from turnstream.store.client.server_checks import SETTINGS
from turnstream.store.run.budget import RESERVE, settled_lease
from turnstream.store.run.configs import read_config_command
from turnstream.store.run.groups import OPEN_GROUP, group_size
from turnstream.store.run.leases import adopt_command, heartbeat_command
from turnstream.store.run.rewards import POST_REWARD
from turnstream.store.run.runs import close_command
from turnstream.store.waits.read_waits import READ_WAITS
from turnstream.types import TrajectoryAbandoned

_APPEND = Script("append", "turnstream.generator.outbox")
_POST_SEALED = Script("post_sealed", "turnstream.generator.outbox")
_ABANDON = Script("abandon", "turnstream.generator.outbox")
_NOTE_CONFLICT = Script("note_conflict", "turnstream.generator.outbox")
SCRIPTS = (
    OPEN_GROUP,
    _APPEND,
    _POST_SEALED,
    _ABANDON,
    close_command("r", "").script,
    read_config_command("r").script,
    _NOTE_CONFLICT,
    RESERVE,
    heartbeat_command("r", (), writer="").script,
    adopt_command("r", "", writer="").script,
    POST_REWARD,
    READ_WAITS,
)
"""Everything that a round may call."""

_FIRST_WORDS: Final[Sequence[Sequence[Argument]]] = (
    *[("SCRIPT", "LOAD", script.source) for script in SCRIPTS],
    ("INFO", "server"),
    ("CONFIG", "GET", *SETTINGS),
)
MAX_ROUND_BYTES: Final = 1 << 20
"""Enough to hide the round trip, and small in the server's buffers."""

MAX_ROUND_TURNS: Final = 1_000
"""Turns of one call, which blocks the store."""

_RUN_ID = re.compile(rb"\brun_id:(\w+)")


def _nothing() -> None:
    pass


class Call(NamedTuple):
    """A call of a round, and what follows from its reply.

    Attributes:
        accept: handles an answer, and the time.
        refuse: handles a refusal, and the time.
        put_back: queues the call again, before all others.
        is_write: a receipt waits for it.
    """

    command: Command
    accept: Callable[[Any, float], None]
    refuse: Callable[[Refusal, float], None]
    put_back: Callable[[], None] = _nothing
    is_write: bool = True


class Round(NamedTuple):
    """Calls that travel together; none only to see which store answers.

    Attributes:
        loads_scripts: load the scripts, and read the server's run id and settings.
        is_grouped: all calls are one transaction, which a store that syncs before it answers syncs
            once.
        pointer: a key that is read too, in a round without calls; "" for none.
    """

    calls: Sequence[Call]
    loads_scripts: bool
    is_grouped: bool = False
    pointer: str = ""

    @property
    def commands(self) -> list[Command]:
        """Return the command of each call."""
        return [call.command for call in self.calls]

    @property
    def num_replies(self) -> int:
        """How many replies will come."""
        num_others = (2 if self.is_grouped else 0) + (1 if self.pointer else 0)
        return self._num_first + len(self.calls) + num_others

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

    def settings(self, replies: Sequence[Any]) -> dict[str, str] | None:
        """Return the durability settings of the store; None if it refuses to report them."""
        answer = replies[self._num_first - 1]
        if isinstance(answer, Exception):
            return None
        words = [word.decode() for word in answer] if isinstance(answer, list) else []
        return dict(zip(words[::2], words[1::2], strict=True))

    @property
    def is_heartbeat(self) -> bool:
        """Whether it has no write that a receipt waits for."""
        return not any(call.is_write for call in self.calls)

    @property
    def _num_first(self) -> int:
        return len(_FIRST_WORDS) if self.loads_scripts else 0


class TargetRun:
    """One run, for the whole life of a publisher: a later run of the name never takes its place.

    Attributes:
        run: its id; its name until it is found.
        pointer: the key that says which run has the name now; "" once the run is found.
    """

    def __init__(self, run: str) -> None:
        self.run = run
        self.pointer = "" if is_id(run) else keys.incarnation_key(run)

    @property
    def is_found(self) -> bool:
        """Whether the id is known."""
        return not self.pointer

    def found(self, run: str) -> None:
        """Keep to this run from now on. Only the first call has an effect."""
        if not self.is_found:
            self.run, self.pointer = run, ""

    def answered(self, answer: Any) -> TurnstreamError | None:
        """Keep to the run that the pointer leads to; return the error where it was not read."""
        if isinstance(answer, ResponseError):
            return translate(answer)
        self.found(parse_incarnation(self.run, answer))
        return None

    def refusal(self, answer: ResponseError) -> Refusal:
        """Return why a call was refused; if the run is not in the store, the message names it."""
        refused = parse_refusal(error_text(answer))
        if refused.code != "NORUN":
            return refused
        return refused._replace(message=str(no_such_run(self.run)))


def admission_command(run: str, writer: str, admission: Admission) -> Command:
    """Return the call that requests the admission of a group."""
    group = admission.group
    number = admission.prompt_number
    return OPEN_GROUP(
        keys.run_keys(run).of_open_group,
        keys.encode_name(group.group_id),
        group_size(group, is_again=admission.is_again, prompt_number=number),
        writer,
        admission.record,
        *[lane.trajectory_id for lane in admission.lanes],
    )


def num_sendable(lane: Lane) -> tuple[int, int]:
    """Return how many turns of a lane fit in a round, at least one, and their bytes."""
    num_turns = 0
    num_bytes = 0
    for turn, _, _ in lane.pending:
        is_full = num_bytes + len(turn.record) > MAX_ROUND_BYTES or num_turns == MAX_ROUND_TURNS
        if num_turns and is_full:
            break
        num_turns += 1
        num_bytes += len(turn.record)
    return num_turns, num_bytes


def payload_command(run: str, writer: str, lane: Lane, *, num_turns: int, seals: bool) -> Command:
    """Return the call that stores the first waiting turns of a lane, and its seal if `seals`."""
    records = [sent.turn.record for sent in itertools.islice(lane.pending, num_turns)]
    if seals:
        records.append(lane.seal_record)
    lease = f"{lane.epoch}{'/' if lane.is_placed else ':'}{writer}"
    payload = keys.trajectory_keys(run, lane.trajectory_id)
    return _APPEND(payload, lease, lane.num_acknowledged, int(seals), *records)


def seals_command(run: str, writer: str, lanes: Sequence[Lane]) -> Command:
    """Return the call that posts the seals of these lanes to the run."""
    arguments: list[Argument] = []
    for lane in lanes:
        lease = settled_lease(
            lane.epoch,
            writer,
            awaits_reward=lane.awaits_reward,
            num_bytes=lane.num_bytes + len(lane.seal_record),
        )
        arguments += (lane.trajectory_id, lease, lane.seal_record)
    return _POST_SEALED(keys.run_keys(run).of_post_sealed, *arguments)


def abandon_command(run: str, writer: str, lane: Lane) -> Command:
    """Return the call that abandons a trajectory."""
    names = keys.run_keys(run)
    reason = lane.abandon_reason or ""
    record = encode_event(TrajectoryAbandoned(key=lane.key, reason=reason))
    run_keys = (names.ledger, names.counts, names.events, names.leases)
    return _ABANDON(run_keys, lane.trajectory_id, f"{lane.epoch}:{writer}", reason, record)


def note_command(run: str, trajectory_id: str, reason: str) -> Command:
    """Return the call that counts a write which was refused for its content."""
    return _NOTE_CONFLICT((keys.run_keys(run).conflicts,), trajectory_id, reason)
