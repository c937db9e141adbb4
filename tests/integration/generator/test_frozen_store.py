"""A store that is stopped keeps its connections and says nothing: every wait ends by its deadline.

Every wait here is short, and the socket's own timeout is 30 s: what does not heed its deadline is
seen by that.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from testkit import group, ids, wait_until, wait_until_async
from testkit.scripts import script
from testkit.stores import Store
from turnstream.errors import NotReadyError, StoreUnavailableError, UnavailableError, WaitKind
from turnstream.generator import AsyncPublisher, Publisher
from turnstream.generator.outbox.receipts import AsyncReceipt, Receipt
from turnstream.store.client.connection import address_of
from turnstream.store.client.deadlines import ANSWER_S
from turnstream.store.run.tasks import Prompt, add_prompts
from turnstream.store.waits.version_wait import wait_for_version
from turnstream.types import TrajectoryKey
from turnstream_server.embedded import EmbeddedServer

pytestmark = pytest.mark.redis

Frozen = Callable[[], contextlib.AbstractContextManager[None]]
ONE_GROUP = {"batch_groups": 1, "max_staleness": 0, "max_planned_ahead": 0}
TIMEOUT_S = 0.3
LONGEST_S = 20.0
"""Far above any deadline here, on a machine that is busy, and far below the socket's timeout."""

SILENT = [WaitKind.STORE_SILENT]
UNACKNOWLEDGED = [WaitKind.NOT_ACKNOWLEDGED, WaitKind.STORE_SILENT]
EXPECTED = {
    "next_task": [WaitKind.NO_TASK, WaitKind.STORE_SILENT],
    "next_refill": [WaitKind.NO_REFILL, WaitKind.STORE_SILENT],
    "lapsed": SILENT,
    "take_over": SILENT,
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
    """A store that may be stopped; of one kind, since no kind says anything then."""
    with EmbeddedServer() as server:
        yield server


@pytest.fixture
def frozen(
    own_store: Store, wait_for_answers: Callable[[float], None]
) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Within `frozen()` the store stands still, and is waited for as long as everybody does."""

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
    """`silent_from(words)` gives a way to the store that is silent from a request with them on."""

    def connect(words: str) -> Any:
        wait_for_answers(ANSWER_S)
        proxy = proxy_to(own_store.url)
        proxy.requests.unanswered = words.encode()
        return proxy

    return connect


def speak(proxy: Any) -> None:
    """Let a store answer again that was silent."""
    proxy.requests.unanswered, proxy.replies.is_silent = b"", False
    proxy.cut_all()


def ended(call: Callable[[], object]) -> UnavailableError:
    """The error of a wait that must end soon."""
    began_s = time.monotonic()
    with pytest.raises(UnavailableError) as caught:
        call()
    assert time.monotonic() - began_s < LONGEST_S
    return caught.value


async def ended_async(call: Awaitable[object]) -> UnavailableError:
    """The same of one that is awaited."""
    began_s = time.monotonic()
    with pytest.raises(UnavailableError) as caught:
        await call
    assert time.monotonic() - began_s < LONGEST_S
    return caught.value


def is_asked_of_it(receipt: Receipt) -> bool:
    """Whether the silent store has been sent what is waited for."""
    return WaitKind.STORE_SILENT in kinds(ended(lambda: receipt.result(0)))


async def is_asked_of_it_async(receipt: AsyncReceipt) -> bool:
    """The same of one that is awaited."""
    return WaitKind.STORE_SILENT in kinds(await ended_async(receipt.result(0)))


def kinds(error: UnavailableError) -> list[str]:
    return [reason.kind for reason in error.reasons]


def facts(error: UnavailableError, kind: WaitKind) -> dict[str, Any]:
    return dict(next(reason.facts for reason in error.reasons if reason.kind == kind))


def test_every_wait_on_a_silent_store_ends_by_its_deadline(
    own_store: Store, frozen: Frozen
) -> None:
    run = own_store.new_run()
    with contextlib.ExitStack() as stack:
        publishers = {
            name: stack.enter_context(Publisher(own_store.url, run, timeout_s=TIMEOUT_S))
            for name in EXPECTED
        }
        for name, publisher in publishers.items():
            publisher.publish(group(f"before-{name}")).result(10)
        open_turn = publishers["turn"].trajectory("turn", 0, num_samples=1).__enter__()
        open_seal = publishers["seal"].trajectory("seal", 0, num_samples=1)
        open_seal.append(ids("a"), ids("b")).result(10)
        new = publishers["append"].trajectory("append", 0, num_samples=1)
        calls: dict[str, Callable[[], object]] = {
            "next_task": lambda: publishers["next_task"].next_task(TIMEOUT_S),
            "next_refill": lambda: publishers["next_refill"].next_refill(TIMEOUT_S),
            "lapsed": publishers["lapsed"].lapsed,
            "take_over": lambda: publishers["take_over"].take_over("g", 0),
            "group": publishers["group"].group("group", 2).__enter__,
            "append": lambda: new.append(ids("a"), ids("b")),
            "turn": lambda: open_turn.append(ids("a"), ids("b")).result(),
            "seal": lambda: open_seal.seal(1.0),
            "post_reward": lambda: publishers["post_reward"].post_reward(
                TrajectoryKey("g", 0), 1.0
            ),
            "publish": lambda: publishers["publish"].publish(group("publish")).result(),
            "close_run": publishers["close_run"].close_run,
        }
        pool = stack.enter_context(ThreadPoolExecutor(len(calls)))

        with frozen():
            waits = {name: pool.submit(ended, call) for name, call in calls.items()}
            errors = {name: wait.result() for name, wait in waits.items()}

    assert {name: kinds(error) for name, error in errors.items()} == EXPECTED
    for error in errors.values():
        assert type(error) is StoreUnavailableError
        silent = facts(error, WaitKind.STORE_SILENT)
        assert silent["address"] == address_of(own_store.url)
        assert TIMEOUT_S <= silent["since_s"] < LONGEST_S
    assert facts(errors["seal"], WaitKind.NOT_ACKNOWLEDGED)["group"] == "seal"
    assert facts(errors["turn"], WaitKind.NOT_ACKNOWLEDGED)["turn"] == 0
    assert facts(errors["group"], WaitKind.NOT_ACKNOWLEDGED) == {"group": "group", "samples": 2}


async def test_every_wait_of_an_async_publisher_ends_by_its_deadline(
    own_store: Store, frozen: Frozen
) -> None:
    run = own_store.new_run()
    async with contextlib.AsyncExitStack() as stack:
        publishers = {
            name: await stack.enter_async_context(
                AsyncPublisher(own_store.url, run, timeout_s=TIMEOUT_S)
            )
            for name in EXPECTED
        }
        for name, publisher in publishers.items():
            await (await publisher.publish(group(f"before-{name}")))
        open_turn = await publishers["turn"].trajectory("turn", 0, num_samples=1).__aenter__()
        open_seal = publishers["seal"].trajectory("seal", 0, num_samples=1)
        await (await open_seal.append(ids("a"), ids("b")))
        new = publishers["append"].trajectory("append", 0, num_samples=1)

        async def turn() -> None:
            await (await open_turn.append(ids("a"), ids("b")))

        async def publish() -> None:
            await (await publishers["publish"].publish(group("publish")))

        calls: dict[str, Awaitable[object]] = {
            "next_task": publishers["next_task"].next_task(TIMEOUT_S),
            "next_refill": publishers["next_refill"].next_refill(TIMEOUT_S),
            "lapsed": publishers["lapsed"].lapsed(),
            "take_over": publishers["take_over"].take_over("g", 0),
            "group": publishers["group"].group("group", 2).__aenter__(),
            "append": new.append(ids("a"), ids("b")),
            "turn": turn(),
            "seal": open_seal.seal(1.0),
            "post_reward": publishers["post_reward"].post_reward(TrajectoryKey("g", 0), 1.0),
            "publish": publish(),
            "close_run": publishers["close_run"].close_run(),
        }

        with frozen():
            found = await asyncio.gather(*[ended_async(call) for call in calls.values()])

    errors = dict(zip(calls, found, strict=True))
    assert {name: kinds(error) for name, error in errors.items()} == EXPECTED
    assert {type(error) for error in errors.values()} == {StoreUnavailableError}


def test_waits_with_their_own_deadline_end_before_the_store_counts_as_away(
    own_store: Store, frozen: Frozen
) -> None:
    run = own_store.new_run()
    publisher = Publisher(own_store.url, run)
    episode = publisher.trajectory("g", 0, num_samples=1)
    episode.append(ids("a"), ids("b")).result(10)

    with frozen():
        receipt = episode.append(ids("abc"), ids("d"))
        wait_until(lambda: is_asked_of_it(receipt), describe="a round on its way")
        errors = [
            ended(lambda: receipt.result(TIMEOUT_S)),
            ended(lambda: publisher.flush(TIMEOUT_S)),
            ended(lambda: publisher.flush_to_disk(TIMEOUT_S)),
            ended(lambda: wait_for_version(own_store.client, run, above=0, timeout_s=TIMEOUT_S)),
            ended(lambda: publisher.close(TIMEOUT_S)),
        ]

    assert [type(error) for error in errors] == [
        *[NotReadyError] * 3,
        *(StoreUnavailableError, NotReadyError),
    ]
    assert {error.retry_after_s for error in errors} == {None}  # the deadlines were the caller's
    assert [kinds(error)[0] for error in errors] == [
        *(WaitKind.NOT_ACKNOWLEDGED, WaitKind.NOT_ACKNOWLEDGED, WaitKind.NOT_ON_DISK),
        *(WaitKind.NO_VERSION, WaitKind.NOT_ACKNOWLEDGED),
    ]
    assert all(WaitKind.STORE_SILENT in kinds(error) for error in errors)


async def test_an_asynchronous_publisher_closes_by_the_deadline_too(
    own_store: Store, frozen: Frozen
) -> None:
    run = own_store.new_run()
    publisher = AsyncPublisher(own_store.url, run)
    episode = publisher.trajectory("g", 0, num_samples=1)
    await (await episode.append(ids("a"), ids("b")))

    with frozen():
        receipt = await episode.append(ids("abc"), ids("d"))
        await wait_until_async(lambda: is_asked_of_it_async(receipt), describe="a round")
        waited = await ended_async(receipt.result(TIMEOUT_S))
        closed = await ended_async(publisher.close(TIMEOUT_S))

    assert [type(error) for error in (waited, closed)] == [NotReadyError, NotReadyError]
    assert kinds(waited) == kinds(closed) == UNACKNOWLEDGED


def test_admission_wait_ends_by_its_deadline_on_a_silent_store(
    own_store: Store, silent_from: Callable[[str], Any], clock: Any
) -> None:
    # What the wait for "b" hangs on is asked of the store, and not answered, when it must end.
    run = own_store.new_run(**ONE_GROUP)
    proxy = silent_from(script("read_waits").sha)
    with (
        Publisher(proxy.url, run, admission_timeout_s=1.0) as publisher,
        ThreadPoolExecutor(1) as pool,
    ):
        held = publisher.trajectory("a", 0, num_samples=1).__enter__()
        entered = pool.submit(ended, publisher.group("b", 2).__enter__)
        wait_until(lambda: proxy.replies.is_silent, describe="the silence of the store")

        clock.resume(ahead_s=1.0)
        error = entered.result()
        speak(proxy)
        held.abandon("over")

    assert type(error) is NotReadyError
    assert kinds(error)[:2] == [WaitKind.NO_LEAVE, WaitKind.STORE_SILENT]
    assert "1 groups are live, 1 are allowed" in error.reasons[0].sentence
    assert 1.0 <= facts(error, WaitKind.NO_LEAVE)["waited_s"] < LONGEST_S


async def test_the_asynchronous_publisher_keeps_that_deadline_too(
    own_store: Store, silent_from: Callable[[str], Any], clock: Any
) -> None:
    run = own_store.new_run(**ONE_GROUP)
    proxy = silent_from(script("read_waits").sha)
    async with AsyncPublisher(proxy.url, run, admission_timeout_s=1.0) as publisher:
        held = await publisher.trajectory("a", 0, num_samples=1).__aenter__()
        entered = asyncio.ensure_future(ended_async(publisher.group("b", 2).__aenter__()))
        await asyncio.to_thread(
            wait_until, lambda: proxy.replies.is_silent, describe="the silence of the store"
        )

        clock.resume(ahead_s=1.0)
        error = await entered
        speak(proxy)
        held.abandon("over")

    assert type(error) is NotReadyError
    assert kinds(error)[:2] == [WaitKind.NO_LEAVE, WaitKind.STORE_SILENT]


def test_task_requested_from_a_silent_store_is_returned_next(
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
            ended(lambda: publisher.next_task(TIMEOUT_S))

        with publisher.next_task(TIMEOUT_S) as second:
            write(second)
        error = ended(lambda: publisher.next_task(0.01))

    assert (first.prompt_uid, second.prompt_uid) == ("a", "b")
    assert kinds(error)[0] == WaitKind.NO_TASK


def write(task: Any) -> None:
    for trajectory in task.trajectories:
        trajectory.append(ids("a"), ids("b"))
        trajectory.seal(1.0)


def test_last_answer_of_a_silent_store_is_reported(
    own_store: Store, silent_from: Callable[[str], Any]
) -> None:
    run = own_store.new_run()
    proxy = silent_from("XREAD")
    with Publisher(proxy.url, run) as publisher:
        # The store must have said by then that there is none, over a connection that is new.
        error = ended(lambda: publisher.next_task(2.0))

    assert type(error) is StoreUnavailableError
    assert "the run was given no prompt" in error.reasons[0].sentence
    assert facts(error, WaitKind.NO_TASK)["told_s"] > 0
    assert error.message.startswith(f"run {run!r}: no task: the store at ")
