"""The calls that writes become, and the rounds in which calls travel. No I/O, no decisions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from turnstream.generator.lanes import Admission, Lane
from turnstream.generator.receipts import Delivery
from turnstream.records.events import encode_event
from turnstream.store import keys
from turnstream.store.runs import close_command
from turnstream.store.scripts import Argument, Command, Script, pack
from turnstream.types import TrajectoryAbandoned

_OPEN_GROUP = Script("open_group")
_APPEND = Script("append")
_POST_SEALED = Script("post_sealed")
_ABANDON = Script("abandon")
SCRIPTS = (
    _OPEN_GROUP,
    _APPEND,
    _POST_SEALED,
    _ABANDON,
    close_command("r", "").script,
)
"""Everything that a round may call."""


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
    """Tell the run that a trajectory is given up."""

    lane: Lane


class CloseCall(NamedTuple):
    """Close the run to new groups."""

    reason: str
    receipt: Delivery


Call = AdmissionCall | PayloadCall | SealsCall | AbandonCall | CloseCall


class Round(NamedTuple):
    """Calls that travel together, on a connection that may not know the scripts yet."""

    calls: Sequence[Call]
    commands: Sequence[Command]
    loads_scripts: bool

    @property
    def num_replies(self) -> int:
        """How many replies will come."""
        return self._num_loads + len(self.commands)

    def pack(self) -> bytes:
        """The bytes to send."""
        loads = [("SCRIPT", "LOAD", script.source) for script in SCRIPTS[: self._num_loads]]
        return pack([*loads, *[command.words for command in self.commands]])

    def answers(self, replies: Sequence[Any]) -> Iterator[tuple[Call, Any]]:
        """Each call with its reply."""
        return zip(self.calls, replies[self._num_loads :], strict=True)

    @property
    def _num_loads(self) -> int:
        return len(SCRIPTS) if self.loads_scripts else 0


class CommandMaker:
    """Says calls in commands, for one writer of one run."""

    def __init__(self, run: str, writer: str) -> None:
        self._run = run
        self._writer = writer
        names = keys.run_keys(run)
        self._group_keys = (
            *(names.frontier, names.config, names.groups, names.ledger),
            *(names.counts, names.events, names.wake),
        )
        self._seals_keys = (names.ledger, names.counts, names.groups, names.events)
        self._abandon_keys = (names.ledger, names.counts, names.events)

    def command(self, call: Call) -> Command:
        """What the store is told."""
        match call:
            case PayloadCall():
                return self._payload(call)
            case SealsCall(lanes):
                return self._seals(lanes)
            case AdmissionCall(admission):
                return self._admission(admission)
            case AbandonCall(lane):
                return self._abandon(lane)
            case CloseCall(reason, _):
                return close_command(self._run, reason)

    def _admission(self, admission: Admission) -> Command:
        return _OPEN_GROUP(
            self._group_keys,
            keys.encode_name(admission.group.group_id),
            admission.group.num_samples,
            self._writer,
            admission.record,
            *[lane.trajectory_id for lane in admission.lanes],
        )

    def _payload(self, call: PayloadCall) -> Command:
        lane = call.lane
        records = [sent.turn.record for sent in itertools.islice(lane.pending, call.num_turns)]
        if call.seals:
            records.append(lane.seal_record)
        lease = lane.epoch if lane.is_placed else f"{lane.epoch}:{self._writer}"
        return _APPEND(lane.keys, lease, lane.num_acknowledged, int(call.seals), *records)

    def _seals(self, lanes: Sequence[Lane]) -> Command:
        arguments: list[Argument] = []
        for lane in lanes:
            arguments += (lane.trajectory_id, lane.epoch, lane.seal_record)
        return _POST_SEALED(self._seals_keys, *arguments)

    def _abandon(self, lane: Lane) -> Command:
        reason = lane.abandon_reason or ""
        record = encode_event(TrajectoryAbandoned(key=lane.key, reason=reason))
        return _ABANDON(self._abandon_keys, lane.trajectory_id, lane.epoch, reason, record)
