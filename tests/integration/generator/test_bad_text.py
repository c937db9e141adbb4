"""A text that is no valid Unicode has no bytes: each call refuses it by field and value.

The calls of publishers are in test_wrong_types.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

import testkit
from testkit.stores import Store
from turnstream.errors import InvalidConfigError, InvalidTurnError, TurnstreamError
from turnstream.generator import Prompt, add_prompts, credit, post_reward
from turnstream.store.run import runs
from turnstream.types import TrajectoryKey
from turnstream.worker import BatchStream, ObserverStream

pytestmark = pytest.mark.redis

HALF = "a\ud800"
"""Half a surrogate pair, as it comes from broken JSON or from the bytes of a file name."""

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
