"""Events that a leader writes: a batch is due, a config is in force, the run is finished.

A leader also answers requests to plan again after damage.
"""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass
from typing import Any

import redis
import redis.asyncio

from turnstream.errors import ConflictError, NotReadyError
from turnstream.records.events import encode_event
from turnstream.store.client import keys
from turnstream.store.client.replies import translating
from turnstream.store.run import clock
from turnstream.store.run.configs import Revision, Revisions, parse_revisions
from turnstream.types import BatchDue, ConfigRevised, RunFinished
from turnstream_server.ledger.core.scan import RunScript, hash_pages
from turnstream_server.ledger.leadership.writes import (
    Changes,
    Difference,
    Term,
    read_facts,
    time_ms,
    write,
    write_decision,
    write_without_facts,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RevisionFacts:
    """The facts in the store about the configs of a run.

    `lease_floor` is `<ms of server time>:<ms until then, when it was set>`, empty before the first.
    """

    revisions: Revisions
    planned: int
    lease_floor: bytes
    now_ms: int


async def announce_due(term: Term, due: BatchDue) -> str:
    """Write the event at which the groups of a batch are chosen; return its id.

    The newest event may be that of an earlier call, whose reply was lost. The fold takes the
    first of several events of a step.
    """
    record = encode_event(due)
    events = keys.run_keys(term.run).events
    (newest,) = await read_facts(term, ("XREVRANGE", events, "+", "-", "COUNT", 1))
    if newest and newest[0][1].get(b"r") == record:
        return newest[0][0].decode()
    changes = Changes()
    changes.write_entry("events", record)
    (event_id,) = await write_without_facts(term, changes)
    return event_id.decode()


async def read_revisions_async(client: redis.asyncio.Redis, run: str) -> Revisions:
    """Return all configs of a run."""
    with translating():
        fields: Any = await client.execute_command("HGETALL", keys.run_keys(run).config)
    return parse_revisions(run, fields)


async def announce_revision(term: Term, revised: ConfigRevised) -> bool:
    """Put a revision in force, and write its event; return False if it was in force before.

    Where the run had no deadline before, every group that is open gets one. A group that is opened
    at this moment may stay without it.

    Raises:
        ConflictError: no such revision, or the step before its first is not planned.
    """
    is_new = False

    async def read() -> RevisionFacts:
        nonlocal is_new
        facts = await _read_revisions(term)
        is_new = revised.revision > facts.revisions.in_force
        if is_new:
            after = due_revision(facts, revised.revision)
            before = facts.revisions.revision(facts.revisions.in_force)
            if not before.config.group_deadline_s and after.config.group_deadline_s:
                await _start_deadlines(term, after.config.group_deadline_s)
        return facts

    await write_decision(term, read, lambda facts: put_in_force(facts, revised))
    return is_new


def due_revision(facts: RevisionFacts, number: int) -> Revision:
    """Return the revision of this number."""
    found = next((each for each in facts.revisions.stored if each.number == number), None)
    if found is None or found.from_step > facts.planned + 1:
        raise ConflictError(f"revision {number} is not due after step {facts.planned}")
    return found


def put_in_force(facts: RevisionFacts, revised: ConfigRevised) -> Changes:
    """Return the writes that put a revision in force.

    For one that is in force, only the first step of the next one is written.
    """
    known = facts.revisions
    changes = Changes()
    changes.expect("config", "newest", b"%d" % known.in_force)
    changes.expect("config", str(known.last.number + 1), None)
    newest = max(known.in_force, revised.revision)
    if newest > known.in_force:
        after = due_revision(facts, newest)
        before = known.revision(known.in_force)
        floor = _lease_floor(facts, before.config.lease_s, after.config.lease_s)
        if floor:
            changes.write("HSET", "config", "lease_floor", floor)
        noted_in = ("config", f"at:{newest}")
        changes.write_entry("events", encode_event(revised), noted_in=noted_in)
        changes.write("HSET", "config", "newest", newest)
        changes.wake()
    later = [each.from_step for each in known.stored if each.number == newest + 1]
    changes.write("HSET", "frontier", "next_revision", later[0] if later else 0)
    return changes


async def finish_run(term: Term, *, step: int, position: str) -> bool:
    """Finish a run after its last step, if it is closed and has no events after `position`."""
    frontier = keys.run_keys(term.run).frontier
    ((closed, finished),) = await read_facts(term, ("HMGET", frontier, "closed", "finished"))
    if finished == b"1" or closed != b"1":
        return finished == b"1"
    changes = Changes()
    changes.expect("frontier", "closed", closed)
    changes.expect("frontier", "finished", finished)
    changes.expect_newest("events", position)
    changes.write("HSET", "frontier", "finished", 1)
    changes.write_entry("events", encode_event(RunFinished(step=step)))
    changes.wake()
    return not isinstance(await write(term, changes), Difference)


def _lease_floor(facts: RevisionFacts, before_s: float, after_s: float) -> str:
    """Return the field that keeps longer leases until writers know it, as in lease_end.lua."""
    if after_s >= before_s:
        return ""
    until_ms = facts.now_ms + int(before_s * 1_000)
    if facts.lease_floor:
        floor_ms, most_ms = map(int, facts.lease_floor.split(b":"))
        if floor_ms - facts.now_ms <= most_ms:
            until_ms = max(until_ms, floor_ms)
    return f"{until_ms}:{until_ms - facts.now_ms}"


async def _read_revisions(term: Term) -> RevisionFacts:
    known = keys.run_keys(term.run)
    config, planned, now = await read_facts(
        term, ("HGETALL", known.config), ("HGET", known.frontier, "planned"), ("TIME",)
    )
    return RevisionFacts(
        revisions=parse_revisions(term.run, config),
        planned=int(planned or 0),
        lease_floor=config.get(b"lease_floor", b""),
        now_ms=time_ms(now),
    )


async def _start_deadlines(term: Term, deadline_s: float) -> None:
    """Give each open group a deadline, from now on by the time of the run."""
    known = keys.run_keys(term.run)
    fields, now = await read_facts(term, ("HMGET", known.clock, *clock.FIELDS), ("TIME",))
    due_ms = clock.run_ms(fields, now_ms=time_ms(now)) + int(deadline_s * 1_000)
    async for page in hash_pages(term.client, known.groups):
        words: list[str | int] = []
        for name, entry in page.items():
            if entry.endswith((b":open", b":evaluating")):
                words += (due_ms, f"group:{name.decode()}")
        if words:
            changes = Changes()
            changes.write("ZADD", "deadlines", "NX", *words)
            await write_without_facts(term, changes)


_REQUEST = RunScript("request_replan", "planning", "frontier wake")


def request_replan(client: redis.Redis, run: str) -> str:
    """Request a replan from the first damaged step on; return the name of the pending request."""
    return _REQUEST.call(client, run, uuid.uuid4().hex).decode()


def await_replan(client: redis.Redis, run: str, request: str, *, wait_s: float) -> str:
    """Wait for the answer to a request; return the steps that are planned again.

    Raises:
        ConflictError: the leader refuses the request.
        NotReadyError: no leader has answered; the request stays.
    """
    end_s = time.monotonic() + wait_s
    while True:
        with translating():
            answer: Any = client.hget(keys.run_keys(run).frontier, "replanned")
        name, _, text = (answer or b"").decode().partition(":")
        if name == request:
            content: dict[str, str] = json.loads(text)
            if "refused" in content:
                raise ConflictError(content["refused"])
            return content.get("done", text)  # an earlier release has other fields
        if time.monotonic() >= end_s:
            raise NotReadyError(
                f"no batcher has answered within {wait_s:g} s; the request is kept, and the next "
                f"batcher that plans run {run!r} executes it"
            )
        time.sleep(0.2)


def answered(request: str, **content: str) -> Changes:
    """Return the writes that answer a pending request: `refused` or `done`, and a sentence."""
    changes = Changes()
    changes.expect("frontier", "replan", request.encode())
    changes.write("HDEL", "frontier", "replan")
    changes.write("HSET", "frontier", "replanned", f"{request}:{json.dumps(content)}")
    changes.wake()
    return changes
