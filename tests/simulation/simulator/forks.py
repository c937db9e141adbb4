"""A run that is forked in its storm, and the fork, which lives when its origin has ended.

Names are those of the origin again, and so are the names of processes: nothing of one run may be
taken for that of the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import redis

from simulator.asking import carried_out, on_the_spot
from simulator.clients import AsyncClient
from simulator.fates import Fate
from simulator.history import History
from simulator.life import Life, patiently
from simulator.processes import Process
from simulator.seen import Seen, Violations
from simulator.values import Stream, ZSet
from simulator.world import World
from turnstream.batching.merge.plan import Manifest
from turnstream.errors import ConflictError, ReleasedError, RunNotFoundError, StoreBehindError
from turnstream.records.compact import compact_batch, decode_batch
from turnstream.store.configs import read_config
from turnstream.types import RecoveryToken
from turnstream_server.bus.forks import fork_run
from turnstream_server.bus.frontier import Origin, read_frontier

FORK = "fork"
_LONGEST_REST_S = 0.05
_WAITS = 0.998
"""How often, where there is no checkpoint yet."""
_LONGEST_STORM_S = 1.0
_NUM_TOKENS = 3
"""Of the newest checkpoints, one is chosen."""
_FROM_THE_START = RecoveryToken(lineage="main", step=0, chain_hash="")
_EMPTY = ("ledger", "groups", "leases", "members", "held", "events", "plan", "refills", "over")


async def forker(process: Process, life: Life) -> None:
    """Forks the run from a checkpoint, once; seldom from its beginning."""
    client, rng = AsyncClient(process), process.world.rng
    while not life.is_ended:
        await asyncio.sleep(rng.random() * _LONGEST_REST_S)
        tokens = life.history.on_disk[-_NUM_TOKENS:]
        if not tokens and rng.random() < _WAITS:
            continue
        token = rng.choice(tokens or [_FROM_THE_START])
        try:
            await patiently(
                lambda token=token: carried_out(
                    client, lambda c: fork_run(c, life.run, FORK, token)
                )
            )
        except (ConflictError, ReleasedError, StoreBehindError) as error:
            life.history.refused(error)
            there = _origin(on_the_spot(process.world))
            if there is not None and there.step == token.step:
                process.world.blame(f"who asks for the fork that is there is told: {error}")
        else:
            life.forked = content(process.world, FORK)
            return


def life_of_fork(world: World, seen: Seen) -> Life | None:
    """The life of the fork of a run that has ended; None where there is none."""
    life, client = seen.life, on_the_spot(world)
    origin = _origin(client)
    if origin is None and life.forked and "cut" not in world.counts:
        world.blame("the fork is gone")
    committed = read_frontier(client, life.run).committed
    known = [token for token in life.history.checkpoints if token.step <= committed]
    if origin is None and known:  # nobody came to it
        origin = fork_run(client, life.run, FORK, known[-1])
    if origin is None:
        return None
    if life.forked not in ({}, content(world, FORK)) and "cut" not in world.counts:
        world.blame("the fork has changed while its origin went on")
    lineage = f"{life.run}@{origin.step}"
    token = RecoveryToken(lineage=lineage, step=origin.step, chain_hash=origin.manifest_hash)
    fork_run(client, life.run, FORK, token)  # goes on where somebody was killed
    inherited = _chain(seen, origin)
    return replace(
        life,
        run=FORK,
        config=read_config(client, FORK)[1],
        history=_history(life.history, inherited, token),
        inherited=inherited,
        is_closing=False,
        is_ended=False,
        is_closed_for_good=False,
        num_begun=0,
        num_evals=0,
        num_prompts=0,
        rotten=set(),
        publishers=[],
    )


def _origin(client: redis.Redis) -> Origin | None:
    """Of the fork; None where there is none."""
    try:
        return read_frontier(client, FORK).origin
    except RunNotFoundError:
        return None


def fate_of_fork(drawn: Fate) -> Fate:
    """A shorter storm, in which nobody forks the fork."""
    return replace(drawn, storm_s=min(drawn.storm_s, _LONGEST_STORM_S), has_forker=False)


def fork_holds(seen: Seen, origin: Life) -> Violations:
    """A run that was forked has what was trained up to the checkpoint, and nothing else."""
    manifests = seen.manifests
    total = sum(each.num_trajectories for each, _ in manifests.values())
    last, own_hash = manifests[max(manifests)] if manifests else (None, "")
    frontier, step = seen.hash("frontier"), max(manifests, default=0)
    for name in (b"planned", b"stepped", b"committed", b"released", b"folded"):
        if int(frontier[name]) != step:
            yield f"the fork behind step {step} has {frontier[name]!r} as {name.decode()}"
    if seen.hash("counts") != {
        b"accepted": b"%d" % total,
        b"planned": b"%d" % total,
        b"open": b"0",
    }:
        yield f"the fork has {seen.hash('counts')}, and {total} were trained"
    batches = {b"%d" % step: f"{total}:{own_hash}".encode()} if step else {}
    if seen.hash("batches") != batches:
        yield f"the fork has the batches {seen.hash('batches')}, and not {batches}"
    begins = seen.begins_with
    if begins is None or begins.next_row_id != (last.end_row_id if last else 0):
        yield f"the fork begins with {begins}"
    past = {step: decode_batch(record) for step, record in seen.hash("past").items()}
    trained = {
        b"%d" % number: compact_batch(manifest, manifest_hash=each_hash)
        for number, (manifest, each_hash) in manifests.items()
    }
    if past != trained or b"inherited" not in frontier:
        yield f"the fork has the past {past}, and {trained} was trained"
    if seen.config(1) not in origin.ever_in_force:
        yield "the fork has a config that its origin never had"
    if left := [name for name in _EMPTY if seen.value(name) is not None]:
        yield f"the fork begins with {left}"


def content(world: World, run: str) -> dict[bytes, Any]:
    """All that is stored of a run and does not pass by itself."""
    of_run = f"ts:{{{run}}}:".encode(), f"ts:{{{run}/".encode()
    store = world.store
    return {
        name: _plain(value)
        for name, value in store.values.items()
        if name.startswith(of_run) and name not in store.expires
    }


def _plain(value: Any) -> Any:
    if isinstance(value, ZSet):
        return dict(value.scores)
    if isinstance(value, Stream):
        return list(value.ids), [[*fields] for fields in value.entries]
    return value if isinstance(value, bytes) else value.copy()


def _chain(seen: Seen, origin: Origin) -> tuple[tuple[Manifest, str], ...]:
    """The plans up to the one that a fork goes on from."""
    found: list[tuple[Manifest, str]] = []
    own_hash = origin.manifest_hash
    while own_hash:
        manifest = seen.by_hash[own_hash]
        found.append((manifest, own_hash))
        own_hash = manifest.previous_hash
    return tuple(reversed(found))


def _history(
    before: History, inherited: Sequence[tuple[Manifest, str]], token: RecoveryToken
) -> History:
    """What is known of a fork when it begins."""
    trained = {manifest.step: own_hash for manifest, own_hash in inherited}
    return History(
        trained=dict(trained),
        ever_trained=dict(trained),
        planned=dict(trained),
        all_trained={*trained.items()},
        checkpoints=[token] if token.step else [],
        on_disk=[token],
        releasable=token.step,
        newest_said=token.step,
        newest_version=before.newest_version,
        num_sessions=before.num_sessions,
    )
