"""The names of all keys in Redis. Nothing else in Turnstream writes a key by hand.

The plan of a run lives in one slot, `ts:{<run>}:`, where scripts can be atomic. A later run of a
name has `~2`, `~3` .. after the brace, `ts:{<run>}~2:`: all of them share the slot and no key.

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
                   the store said `at_ms`, and goes on by `most_ms` at most, see tick_clock.lua
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
                   keeps it from going on, where something does; parked, `<last event id> <last wake
                   id>`, while the run is idle and has no leader, see park_leader.lua
config     hash    revision -> JSON of the batching config, with the `format` of everything that is
                   stored of the run, see records/configs.py; `newest` -> the revision in force;
                   `from:<revision>` -> its first step, `at:<revision>` -> id of the event that
                   put it in force; `last` -> the last revision, once there are several;
                   `lease_floor`, after leases became shorter, see lease_end.lua
prompts    hash    number, from 1 -> record of a prompt that is not done, see add_prompts.lua;
                   added, the newest number; next, the newest that was opened as a group; done,
                   the number of finished ones; filtered, those of them without a signal;
                   most_samples, the largest num_samples
tasks      hash    group name -> number of its prompt, while the group is not finished
again      zset    numbers of prompts whose group failed, to be sampled again
leases     zset    id of every open trajectory -> when its writer's lease ends, ms of server time
sessions   hash    name of every trainer session that ever began -> its epoch
ranks      hash    dp_rank of the session, if it has several -> `<step>:<manifest hash>`, the newest
                   batch that it is known to have, or was about to get; `stepped:<dp_rank>` -> the
                   same, `committed:<dp_rank>` -> step, of ranks that acknowledge for themselves
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
over       hash    bucket -> fingerprints of the groups that are finished, see below
letters    hash    id of a dead trajectory -> `<since, server ms>:<bytes>`
conflicts  hash    num, writes refused for their content; last, last_ms, token: note_conflict.lua
damaged    stream  rejected events of no sealed trajectory, under their own ids; fields `r`, `why`
rejected   zset    ids of events that no leader folds, by their milliseconds: see trim_events.lua
evals      hash    version, or `unknown` -> record of what its evaluations gave
evalgroups stream  evaluated groups, the newest of them; field `r` = record
snapshot   hash    position, step, record: what the planner knew after the event `position`;
                   before, the position of the snapshot before: the events below it go;
                   withdrawn_at, that of the newest one from which plans were withdrawn
cold       hash    newest step of a file of compact records -> its name in the archive folder
deleted    hash    since_ms, fence_ms: the run is being deleted, or was and the key expires
doomed     hash    the ledger of a run that is being deleted, until the payload is gone
=========  ======  ==========================================================================

`ts:{<run>}:incarnation`, a string, is one for all runs of a name, from the first deletion on: the
number of the run that has the name, or gets it when it is created. The runs before are deleted, or
being deleted. It never decreases and stays (about 100 bytes): no number is ever used twice.

A ledger value is `open:<epoch>:<writer>`, `sealed:<epoch>`, `awaiting_reward:<epoch>`,
`planned:<step>` or `<filtered|expired|surplus|incomplete|evaluated|abandoned|dead>:<reason>`.
Whether a planned trajectory is stepped or committed follows from the frontier.

A released trajectory has no ledger entry any more: a compact record names it. The entry in `groups`
of a finished group becomes 8 bytes in `over`, the beginning of the SHA-1 of its name. So no name is
ever opened again. The first three hex digits of the SHA-1 are the bucket.

The payload of a trajectory lives in a slot of its own, `ts:{<run>/<trajectory id>}:`, of a later
run of the name `ts:{<run>/<trajectory id>}~2:`:

=========  ======  ==========================================================================
turns      stream  turn n (from 0) has id `0-<n + 1>`, the seal is the entry after the last
                   turn; field `r` = record
meta       hash    epoch, writer, turns, bytes, sealed (0 or 1); made by the first append only;
                   after the release only `released`, for as long as late writers may come
=========  ======  ==========================================================================

After a deletion remain `deleted`, `wake` with one entry, and `meta` of the trajectories that
another process may still write to; all of them expire. `incarnation` stays.

Three keys are global:

=========  ======  ==========================================================================
ts:runs    set     the ids of all runs: `<name>`, `<name>~2`
ts:news    stream  runs that were made, or opened again, about the newest 1,000; field `n` = id
ts:batchers zset   address of a batcher -> end of its lease, server ms: see register_batcher.lua
=========  ======  ==========================================================================
"""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

from turnstream.types import TrajectoryKey
from turnstream.types.names import RunId, decode_name, encode_name, encode_run  # noqa: F401

RUNS = "ts:runs"
"""Set of the (encoded) ids of all runs."""

NEWS = "ts:news"
"""Stream of the (encoded) ids of runs for which a batcher is needed from now on."""

BATCHERS = "ts:batchers"
"""Sorted set of the addresses at which batchers answer."""

_GLOBAL_TYPES = {RUNS: "set", NEWS: "stream", BATCHERS: "zset"}

_STREAMS = {"events", "plan", "wake", "versions", "damaged", "evalgroups"}
_SORTED_SETS = {"leases", "deadlines", "refills", "rewarded", "rejected", "again"}
_TRAJECTORY_TYPES = {"turns": "stream", "meta": "hash"}
_KEY = re.compile(
    r"ts:\{(?P<name>[^{}/~]+)(?P<trajectory>/[^{}/]+/\d+/\d+)?\}(?P<number>~\d+)?:(?P<part>[a-z]+)"
)


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
    rejected: str
    conflicts: str
    cold: str
    deleted: str
    doomed: str

    @property
    def of_begin_delete(self) -> tuple[str, ...]:
        """The keys of the script begin_delete: every key of the run, and the one of its name."""
        first = (self.deleted, self.wake, self.ledger, self.doomed, self.frontier, self.config)
        shared = incarnation_key(run_of(self.frontier))
        return (*first, shared, *(key for key in self if key not in first))

    @property
    def of_open_group(self) -> tuple[str, ...]:
        """The keys of the script open_group."""
        return (
            *(self.frontier, self.config, self.groups, self.ledger, self.counts, self.events),
            *(self.wake, self.leases, self.deadlines, self.members, self.refills, self.over),
            *(self.held, self.budget, self.clock, self.leader),
        )

    @property
    def of_next_task(self) -> tuple[str, ...]:
        """The keys of the script next_task."""
        return (
            *(self.prompts, self.tasks, self.again, self.frontier, self.config, self.groups),
            *(self.ledger, self.wake, self.members, self.refills, self.over),
        )

    @property
    def of_open_task(self) -> tuple[str, ...]:
        """The keys of the script open_task."""
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
    """The keys of the run with this (plain) id; InvalidConfigError where no run can have it.

    >>> run_keys("maze").ledger, run_keys("maze~2").ledger
    ('ts:{maze}:ledger', 'ts:{maze}~2:ledger')
    """
    name, number = _encoded_parts(run)
    return RunKeys(*[f"ts:{{{name}}}{number}:{part}" for part in RunKeys._fields])


def trajectory_keys(run: str, trajectory_id: str) -> TrajectoryKeys:
    """The keys of one trajectory's payload.

    >>> trajectory_keys("maze~2", "g/0/0").turns
    'ts:{maze/g/0/0}~2:turns'
    """
    name, number = _encoded_parts(run)
    prefix = f"ts:{{{name}/{trajectory_id}}}{number}:"
    return TrajectoryKeys(prefix + "turns", prefix + "meta")


def incarnation_key(run: str) -> str:
    """The key that all runs of this run's name share; see the table above.

    >>> incarnation_key("maze"), incarnation_key("maze~2")
    ('ts:{maze}:incarnation', 'ts:{maze}:incarnation')
    """
    return f"ts:{{{_encoded_parts(run)[0]}}}:incarnation"


@functools.lru_cache(maxsize=1024)
def _encoded_parts(run: str) -> tuple[str, str]:
    """The name inside the braces of a key, and what follows them."""
    name, tilde, number = encode_run(run).partition("~")
    return name, tilde + number


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
    """
    group, sample, attempt = text.split("/")
    return TrajectoryKey(decode_name(group), int(sample), int(attempt))


def readable_name(trajectory_id: str) -> str:
    """A trajectory's id as people read it.

    >>> readable_name("task-7%231/0/0")
    'task-7#1/0/0'
    """
    group, separator, rest = trajectory_id.partition("/")
    return f"{decode_name(group)}{separator}{rest}"


def run_of(key: str) -> RunId:
    """The (plain) id of the run that a key is of.

    >>> run_of("ts:{a%2Fb}:ledger"), run_of("ts:{a/g/0/0}~2:meta")
    ('a/b', 'a~2')
    """
    match = _KEY.fullmatch(key)
    if match is None:
        raise ValueError(f"{key!r} is the key of no run")
    return RunId(decode_name(match["name"]) + (match["number"] or ""))


def declared_type(key: str) -> str | None:
    """The Redis type that a key of this name must have; None if no such key is declared.

    >>> declared_type("ts:{a}~2:ledger"), declared_type("ts:{a/g/0/0}:meta"), declared_type("a")
    ('hash', 'hash', None)
    """
    if key in _GLOBAL_TYPES:
        return _GLOBAL_TYPES[key]
    match = _KEY.fullmatch(key)
    if match is None:
        return None
    part = match["part"]
    if match["trajectory"]:
        return _TRAJECTORY_TYPES.get(part)
    if part == "incarnation":
        return "string"
    if part not in RunKeys._fields:
        return None
    return "stream" if part in _STREAMS else "zset" if part in _SORTED_SETS else "hash"
