"""The end of everything that a publisher has accepted and cannot send."""

from __future__ import annotations

from collections.abc import Callable

from turnstream.errors import TurnstreamError
from turnstream.generator.lanes import Admission, Lane
from turnstream.generator.lives import Lives
from turnstream.generator.receipts import Delivery


def end_all(lives: Lives, error_of: Callable[[Lane | Admission | str], TurnstreamError]) -> None:
    """Give up whatever is not acknowledged, and tell whoever waits for it.

    Args:
        lives: of the publisher, with its queues, in which everything stands.
        error_of: of a trajectory, of a group that asks for leave, or of a call, in words.
    """
    queues = lives.queues
    opened = [(each.opened, error_of(each)) for each in queues.admissions]
    calls: list[tuple[Delivery, str]] = [
        *[(call.receipt, "the closing of the run") for call in queues.closings],
        *[(call.receipt, "the question what the run declares") for call in queues.questions],
        *[(call.post.receipt, f"the reward of {call.post.name}") for call in queues.rewards],
    ]
    queues.clear()
    lives.give_up(error_of)
    for receipt, error in opened:
        receipt.settle(None, error)
    for receipt, what in calls:
        receipt.settle(None, error_of(what))
