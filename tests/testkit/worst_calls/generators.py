"""The most expensive calls of generators, and of those who operate a run."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

from testkit.runs.scripts import script
from testkit.worst_calls.store import NAME, Build, LimitStore, ids_of, worst
from turnstream.batching.config.values import LARGEST_GROUP
from turnstream.generator.encode.checks import MAX_RECORD_BYTES
from turnstream.generator.outbox.writes import MAX_ROUND_BYTES, MAX_ROUND_TURNS
from turnstream.records.configs import encode_config
from turnstream.records.events import MAX_EVENT_BYTES
from turnstream.store.client.scripts import Command
from turnstream.store.run import tasks
from turnstream.store.run.configs import read_config
from turnstream.store.run.groups import (
    LEAST_NAME_BYTES,
    MAX_HEARTBEATS,
    MAX_LAPSED,
    heartbeat_command,
)
from turnstream.store.run.tasks import (
    MAX_PAYLOAD_BYTES,
    MOST_PASSED,
    Prompt,
    next_task_command,
)
from turnstream.store.waits.read_waits import waits_command
from turnstream_server.batcher.serving.requests import MAX_DP_WORLD_SIZE

WORST: Final[dict[str, Build]] = {}

CONSTANT: Final = {
    "abandon": "single fields of one trajectory, and one event",
    "adopt": "single fields of one trajectory",
    "create_run": "single fields of a new run",
    "note_conflict": "two fields",
    "read_config": "one config",
    "register_batcher": "one address; those of ended batchers are removed by the next call",
    "set_closed": "single fields, and one event",
    "set_paused": "one field",
}

GROUP: Final = "g" * (LEAST_NAME_BYTES - 4) + "%231"
"""The longest name that a group of LARGEST_GROUP samples may have."""

LARGE: Final = ids_of(LARGEST_GROUP, group=GROUP)
HELD: Final = ids_of(MAX_HEARTBEATS)
LONGEST_GAP: Final = 9_999
BUCKET: Final = b"f" * 20_000
"""Fingerprints of `over` after ten million groups. No setting limits their number."""


def opened(store: LimitStore, ids: Sequence[str], *, writer: str = NAME) -> None:
    """Write open trajectories, with leases that have ended and reservations."""
    store.fill(store.keys.ledger, ((each, f"open:1:{writer}") for each in ids))
    store.score(store.keys.leases, ((each, 1) for each in ids))
    store.fill(store.keys.payload_bytes, ((each, "r70000") for each in ids))


@worst(WORST)
def open_group(store: LimitStore) -> list[Command]:
    """A new group of the largest size, of a prompt far ahead; again, and for another writer."""
    store = store.configured(group_deadline_s=9)
    number = str(LONGEST_GAP + 1)
    store.fill(store.keys.prompts, [("added", number), (number, f"9/9:{GROUP[:-4]}:")])
    size = LARGEST_GROUP
    new = store.commands.open_group(
        *LARGE, group=GROUP, num_samples=f"{size}#{number}", writer=NAME
    )
    other = store.commands.open_group(*LARGE, group=GROUP, num_samples=size, writer="other")
    return [new, new, other]


@worst(WORST)
def read_group(store: LimitStore) -> list[Command]:
    """An open group of the largest size."""
    store.fill(store.keys.groups, [(GROUP, f"{LARGEST_GROUP}:open")])
    opened(store, LARGE)
    return [
        store.script("read_group", "frontier groups ledger finished_groups", GROUP, LARGEST_GROUP)
    ]


@worst(WORST)
def next_task(store: LimitStore) -> list[Command]:
    """A prompt with the largest payload and many visits; refills that another caller takes."""
    prompt = Prompt(prompt_uid=NAME[:490], payload=b"p" * MAX_PAYLOAD_BYTES, num_samples=1)
    tasks.add_prompts(store.client, store.run, [prompt])
    store.fill(store.keys.finished_groups, ((f"{number:03x}", BUCKET) for number in range(4096)))
    visits = (f"{prompt.prompt_uid}%23{1 << power}" for power in range(20))
    store.fill(store.keys.groups, ((each, "1:evaluated") for each in visits))
    task = next_task_command(store.run, num_passed=MOST_PASSED)
    refilled = store.configured()
    groups = [f"{number:03}{NAME}" for number in range(32)]
    tasks.add_prompts(store.client, refilled.run, [prompt])
    refilled.fill(refilled.keys.groups, ((each, "1:open") for each in groups))
    refilled.fill(refilled.keys.members, ((each, f"1:1:1:{NAME}") for each in groups))
    refilled.fill(refilled.keys.tasks, ((each, "1") for each in groups))
    refilled.score(refilled.keys.refills, ((f"{each}/0/1", 1) for each in groups))
    return [task, next_task_command(refilled.run, num_passed=MOST_PASSED)]


@worst(WORST)
def list_lapsed(store: LimitStore) -> list[Command]:
    """Leases that have ended, and leases from before the clock was set back."""
    opened(store, ids_of(2 * MAX_LAPSED))
    store.score(store.keys.leases, ((each, 9e15) for each in HELD))
    return [store.script("list_lapsed", "ledger leases config", "", MAX_LAPSED)]


@worst(WORST)
def heartbeat(store: LimitStore) -> list[Command]:
    """The most trajectories of one call, held or not."""
    opened(store, HELD)
    held = [(each, 1) for each in HELD]
    return [heartbeat_command(store.run, held, writer=each) for each in (NAME, "other")]


@worst(WORST)
def reserve(store: LimitStore) -> list[Command]:
    """The most trajectories of one call."""
    opened(store, HELD)
    words = [word for each in HELD for word in (each, f"1:{NAME}", 10**9)]
    return [store.script("reserve", "ledger payload_bytes budget", *words)]


@worst(WORST)
def add_prompts(store: LimitStore) -> list[Command]:
    """A full page of prompts, twice, and one of the largest size."""
    page = [f"1/1:{NAME}:" + "p" * 3_000] * 256
    where = "frontier prompts wake"
    first = store.script("add_prompts", where, 1, 1, *page)
    largest = b"1/1:u:" + b"p" * MAX_PAYLOAD_BYTES
    return [first, first, store.script("add_prompts", where, 257, 1, largest)]


@worst(WORST)
def revise_config(store: LimitStore) -> list[Command]:
    """A config with the longest texts, after many others."""
    _, config = read_config(store.client, store.run)
    text = encode_config(config) + " " * 100_000
    store.fill(store.keys.config, ((f"from:{number}", 1) for number in range(2, 10_000)))
    return [store.script("revise_config", "frontier config wake", text, 2, 1)]


@worst(WORST)
def post_reward(store: LimitStore) -> list[Command]:
    """The longest record, and a group whose fingerprint is looked for in a full bucket."""
    opened(store, HELD)
    store.fill(store.keys.ledger, [(HELD[0], "awaiting_reward:1")])
    digest = hashlib.sha1(b"over", usedforsecurity=False)
    bucket = [(digest.hexdigest()[:3], BUCKET + digest.digest()[:8])]
    store.fill(store.keys.finished_groups, bucket)
    record = b"r" * MAX_EVENT_BYTES
    where = "ledger counts rewards deadlines events conflicts frontier groups finished_groups"
    return [
        store.script("post_reward", where, HELD[0], "crc", record),
        store.script("post_reward", where, "over/0/0", "crc", record),
    ]


@worst(WORST)
def read_waits(store: LimitStore) -> list[Command]:
    """The most ranks, leases and refills, of a trainer that is awaited."""
    ranks = range(MAX_DP_WORLD_SIZE)
    for kind in ("", "stepped:", "committed:"):
        store.fill(store.keys.ranks, ((f"{kind}{rank}", "100000:" + "f" * 64) for rank in ranks))
    store.fill(store.keys.frontier, [("planned", "1"), ("rollbacks", NAME)])
    opened(store, ids_of(1_024))
    store.score(store.keys.refills, ((each, 1) for each in ids_of(1_024)))
    return [waits_command(store.run)]


@worst(WORST)
def append(store: LimitStore) -> list[Command]:
    """A full round of small turns, and the largest turn with the longest seal; both repeated."""
    small = [b"t" * (MAX_ROUND_BYTES // MAX_ROUND_TURNS)] * MAX_ROUND_TURNS
    first = store.commands.append(*small, trajectory_id=HELD[0], lease=f"1:{NAME}")
    largest = (b"t" * MAX_RECORD_BYTES, b"s" * MAX_EVENT_BYTES)
    large = store.commands.append(*largest, seals=True, trajectory_id=HELD[1], lease=f"1:{NAME}")
    return [first, first, large, large]


@worst(WORST)
def post_sealed(store: LimitStore) -> list[Command]:
    """The most seals of one call that wait for rewards, and the longest seal."""
    store = store.configured(reward_deadline_s=9, deadline_policy="drop")
    opened(store, HELD)
    groups = [f"{number:03}{NAME}" for number in range(len(HELD))]
    ids = [f"{each}/0/0" for each in groups]
    opened(store, ids)
    store.fill(store.keys.groups, ((each, "1:open") for each in [NAME, *groups]))
    record, lease = b"s" * (MAX_ROUND_BYTES // len(ids)), f"1:awaits/100:{NAME}"
    words = [word for each in ids for word in (each, lease, record)]
    names = store.keys.of_post_sealed
    longest = (HELD[0], lease, b"s" * MAX_EVENT_BYTES)
    return [
        script("post_sealed")(names, *words),
        script("post_sealed")(names, *words),
        script("post_sealed")(names, *longest),
    ]
