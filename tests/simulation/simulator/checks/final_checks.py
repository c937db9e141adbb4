"""Invariants at the end of a simulated run."""

from __future__ import annotations

import re
from collections import Counter

from simulator.checks.run_writes import RunWrites, Violations
from turnstream.records.compact import decode_ends
from turnstream.store.client import keys

_UNFINISHED = ("open", "sealed", "awaiting_reward")
_GIVEN_UP = re.compile(r"abandoned:the lease of (.*) ended")
_NO_ADMISSION = "the run takes no new group"
_HALF_GONE = "the store came back without turn"
_NO_TOMBSTONE = "the trajectory was never opened, or is released"
_PROMPT_GOES_ON = "or has trained as one"
_DROPPED = ("filtered", "expired", "incomplete")


def everything_ended(writes: RunWrites) -> Violations:
    """P4: everything is in a final state, and every acknowledged seal is there."""
    frontier = writes.hash("frontier")
    if frontier[b"stepped"] != frontier.get(b"planned", b"0"):
        yield f"the run ended with {frontier}"
    states = states_of(writes)
    accepted = int(writes.hash("counts")[b"accepted"])
    if len(states) != accepted:
        yield f"P4: {accepted} are accepted, {len(states)} have a state"
    for name, state in states.items():
        if state.partition(":")[0] in _UNFINISHED:
            yield f"P5: {name} is {state} at the end"
        if state.startswith("dead:") and name not in writes.shared.rotten:
            yield f"{name} is {state}, and was never damaged"
        given_up = _GIVEN_UP.fullmatch(state)
        if given_up and writes.world.must_keep_leases(given_up[1]):
            yield f"{name} is {state}, who lives"
    yield from _nothing_vanished(writes, states)
    for group, entry in writes.hash("groups").items():
        if entry.endswith((b":open", b":decided", b":evaluating")):
            yield f"P5: group {group!r} is {entry!r} at the end"
    if b"marking" in writes.hash("frontier"):
        yield "I1: groups of the last plan are not marked as planned"
    yield from _trained_once(writes)
    yield from _nothing_came_back(writes, states)


def _nothing_vanished(writes: RunWrites, states: dict[str, str]) -> Violations:
    """P1: every acknowledged seal has a state at the end, unless its writers died in a cut."""
    history, world = writes.shared.history, writes.world
    for name in sorted({*history.acknowledged, *[n for n in history.lost if "/" in n]}):
        if "cut" in world.counts and history.writers.get(name, set()) & world.died:
            continue
        state = states.get(name, "nowhere")
        group_id = keys.parse_trajectory_id(name).group_id
        if name in writes.shared.rotten and state.startswith("dead:"):
            continue
        ends = {"evaluated"} if group_id in writes.evals else {"planned", *_DROPPED}
        if name in history.lost and _is_named_well(writes, name, state):
            continue
        if name in history.acknowledged and state.partition(":")[0] not in {*ends, "surplus"}:
            yield f"P1: {name} was acknowledged as sealed, and is {state}"
        is_given_again = _is_task(name) and len(history.writers[name]) > 1
        if name in history.lost and not is_given_again:
            yield f"P1: {history.lost[name]}: all of its writers live, and it is {state}"


def _is_named_well(writes: RunWrites, name: str, state: str) -> bool:
    """Return whether a publisher that survived may report this trajectory as lost."""
    error = writes.shared.history.lost[name]
    if "jump" in writes.world.counts and error.endswith(_NO_TOMBSTONE):
        return True  # the clock has removed a tombstone
    if "cut" not in writes.world.counts:
        return False
    had_another = len(writes.shared.history.writers[name]) > 1
    is_half_gone = had_another and _HALF_GONE in error  # it does not keep turns before its own
    has_another = state != "nowhere" and had_another
    may_be_given_again = state == "nowhere" or _is_task(name)
    has_no_leave = may_be_given_again and error.endswith(_NO_ADMISSION)
    group_id = keys.parse_trajectory_id(name).group_id
    is_left_out = state == "nowhere" and _is_decided(writes, group_id)
    goes_on = _is_task(name) and error.endswith(_PROMPT_GOES_ON)
    is_known = has_another or has_no_leave or is_left_out or is_half_gone or goes_on
    was_given_up = _GIVEN_UP.fullmatch(state) or _GIVEN_UP.search(error)
    return bool(was_given_up) or is_known


def _is_task(name: str) -> bool:
    return name.startswith("p")


def _is_decided(writes: RunWrites, group_id: str) -> bool:
    """Whether a group has ended, or is gone from the store, which had let it begin."""
    entry = writes.hash("groups").get(keys.encode_name(group_id).encode(), b":over")
    return group_id in writes.opened and not entry.endswith((b":open", b":evaluating"))


def _nothing_came_back(writes: RunWrites, states: dict[str, str]) -> Violations:
    if "jump" in writes.world.counts:
        return  # a clock that is set forward removes the tombstones that refuse late writers
    ledger = writes.hash("ledger")
    for name, state in states.items():
        turns = keys.trajectory_keys(writes.shared.run, name).turns.encode()
        if name.encode() not in ledger and turns in writes.values:
            yield f"{name} is {state}, was released, and has turns again"


def states_of(writes: RunWrites) -> dict[str, str]:
    """Every trajectory with its state, from the ledger, the plans and the compact records."""
    states = {name: f"planned:{step}" for name, step in writes.step_of.items()}
    for record in writes.hash("untrained").values():
        for key, end in decode_ends(record).items():
            if (name := keys.trajectory_id(key)) in states:
                writes.world.fail(f"{name} is {states[name]} and {end}")
            states[name] = end
    for raw, entry in writes.hash("ledger").items():
        name, state = raw.decode(), entry.decode()
        if states.setdefault(name, state) != state:
            writes.world.fail(f"{name} is {states[name]} and {state}")
    return states


def _trained_once(writes: RunWrites) -> Violations:
    """I2 and I3: each step is trained once, as it was planned."""
    expected = {step: own_hash for step, (_, own_hash) in writes.manifests.items()}
    trained = writes.shared.history.trained
    if trained != expected:
        yield f"I3: the surviving steps are {sorted(trained)}, planned are {sorted(expected)}"
    groups = [group for manifest, _ in writes.manifests.values() for group in manifest.groups]
    prompts = Counter(group.prompt_uid for group in groups if _is_task(group.group_id))
    for prompt, number in prompts.items():
        if number > 1:
            yield f"I2: the prompt {prompt} is trained {number} times"
