from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from testkit import assert_same, group, trajectory, turn
from testkit.strategies import declared_columns, forests, trees, with_extras
from turnstream.batching.merge.merging import anchor_hash, store_turns
from turnstream.errors import ConflictError, InvalidTurnError
from turnstream.generator.api.work import adopted_turns
from turnstream.generator.encode import checks, encoder
from turnstream.generator.encode.encoder import TrajectoryDraft, draft_group
from turnstream.records.events import decode_event, encode_event
from turnstream.records.turns import decode_turn, encode_turn
from turnstream.types import (
    DeclaredColumn,
    SealedTrajectory,
    Status,
    TrajectoryKey,
    Turn,
    VersionRun,
)

KEY = TrajectoryKey("g", 0)
NO_FIELDS: dict[str, Any] = {
    **dict.fromkeys(("reward", "reward_components", "sampling", "tags", "metrics")),
    "status": Status.COMPLETED,
}


def draft(*turns: Turn) -> TrajectoryDraft:
    made = TrajectoryDraft(KEY)
    for one in turns:
        made.add(one)
    return made


def seal(made: TrajectoryDraft, epoch: int = 1, **fields: Any) -> SealedTrajectory:
    event = decode_event(made.seal(**{**NO_FIELDS, **fields}).make(epoch))
    assert isinstance(event, SealedTrajectory)
    return event


def resume(
    records: list[bytes], declared: tuple[DeclaredColumn, ...] = (), *, made: Any = None
) -> TrajectoryDraft:
    """Return a draft that continues after these stored turns."""
    resumed = made or TrajectoryDraft(KEY, extra_columns=declared)
    for stored, whole in adopted_turns(records, declared):
        resumed.restore(whole, stored)
    return resumed


def test_only_new_tokens_are_encoded() -> None:
    made = TrajectoryDraft(KEY)

    turns = (turn("ab", "C"), turn("abcd", "E"), turn("abx", "F"))
    records = [made.add(one).record for one in turns]
    first, second, third = map(decode_turn, records)

    assert (first.index, first.parent_turn, first.token_ids.tolist()) == (0, -1, [97, 98, 99])
    assert (second.index, second.parent_turn, second.shared_tokens) == (1, 0, 3)
    assert (third.index, third.parent_turn, third.shared_tokens) == (2, 0, 2)
    assert third.token_ids.tolist() == [ord("x"), ord("f")]
    assert seal(made).num_payload_bytes == sum(map(len, records))
    assert seal(made).payload_crcs == (first.payload_crc, second.payload_crc, third.payload_crc)


def test_turn_and_seal_contain_the_anchor() -> None:
    made = TrajectoryDraft(KEY)

    said, unsaid = (
        decode_turn(made.add(one).record)
        for one in (turn("ab", "C", anchor="room 3"), turn("abc", "D"))
    )

    assert (said.anchor, unsaid.anchor) == (anchor_hash("room 3"), None)
    assert seal(made).anchors == (anchor_hash("room 3"), None)
    assert seal(draft(turn("ab", "C"))).anchors == ()
    same, again, other = (
        TrajectoryDraft(KEY).add(turn("ab", "C", anchor=anchor)).record
        for anchor in ("room 3", b"room 3", "room 4")
    )
    assert same == again
    assert same[-4:] != other[-4:]


def test_the_seal_sums_the_turns_up() -> None:
    made = draft(
        turn("ab", "CD", rewards=0.5, logprobs=-1.0), turn("abcd", "eF", logprobs=-1.0, rewards=1.0)
    )

    sealed = seal(made, reward_components={"b": 1, "a": 2}, status="truncated", tags={"k": "v"})

    assert sealed.key == KEY
    assert [s.num_tokens for s in sealed.turns] == [4, 6]
    assert [s.num_trained_tokens for s in sealed.turns] == [2, 1]
    assert sealed.turn_rewards == (0.5, 1.0)
    assert sealed.reward is None
    assert list(sealed.reward_components.items()) == [("a", 2.0), ("b", 1.0)]
    assert sealed.status is Status.TRUNCATED
    assert sealed.has_logprobs


def test_versions_count_only_where_they_sampled_a_trained_token() -> None:
    runs = (VersionRun(1, 1), VersionRun(5, 1), VersionRun(None, 1), VersionRun(9, 1))
    mixed = checks.checked_turn([1], [2, 3, 4, 5], loss_mask=[0, 1, 1, 0], version_runs=runs)

    assert seal(draft(mixed)).oldest_version == seal(draft(mixed)).newest_version == 5
    both = seal(draft(mixed, turn("ab", "C", version=3)))
    assert (both.oldest_version, both.newest_version) == (3, 5)
    assert seal(draft(turn("ab", "C"))).oldest_version is None
    assert seal(draft(turn("ab", "c", version=3))).oldest_version is None


def test_seal_lists_versions_by_turn_only_if_several_sampled() -> None:
    runs = (VersionRun(5, 2), VersionRun(None, 1), VersionRun(3, 1), VersionRun(5, 1))
    mixed = checks.checked_turn([1], [2, 3, 4, 5, 6], loss_mask=[0, 1, 1, 1, 1], version_runs=runs)
    plain, unknown = turn("ab", "CD", version=7), turn("xy", "Z")

    assert seal(draft(plain, turn("ab", "c", version=9))).turn_versions == ()
    assert seal(draft(unknown)).turn_versions == ()
    assert seal(draft(mixed, plain, turn("k", "l", version=3))).turn_versions == (
        ((None, 1), (3, 1), (5, 2)),
        ((7, 2),),
        (),
    )
    assert seal(draft(plain, unknown)).turn_versions == (((7, 2),), ((None, 1),))


def test_trained_turn_without_log_probabilities_is_reported() -> None:
    with_logprobs = turn("ab", "C", logprobs=-1.0)

    assert seal(draft(with_logprobs, turn("ab", "observed"))).has_logprobs
    assert not seal(draft(with_logprobs, turn("abc", "D"))).has_logprobs


@given(turns=forests(), data=st.data())
def test_seal_is_that_of_a_trajectory_without_the_turns_left_out(
    turns: tuple[Turn, ...], data: st.DataObject
) -> None:
    superseded = data.draw(st.sets(st.integers(0, len(turns) - 1)))
    made = draft(*turns)

    found = seal(made, siblings="mask", superseded=superseded, reward=1.0)

    kept = found.kept_turns
    others = draft(*[turns[number] for number in kept])
    expected = seal(others, reward=1.0)
    fields = ("oldest_version", "newest_version", "has_logprobs")
    for name in fields:
        assert getattr(found, name) == getattr(expected, name)
    for name in ("turn_rewards", "turn_versions"):
        values = getattr(found, name) and [getattr(found, name)[number] for number in kept]
        assert [*values] == [*getattr(expected, name)]
    unused = {*range(len(turns))} - {*kept}
    assert all(not found.turns[n].num_trained_tokens and not found.turn_rewards[n] for n in unused)
    assert found.num_payload_bytes == seal(draft(*turns)).num_payload_bytes
    drafted = made.seal(**{**NO_FIELDS, "siblings": "mask", "superseded": superseded})
    assert drafted.merged_tokens == others.merged_tokens
    assert encode_event(replace(found, reward=None)) == drafted.make(1)
    assert seal(made).turns == tuple(one.shape for one in store_turns(turns))  # unchanged by it


def test_turn_of_a_known_call_is_recognised_also_after_adoption() -> None:
    first, second = (replace(turn(p, "C"), call_id=p) for p in ("ab", "abcd"))
    made = TrajectoryDraft(KEY)
    records = [made.add(first).record, made.add_last(second).record]
    resumed = resume(records)

    for known in (made, resumed):
        assert dict(known.call_ids) == {"ab": 0, "abcd": 1}
        assert known.is_repeated(replace(first, logprobs=None))
        assert known.is_repeated(second)
        assert not known.is_repeated(turn("ab", "C"))
        assert not known.is_repeated(replace(first, call_id="other"))
        for wrong in (turn("ab", "D"), turn("a", "BC"), turn("abC", "")):
            with pytest.raises(ConflictError, match="turn 0 of g/0/0 has the call_id 'ab'"):
                known.is_repeated(replace(wrong, call_id="ab"))
    whole = draft_group(group("g", trajectory(first, second, first))).trajectories[0]
    assert [made.record for made in whole.turns] == records


@pytest.mark.parametrize("call_id", ["", "a" * 65, "naïve", "a\n", b"a", 7])
def test_call_id_is_a_short_printable_text(call_id: Any) -> None:
    with pytest.raises(InvalidTurnError, match=r"call_id: .* is not a text of 1 to 64 printable"):
        checks.checked_turn([1], [2], call_id=call_id)
    assert checks.checked_turn([1], [2], call_id="~ " * 32).call_id == "~ " * 32


def test_siblings_is_one_of_three_words() -> None:
    with pytest.raises(InvalidTurnError, match="siblings: 'drop' is none of 'train', 'mask', 'ref"):
        seal(draft(turn("ab", "C")), siblings="drop")


def test_a_trajectory_without_turns_cannot_be_sealed() -> None:
    with pytest.raises(InvalidTurnError, match="turns: there is none"):
        seal(draft())


def test_a_record_that_is_too_large_is_refused_and_forgotten() -> None:
    image = DeclaredColumn(name="image", per="items", dtype="uint8", shape=(1 << 20,))
    patches = np.zeros((9, 1 << 20), np.uint8)
    made = TrajectoryDraft(KEY, extra_columns=[image])
    whole = replace(turn("ab", "C"), extras={"image": patches})

    with pytest.raises(InvalidTurnError) as refused:
        made.add(whole)

    assert re.search(r"turn: is a record of 94372\d\d bytes, more than 8388608", str(refused.value))
    assert "with 9437184 of extras['image']: append it as several turns" in str(refused.value)
    # The remedy of the message.
    first = made.add(replace(turn("a", ""), extras={"image": patches[:5]}))
    second = made.add(whole)
    assert [len(decode_turn(e.record).extras["image"].values) for e in (first, second)] == [5, 4]
    assert made.merged_tokens == 3


@pytest.mark.parametrize(
    ("turns", "merged"),
    [
        ([turn("ab", "C")], 3),
        ([turn("ab", "C"), turn("abcd", "E")], 5),
        ([turn("ab", "C"), turn("abx", "D")], 3 + 4),
        ([turn("ab", "C"), turn("xy", "D"), turn("abcz", "E"), turn("xydz", "F")], 5 + 5),
    ],
)
def test_merged_tokens_are_those_of_the_rows(turns: list[Turn], merged: int) -> None:
    assert draft(*turns).merged_tokens == merged


def test_the_generator_may_reuse_its_arrays() -> None:
    made = TrajectoryDraft(KEY)
    prompt, response = np.array([1, 2], np.int32), np.array([3], np.int32)
    made.add(checks.checked_turn(prompt, response))
    prompt[:], response[:] = 9, 9

    second = decode_turn(made.add(checks.checked_turn([1, 2, 3, 4], [5])).record)

    assert (second.parent_turn, second.shared_tokens) == (0, 3)


@st.composite
def episodes(draw: st.DrawFn) -> tuple[tuple[Turn, ...], tuple[DeclaredColumn, ...]]:
    """Turns of a trajectory, and what their run declares; half of the runs declare nothing."""
    declared = draw(st.just(()) | declared_columns())
    return draw(with_extras(draw(trees(max_turns=5)), declared, agrees=True)), declared


@given(episode=episodes(), ended=st.booleans())
def test_draft_has_the_records_of_stored_turns(
    episode: tuple[tuple[Turn, ...], tuple[DeclaredColumn, ...]], ended: bool
) -> None:
    # The draft packs the arrays of its turns without the values in between.
    turns, declared = episode
    made = TrajectoryDraft(KEY, extra_columns=declared)
    records = [made.add(one).record for one in turns[: -ended or None]]
    records += [made.add_last(one).record for one in turns[len(records) :]]

    stored = store_turns(turns, extra_columns=declared)

    assert records == [encode_turn(one) for one in stored]
    event = seal(made, epoch=3)
    assert event.turns == tuple(one.shape for one in stored)
    assert event.lease_epoch == 3
    make = made.seal(**{**NO_FIELDS, "reward": 0.0}).make
    for epoch in (2**31, 1):  # a trajectory that is opened again has another epoch
        assert make(epoch) == encode_event(replace(event, lease_epoch=epoch, reward=0.0))


@given(episode=episodes(), num_stored=st.integers(0, 5))
def test_draft_continues_stored_turns_as_its_own(
    episode: tuple[tuple[Turn, ...], tuple[DeclaredColumn, ...]], num_stored: int
) -> None:
    turns, declared = episode
    whole = TrajectoryDraft(KEY, extra_columns=declared)
    records = [whole.add(one).record for one in turns]
    taken = adopted_turns(records[:num_stored], declared)

    resumed = resume(records[:num_stored], declared)
    rest = [resumed.add(one).record for one in turns[num_stored:]]

    prompts = [one.prompt_ids for one in turns[:num_stored]]
    assert_same([each.turn.prompt_ids for each in taken], prompts)
    for each, told in zip(taken, turns, strict=False):
        # Stored weights that equal the mask come back as None.
        weights, mask = told.token_weights, told.loss_mask
        if weights is not None and (weights != (1 if mask is None else mask)).any():
            assert_same(each.turn.token_weights, weights)
        for name, values in each.turn.extras.items():
            assert_same(values, told.extras[name])
    assert rest == records[num_stored:]
    assert seal(resumed) == seal(whole)
    assert resumed.merged_tokens == whole.merged_tokens


@st.composite
def gappy_episodes(draw: st.DrawFn) -> tuple[tuple[Turn, ...], tuple[DeclaredColumn, ...]]:
    """Turns that leave optional columns out here and there, and what their run declares."""
    per_token = DeclaredColumn(name="a", per="token", dtype="int32", fill=7)
    columns = [per_token, *draw(declared_columns())]
    declared = tuple([replace(each, is_optional=True) for each in columns])
    return draw(with_extras(draw(trees(max_turns=5)), declared)), declared


@given(episode=gappy_episodes(), num_stored=st.integers(0, 5))
def test_draft_resumes_after_turns_that_left_columns_out(
    episode: tuple[tuple[Turn, ...], tuple[DeclaredColumn, ...]], num_stored: int
) -> None:
    # A turn shared per-token values with an earlier turn that had left the column out. The
    # adoption searched for them there and raised InvalidTurnError.
    turns, declared = episode
    whole = TrajectoryDraft(KEY, extra_columns=declared)
    try:
        records = [whole.add(one).record for one in turns]
    except InvalidTurnError:  # items that a shorter prompt may not leave out
        reject()

    resumed = resume(records[:num_stored], declared)
    rest = [resumed.add(one).record for one in turns[num_stored:]]

    assert rest == records[num_stored:]
    assert seal(resumed) == seal(whole)


def test_draft_continues_a_turn_without_items_of_the_shared_prompt() -> None:
    declared = (DeclaredColumn(name="images", per="items", dtype="uint8", is_optional=True),)
    some, none = np.array([7], np.uint8), np.zeros(0, np.uint8)
    turns = [
        replace(turn("ab", "C"), extras={"images": some}),
        replace(turn("a", "D"), extras={"images": none}),
    ]
    whole = TrajectoryDraft(KEY, extra_columns=declared)

    resumed = resume([whole.add(one).record for one in turns], declared)

    assert seal(resumed) == seal(whole)


def test_draft_continues_stored_rows_with_any_links() -> None:
    # Turn 1 is stored whole, as by a client that finds no prefixes: row 0 has no second turn.
    resumed = TrajectoryDraft(KEY)
    for alone in (turn("ab", "C"), turn("abcd", "E")):
        resume([draft().add(alone).record], made=resumed)

    links = [resumed.add(turn(prompt, "Z")).shape[:2] for prompt in ("abcdx", "abcdex")]

    assert links == [(0, 3), (1, 5)]


def test_a_group_is_drafted_in_order_and_its_errors_say_where() -> None:
    turns = [turn("a", "B", anchor="room 3"), turn("ab", "C")]

    drafted = draft_group(group("g", trajectory(sample=1), trajectory(*turns))).trajectories

    assert [made.key.sample for made in drafted] == [0, 1]
    assert [len(made.turns) for made in drafted] == [2, 1]
    assert drafted[0].seal.merged_tokens == 3
    event = decode_event(drafted[0].seal.make(1))
    assert isinstance(event, SealedTrajectory)
    assert event.anchors == (anchor_hash("room 3"), None)
    no_anchor: Any = 0.5
    for wrong, message in (
        (trajectory(reward=float("nan")), r"reward: nan is not finite"),
        (trajectory(turns[0], turn("", "C")), r"turns\[1\]\.prompt_ids: is empt"),
        (
            trajectory(turns[0], turn("ab", "C", anchor=no_anchor)),
            r"turns\[1\]\.anchor: 0\.5 is not",
        ),
    ):
        with pytest.raises(InvalidTurnError, match=rf"trajectories\[0\]\.{message}"):
            draft_group(group("g", wrong))


def test_turn_beyond_the_limit_of_a_seal_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # A seal of more turns than a batcher reads was written, and its trajectory was lost there.
    monkeypatch.setattr(encoder, "MAX_TURNS", 2)
    made = draft(turn("ab", "C"), turn("abcd", "E"))

    with pytest.raises(InvalidTurnError, match="number 3, more than 2 turns"):
        made.add(turn("abx", "F"))

    assert len(seal(made, reward=1.0).turns) == 2


def test_seal_beyond_the_limit_of_an_event_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "MAX_TURNS", 2)
    monkeypatch.setattr(encoder, "MAX_EVENT_BYTES", 50)
    made = draft(turn("ab", "CD", version=1), turn("x", "FG", version=2))

    with pytest.raises(InvalidTurnError, match="bytes, more than 50"):
        seal(made, reward=1.0)
