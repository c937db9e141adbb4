from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from testkit.waiting import finish
from turnstream.errors import ConflictError, FencedError, NotReadyError, StoreBehindError
from turnstream.generator.outbox.receipts import AsyncReceipt, PendingWrite, Receipt, raise_unread
from turnstream.types import TrajectoryKey

ONE, OTHER = TrajectoryKey("g", 0), TrajectoryKey("g", 1)


def test_a_receipt_is_done_when_all_its_parts_are() -> None:
    receipt = Receipt(2)

    receipt.settle(ONE)
    was_done = receipt.is_done
    receipt.settle(OTHER)

    assert not was_done
    assert receipt.is_done
    receipt.result()


def test_a_receipt_raises_the_first_error_and_names_them_all() -> None:
    receipt = Receipt(2)
    receipt.settle(ONE, ConflictError("first"))
    receipt.settle(OTHER, FencedError("second"))

    with pytest.raises(ConflictError, match="first"):
        receipt.result()

    assert list(receipt.errors) == [ONE, OTHER]


def test_waiting_thread_is_woken() -> None:
    receipt = Receipt()
    waiters = [threading.Thread(target=receipt.result, args=(10,), daemon=True) for _ in range(3)]
    for waiter in waiters:
        waiter.start()

    receipt.settle(ONE)

    for waiter in waiters:
        waiter.join(10)
        assert not waiter.is_alive()


async def test_an_async_receipt_can_be_awaited_by_many() -> None:
    receipt = AsyncReceipt()

    async def awaited() -> None:
        await receipt

    waiting = [asyncio.create_task(each) for each in (receipt.result(10), awaited(), awaited())]
    done_before, _ = await asyncio.wait(waiting, timeout=0.01)

    receipt.settle(ONE)

    await asyncio.gather(*waiting)
    assert not done_before


@pytest.mark.parametrize("kind", [Receipt, AsyncReceipt])
async def test_receipt_wait_ends_by_its_deadline(kind: Any) -> None:
    with pytest.raises(NotReadyError, match=r"within 0\.01 s"):
        await finish(lambda: kind().result(0.01))


def test_unread_failures_are_raised_once_as_one_error() -> None:
    failures: list[PendingWrite] = []
    lost, only, common, asked = (ConflictError(str(number)) for number in range(4))
    for errors in ([only, common], [common, common], [asked, asked]):
        receipt = Receipt(2, unread_failures=failures)
        for key, error in zip((ONE, OTHER), errors, strict=True):
            receipt.settle(key, error)
    with pytest.raises(ConflictError):
        failures[-1].raise_error()

    with pytest.raises(ConflictError) as raised:
        raise_unread(failures, [lost])
    raise_unread(failures, [])

    assert raised.value is lost
    assert lost.others == (only, common)


@pytest.mark.parametrize(
    ("num_others", "notes"),
    [
        (0, []),
        (5, ["and 1", "and 2", "and 3", "and 4", "and 5"]),
        (7, ["and 1", "and 2", "and 3", "and 4", "and 5", "and 2 more"]),
    ],
)
def test_a_traceback_names_the_first_of_the_other_errors(num_others: int, notes: list[str]) -> None:
    lost = [StoreBehindError(str(number)) for number in range(1 + num_others)]

    with pytest.raises(StoreBehindError, match="0") as raised:
        raise_unread([], [*lost])

    assert raised.value.others == (*lost[1:],)
    assert getattr(raised.value, "__notes__", []) == notes
