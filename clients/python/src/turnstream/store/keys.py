"""The names of all keys in Redis. Nothing else in Turnstream writes a key by hand.

The plan of a run lives in one slot, `ts:{<run>}:`, where scripts can be atomic:

=========  ======  ==========================================================================
events     stream  what the plan depends on, in order; field `r` = event record; where a generator
                   wrote it, `t` = the id of the trajectory that it is of
plan       stream  manifests, ids `<step>-<revision>`, one per step; field `r` = manifest record
wake       stream  one entry, no data: written whenever a refused call may now succeed
versions   stream  announced weights, ids `<version + 1>-0`; field `r` = event record
ledger     hash    trajectory id -> its state, see below
counts     hash    state -> number of trajectories; `accepted`, their sum; and `late_rewards`,
                   `discarded` (of the dead), `dead_bytes` (of what `letters` and `damaged` keep)
groups     hash    group name -> `<num_samples>:<state>`; the state is `open`; then maybe `decided`,
                   where it is ready and takes no more samples; at last `planned`, or why it was
                   dropped; of one that is never trained, `evaluating`, then `evaluated`
members    hash    group name -> `<num_needed>:<highest attempt>:<refills granted>:<prompt_uid>`, of
                   groups that need fewer members than samples, or had further attempts; the
                   prompt_uid is there once a refill was granted
deadlines  zset    `group:<group name>` and `reward:<trajectory id>`, by when they fire in ms of the
                   run's own time
clock      hash    the run's own time, which no jump of the store's clock changes: it was `ms` when
                   the store said `at_ms`, and goes on by `most_ms` at most, see keep_clock.lua
refills    zset    ids of granted attempts that nobody has opened, by when they were granted
rewards    hash    trajectory id -> CRC of the reward that was posted for it, `late:<CRC>` where its
                   group was decided before, `missed` where its deadline has passed without
rewarded   zset    ids in `rewards` that are not in the ledger, by when, server ms: the newest 4,096
frontier   hash    stepped, committed, session_epoch, session, dp_world_size, lineage,
                   live_groups, open_groups, opened_groups, closed (0 or 1); session_ms, when the
                   session began, was ended by the store, or the run was made; opened_ms, when the
                   newest group to train was opened, planned, the newest batch, and session_token,
                   what the session began with, are added when there is one;
                   checkpoints, the committed steps a session may begin after, `<step>,<step>`;
                   rollbacks, the newest 16 lineages but the first, the last one first, each
                   `<lineage>:<step it goes on from>:<stepped before>`;
                   released, the newest step whose payload may be gone; folded, the newest step
                   of which a compact record is left; ends, number of the newest of `ended`;
                   cold, the newest step whose compact record is in a file;
                   planned_groups, the number of groups in batches; at_plans, as of the newest one
                   or two plans `<step>:<groups dropped by then>:<planned_groups>`, the newer last;
                   of a forked run: origin, `<run>:<step>:<trajectories>:<manifest hash>`;
                   version_floor, what its versions must be above; inherited, 1 once `past` is
                   whole;
                   next_revision, first step of the next config that is not in force, or 0;
                   revised_groups, added to the groups that may be live, because planned steps had
                   others than batch_groups: before a revision of it, or short; paused, the
                   reason, while the run is;
                   forks, `<version>:<step>,...`: what was announced up to the version is as old as
                   that step, at least, because the trainer went back to it;
                   damaged, `<step>:<manifest hash>:<sentence>`, payload that a rank was refused;
                   replan, `<name>:<step>`, a request to plan again that was not answered, and
                   refused_replan, `<name>:<why>`, the last that came to nothing; replanned,
                   `<name>:<server ms>:<JSON>`, the last that was done, see withdraw_plans.lua;
                   withdrawn, `<revision>:<step>`, how often plans were withdrawn, and the newest
                   step that ever was;
                   leftover, see RunClosed, while it is closed; finished, 1 once all is planned;
                   session_lost, `<step>:<why>`, while the ranks of the session differ in a step
batches    hash    step -> `<trajectories planned up to it>:<manifest hash>`; from `released` on
observers  hash    name -> `<newest step seen>:<when it expires, in ms of the run's own time, or 0
                   once it is forgotten>:<expiry in ms>`, and then `:<first step it missed>` where
                   it was forgotten before and has seen nothing since
leader     hash    epoch, owner, expires_ms, lease_ms; planning_trouble and release_trouble, what
                   keeps it from going on, where something does
config     hash    revision -> JSON of the batching config; `newest` -> the revision in force;
                   `from:<revision>` -> its first step, `at:<revision>` -> id of the event that
                   put it in force; `last` -> the last revision, once there are several;
                   `lease_floor`, after leases became shorter, see lease_end.lua
prompts    hash    number, from 1 -> record of a prompt that is not done, see add_prompts.lua;
                   added, the newest number; next, the newest that was given out; done, how many
                   are over; filtered, how many of these without a signal
tasks      hash    group name -> number of its prompt, while the group is not over; `?<place>` ->
                   the last answer to a request, see next_task.lua
again      zset    numbers of prompts whose group failed, to be given out again
leases     zset    id of every open trajectory -> when its writer's lease ends, ms of server time
sessions   hash    name of every trainer session that ever began -> its epoch
ranks      hash    dp_rank of the session, if it has several -> `<step>:<manifest hash>`, the newest
                   batch that it is known to have, or was about to get
times      hash    `planned:<step>`, `stepped:<step>`, `committed:<step>` -> when, server ms, of the
                   steps that are in `batches`; of a checkpoint, and not of every step up to it
past       hash    step -> compact record of a batch that is over
ended      hash    number -> compact record of trajectories that ended untrained
reasons    hash    `<state>:<reason>` -> how many of those in `ended`
held       hash    trajectory id -> bytes that its payload takes, `r<bytes>` while they are only
                   reserved for it; from its group's opening until its payload is released
budget     hash    reserved, stored, planned: the sums of `held` of what is not sealed, what is
                   sealed, and what is in a batch; estimate, the usual bytes of a trajectory, and
                   settled, over how many at most that is a mean
over       hash    bucket -> fingerprints of the groups that are over; `n` -> how many, see below
letters    hash    id of a dead trajectory whose payload is kept -> `<since, server ms>:<bytes>:<id
                   of the trajectory that it was replayed as, or nothing>`
conflicts  hash    num, the writes that were refused because their key has another content; last,
                   last_ms, which was the last one and when; token, see note_conflict.lua
damaged    stream  events that nobody can read, under their own ids; fields `r` = record, `why`
evals      hash    version, or `unknown` -> record of what its evaluations gave
evalgroups stream  evaluated groups, the newest of them; field `r` = record
snapshot   hash    position, step, record: what the planner knew after the event `position`;
                   before, the position of the snapshot before: the events below it go;
                   withdrawn_at, that of the newest one from which plans were withdrawn
cold       hash    newest step of a file -> its name in the archive folder: compact records that
                   have left `past`
deleted    hash    since_ms, fence_ms: the run is being deleted, or was and the key expires
doomed     hash    the ledger of a run that is being deleted, until the payload is gone
=========  ======  ==========================================================================

A ledger value is `open:<epoch>:<writer>`, `sealed:<epoch>`, `awaiting_reward:<epoch>`,
`planned:<step>` or `<filtered|expired|surplus|incomplete|evaluated|abandoned|dead>:<reason>`.
Whether a planned trajectory is stepped or committed follows from the frontier.

A released trajectory has no ledger entry any more: a compact record names it. Of a group that is
over, the entry in `groups` becomes 8 bytes in `over`, the beginning of the SHA-1 of its name, so
that no name is ever opened again. The buckets of `over` are split one by one as it grows (linear
hashing, 64 fingerprints a bucket): a lookup reads about 500 bytes, however many there are.

The payload of a trajectory lives in a slot of its own, `ts:{<run>/<trajectory id>}:`:

=========  ======  ==========================================================================
turns      stream  turn n (from 0) has id `0-<n + 1>`, the seal is the entry after the last
                   turn; field `r` = record
meta       hash    epoch, writer, turns, bytes, sealed (0 or 1); made by the first append only;
                   after the release only `released`, for as long as late writers may come
=========  ======  ==========================================================================

Of a deleted run stay `deleted`, `wake` with one entry, and `meta` of the trajectories that somebody
may still write to; all of them expire.

Two keys are global:

=========  ======  ==========================================================================
ts:runs    set     the names of all runs
ts:news    stream  runs that were made, or opened again, about the newest 1,000; field `n` = name
=========  ======  ==========================================================================
"""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

from turnstream.types import TrajectoryKey
from turnstream.types.names import decode_name, encode_name, encode_run

RUNS = "ts:runs"
"""Set of the (encoded) names of all runs."""

NEWS = "ts:news"
"""Stream of the (encoded) names of runs for which a batcher is needed from now on."""

_GLOBAL_TYPES = {RUNS: "set", NEWS: "stream"}

_RUN_TYPES = {
    "events": "stream",
    "plan": "stream",
    "wake": "stream",
    "versions": "stream",
    "ledger": "hash",
    "counts": "hash",
    "groups": "hash",
    "frontier": "hash",
    "batches": "hash",
    "observers": "hash",
    "leader": "hash",
    "config": "hash",
    "leases": "zset",
    "sessions": "hash",
    "ranks": "hash",
    "times": "hash",
    "members": "hash",
    "deadlines": "zset",
    "clock": "hash",
    "refills": "zset",
    "rewards": "hash",
    "rewarded": "zset",
    "past": "hash",
    "ended": "hash",
    "reasons": "hash",
    "over": "hash",
    "snapshot": "hash",
    "letters": "hash",
    "damaged": "stream",
    "cold": "hash",
    "deleted": "hash",
    "doomed": "hash",
    "conflicts": "hash",
    "evals": "hash",
    "evalgroups": "stream",
    "prompts": "hash",
    "tasks": "hash",
    "again": "zset",
    "held": "hash",
    "budget": "hash",
}
_TRAJECTORY_TYPES = {"turns": "stream", "meta": "hash"}
_NAME_IN_TEXT = re.compile(
    r"(?:(?<=\bgroup )|(?<=\bobserver )|(?<=\bby )|(?<=\bof )|(?<=\d:))[A-Za-z0-9._%-]+"
    r"|[A-Za-z0-9._%-]+(?=/\d+/\d+\b)"
)
_KEY = re.compile(r"ts:\{([^{}/]+)(/[^{}/]+/\d+/\d+)?\}:([a-z]+)")


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
    rewarded: str
    past: str
    ended: str
    reasons: str
    over: str
    snapshot: str
    held: str
    budget: str
    prompts: str
    tasks: str
    again: str
    evals: str
    evalgroups: str
    letters: str
    damaged: str
    conflicts: str
    cold: str
    deleted: str
    doomed: str

    @property
    def of_condemn_run(self) -> tuple[str, ...]:
        """The keys of the script condemn_run: every key of the run."""
        first = (self.deleted, self.wake, self.ledger, self.doomed, self.frontier, self.config)
        return (*first, *(key for key in self if key not in first))

    @property
    def of_open_group(self) -> tuple[str, ...]:
        """The keys of the script open_group."""
        return (
            *(self.frontier, self.config, self.groups, self.ledger, self.counts, self.events),
            *(self.wake, self.leases, self.deadlines, self.members, self.refills, self.over),
            *(self.held, self.budget, self.clock),
        )

    @property
    def of_next_task(self) -> tuple[str, ...]:
        """The keys of the scripts next_task and reopen_task."""
        return (self.prompts, self.tasks, self.again, *self.of_open_group)

    @property
    def of_post_sealed(self) -> tuple[str, ...]:
        """The keys of the script post_sealed."""
        return (
            *(self.ledger, self.counts, self.groups, self.events),
            *(self.leases, self.deadlines, self.config, self.held, self.budget, self.clock),
        )

    @property
    def of_post_reward(self) -> tuple[str, ...]:
        """The keys of the script post_reward."""
        return (
            *(self.ledger, self.counts, self.rewards, self.deadlines, self.events),
            *(self.conflicts, self.frontier, self.groups, self.over, self.rewarded),
        )

    @property
    def of_fold_batch(self) -> tuple[str, ...]:
        """The keys of the script fold_batch."""
        return (
            *(self.leader, self.frontier, self.ledger, self.groups),
            *(self.over, self.rewards, self.rewarded),
        )


class TrajectoryKeys(NamedTuple):
    """The keys of one trajectory's payload, both in one slot."""

    turns: str
    meta: str


@functools.lru_cache(maxsize=1024)
def run_keys(run: str) -> RunKeys:
    """The keys of the run with this (plain) name; InvalidConfigError where no run can have it."""
    prefix = f"ts:{{{encode_run(run)}}}:"
    return RunKeys(*[prefix + part for part in RunKeys._fields])


def trajectory_keys(run: str, trajectory_id: str) -> TrajectoryKeys:
    """The keys of one trajectory's payload."""
    prefix = f"ts:{{{encode_run(run)}/{trajectory_id}}}:"
    return TrajectoryKeys(prefix + "turns", prefix + "meta")


def trajectory_id(key: TrajectoryKey) -> str:
    """The trajectory's name inside its run.

    >>> trajectory_id(TrajectoryKey("g/1", sample=3))
    'g%2F1/3/0'
    """
    return key.trajectory_id


def parse_trajectory_id(text: str) -> TrajectoryKey:
    """The key that `trajectory_id` was given.

    >>> parse_trajectory_id("g%2F1/3/0")
    TrajectoryKey(group_id='g/1', sample=3, attempt=0)

    Raises:
        ValueError: the text is not a trajectory id.
    """
    group, sample, attempt = text.split("/")
    return TrajectoryKey(decode_name(group), int(sample), int(attempt))


def keys_named(text: str) -> tuple[TrajectoryKey, ...]:
    """The trajectories that somebody may mean by a name, as people read it or as an id.

    A group may have a name that looks encoded: as it is read comes first.

    >>> [key.group_id for key in keys_named("a/b#1/3/0")]
    ['a/b#1']
    >>> [key.group_id for key in keys_named("a%2Fb%231/3/0")]
    ['a%2Fb%231', 'a/b#1']

    Raises:
        ValueError: it is the name of no trajectory.
    """
    group, sample, attempt = text.rsplit("/", 2)
    encode_name(group)  # refuses what no group can be called
    names = dict.fromkeys((group, decode_name(group)))
    return tuple(TrajectoryKey(name, int(sample), int(attempt)) for name in names)


def readable_name(trajectory_id: str) -> str:
    """A trajectory's id as people read it.

    >>> readable_name("task-7%231/0/0")
    'task-7#1/0/0'
    """
    group, separator, rest = trajectory_id.partition("/")
    return f"{decode_name(group)}{separator}{rest}"


def with_readable_names(message: str) -> str:
    """A message of a script with its names as people read them: scripts know only encoded ones.

    Trajectories are known by their form, groups, observers and writers by the word before them.
    What else is in a message stays as it is: a reason that somebody gave may have a percent sign.

    >>> with_readable_names("group a%2Fb of a%2Fb/0/0 is open:1:host%3A7, not at 50%25")
    'group a/b of a/b/0/0 is open:1:host:7, not at 50%25'
    """
    return _NAME_IN_TEXT.sub(lambda found: decode_name(found[0]), message)


def run_of(key: str) -> str:
    """The (plain) name of the run that a key is of.

    >>> run_of("ts:{a%2Fb}:ledger"), run_of("ts:{a/g/0/0}:meta")
    ('a/b', 'a')

    Raises:
        ValueError: it is the key of no run.
    """
    match = _KEY.fullmatch(key)
    if match is None:
        raise ValueError(f"{key!r} is the key of no run")
    return decode_name(match[1])


def declared_type(key: str) -> str | None:
    """The Redis type that a key of this name must have; None if no such key is declared.

    >>> declared_type("ts:{a}:ledger"), declared_type("ts:{a/g/0/0}:meta"), declared_type("a")
    ('hash', 'hash', None)
    """
    if key in _GLOBAL_TYPES:
        return _GLOBAL_TYPES[key]
    match = _KEY.fullmatch(key)
    if match is None:
        return None
    types = _TRAJECTORY_TYPES if match[2] else _RUN_TYPES
    return types.get(match[3])
