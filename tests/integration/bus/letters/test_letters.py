"""Dead letters: listed, opened, mended, ended."""

from __future__ import annotations

import json

import pytest

from turnstream.errors import ConflictError, CorruptRecordError, InvalidTurnError
from turnstream.store.connection import connect_async
from turnstream.testing import ids
from turnstream.types import TrajectoryKey, TrajectoryState
from turnstream_server.bus.budget import read_budget
from turnstream_server.bus.discards import discard_oldest
from turnstream_server.bus.fixes import raw_bytes, raw_records, read_fix
from turnstream_server.bus.histories import read_history
from turnstream_server.bus.letters import (
    LetterNotFoundError,
    discard_event,
    discard_letter,
    open_event,
    open_letter,
    read_letters,
)
from turnstream_server.bus.replays import replay_letters

pytestmark = pytest.mark.redis


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
