"""Arguments of wrong types are refused by field and value, before anything is sent."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import testkit
from testkit import group, trajectory, turn
from testkit.services.stores import Store
from testkit.waiting import entered, finish
from turnstream.errors import InvalidConfigError, InvalidTurnError, TurnstreamError
from turnstream.generator import AsyncPublisher, Prompt, Publisher, add_prompts, credit, post_reward
from turnstream.store.run import runs
from turnstream.types import DeclaredColumn, Group, TrajectoryKey, VersionRun
from turnstream.types.names import quoted
from turnstream.worker import BatchStream
from turnstream.worker.observer import ObserverStream

pytestmark = pytest.mark.redis

Case = tuple[str, dict[str, Any]]
"""The field that an error names, and the arguments of the call."""

HALF = "a\ud800"
"""Half a surrogate pair, as it comes from broken JSON or from the bytes of a file name."""

LONG = 10**400  # too large for a float
ENDLESS = 10**5000  # Python refuses to print it
NOT_A_TEXT = [None, 5, b"g", ["g"], {}, HALF, ENDLESS]
NOT_WHOLE = [None, "1", b"1", 1.5, math.nan, True, -1, LONG, ENDLESS, [1], {}]
NOT_A_NUMBER = ["1", b"1", bytearray(b"1"), [1.0], {}, 1j, math.nan, math.inf, LONG, ENDLESS]
NOT_TOKENS = [None, 5, "ab", b"ab", ["a"], {1: 2}, {1}, [None], [LONG], [ENDLESS], [1.5], [True]]
NOT_PER_TOKEN = [5, "a", b"a", ["a"], {1: 2}, [None], [LONG], [ENDLESS], [1j], [math.nan], [HALF]]
NOT_NAMED = [
    5,
    True,
    "ab",
    ["a"],
    [],
    {5: 1.0},
    {None: 1.0},
    {HALF: 1.0},
    {"a": None},
    {1: 1, "a": 1},
]
NOT_A_FLAG = [None, 1, "yes", "no", [], ENDLESS]
NOT_SECONDS = ["5", b"5", [], {}, True, math.nan, math.inf, 1e300, LONG, ENDLESS]
NOT_A_KEY = [None, 5, "g/0/0", ("g", 0, 0)]


def each(field: str, values: list[Any], **fixed: Any) -> list[Case]:
    """A case for each value of an argument."""
    return [(field, {**fixed, field: value}) for value in values]


APPEND = [
    *each("prompt_ids", NOT_TOKENS),
    *each("response_ids", NOT_TOKENS),
    *each("logprobs", NOT_PER_TOKEN),
    *each("loss_mask", NOT_PER_TOKEN),
    *each("rewards", NOT_PER_TOKEN),
    *each("policy_version", NOT_WHOLE[1:]),
    *each(
        "version_runs", [None, 5, "ab", [5], [(1, 2, 3)], [("a", 1)], [(1, "a")], [(ENDLESS, 1)]]
    ),
    *each("extras", [5, "ab", ["a"], [], {5: [1]}, {HALF: [1]}, {"teacher": "a"}]),
    *each("extras", [{"teacher": [value]} for value in NOT_PER_TOKEN[1:]]),
    *each("anchor", [1.5, [], {}, True, -1, ENDLESS, HALF, bytearray(b"1")]),
    *each("allow_empty", NOT_A_FLAG),
    *each("status", [None, 5, b"completed", HALF, ENDLESS]),
]
SEAL = [
    *each("reward", NOT_A_NUMBER),
    *each("reward_components", [*NOT_NAMED, *[{"a": value} for value in NOT_A_NUMBER]]),
    *each("sampling", [*NOT_NAMED, *[{"a": value} for value in NOT_A_NUMBER]]),
    *each("metrics", [*NOT_NAMED, *[{"a": value} for value in NOT_A_NUMBER]]),
    *each("tags", [*NOT_NAMED, *[{"a": value} for value in NOT_A_TEXT]]),
    *each("status", [5, b"completed", [], {}, HALF, ENDLESS]),
    *each("awaits_reward", NOT_A_FLAG),
]
OPEN = [
    *each("group_id", [*NOT_A_TEXT, ""], num_samples=2),
    *each("num_samples", NOT_WHOLE, group_id="g"),
    *each("num_needed", NOT_WHOLE[1:], group_id="g", num_samples=2),
    *each("prompt_uid", NOT_A_TEXT, group_id="g", num_samples=2),
    *each("purpose", [None, 5, "train ", [], ENDLESS], group_id="g", num_samples=2),
]
SAMPLE = [
    *each("sample", NOT_WHOLE, group_id="g"),
    *each("attempt", NOT_WHOLE, group_id="g", sample=0),
]
CALLS: dict[str, list[Case]] = {
    "group": OPEN,
    "trajectory": [
        *[(field, {"sample": 0, **given}) for field, given in OPEN],
        *[(field, {"num_samples": 1, **given}) for field, given in SAMPLE],
    ],
    "adopt": [*SAMPLE, *each("group_id", NOT_A_TEXT, sample=0)],
    "post_reward": [
        *each("key", NOT_A_KEY, reward=1.0),
        *[
            (field, {"key": TrajectoryKey(**{"group_id": "g", **given}), "reward": 1.0})
            for field, given in [*SAMPLE, *each("group_id", [*NOT_A_TEXT, ""], sample=0)]
        ],
        *[
            (field, {"key": TrajectoryKey("g", 0), **given})
            for field, given in SEAL
            if field in {"reward", "reward_components"}
        ],
        ("reward", {"key": TrajectoryKey("g", 0)}),
    ],
    "refill_trajectory": each("refill", [None, 5, "g", {}]),
    "next_refill": each("timeout_s", [None, *NOT_SECONDS]),
    "next_task": each("wait_s", [None, *NOT_SECONDS]),
    "flush": each("timeout_s", NOT_SECONDS),
    "flush_to_disk": each("timeout_s", NOT_SECONDS),
    "close_run": each("reason", NOT_A_TEXT),
    "publish": each("group", [None, 5, "g", {}]),
    "close": each("timeout_s", NOT_SECONDS),
}
PUBLISHER = [
    *each("url", [None, 5, b"redis://a", "", "nowhere", "ftp://a", "redis://a:port", [], HALF]),
    *each("run", [*NOT_A_TEXT, ""]),
    *each("writer", [*NOT_A_TEXT[1:], ""]),
    *each("max_inflight_bytes", NOT_WHOLE),
    *each("max_kept_bytes", NOT_WHOLE),
    *each("timeout_s", [None, -1, *NOT_SECONDS]),
    *each("admission_timeout_s", [None, -1, *NOT_SECONDS]),
    *each("keep_s", [None, -1, *NOT_SECONDS]),
]
TEACHER = DeclaredColumn(name="teacher", per="response_token", dtype="float32", is_optional=True)


@contextlib.contextmanager
def refused(case: Case, errors: Any = (InvalidTurnError, InvalidConfigError)) -> Iterator[None]:
    """Check that the block raises an error that names the field, and shows the value in short."""
    field, given = case
    value = given.get(field)
    try:
        yield
    except errors as error:
        name, message = error.args[:2]
    else:
        pytest.fail(f"{field}={quoted(value)} was accepted")
    assert name.partition("[")[0].partition(".")[0] == field, quoted(value)
    assert len(message) < 400
    if isinstance(value, int | float) and abs(value) < 10**9:
        assert repr(value) in message
    if value is LONG or value is ENDLESS:
        assert "whole number of" in message


async def answer_of(method: Callable[..., Any], given: dict[str, Any]) -> Any:
    """Return what a method of either kind of publisher returns."""
    return await finish(lambda: method(**given))


@pytest.fixture
def run(store: Store) -> str:
    """A run that declares an extra column."""
    return store.new_run(extra_columns=(TEACHER,))


@pytest.fixture(autouse=True)
def nothing_is_sent(store: Store, run: str) -> Iterator[None]:
    """Nothing is sealed; a trajectory may have been opened."""
    yield
    stored = store.read(run)
    assert stored.sealed() == []
    assert set(stored.states().values()) <= {"abandoned"}


BOTH = pytest.mark.parametrize("kind", [Publisher, AsyncPublisher])


@BOTH
async def test_append_and_seal_refuse_wrong_types_by_field_and_value(
    store: Store, run: str, kind: Any
) -> None:
    turn_of_one = {"prompt_ids": [1], "response_ids": [2]}
    async with entered(kind(store.url, run)) as publisher:
        for case in APPEND:
            episode = publisher.trajectory("g", 0, num_samples=1)
            with refused(case, InvalidTurnError):
                await answer_of(episode.append, {**turn_of_one, **case[1]})
        for number, case in enumerate(SEAL):
            async with entered(publisher.trajectory(f"s{number}", 0, num_samples=1)) as episode:
                await answer_of(episode.append, turn_of_one)
                with refused(case, InvalidTurnError):
                    await answer_of(episode.seal, case[1])


@BOTH
@pytest.mark.parametrize("method", CALLS)
async def test_publishers_refuse_wrong_types_by_field_and_value(
    store: Store, run: str, kind: Any, method: str
) -> None:
    async with entered(kind(store.url, run)) as publisher:
        for case in CALLS[method]:
            with refused(case):
                await answer_of(getattr(publisher, method), case[1])


@BOTH
def test_publisher_constructors_refuse_wrong_types(store: Store, run: str, kind: Any) -> None:
    for case in PUBLISHER:
        with refused(case):
            kind(**{"url": store.url, "run": run, **case[1]})


def test_publisher_hides_the_password_of_a_wrong_url(run: str) -> None:
    # An error shows the wrong value, and the value of a URL holds a password.
    # Only the part after it is shown.
    wrong: list[Any] = [
        "redis://u:secret@h:port",
        b"redis://u:secret@h",
        "redis://u:secret@" + HALF,
    ]
    for url in wrong:
        with pytest.raises(InvalidConfigError, match=r"^url: ") as error:
            Publisher(url, run)
        assert "secret" not in str(error.value)


def test_writers_refuse_a_wrong_sample_and_a_wrong_reason(store: Store, run: str) -> None:
    with Publisher(store.url, run) as publisher, publisher.group("w", 2) as visit:
        episode = visit.trajectory(1)
        for case in each("sample", [None, "0", [], 1.0, True, -1, 2, ENDLESS]):
            with refused(case, InvalidTurnError):
                visit.trajectory(case[1]["sample"])
        for case in each("reason", NOT_A_TEXT[:5]):
            with refused(case, InvalidTurnError):
                episode.abandon(case[1]["reason"])

        assert not episode.has_ended


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("trajectories", replace(group("g"), trajectories=5)),
        ("trajectories", replace(group("g"), trajectories=[5])),
        ("sample", group("g", replace(trajectory(), sample="0"))),
        ("sample", group("g", trajectory(), replace(trajectory(), sample=None))),
        ("group_id", group(5)),  # pyright: ignore[reportArgumentType]
        ("purpose", replace(group("g"), purpose=5)),
        *[
            (f"trajectories[0].{field}", group("g", replace(trajectory(), **{name: value})))
            for field, name, value in [
                ("attempt", "attempt", "0"),
                ("turns", "turns", 5),
                ("turns", "turns", [5]),
                ("reward", "reward", "1"),
                ("tags", "tags", 5),
                ("awaits_reward", "awaits_reward", "yes"),
                ("turns[0].extras", "turns", [replace(turn("a", "B"), extras=5)]),
                ("turns[0].version_runs", "turns", [replace(turn("a", "B"), version_runs=5)]),
            ]
        ],
    ],
)
def test_publish_refuses_wrong_types_inside_a_group(
    store: Store, run: str, field: str, wrong: Group
) -> None:
    with Publisher(store.url, run) as publisher, pytest.raises(InvalidTurnError) as error:
        publisher.publish(wrong)

    assert error.value.field == field


@BOTH
async def test_receipts_refuse_a_timeout_that_is_no_number(
    store: Store, run: str, kind: Any
) -> None:
    # The receipt is still good for another call.
    async with (
        entered(kind(store.url, run)) as publisher,
        entered(publisher.trajectory("t", 0, num_samples=1)) as episode,
    ):
        for case in each("timeout_s", NOT_SECONDS):
            receipt = await finish(lambda: episode.append([1], [2]))
            with refused(case):
                await finish(lambda wait=receipt.result, case=case: wait(case[1]["timeout_s"]))
            await finish(lambda wait=receipt.result: wait(10))


def test_numbers_of_numpy_are_accepted_everywhere(store: Store) -> None:
    # Scalars of numpy count as numbers and flags, as they come out of arrays.
    run = store.new_run(extra_columns=(TEACHER,))
    one: Any = np.int64(1)
    no: Any = np.bool_(False)
    sizes: Any = {"timeout_s": np.float32(30), "max_inflight_bytes": np.int64(1 << 20)}
    wrapped: Any = {"reward": np.float32(0.5), "metrics": {"m": np.int32(3)}}
    with Publisher(store.url, run, **sizes) as publisher:
        with publisher.group(
            np.str_("g"), one + 1, num_needed=one, prompt_uid=np.str_("p")
        ) as visit:
            episode = visit.trajectory(one)
            episode.append(
                np.array([1]),
                np.array([2]),
                version_runs=[VersionRun(one, one)],
                extras={np.str_("teacher"): np.array([0.5], np.float16)},
                anchor=one,
                allow_empty=no,
            )
            episode.seal(
                **wrapped,
                reward_components={np.str_("a"): np.float64(1)},
                tags={"a": np.str_("b")},
                awaits_reward=no,
            )
        publisher.flush(np.float64(10))

    assert store.read(run).states()["g/1/0"] == "sealed"


CLOSED = "127.0.0.1:1"  # an address without a server
CONFIG = testkit.config(1)
KEY = TrajectoryKey("g", 0)

Call = Callable[[Store, str], object]
OF_DATA: list[tuple[str, Call]] = [
    (
        "prompt_uid",
        lambda s, run: add_prompts(
            s.client, run, [Prompt(prompt_uid=HALF, payload=b"", num_samples=2)]
        ),
    ),
    (
        "reward_components",
        lambda s, run: post_reward(s.client, run, KEY, reward_components={HALF: 1.0}),
    ),
    ("group_id", lambda s, run: post_reward(s.client, run, TrajectoryKey(HALF, 0), 1.0)),
]
OF_RUNS: list[tuple[str, Call]] = [
    ("run", lambda s, _: runs.create_run(s.client, HALF, CONFIG)),
    ("run", lambda s, _: runs.create_run(s.client, "", CONFIG)),
    ("run", lambda s, _: credit(s.client, HALF)),
    ("run", lambda s, _: post_reward(s.client, HALF, KEY, 1.0)),
    ("reason", lambda s, run: runs.close_run(s.client, run, HALF)),
    ("reason", lambda s, run: runs.pause_run(s.client, run, HALF)),
    ("run", lambda _, __: BatchStream(CLOSED, HALF)),
    ("session", lambda _, run: BatchStream(CLOSED, run, session=HALF)),
    ("recovery_token", lambda _, run: BatchStream(CLOSED, run, recovery_token=HALF)),
    ("run", lambda _, __: ObserverStream(CLOSED, HALF, "o")),
    ("observer", lambda _, run: ObserverStream(CLOSED, run, HALF)),
]


@pytest.mark.parametrize(
    ("kind", "field", "call"),
    [
        *[(InvalidTurnError, *each) for each in OF_DATA],
        *[(InvalidConfigError, *each) for each in OF_RUNS],
    ],
)
def test_text_without_bytes_is_refused_by_field_and_value(
    store: Store, kind: type[TurnstreamError], field: str, call: Call
) -> None:
    run = store.new_run()

    with pytest.raises(kind) as refused:
        call(store, run)

    assert refused.value.args[0] == field
    assert any(each in refused.value.args[1] for each in (r"'a\ud800'", "''"))
