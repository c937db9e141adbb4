"""The sentence of each reason for a wait. No I/O; docs/waits.md has an example of each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from turnstream.errors import WaitKind, WaitReason

Fact = str | int | float | None

_GROUP: Final = "group {group}[ ({sealed} of {needed} members)]"
_FULL_BUDGET: Final = (
    "max_bytes={max_bytes:,} is less than the {steps} retained steps take, {planned:,}: the run "
    "continues above it, step by step. Raise it; a step is released when it is committed and no "
    "longer retained, is archived if the run asks for that, and was seen by every observer"
    "[: {unseen_by}]"
)

_SENTENCES: Final[dict[WaitKind, str]] = {
    WaitKind.NO_ADMISSION: "group {group} has waited {waited_s:.0f} s for admission: {why}",
    WaitKind.NO_TASK: "{why}",
    WaitKind.NO_REFILL: "{why}",
    WaitKind.NO_VERSION: "{newest}; {stepped} steps are stepped",
    WaitKind.STORE_AWAY: "the store at {address} has taken nothing for {since_s:.1f} s: {why}",
    WaitKind.STORE_SILENT: (
        "the store at {address} was asked {since_s:.1f} s ago, and has not answered"
    ),
    WaitKind.NO_BATCH: "step {step} of run {run} was waited for {waited_s:.0f} s",
    WaitKind.NOT_ACKNOWLEDGED: "{call} is not acknowledged after {waited_s:.1f} s",
    WaitKind.BATCHER_AWAY: "the batcher at {address} has sent nothing for {since_s:.1f} s: {why}",
    WaitKind.BATCHER_SILENT: (
        "the batcher at {address} was asked {since_s:.1f} s ago, and has not answered"
    ),
    WaitKind.RUN_FINISHED: "run {run} is closed and finished: all {stepped} steps are stepped",
    WaitKind.STORE_FULL: "{why}",
    WaitKind.STORE_REFUSES_WRITES: "{reason}; nothing new is acknowledged",
    WaitKind.RUN_PAUSED: "{why}; no group starts, no batch is planned",
    WaitKind.PAYLOAD_DAMAGED: "{damage}; {hint}",
    WaitKind.NO_PLANNER: (
        "no batcher plans the run[: the lease of {planner} ended {ended_s:.0f} s ago]"
    ),
    WaitKind.PLANNING_FAILS: "batcher {planner} cannot plan the run: {trouble}",
    WaitKind.TRAINER_NOT_STEPPED: (
        "step {awaited} is planned and not stepped; {trainer}[ for {since_s:.0f} s]"
        "[; dp_rank {behind} did not ask for it]"
    ),
    WaitKind.PROMPTS_EXHAUSTED: (
        "all {prompts} prompts of the run are done, {filtered} of them filtered: add others, or "
        "close the run"
    ),
    WaitKind.OUT_OF_DATA: (
        "step {step}[ waits for {since_s:.0f} s]: {ready} of {needed} groups ready, and no "
        "generator has a group open[; the last was opened {opened_s:.0f} s ago]; {newest}"
    ),
    WaitKind.TOO_FEW_READY: (
        "step {step}[ waits for {since_s:.0f} s]: {ready} of {needed} groups ready, {open} open"
    ),
    WaitKind.GENERATOR_GONE: (
        "generator {writer} is gone: all {open} trajectories that it writes have lapsed, the last "
        "{silent_s:.0f} s ago"
    ),
    WaitKind.MEMBER_LAPSED: (
        _GROUP + " waits for sample {sample} of generator {writer}[ for {age_s:.0f} s]: lease "
        "lapsed {lapsed_s:.0f} s ago[; its deadline {deadline}]"
    ),
    WaitKind.PASS_RATE_LOW: (
        "{dropped} of the {decided} groups that were decided[ since step {since} was planned] were "
        "dropped[; trajectories that ended untrained, of the whole run: {ended}]"
    ),
    WaitKind.NO_SIGNAL: (
        "all advantages of step {step}, the newest batch, are 0: the rewards in each of its "
        "{groups} groups are equal, so its policy loss trains nothing"
    ),
    WaitKind.MEMBER_UNSEALED: (
        "{trajectories} trajectories were left without a seal and are not trained: the generator "
        "has to call seal(reward=...) before the block of a trajectory ends"
    ),
    WaitKind.REWARD_AWAITED: (
        _GROUP + " waits for the reward of sample {sample}, which is sealed[ for {since_s:.0f} s]"
        "[; its deadline {deadline}]"
    ),
    WaitKind.REFILL_OPEN: (
        "attempt {attempt} of sample {sample} of group {group} was granted {since_s:.0f} s ago, "
        "and no generator takes it"
    ),
    WaitKind.MEMBER_NOT_STARTED: (
        _GROUP + " waits for sample {sample}[ for {age_s:.0f} s]: no generator has started it"
        "[; its deadline {deadline}]"
    ),
    WaitKind.MEMBER_OPEN: (
        _GROUP + " waits for sample {sample} of generator {writer}[ for {age_s:.0f} s]: lease "
        "renewed, {lease_left_s:.0f} s left[; its deadline {deadline}]"
    ),
    WaitKind.WEIGHTS_NOT_ANNOUNCED: "{why}[ for {stepped_s:.0f} s]",
    WaitKind.OUT_OF_CAPACITY: "{why}[; the last was opened {since_s:.0f} s ago]",
    WaitKind.RELEASE_FAILS: "batcher {planner} cannot release finished steps: {trouble}",
    WaitKind.OUT_OF_BYTES: "{why}",
    WaitKind.BUDGET_TOO_SMALL: _FULL_BUDGET,
    WaitKind.NOTHING_WRONG: "nothing is wrong: {state}",
    WaitKind.OBSERVER_BEHIND: (
        "no step after step {released} is deleted: observer {observers}; "
        "`turnstream run remove-observer {run} NAME` removes one"
    ),
    WaitKind.DEAD_LETTERS: (
        "dead letters that are kept: {trajectories} of trajectories, {events} of events; the "
        "newest is {newest}: {reason}; `turnstream dead list {run}` lists them"
    ),
    WaitKind.RUN_CLOSED: "run {run} is closed: it takes no new group",
}
"""A part in brackets is left out where its value is unknown: None, or an empty text."""

_OPTIONAL: Final = re.compile(r"\[([^\]]*?\{(\w+)[^\]]*)\]")


def wait_reason(kind: WaitKind, facts: Mapping[str, Fact], **words: Fact) -> WaitReason:
    """Return a reason with its sentence.

    >>> facts = {"address": "10.0.0.7:6379", "since_s": 12.0}
    >>> wait_reason(WaitKind.STORE_SILENT, facts).sentence
    'the store at 10.0.0.7:6379 was asked 12.0 s ago, and has not answered'

    Args:
        kind: kind of the reason.
        facts: values for programs.
        words: the other values of the sentence.
    """
    values = {**facts, **words}

    def known(part: re.Match[str]) -> str:
        return "" if values[part[2]] in (None, "") else part[1]

    template = _OPTIONAL.sub(known, _SENTENCES[kind])
    return WaitReason(kind, template.format_map(values), facts)
