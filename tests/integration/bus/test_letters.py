"""Dead letters: listed, opened, mended, replayed once, ended."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from turnstream.errors import ConflictError, CorruptRecordError, FencedError, InvalidTurnError
from turnstream.generator import Publisher
from turnstream.records.events import decode_event
from turnstream.store import keys
from turnstream.store.connection import connect_async
from turnstream.store.scripts import Script, run_command
from turnstream.testing import ids
from turnstream.types import (
    SealedTrajectory,
    TrajectoryDied,
    TrajectoryKey,
    TrajectoryState,
)
from turnstream_server.bus.budget import read_budget
from turnstream_server.bus.discards import discard_oldest
from turnstream_server.bus.fixes import raw_bytes, raw_records, read_fix, to_json
from turnstream_server.bus.histories import read_history
from turnstream_server.bus.leadership import acquire_leadership
from turnstream_server.bus.ledger import read_ledger
from turnstream_server.bus.letters import (
    LetterNotFoundError,
    discard_event,
    discard_letter,
    open_event,
    open_letter,
    read_letters,
)
from turnstream_server.bus.replays import replay_letters
from turnstream_server.bus.trajectories import keep_event, mark_dead

pytestmark = pytest.mark.redis


class Office:
    """A run with dead letters, and what is done with them."""

    def __init__(self, url: str, client: redis.Redis, run: str) -> None:
        self.url = url
        self.client = client
        self.run = run
        self.names = keys.run_keys(run)
        self._epoch = 0

    def publish(self, group_id: str, sample: int, *, num_samples: int = 3) -> None:
        """A sample of two turns."""
        with Publisher(self.url, self.run, writer="generator") as publisher:
            writer = publisher.trajectory(
                group_id, sample, num_samples=num_samples, prompt_uid="uid"
            )
            writer.append(ids("ab"), ids("CD"), logprobs=[-0.5, -0.25], version=1)
            writer.append(ids("abCDe"), ids("F"), logprobs=[-1.0], version=1)
            writer.seal(float(sample), tags={"split": "a"})

    def damage(self, trajectory_id: str, *, at: int = -9, bits: int = 1) -> None:
        """Flip bits of the first turn."""
        stream = keys.trajectory_keys(self.run, trajectory_id).turns
        entries: Any = self.client.xrange(stream)
        records = [bytearray(fields[b"r"]) for _, fields in entries]
        records[0][at] ^= bits
        self.client.delete(stream)
        for number, record in enumerate(records, start=1):
            self.client.xadd(stream, {"r": bytes(record)}, id=f"0-{number}")

    async def kill(self, *trajectory_ids: str, reason: str = "its bytes are damaged") -> None:
        """Set trajectories aside, as a leader does."""
        async with connect_async(self.url) as client:
            epoch = await self._lead(client)
            for name in trajectory_ids:
                died = TrajectoryDied(key=keys.parse_trajectory_id(name), reason=reason)
                await mark_dead(client, self.run, died, leader_epoch=epoch)

    async def keep_event(self, event_id: str, record: bytes) -> bool:
        """Keep an event that nobody can read, as a leader does."""
        async with connect_async(self.url) as client:
            epoch = await self._lead(client)
            return await keep_event(
                client,
                self.run,
                event_id=event_id,
                record=record,
                reason="no event",
                leader_epoch=epoch,
            )

    async def bury(self, name: str, *, at: int = -9, bits: int = 1) -> None:
        """A trajectory that was published, damaged and found."""
        key = keys.parse_trajectory_id(name)
        self.publish(key.group_id, key.sample)
        self.damage(name, at=at, bits=bits)
        await self.kill(name)

    def mend(self, name: str, folder: Path) -> Any:
        """What can be read of a letter, as it is mended by hand."""
        content = open_letter(self.client, self.run, name)
        path = folder / "fix.json"
        path.write_text(to_json(content))
        return read_fix(path, sample=0, seal=content.seal, declared=())

    def decide(self, group_id: str, state: str) -> None:
        """What a leader made of a group."""
        entry: Any = self.client.hget(self.names.groups, group_id)
        samples = entry.decode().partition(":")[0]
        self.client.hset(self.names.groups, group_id, f"{samples}:{state}")

    def entry(self, name: str) -> str:
        """What the ledger says."""
        entry: Any = self.client.hget(self.names.ledger, name)
        return (entry or b"").decode()

    def seals(self) -> list[SealedTrajectory]:
        """Those that the run was told of."""
        entries: Any = self.client.xrange(self.names.events)
        events = [decode_event(fields[b"r"]) for _, fields in entries]
        return [each for each in events if isinstance(each, SealedTrajectory)]

    def check(self) -> None:
        """The states must add up."""
        read_ledger(self.client, self.run).check()

    async def _lead(self, client: Any) -> int:
        if not self._epoch:
            leadership = await acquire_leadership(client, self.run, owner="test", lease_s=60)
            self._epoch = leadership.epoch
        return self._epoch


@pytest.fixture
def office(server: Any, client: redis.Redis, new_run: Callable[..., str]) -> Office:
    return Office(server.url, client, new_run(client))


async def test_lists_what_was_set_aside_with_its_reason_its_size_and_its_group(office):
    await office.bury("g/1/0")
    await office.bury("h/0/0")
    office.decide("h", "planned")

    found = read_letters(office.client, office.run)

    one, other = found.letters
    assert (one.trajectory_id, one.group_state) == ("g/1/0", "open")
    assert (other.trajectory_id, other.group_state) == ("h/0/0", "planned")
    assert one.reason == "its bytes are damaged"
    assert one.num_bytes + other.num_bytes == found.num_bytes > 200
    assert found.max_bytes == 256 * 1024 * 1024
    office.check()


async def test_shows_each_turn_and_the_byte_that_is_wrong(office):
    await office.bury("g/1/0", at=-9, bits=4)

    content = open_letter(office.client, office.run, "g/1/0")

    first, second = content.turns
    (flaw,) = first.flaws
    assert (flaw.start, flaw.stop) == (len(first.record) - 9, len(first.record) - 8)
    assert first.sealed_crc == first.stored_crc != first.found_crc
    assert second.flaws == ()
    assert content.seal is not None
    assert content.seal.key == TrajectoryKey("g", 1)


async def test_a_letter_that_is_none_is_named(office):
    office.publish("g", 1)

    with pytest.raises(LetterNotFoundError, match="no dead letter 'g/1/0'"):
        open_letter(office.client, office.run, "g/1/0")


async def test_a_damaged_letter_is_not_replayed_as_it_is(office):
    await office.bury("g/1/0")

    with pytest.raises(CorruptRecordError, match=r"turn 0, bytes .*give a fix"):
        replay_letters(office.url, office.run, {"g/1/0": None})

    assert office.entry("g/1/1") == ""


async def test_a_mended_letter_becomes_another_attempt_while_its_group_is_undecided(
    office, tmp_path
):
    await office.bury("g/1/0")

    fixed = office.mend("g/1/0", tmp_path)
    (replayed,) = replay_letters(office.url, office.run, {"g/1/0": fixed})

    assert (replayed.trajectory_id, replayed.state) == ("g/1/1", TrajectoryState.SEALED)
    seal = office.seals()[-1]
    assert (seal.key, seal.reward, seal.tags) == (TrajectoryKey("g", 1, 1), 1.0, {"split": "a"})
    assert seal.payload_crcs == office.seals()[0].payload_crcs  # as it was before the damage
    assert office.entry("g/1/0").startswith("dead:")
    assert read_letters(office.client, office.run).letters[0].replayed_as == "g/1/1"
    office.check()


async def test_a_letter_that_is_sound_after_all_is_replayed_as_it_is(office):
    office.publish("g", 1)
    await office.kill("g/1/0", reason="an older release could not read it")

    (replayed,) = replay_letters(office.url, office.run, {"g/1/0": None})

    assert replayed.state is TrajectoryState.SEALED


async def test_however_often_a_letter_is_replayed_it_is_sealed_once(office, tmp_path):
    await office.bury("g/1/0")
    fixed = office.mend("g/1/0", tmp_path)

    outcomes = [replay_letters(office.url, office.run, {"g/1/0": fixed}) for _ in range(3)]

    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert len(office.seals()) == 2
    with pytest.raises(ConflictError, match="replayed as g/1/1, which is sealed"):
        replay_letters(office.url, office.run, {"g/1/0": fixed}, as_group="new")
    office.check()


async def test_replays_at_the_same_time_seal_a_letter_once(office, tmp_path):
    await office.bury("g/1/0")
    fixed = office.mend("g/1/0", tmp_path)
    failures: list[Exception] = []

    def replay(as_group: str | None) -> None:
        try:
            replay_letters(office.url, office.run, {"g/1/0": fixed}, as_group=as_group)
        except (ConflictError, FencedError) as error:
            failures.append(error)

    threads = [
        threading.Thread(target=replay, args=(name,), daemon=True)
        for name in (None, "x", "y", None, "x", "y")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)

    assert len(failures) < len(threads)
    assert len(office.seals()) == 2
    office.check()


async def test_a_letter_whose_group_was_decided_without_it_needs_a_new_group(office, tmp_path):
    await office.bury("g/1/0")
    fixed = office.mend("g/1/0", tmp_path)
    office.decide("g", "planned")

    with pytest.raises(ConflictError, match=r"already planned.*name a new group"):
        replay_letters(office.url, office.run, {"g/1/0": fixed})
    assert office.entry("g/1/1") == ""

    (replayed,) = replay_letters(office.url, office.run, {"g/1/0": fixed}, as_group="new")
    assert (replayed.trajectory_id, replayed.state) == ("new/0/0", TrajectoryState.SEALED)
    office.check()


async def test_letters_of_one_group_may_share_a_new_group(office, tmp_path):
    for name in ("g/0/0", "g/2/0"):
        await office.bury(name)
    office.decide("g", "incomplete")
    fixed = {name: office.mend(name, tmp_path) for name in ("g/0/0", "g/2/0")}

    replayed = replay_letters(office.url, office.run, fixed, as_group="new")

    assert [each.trajectory_id for each in replayed] == ["new/0/0", "new/1/0"]
    assert [each.reward for each in office.seals()[-2:]] == [0.0, 2.0]
    assert office.client.hget(office.names.groups, "new") == b"2:open"
    office.check()


async def test_a_replay_that_was_left_out_may_be_tried_again_and_no_other(office, tmp_path):
    await office.bury("g/1/0")
    fixed = office.mend("g/1/0", tmp_path)
    replay_letters(office.url, office.run, {"g/1/0": fixed})

    for state in ("planned:1", "filtered:all equal", "expired:old", "dead:again"):
        office.client.hset(office.names.ledger, "g/1/1", state)
        with pytest.raises(ConflictError, match="replayed as g/1/1"):
            replay_letters(office.url, office.run, {"g/1/0": fixed}, as_group="new")
    office.client.hset(office.names.ledger, "g/1/1", "surplus:its group was decided")

    (replayed,) = replay_letters(office.url, office.run, {"g/1/0": fixed}, as_group="newer")
    assert replayed.trajectory_id == "newer/0/0"


async def test_a_letter_becomes_only_what_is_open_for_its_replay(office):
    await office.bury("g/1/0")
    claim = Script("claim_replay", "turnstream_server.bus")
    where = (office.names.ledger, office.names.letters)

    for target in ("g/1/0", "g/9/0"):
        with pytest.raises(ConflictError, match="not open for the replay"):
            run_command(office.client, claim(where, "replay-1", "g/1/0", target, ""))
    office.client.hset(office.names.ledger, "g/1/1", "open:1:generator")
    with pytest.raises(ConflictError, match="not open for the replay"):
        run_command(office.client, claim(where, "replay-1", "g/1/0", "g/1/1", ""))

    assert read_letters(office.client, office.run).letters[0].replayed_as == ""
    office.client.hdel(office.names.ledger, "g/1/1")


async def test_a_fix_goes_through_the_door(office, tmp_path):
    await office.bury("g/1/0")
    path = tmp_path / "fix.json"
    turn = {"prompt_ids": [1, 2], "response_ids": [3], "logprobs": [float("nan")]}
    path.write_text(json.dumps({"turns": [turn]}))

    with pytest.raises(InvalidTurnError, match=r"turns\[0\].logprobs: nan at position 0"):
        read_fix(path, sample=1, seal=None, declared=())


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("{", "no JSON"),
        ('{"turns": 3}', "turns: is no list"),
        ('{"turns": [], "rewrad": 1}', "rewrad"),
        ('{"turns": [{"prompt_ids": [1], "response_ids": [2], "lobprobs": []}]}', "lobprobs"),
        ('{"turns": [{"prompt_ids": [1], "response_ids": [2], "version_runs": [3]}]}', "runs"),
    ],
)
def test_a_fix_that_says_nonsense_is_refused_by_name(tmp_path, text, field):
    path = tmp_path / "fix.json"
    path.write_text(text)

    with pytest.raises(InvalidTurnError, match=field):
        read_fix(path, sample=0, seal=None, declared=())


async def test_raw_records_come_out_and_go_in_as_they_are(office, tmp_path):
    office.publish("g", 1)
    await office.kill("g/1/0")
    content = open_letter(office.client, office.run, "g/1/0")
    path = tmp_path / "letter.raw"

    path.write_bytes(raw_bytes(content.records))
    fixed = read_fix(path, sample=1, seal=None, declared=())

    assert raw_records(path.read_bytes()) == content.records
    assert len(fixed.turns) == 2
    assert fixed.turns[1].prompt_ids.tolist() == ids("abCDe").tolist()
    assert fixed.reward == 1.0
    with pytest.raises(CorruptRecordError, match="a raw file of"):
        raw_records(path.read_bytes()[:-1])


async def test_what_is_discarded_keeps_its_reason_and_nothing_else(office, tmp_path):
    await office.bury("g/1/0")
    fixed = office.mend("g/1/0", tmp_path)

    held = read_budget(office.client, office.run).held.stored

    assert discard_letter(office.client, office.run, "g/1/0")
    assert not discard_letter(office.client, office.run, "g/1/0")

    history = read_history(office.client, office.run, "g/1/0")
    assert history.state is TrajectoryState.DEAD
    assert history.reason == "discarded: its bytes are damaged"
    assert not history.payload_is_kept
    assert 0 == read_budget(office.client, office.run).held.stored < held
    found = read_letters(office.client, office.run)
    assert (found.letters, found.num_discarded, found.num_bytes) == ((), 1, 0)
    with pytest.raises(LetterNotFoundError):
        replay_letters(office.url, office.run, {"g/1/0": fixed})
    office.check()


async def test_only_what_is_dead_is_discarded(office):
    office.publish("g", 1)

    with pytest.raises(ConflictError, match="not dead"):
        discard_letter(office.client, office.run, "g/1/0")

    assert read_history(office.client, office.run, "g/1/0").payload_is_kept


async def test_the_oldest_letters_make_room(office):
    for sample in range(3):
        await office.bury(f"g/{sample}/0")
    kept = read_letters(office.client, office.run)

    async with connect_async(office.url) as client:
        num_discarded = await discard_oldest(
            client, office.run, max_bytes=kept.letters[-1].num_bytes
        )

    assert num_discarded == 2
    (left,) = read_letters(office.client, office.run).letters
    assert left.trajectory_id == "g/2/0"
    assert office.entry("g/0/0") == "dead:discarded for room: its bytes are damaged"
    office.check()


async def test_an_event_that_nobody_can_read_is_kept_once(office):
    assert await office.keep_event("17-1", b"junk")
    assert not await office.keep_event("17-1", b"junk")

    event = open_event(office.client, office.run, "17-1")
    assert (event.record, event.reason, event.since_ms) == (b"junk", "no event", 17)
    assert discard_event(office.client, office.run, "17-1")
    assert not discard_event(office.client, office.run, "17-1")
    assert not await office.keep_event("17-1", b"junk")
    found = read_letters(office.client, office.run)
    assert (found.events, found.num_discarded_events, found.num_bytes) == ((), 1, 0)


REPLAY = """
import sys
from pathlib import Path
from turnstream.store.connection import connect
from turnstream_server import failpoints
from turnstream_server.bus.fixes import read_fix
from turnstream_server.bus.letters import open_letter
from turnstream_server.bus.replays import replay_letters
url, run, name, path, group, failpoint = sys.argv[1:]
failpoints.arm(failpoint)
with connect(url) as client:
    seal = open_letter(client, run, name).seal
fixed = read_fix(Path(path), sample=0, seal=seal, declared=())
replay_letters(url, run, {name: fixed}, as_group=group or None)
"""


@pytest.mark.parametrize("group", ["", "new"])
@pytest.mark.parametrize(
    "failpoint",
    ["replay.after_open", "replay.after_claim", "replay.after_append", "replay.after_seal"],
)
async def test_a_replay_that_was_killed_goes_on_and_seals_once(office, tmp_path, failpoint, group):
    await office.bury("g/1/0")
    fixed = office.mend("g/1/0", tmp_path)

    words = [office.url, office.run, "g/1/0", tmp_path / "fix.json", group, failpoint]
    command = [sys.executable, "-c", REPLAY, *map(str, words)]
    killed = await asyncio.to_thread(subprocess.run, command, check=False)
    (replayed,) = replay_letters(office.url, office.run, {"g/1/0": fixed}, as_group=group or None)

    assert killed.returncode == -signal.SIGKILL
    assert replayed.state is TrajectoryState.SEALED
    assert replayed.trajectory_id == ("new/0/0" if group else "g/1/1")
    assert len(office.seals()) == 2
    office.check()
