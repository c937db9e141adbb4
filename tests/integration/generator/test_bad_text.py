"""A text that is no valid Unicode has no bytes: every door refuses it by field and value."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import redis

import testkit
from testkit import ids
from turnstream.errors import InvalidConfigError, InvalidTurnError, TurnstreamError
from turnstream.generator import Prompt, Publisher, add_prompts, credit, post_reward
from turnstream.store.run import runs
from turnstream.types import TrajectoryKey
from turnstream.worker import BatchStream, ObserverStream
from turnstream_server.embedded import EmbeddedServer

pytestmark = pytest.mark.redis

HALF = "a\ud800"
"""Half a surrogate pair, as it comes from broken JSON or from the bytes of a file name."""

NOBODY = "127.0.0.1:1"
CONFIG = testkit.config(1)
KEY = TrajectoryKey("g", 0)


class Store(NamedTuple):
    """A run, and a publisher of it."""

    client: redis.Redis
    url: str
    run: str
    publisher: Publisher

    def seal(self, **options: Any) -> None:
        """Seal a trajectory whose only turn is not sent before."""
        trajectory = self.publisher.trajectory("g", 0, num_samples=1)
        trajectory.append(ids("a"), ids("B"))
        trajectory.seal(1.0, **options)


@pytest.fixture
def store(
    client: redis.Redis, server: EmbeddedServer, new_run: Callable[..., str]
) -> Iterator[Store]:
    run = new_run(client)
    with Publisher(server.url, run) as publisher:
        yield Store(client, server.url, run, publisher)


OF_DATA: dict[str, tuple[str, Callable[[Store], object]]] = {
    "run of a publisher": ("run", lambda s: Publisher(s.url, HALF)),
    "writer": ("writer", lambda s: Publisher(s.url, s.run, writer=HALF)),
    "group": ("group_id", lambda s: s.publisher.group(HALF, 2)),
    "trajectory": ("group_id", lambda s: s.publisher.trajectory(HALF, 0, num_samples=1)),
    "take-over": ("group_id", lambda s: s.publisher.take_over(HALF, 0)),
    "whole group": ("group_id", lambda s: s.publisher.publish(testkit.group(HALF))),
    "prompt of a group": ("prompt_uid", lambda s: s.publisher.group("g", 2, prompt_uid=HALF)),
    "prompt of a run": (
        "prompt_uid",
        lambda s: add_prompts(
            s.client, s.run, [Prompt(prompt_uid=HALF, payload=b"", num_samples=2)]
        ),
    ),
    "component": ("reward_components", lambda s: s.seal(reward_components={HALF: 1.0})),
    "name of a tag": ("tags", lambda s: s.seal(tags={HALF: "easy"})),
    "tag": ("tags['level']", lambda s: s.seal(tags={"level": HALF})),
    "metric": ("metrics", lambda s: s.seal(metrics={HALF: 1.0})),
    "sampling": ("sampling", lambda s: s.seal(sampling={HALF: 1.0})),
    "status": ("status", lambda s: s.seal(status=HALF)),
    "later component": (
        "reward_components",
        lambda s: post_reward(s.client, s.run, KEY, reward_components={HALF: 1.0}),
    ),
    "later component that is no text": (
        "reward_components",
        lambda s: post_reward(s.client, s.run, KEY, reward_components={3: 1.0}),  # pyright: ignore[reportArgumentType]
    ),
    "later reward": (
        "group_id",
        lambda s: post_reward(s.client, s.run, TrajectoryKey(HALF, 0), 1.0),
    ),
}
"""Where it is given, the field that is named, and how."""

OF_RUNS: dict[str, tuple[str, Callable[[Store], object]]] = {
    "new run": ("run", lambda s: runs.create_run(s.client, HALF, CONFIG)),
    "new run without a name": ("run", lambda s: runs.create_run(s.client, "", CONFIG)),
    "run of a credit": ("run", lambda s: credit(s.client, HALF)),
    "run of a reward": ("run", lambda s: post_reward(s.client, HALF, KEY, 1.0)),
    "reason of an end": ("reason", lambda s: runs.close_run(s.client, s.run, HALF)),
    "reason of a pause": ("reason", lambda s: runs.pause_run(s.client, s.run, HALF)),
    "run of a trainer": ("run", lambda s: BatchStream(NOBODY, HALF)),
    "session": ("session", lambda s: BatchStream(NOBODY, s.run, session=HALF)),
    "token": ("recovery_token", lambda s: BatchStream(NOBODY, s.run, recovery_token=HALF)),
    "run of an observer": ("run", lambda s: ObserverStream(NOBODY, HALF, "o")),
    "observer": ("observer", lambda s: ObserverStream(NOBODY, s.run, HALF)),
}


@pytest.mark.parametrize(
    ("kind", "field", "call"),
    [
        *(pytest.param(InvalidTurnError, *each, id=name) for name, each in OF_DATA.items()),
        *(pytest.param(InvalidConfigError, *each, id=name) for name, each in OF_RUNS.items()),
    ],
)
def test_a_text_that_has_no_bytes_is_refused_by_field_and_value(
    store: Store,
    kind: type[TurnstreamError],
    field: str,
    call: Callable[[Store], object],
) -> None:
    with pytest.raises(kind) as refused:
        call(store)

    assert refused.value.args[0] == field
    assert any(each in refused.value.args[1] for each in (r"'a\ud800'", "''", "3 is not a text"))
