"""Bytes as the reason of a wait: who holds them, and when they are none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from turnstream_server.bus.queries.budget import ByteBudget, HeldBytes
from turnstream_server.bus.queries.run_snapshot import RunSnapshot
from turnstream_server.bus.queries.wait_reasons import ReasonKind, reasons

Starved = Callable[..., RunSnapshot]


def kinds(snapshot: RunSnapshot) -> list[ReasonKind]:
    return [reason.kind for reason in reasons(snapshot)]


def held(*, planned: int = 0, reserved: int = 0, **limits: int) -> ByteBudget:
    sums = HeldBytes(reserved=reserved, stored=0, planned=planned, estimate=1_000)
    memory: dict[str, Any] = {"max_bytes": 0, "server_used": 0, "server_max": 0, **limits}
    return ByteBudget(held=sums, num_kept_steps=2, **memory)


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (held(planned=50_000), []),
        (held(planned=5_000, max_bytes=6_000), []),
        (held(planned=5_000, max_bytes=5_999), [ReasonKind.OUT_OF_BYTES]),
        (
            held(planned=7_000, max_bytes=6_000),
            [ReasonKind.OUT_OF_BYTES, ReasonKind.BUDGET_TOO_SMALL],
        ),
        (held(server_used=79_000, server_max=100_000), []),
        (held(server_used=79_001, server_max=100_000), [ReasonKind.OUT_OF_BYTES]),
        (held(server_used=78_000, reserved=1_001, server_max=100_000), [ReasonKind.OUT_OF_BYTES]),
    ],
)
def test_bytes_are_a_reason_where_no_usual_group_has_room(
    budget: ByteBudget, expected: list[ReasonKind], starved: Starved
) -> None:
    assert kinds(starved(budget=budget, frontier={"planned": 3})) == (
        expected or [ReasonKind.NOTHING_WRONG]
    )


def test_bytes_are_no_reason_while_groups_start_for_a_starving_trainer(
    starved: Starved,
) -> None:
    full = held(planned=5_000, max_bytes=5_999)
    in_reserve = held(server_used=79_001, server_max=100_000)
    beyond = held(server_used=89_001, server_max=100_000)

    assert ReasonKind.OUT_OF_BYTES not in kinds(starved(budget=full))
    assert ReasonKind.OUT_OF_BYTES not in kinds(starved(budget=in_reserve))
    assert ReasonKind.OUT_OF_BYTES in kinds(starved(budget=beyond))


def test_holders_of_the_bytes_are_listed(starved: Starved) -> None:
    budget = held(planned=5_000, reserved=2_000, max_bytes=7_500)

    (found,) = reasons(starved(budget=budget, frontier={"planned": 3}))

    assert found.sentence == (
        "generators wait for bytes: 7,000 of max_bytes=7,500 are held, 2,000 by open trajectories, "
        "0 by sealed ones, 5,000 by the 2 steps that are kept; steps make room as they are "
        "committed and fall behind the retained checkpoints"
    )
    assert found.facts["max_bytes"] == 7_500
