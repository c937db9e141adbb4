"""The names of all keys in Redis. Nothing else in Turnstream writes a key by hand.

The plan of a run lives in one slot, `ts:{<run>}:`, where scripts can be atomic. A later run of a
name has `~2`, `~3` .. after the brace, `ts:{<run>}~2:`: all of them share the slot and no key.

=========  ======  ==========================================================================
events     stream  inputs of the plan, in order; field `r` = event record; where a generator wrote
                   it, `t` = the id of its trajectory.
plan       stream  manifests, ids `<step>-<revision>`, one per step; field `r` = manifest record.
wake       stream  one entry, no data: written whenever a refused call may now succeed.
versions   stream  announced weights, ids `<version + 1>-0`; field `r` = event record.
ledger     hash    trajectory id -> its state, see below.
counts     hash    state -> number of trajectories; `accepted`, their sum; `late_rewards`;
                   `discarded` and `dead_bytes`, for dead ones.
groups     hash    group name -> `<num_samples>:<state>`. The state is `open`, `decided` once it
                   takes no more samples, then `planned` or the reason of its drop. Evaluations
                   are `evaluating`, then `evaluated`.
members    hash    group name -> `<num_needed>:<highest attempt>:<refills granted>:<prompt_uid>`.
                   Only groups that need fewer members than samples, or had further attempts, have
                   an entry. The prompt_uid is empty until a refill was granted.
deadlines  zset    `group:<group name>` and `reward:<trajectory id>`, by ms of the run's own time.
clock      hash    the run's own time, independent of jumps of the store's clock. It is `ms` at
                   `at_ms` of the store's clock, and later at most `most_ms` more: leader_fields.py.
refills    zset    ids of granted attempts that are not open, by when they were granted.
rewards    hash    trajectory id in the ledger -> CRC of its posted reward, `late:<CRC>` after the
                   decision of its group, `missed` after its deadline.
frontier   hash    Steps: stepped, committed, planned, released (the newest one whose payload may be
                   gone), folded (the newest one with a compact record). Also marking, the newest
                   planned step while some of its groups are not marked: see plan_writes.py.
                   Counters: live_groups, open_groups, opened_groups, planned_groups, ends (the
                   newest number in `ended`).
                   The session: session_epoch, session, dp_world_size, lineage, session_ms (its
                   start or end), session_token, announced (the step of its newest weights),
                   session_lost (`<step>:<why>`, while its ranks differ in a step).
                   Times: opened_ms, when the newest group to train was opened. at_plans has
                   `<step>:<groups dropped by then>:<planned_groups>` of the newest two plans.
                   History: checkpoints, the committed steps `<step>,<step>`. rollbacks has the
                   newest 16 lineages as `<lineage>:<step>:<stepped before>`.
                   A fork: origin, `<run>:<step>:<trajectories>:<manifest hash>`, and version_floor,
                   the limit of its versions.
                   Control: closed (0 or 1), leftover (see RunClosed), finished, paused (reason),
                   next_revision (the first step of the next config, or 0).
                   Damage: damaged, `<step>:<manifest hash>:<sentence>`. replan is the pending
                   request, and replanned the newest answer, `<request>:<JSON>`. withdrawn is
                   `<revision>:<step>`, the number of withdrawals and the newest step.
batches    hash    step -> `<trajectories planned up to it>:<manifest hash>`; from `released` on.
observers  hash    name -> `<newest step seen>:<expiry, ms of the run's own time, 0 after
                   it>:<length in ms>`, then `:<first step it missed>` after an expiry, then
                   `@<owner>`, the owner of its API key.
leader     hash    epoch, owner, expires_ms, lease_ms; planning_trouble and release_trouble, its
                   errors. An idle run without a leader has parked, which is
                   `<last event id> <last wake id>`.
config     hash    revision -> JSON of the batching config, with the `format` of the run's stored
                   state; `newest` -> the revision in force; `from:<revision>` -> its first step,
                   `at:<revision>` -> id of the event that put it in force; `last` -> the last
                   revision; `lease_floor`, see lease_end.lua.
prompts    hash    number, from 1 -> record of a prompt that is not done, see add_prompts.lua.
                   added is the newest number, and next the newest that was opened as a group. done
                   counts the finished ones, and filtered those of them without a signal.
                   most_samples is the largest num_samples.
tasks      hash    group name -> number of its prompt, while the group is not finished.
again      zset    numbers of prompts whose group failed, to be sampled again.
leases     zset    id of every open trajectory -> end of its lease, ms of server time.
sessions   hash    name of every trainer session that ever began -> its epoch.
ranks      hash    dp_rank -> `<step>:<manifest hash>`, the newest batch that it may have, if the
                   session has several ranks. `stepped:<dp_rank>` -> the same for the newest batch
                   that it has stepped. `committed:<dp_rank>` -> the newest step that it committed.
times      hash    `planned:<step>`, `stepped:<step>`, `committed:<step>` -> server ms, of the steps
                   in `batches`.
past       hash    step -> compact record of a finished batch.
ended      hash    number -> compact record of trajectories that ended untrained.
reasons    hash    `<state>:<reason>` -> how many of those in `ended`.
held       hash    trajectory id -> bytes of its payload, `r<bytes>` while they are reserved, from
                   the opening of its group to its release.
budget     hash    reserved, stored, planned: sums of `held` for unsealed, sealed and planned ones.
                   estimate is the usual size of a trajectory, the mean over `settled` of them.
over       hash    bucket -> fingerprints of finished groups, see below.
letters    hash    id of a dead trajectory -> `<since, server ms>:<bytes>`.
conflicts  hash    num, writes refused for their content; last, last_ms: note_conflict.lua.
damaged    stream  rejected events of no sealed trajectory, under their own ids; fields `r`, `why`.
rejected   zset    ids of events that no leader folds, by their milliseconds: see leader_fields.py.
evals      hash    version, or `unknown` -> record of the result of its evaluations.
evalgroups stream  the newest evaluated groups; field `r` = record.
snapshot   hash    position, step, record: state of the planner after the event `position`. before
                   is the position of the previous snapshot: older events are deleted. withdrawn_at
                   is the position of the newest snapshot from which plans were withdrawn.
cold       hash    newest step of a file of compact records -> its name, of earlier releases.
deleted    hash    since_ms, fence_ms. It exists during the deletion, and expires after it.
doomed     hash    the ledger of a run that is being deleted, until the payload is gone.
=========  ======  ==========================================================================

`ts:{<run>}:incarnation`, a string for all runs of a name, made by the first deletion: the number of
the run that has the name, or is created next. It never decreases and stays (about 100 bytes).

A ledger value is `open:<epoch>:<writer>`, `sealed:<epoch>`, `awaiting_reward:<epoch>`,
`planned:<step>` or `<filtered|expired|surplus|incomplete|evaluated|abandoned|dead>:<reason>`.
Whether a planned trajectory is stepped or committed follows from the frontier.

A compact record replaces the ledger entry of a released trajectory. The entry in `groups` of a
finished group becomes 8 bytes in `over`, the beginning of the SHA-1 of its name, so that no name is
opened twice. The first three hex digits of the SHA-1 are the bucket.

The payload of a trajectory lives in a slot of its own, `ts:{<run/<trajectory id>}:`, of a later
run of the name `ts:{<run/<trajectory id>}~2:`:

=========  ======  ==========================================================================
turns      stream  turn n (from 0) has id `0-<n + 1>`, the seal is the entry after the last
                   turn; field `r` = record.
meta       hash    epoch, writer, turns, bytes, sealed (0 or 1), from the first append on; turns
                   and bytes lack those that were added without a script since the last one;
                   after the release only `released`, for as long as late writers may come.
=========  ======  ==========================================================================

After a deletion remain `deleted`, `wake` with one entry, and `meta` of the trajectories that
another process may still write to; all of them expire. `incarnation` stays.

Keys of hosted models are listed in `turnstream_server.operations.keys`. Three keys are global:

=========  ======  ==========================================================================
ts:runs    set     the ids of all runs: `<name>`, `<name>~2`.
ts:news    stream  runs that were created or reopened, about the newest 1,000; field `n` = id.
ts:batchers zset   address of a batcher -> end of its lease, server ms: see register_batcher.lua.
=========  ======  ==========================================================================
"""

from __future__ import annotations

import functools
import re
from typing import Final, NamedTuple

from turnstream.types import TrajectoryKey
from turnstream.types.names import RunId, decode_name, encode_name, encode_run  # noqa: F401

RUNS = "ts:runs"
"""Set of the (encoded) ids of all runs."""

NEWS = "ts:news"
"""Stream of the (encoded) ids of runs for which a batcher is needed from now on."""

BATCHERS = "ts:batchers"
"""Sorted set of the addresses at which batchers answer."""

_KEY = re.compile(
    r"ts:\{(?P<name>[^{}/~]+)(?P<trajectory>/[^{}/]+/\d+/\d+)?\}(?P<number>~\d+)?:(?P<part>[a-z]+)"
)

_STORED: Final = {
    "finished_batches": "past",
    "untrained": "ended",
    "finished_groups": "over",
    "payload_bytes": "held",
    "retry": "again",
    "dead_letters": "letters",
    "archive_files": "cold",
    "deleting": "doomed",
}
"""Names of keys in the store, where the code has another word. They are those of older releases."""


class RunKeys(NamedTuple):
    """The keys of one run, all in one slot."""

    events: str
    plan: str
    wake: str
    versions: str
    ledger: str
    counts: str
    groups: str
    frontier: str
    batches: str
    observers: str
    leader: str
    config: str
    leases: str
    sessions: str
    ranks: str
    times: str
    members: str
    deadlines: str
    clock: str
    refills: str
    rewards: str
    finished_batches: str
    untrained: str
    reasons: str
    finished_groups: str
    snapshot: str
    payload_bytes: str
    budget: str
    prompts: str
    tasks: str
    retry: str
    evals: str
    evalgroups: str
    dead_letters: str
    damaged: str
    rejected: str
    conflicts: str
    archive_files: str
    deleted: str
    deleting: str

    @property
    def of_begin_delete(self) -> tuple[str, ...]:
        """The keys of the script begin_delete: every key of the run, and the one of its name."""
        first = (self.deleted, self.wake, self.ledger, self.deleting, self.frontier, self.config)
        shared = incarnation_key(run_of(self.frontier))
        return (*first, shared, *(key for key in self if key not in first))

    @property
    def of_open_group(self) -> tuple[str, ...]:
        """The keys of the script open_group."""
        return (
            *(self.frontier, self.config, self.groups, self.ledger, self.counts, self.events),
            *(
                self.wake,
                self.leases,
                self.deadlines,
                self.members,
                self.refills,
                self.finished_groups,
            ),
            *(self.payload_bytes, self.budget, self.clock, self.leader),
            *(self.prompts, self.tasks, self.retry),
        )

    @property
    def of_post_sealed(self) -> tuple[str, ...]:
        """The keys of the script post_sealed."""
        return (
            *(self.ledger, self.counts, self.groups, self.events),
            *(
                self.leases,
                self.deadlines,
                self.config,
                self.payload_bytes,
                self.budget,
                self.clock,
            ),
        )

    @property
    def of_post_reward(self) -> tuple[str, ...]:
        """The keys of the script post_reward."""
        return (
            *(self.ledger, self.counts, self.rewards, self.deadlines, self.events),
            *(self.conflicts, self.frontier, self.groups, self.finished_groups),
        )


class TrajectoryKeys(NamedTuple):
    """The keys of one trajectory's payload, both in one slot."""

    turns: str
    meta: str


@functools.lru_cache(maxsize=1024)
def run_keys(run: str) -> RunKeys:
    """Return the keys of the run with this (plain) id; InvalidConfigError if no run can have it.

    >>> run_keys("maze").ledger, run_keys("maze~2").ledger
    ('ts:{maze}:ledger', 'ts:{maze}~2:ledger')
    """
    name, number = _encoded_parts(run)
    parts = (_STORED.get(field, field) for field in RunKeys._fields)
    return RunKeys(*[f"ts:{{{name}}}{number}:{part}" for part in parts])


def trajectory_keys(run: str, trajectory_id: str) -> TrajectoryKeys:
    """Return the keys of one trajectory's payload.

    >>> trajectory_keys("maze~2", "g/0/0").turns
    'ts:{maze/g/0/0}~2:turns'
    """
    name, number = _encoded_parts(run)
    prefix = f"ts:{{{name}/{trajectory_id}}}{number}:"
    return TrajectoryKeys(prefix + "turns", prefix + "meta")


def incarnation_key(run: str) -> str:
    """Return the key that all runs of this run's name share; see the table above.

    >>> incarnation_key("maze"), incarnation_key("maze~2")
    ('ts:{maze}:incarnation', 'ts:{maze}:incarnation')
    """
    return f"ts:{{{_encoded_parts(run)[0]}}}:incarnation"


@functools.lru_cache(maxsize=1024)
def _encoded_parts(run: str) -> tuple[str, str]:
    """Return the name inside the braces of a key, and what follows them."""
    name, tilde, number = encode_run(run).partition("~")
    return name, tilde + number


def trajectory_id(key: TrajectoryKey) -> str:
    """Return the trajectory's name inside its run.

    >>> trajectory_id(TrajectoryKey("g/1", sample=3))
    'g%2F1/3/0'
    """
    return key.trajectory_id


def parse_trajectory_id(text: str) -> TrajectoryKey:
    """Return the key of an id.

    >>> parse_trajectory_id("g%2F1/3/0")
    TrajectoryKey(group_id='g/1', sample=3, attempt=0)
    """
    group, sample, attempt = text.split("/")
    return TrajectoryKey(decode_name(group), int(sample), int(attempt))


def readable_name(trajectory_id: str) -> str:
    """Return a trajectory's id as people read it.

    >>> readable_name("task-7%231/0/0")
    'task-7#1/0/0'
    """
    group, separator, rest = trajectory_id.partition("/")
    return f"{decode_name(group)}{separator}{rest}"


def is_of_run(key: str) -> bool:
    """Return whether a key is one of a run; those of hosted models are not.

    >>> is_of_run("ts:{maze}:ledger"), is_of_run("tm:{S:train:0}:model")
    (True, False)
    """
    return _KEY.fullmatch(key) is not None


def run_of(key: str) -> RunId:
    """Return the (plain) id of the run that a key is of.

    >>> run_of("ts:{a%2Fb}:ledger"), run_of("ts:{a/g/0/0}~2:meta")
    ('a/b', 'a~2')
    """
    match = _KEY.fullmatch(key)
    if match is None:
        raise ValueError(f"{key!r} is the key of no run")
    return RunId(decode_name(match["name"]) + (match["number"] or ""))
