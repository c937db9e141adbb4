"""Named places at which a test lets a process die or sleep: `TURNSTREAM_FAILPOINT`.

Each is a line `failpoint("plan.after_write")` in production code. Unless armed, it compares two
names.
Only `bootstrap` arms, from the settings, and one place at most per process::

    plan.after_write            SIGKILL when it is reached
    plan.after_write@3          the third time
    plan.after_write=stop       SIGSTOP: it sleeps until SIGCONT
"""

from __future__ import annotations

import os
import re
import signal
from typing import Final

from turnstream.errors import InvalidConfigError

NAMES: Final = frozenset(
    {
        "plan.before_check",  # groups are chosen, their payload is not yet read
        "plan.before_write",
        "plan.after_write",
        "replan.before_write",  # the damage is known, the plans are still valid
        "replan.after_write",  # the plans are withdrawn, nothing is planned in their place
        "revise.before",  # a revision of the config is due, the run has no event of it
        "revise.after",  # the run has the event, and nothing is planned by it yet
        "settle.before",  # groups that were dropped, the ledger does not know yet
        "settle.after",
        "batch_due.before",  # the groups of a batch are to be chosen
        "batch_due.after",  # the event is written, no groups are chosen
        "grant_refill.before",  # a refill is wanted, the ledger does not know yet
        "grant_refill.after",
        "fire_deadlines.before",  # deadlines have passed, the run has no event of it
        "fire_deadlines.after",  # the event is written, but not folded
        "abandon_lapsed.before",  # leases have expired, no generator adopted
        "abandon_lapsed.after",  # the run has the event, the payload does not
        "finish_run.before",  # nothing is left to plan
        "finish_run.after",
        "reject.before",  # an event cannot be read or folded, the store does not know yet
        "reject.after",  # the decision is stored, nothing that depends on it is planned
        "archive.before_rename",  # the file of a step is written, and has no name yet
        "advance_watermark.before",  # the acts of the release, in their order
        "release_payload.before",
        "release_bytes.before",
        "compact_batch.before",
        "finish_batch.before",
        "compact_ended.before",
        "save_snapshot.before",
        "trim_events.before",
        "park.before",  # a run looks idle, it is still led
        "park.after",  # it is parked, no listener waits yet
        "mark_dead.before",  # damage was found, the ledger does not know yet
        "mark_dead.after",
        "discard.after_entry",  # a dead letter is discarded in the ledger, its payload is stored
        "session.before_start",
        "session.after_start",  # the session is stored, its trainer has no answer
        "stepped.before",
        "stepped.after",
        "committed.before",
        "committed.after",
        "get.after_header",  # the rank knows what will come, nothing of it was sent
        "get.after_data",  # a mini-batch was sent, the next was not
        "operations.after_header",  # a rank knows its next share of a pass, nothing of it was sent
        "operations.after_data",  # a share was sent, the next was not
        "train.after_update",  # the optimizer has taken the last update, no batcher knows
        "train.after_stepped",
        "publish.before_push",  # the weights are written, no server has them
        "checkpoint.after_shards",  # this rank has written its shards, others may have not
        "checkpoint.after_weights",  # the weights are written, the token is not
        "checkpoint.before_committed",  # the checkpoint is on disk, no batcher knows
        "checkpoint.after_committed",
        "delete.after_begin",  # the name is free, the whole payload remains
        "delete.after_slice",  # a part of the payload is gone
        "delete.after_payload",  # the name of the run is not free yet
        "gateway.after_submit",  # a command is in the log, its client has no request id
        "engine.after_pass",  # a call of a model has a part of its gradient, and passes left
        "engine.after_run",  # a command of a model has run, its result is not written
        "engine.after_finish",  # its result is written, no durable checkpoint has its effect
        "engine.after_save",  # the folder of a checkpoint is written, its record is not
        "engine.after_durable",  # a durable checkpoint is written
        "engine.before_cover",  # the log does not name it yet
        "engine.after_cover",  # the log names it, the older ones are not removed
        "engine.after_stepped",  # a run has the step of a model, the result is not written
        "engine.before_committed",  # the log names a durable checkpoint, no batcher knows
        "fork.after_made",  # the new run can be trained, of its past nothing is written
    }
)
"""Every place there is."""

_FORM = re.compile(r"(?P<name>[a-z_.]+)(@(?P<count>[1-9][0-9]*))?(?P<stops>=stop)?")


class _Armed:
    """The armed failpoint: after `countdown` further passes, the process sends itself `number`."""

    name = ""
    countdown = 0
    number = signal.SIGKILL


def arm(text: str) -> None:
    """Arm the place that `text` names; none if it is empty."""
    match = _FORM.fullmatch(text)
    if text and (match is None or match["name"] not in NAMES):
        raise InvalidConfigError(
            "TURNSTREAM_FAILPOINT",
            f"{text!r} is not NAME[@COUNT][=stop] with one of {', '.join(sorted(NAMES))}",
        )
    _Armed.name = match["name"] if match else ""
    _Armed.countdown = int(match["count"] or 1) if match else 0
    _Armed.number = signal.SIGSTOP if match and match["stops"] else signal.SIGKILL


def failpoint(name: str) -> None:
    """Die or sleep if this place is armed."""
    if name != _Armed.name:
        return
    _Armed.countdown -= 1
    if _Armed.countdown == 0:
        os.kill(os.getpid(), _Armed.number)
