"""Arguments of wrong types to the functions of the store: refused before anything is sent."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import redis

from turnstream.errors import InvalidConfigError, InvalidTurnError
from turnstream.generator import Prompt, add_prompts, post_reward
from turnstream.store.run.tasks import read_prompt_counts
from turnstream.types import TrajectoryKey
from turnstream.types.names import quoted

pytestmark = pytest.mark.redis

NewRun = Callable[..., str]
LONG = 10**400  # too large for a float
ENDLESS = 10**5000  # Python refuses to print it
NOT_A_TEXT = [None, 5, b"g", ["g"], {}, "a\ud800", ENDLESS]
NOT_WHOLE = [None, "1", b"1", 1.5, math.nan, True, -1, LONG, ENDLESS, [1], {}]
NOT_A_NUMBER = ["1", b"1", bytearray(b"1"), [1.0], {}, 1j, math.nan, math.inf, LONG, ENDLESS]
REFUSED = (InvalidTurnError, InvalidConfigError)
PROMPT = Prompt(prompt_uid="p", payload=b"", num_samples=2)


def each(field: str, values: list[Any]) -> list[tuple[str, dict[str, Any]]]:
    """A case for each value of an argument."""
    return [(field, {field: value}) for value in values]


def is_refused(error: pytest.ExceptionInfo[Any], field: str, value: Any) -> None:
    """Check that an error names the field, or an entry of it, and shows the value in short."""
    assert error.value.field.partition("[")[0] == field
    assert len(error.value.message) < 200
    if isinstance(value, int | float) and abs(value) < 10**9:
        assert repr(value) in error.value.message
    if value is LONG or value is ENDLESS:
        assert "whole number of" in error.value.message


@pytest.fixture
def run(client: redis.Redis, new_run: NewRun) -> str:
    """A run without prompts."""
    return new_run(client)


@pytest.mark.parametrize("reward", NOT_A_NUMBER, ids=quoted)
def test_posted_reward_of_a_wrong_type_is_refused(
    client: redis.Redis, run: str, reward: Any
) -> None:
    with pytest.raises(InvalidTurnError) as error:
        post_reward(client, run, TrajectoryKey("g", 0), reward)

    is_refused(error, "reward", reward)


@pytest.mark.parametrize(
    ("field", "given"),
    [
        *each("run", [*NOT_A_TEXT, ""]),
        *each("prompts", [None, 5]),
        *[("prompts", {"prompts": [value]}) for value in [None, 5, "p", {}, ENDLESS]],
        *each("first", [*NOT_WHOLE[1:], 0]),
    ],
    ids=quoted,
)
def test_add_prompts_refuses_wrong_types_by_field_and_value(
    client: redis.Redis, run: str, field: str, given: dict[str, Any]
) -> None:
    with pytest.raises(REFUSED) as error:
        add_prompts(client, **{"run": run, "prompts": [PROMPT], **given})

    is_refused(error, field, given[field])
    assert read_prompt_counts(client, run).num_added == 0


@pytest.mark.parametrize(
    ("field", "given"),
    [
        *each("prompt_uid", [*NOT_A_TEXT, ""]),
        *each("payload", [None, 5, "p", [1], bytearray(b"p"), ENDLESS]),
        *each("num_samples", [*NOT_WHOLE, 0]),
        *each("num_needed", NOT_WHOLE),
    ],
    ids=quoted,
)
def test_prompt_refuses_wrong_types_by_field_and_value(field: str, given: dict[str, Any]) -> None:
    with pytest.raises(InvalidTurnError) as error:
        replace(PROMPT, **given)

    is_refused(error, field, given[field])
