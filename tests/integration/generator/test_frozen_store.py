"""A store that is stopped keeps its connections and says nothing: every wait ends by its deadline.

Every wait here is short, and the socket's own timeout is 30 s. So a wait that ignores its deadline
fails its test.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

import turnstream
from testkit import group, ids, wait_until_async
from testkit.runs.scripts import script
from testkit.services.stores import Store
from testkit.waiting import entered, entry, facts, finish, kinds
from turnstream.errors import NotReadyError, StoreUnavailableError, UnavailableError, WaitKind
from turnstream.generator import AsyncPublisher, Publisher
from turnstream.store.client import connection
from turnstream.store.client.addresses import address_of
from turnstream.store.client.deadlines import ANSWER_S
from turnstream.store.run.tasks import Prompt, add_prompts
from turnstream.store.waits.version_wait import wait_for_version
from turnstream.types import TrajectoryKey
from turnstream_server.embedded import EmbeddedServer

pytestmark = pytest.mark.redis

Frozen = Callable[[], contextlib.AbstractContextManager[None]]
ONE_GROUP = {"batch_groups": 1, "max_staleness": 0, "max_planned_ahead": 0}
TIMEOUT_S = 0.3
BOTH = pytest.mark.parametrize("kind", [Publisher, AsyncPublisher])
LONGEST_S = 20.0
"""Far above any deadline here, on a machine that is busy, and far below the socket's timeout."""

SILENT = [WaitKind.STORE_AWAY]
UNACKNOWLEDGED = [WaitKind.NOT_ACKNOWLEDGED, WaitKind.STORE_AWAY]
EXPECTED = {
    "next_task": [WaitKind.NOT_READY, WaitKind.STORE_AWAY],
    "next_refill": [WaitKind.NOT_READY, WaitKind.STORE_AWAY],
    "lapsed": SILENT,
    "adopt": SILENT,
    "group": UNACKNOWLEDGED,
    "append": UNACKNOWLEDGED,
    "turn": UNACKNOWLEDGED,
    "seal": UNACKNOWLEDGED,
    "post_reward": UNACKNOWLEDGED,
    "publish": UNACKNOWLEDGED,
    "close_run": UNACKNOWLEDGED,
}


@pytest.fixture
def own_server() -> Iterator[EmbeddedServer]:
    """A store that may be stopped. All kinds of servers are equal then, so one kind is enough."""
    with EmbeddedServer() as server:
        yield server


@pytest.fixture
def frozen(
    own_store: Store, wait_for_answers: Callable[[float], None]
) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Within `frozen()` the store is stopped, and waits use the deadlines of the product."""

    @contextlib.contextmanager
    def freeze() -> Iterator[None]:
        wait_for_answers(ANSWER_S)
        os.kill(own_store.server.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(own_store.server.pid, signal.SIGCONT)
            wait_for_answers(LONGEST_S)

    return freeze


@pytest.fixture
def silent_from(
    own_store: Store, proxy_to: Callable[[str], Any], wait_for_answers: Callable[[float], None]
) -> Callable[[str], Any]:
    """`silent_from(words)` returns a proxy that is silent from a request with these words on."""

    def connect(words: str) -> Any:
        wait_for_answers(ANSWER_S)
        proxy = proxy_to(own_store.url)
        proxy.unanswered = words.encode()
        return proxy

    return connect


def speak(proxy: Any) -> None:
    """Let a silent store answer again."""
    proxy.unanswered, proxy.replies.is_silent = b"", False
    proxy.cut_all()


async def ended(call: Callable[[], Any]) -> UnavailableError:
    """Return the error of a wait that must end soon."""
    began_s = time.monotonic()
    with pytest.raises(UnavailableError) as caught:
        await finish(call)
    assert time.monotonic() - began_s < LONGEST_S
    return caught.value


async def append(writer: Any, prompt: str, response: str) -> Any:
    """Append a turn; return its receipt."""
    return await finish(lambda: writer.append(ids(prompt), ids(response)))


async def stored(writer: Any) -> Any:
    """Return a writer with one acknowledged turn."""
    await finish((await append(writer, "a", "b")).result)
    return writer


async def test_calls_of_a_service_and_a_run_end_soon_on_a_silent_store(
    own_store: Store, frozen: Frozen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "SILENT_S", TIMEOUT_S)
    name = own_store.new_run()
    with turnstream.connect(own_store.url) as service:
        run = service.run(name)
        calls = [
            partial(turnstream.connect, own_store.url),
            partial(service.run, name),
            service.runs,
            run.credit,
            run.pause,
            lambda: pickle.loads(pickle.dumps(run)).credit(),
        ]
        with frozen():
            found = await asyncio.gather(*[ended(call) for call in calls])

    assert {type(error) for error in found} == {StoreUnavailableError}


@BOTH
async def test_every_wait_on_a_silent_store_ends_by_its_deadline(
    kind: Any, own_store: Store, frozen: Frozen
) -> None:
    run = own_store.new_run()
    async with contextlib.AsyncExitStack() as stack:
        publishers: dict[str, Any] = {}
        for name in EXPECTED:
            publisher = kind(own_store.url, run, timeout_s=TIMEOUT_S)
            publishers[name] = await stack.enter_async_context(entered(publisher))
            whole = group(f"before-{name}")
            await finish((await finish(partial(publisher.publish, whole))).result)
        open_turn = await finish(entry(publishers["turn"].trajectory("turn", 0, num_samples=1)))
        open_seal = await stored(publishers["seal"].trajectory("seal", 0, num_samples=1))
        new = publishers["append"].trajectory("append", 0, num_samples=1)

        async def turn() -> None:
            await finish((await append(open_turn, "a", "b")).result)

        async def publish() -> None:
            receipt = await finish(lambda: publishers["publish"].publish(group("publish")))
            await finish(receipt.result)

        calls: dict[str, Callable[[], Any]] = {
            "next_task": partial(publishers["next_task"].next_task, TIMEOUT_S),
            "next_refill": partial(publishers["next_refill"].next_refill, TIMEOUT_S),
            "lapsed": publishers["lapsed"].lapsed,
            "adopt": partial(publishers["adopt"].adopt, "g", 0),
            "group": entry(publishers["group"].group("group", 2)),
            "append": partial(append, new, "a", "b"),
            "turn": turn,
            "seal": partial(open_seal.seal, 1.0),
            "post_reward": partial(
                publishers["post_reward"].post_reward, TrajectoryKey("g", 0), 1.0
            ),
            "publish": publish,
            "close_run": publishers["close_run"].close_run,
        }

        with frozen():
            found = await asyncio.gather(*[ended(call) for call in calls.values()])

    errors = dict(zip(calls, found, strict=True))
    assert {name: kinds(error) for name, error in errors.items()} == EXPECTED
    for error in found:
        assert type(error) is StoreUnavailableError
        silent = facts(error, WaitKind.STORE_AWAY)
        assert silent["address"] == address_of(own_store.url)
        assert TIMEOUT_S <= silent["since_s"] < LONGEST_S
    assert facts(errors["seal"], WaitKind.NOT_ACKNOWLEDGED)["group"] == "seal"
    assert facts(errors["turn"], WaitKind.NOT_ACKNOWLEDGED)["turn"] == 0
    assert facts(errors["group"], WaitKind.NOT_ACKNOWLEDGED) == {"group": "group", "samples": 2}


@BOTH
async def test_waits_with_their_own_deadline_end_before_the_store_counts_as_away(
    kind: Any, own_store: Store, frozen: Frozen
) -> None:
    run = own_store.new_run()
    publisher = kind(own_store.url, run)
    episode = await stored(publisher.trajectory("g", 0, num_samples=1))

    with frozen():
        receipt = await append(episode, "abc", "d")

        async def is_sent() -> bool:
            return WaitKind.STORE_AWAY in kinds(await ended(partial(receipt.result, 0)))

        await wait_until_async(is_sent, describe="a round in flight")
        errors = [
            await ended(partial(receipt.result, TIMEOUT_S)),
            await ended(partial(publisher.flush, TIMEOUT_S)),
            await ended(partial(publisher.flush_to_disk, TIMEOUT_S)),
            await ended(
                partial(wait_for_version, own_store.client, run, above=0, timeout_s=TIMEOUT_S)
            ),
            await ended(partial(publisher.close, TIMEOUT_S)),
        ]

    assert [type(error) for error in errors] == [
        *[NotReadyError] * 3,
        *(StoreUnavailableError, NotReadyError),
    ]
    assert {error.retry_after_s for error in errors} == {None}  # the deadlines were the caller's
    assert [kinds(error)[0] for error in errors] == [
        *(WaitKind.NOT_ACKNOWLEDGED, WaitKind.NOT_ACKNOWLEDGED, WaitKind.NOT_READY),
        *(WaitKind.NOT_READY, WaitKind.NOT_ACKNOWLEDGED),
    ]
    assert all(WaitKind.STORE_AWAY in kinds(error) for error in errors)


@BOTH
async def test_admission_wait_ends_by_its_deadline_on_a_silent_store(
    kind: Any, own_store: Store, silent_from: Callable[[str], Any], clock: Any
) -> None:
    # The reasons of the wait for "b" are requested, and not answered, when it must end.
    run = own_store.new_run(**ONE_GROUP)
    proxy = silent_from(script("read_waits").sha)
    async with entered(kind(proxy.url, run, admission_timeout_s=1.0)) as publisher:
        first = await finish(entry(publisher.trajectory("a", 0, num_samples=1)))
        waiting = asyncio.ensure_future(ended(entry(publisher.group("b", 2))))
        await wait_until_async(lambda: proxy.replies.is_silent, describe="the silence of the store")

        clock.resume(ahead_s=1.0)
        error = await waiting
        speak(proxy)
        first.abandon("over")

    assert type(error) is NotReadyError
    assert kinds(error)[:2] == [WaitKind.NO_ADMISSION, WaitKind.STORE_AWAY]
    assert "1 groups are live, 1 are allowed" in error.reasons[0].sentence
    assert 1.0 <= facts(error, WaitKind.NO_ADMISSION)["waited_s"] < LONGEST_S


async def test_task_requested_from_a_silent_store_is_returned_next(
    own_store: Store, frozen: Frozen
) -> None:
    run = own_store.new_run()
    add_prompts(
        own_store.client, run, [Prompt(prompt_uid=uid, payload=b"", num_samples=1) for uid in "ab"]
    )
    with Publisher(own_store.url, run) as publisher:
        with publisher.next_task(10) as first:
            write(first)
        with frozen():
            await ended(partial(publisher.next_task, TIMEOUT_S))

        with publisher.next_task(TIMEOUT_S) as second:
            write(second)
        error = await ended(partial(publisher.next_task, 0.01))

    assert (first.prompt_uid, second.prompt_uid) == ("a", "b")
    assert kinds(error)[0] == WaitKind.NOT_READY


def write(task: Any) -> None:
    for trajectory in task.trajectories:
        trajectory.append(ids("a"), ids("b"))
        trajectory.seal(1.0)


async def test_last_answer_of_a_silent_store_is_reported(
    own_store: Store, silent_from: Callable[[str], Any]
) -> None:
    run = own_store.new_run()
    proxy = silent_from("XREAD")
    with Publisher(proxy.url, run) as publisher:
        # The store must have said by then that there is none, over a connection that is new.
        error = await ended(partial(publisher.next_task, 2.0))

    assert type(error) is StoreUnavailableError
    assert "the run was given no prompt" in error.reasons[0].sentence
    assert facts(error, WaitKind.NOT_READY)["told_s"] > 0
    assert error.message.startswith(f"run {run!r}: no task: the store at ")
