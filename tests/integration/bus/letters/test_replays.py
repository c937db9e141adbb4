"""Dead letters that are written once more: once, whoever does it, and however often."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading

import pytest

from turnstream.errors import ConflictError, CorruptRecordError, FencedError
from turnstream.store.scripts import Script, run_command
from turnstream.types import TrajectoryKey, TrajectoryState
from turnstream_server.bus.letters import read_letters
from turnstream_server.bus.replays import replay_letters

pytestmark = pytest.mark.redis


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
    before, again = office.seals()
    assert again.payload_crcs == before.payload_crcs
    assert again.anchors == before.anchors != ()


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
