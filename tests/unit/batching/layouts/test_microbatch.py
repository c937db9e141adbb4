from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnstream.batching.packing.balance import Method as BalanceMethod
from turnstream.batching.packing.balance import balance, largest_part
from turnstream.batching.packing.bins import Bins, grow_bins, pack
from turnstream.batching.packing.bins import Method as PackingMethod
from turnstream.batching.packing.microbatch import (
    Budget,
    CostModel,
    PassOrder,
    plan_passes,
    row_units,
)
from turnstream.errors import BatchingError

MODELS: list[CostModel] = ["packed", "padded", "quadratic"]


@pytest.mark.parametrize(
    ("budget", "cost"),
    [
        (Budget(limit=0, model="packed"), 11),
        (Budget(limit=0, model="packed", alignment=4), 16),
        (Budget(limit=0, model="padded"), 18),
        (Budget(limit=0, model="padded", alignment=4), 24),
        (Budget(limit=0, model="quadratic", a=2, b=0.5), 22 + (9 + 4 + 36) / 2),
        (Budget(limit=0, model="quadratic", b=1, alignment=4), 16 + 16 + 16 + 64),
    ],
)
def test_a_pass_over_rows_of_3_2_and_6_tokens_costs(budget: Budget, cost: float) -> None:
    assert budget.cost([3, 2, 6]) == cost


@pytest.mark.parametrize(
    ("order", "tokens"),
    [
        ("largest_first", [9, 7, 5, 3, 1]),
        ("small_at_both_ends", [1, 5, 9, 7, 3]),
        ("as_packed", [5, 7, 3, 9, 1]),
    ],
)
@pytest.mark.parametrize("model", ["packed", "quadratic"])
def test_passes_come_in_the_order_of_the_run(
    order: PassOrder, tokens: list[int], model: CostModel
) -> None:
    lengths = [5, 7, 3, 9, 1]
    budget = Budget(limit=9, model=model, packing="next_fit", balancing="none", order=order)

    [passes] = plan_passes([lengths], budget=budget, multiple_of=5)

    assert [lengths[row] for [row] in passes] == tokens


@pytest.mark.parametrize(
    ("packing", "expected"),
    [
        ("next_fit", [[0, 1], [2], [3, 4], [5, 6], [7]]),
        ("first_fit", [[0, 1, 6], [2, 4], [3], [5], [7]]),
        ("best_fit_decreasing", [[4, 7], [1, 3], [0, 5], [2, 6]]),
        ("worst_fit_decreasing", [[6, 7], [3, 4], [0, 1], [2, 5]]),
    ],
)
def test_passes_without_balance_are_the_golden_bins(packing: PackingMethod, expected: Bins) -> None:
    budget = Budget(limit=10, model="packed", packing=packing, balancing="none", order="as_packed")

    [passes] = plan_passes([[6, 3, 5, 7, 2, 4, 1, 8]], budget=budget)

    assert passes == expected


def test_padded_passes_without_balance_are_filled_one_after_the_other() -> None:
    level = Budget(limit=12, order="as_packed")
    filled = replace(level, balancing="none")

    assert plan_passes([[4, 1, 1, 4]], budget=level) == [[[1, 2], [0, 3]]]
    assert plan_passes([[4, 1, 1, 4]], budget=filled) == [[[0, 1, 2], [3]]]
    assert plan_passes([[1, 1, 1, 1]], budget=filled, multiple_of=2) == [[[0, 1], [2, 3]]]


def test_more_passes_than_rows_are_refused_with_both_numbers() -> None:
    with pytest.raises(BatchingError, match="rank 1 has 1 rows for 2 micro-batches: add inert"):
        plan_passes([[8, 8], [1]], budget=Budget(limit=8, model="packed"))


budgets = st.builds(
    lambda limit, model, alignment, a, b, packing, balancing, order: Budget(
        limit=limit,
        model=model,
        alignment=alignment,
        a=a if model == "quadratic" else 1.0,
        b=b if model == "quadratic" else 0.0,
        packing=packing,
        balancing=balancing,
        order=order,
    ),
    st.integers(0, 80),
    st.sampled_from(MODELS),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([0.3, 1.0, 2.0]),
    st.sampled_from([0.0, 0.1, 1.0]),
    st.sampled_from(get_args(PackingMethod)),
    st.sampled_from(get_args(BalanceMethod)),
    st.sampled_from(get_args(PassOrder)),
)
shares = st.integers(1, 9).flatmap(
    lambda count: st.lists(
        st.lists(st.integers(1, 30), min_size=count, max_size=count), min_size=1, max_size=4
    )
)


@given(shares, budgets, st.integers(1, 3))
def test_rows_are_in_one_pass_within_the_budget_with_equal_rank_counts(
    lengths: list[list[int]], budget: Budget, multiple_of: int
) -> None:
    lengths = [share[: len(share) // multiple_of * multiple_of] for share in lengths]

    by_rank = plan_passes(lengths, budget=budget, multiple_of=multiple_of)

    [num_passes] = {len(passes) for passes in by_rank}
    assert num_passes % multiple_of == 0
    for share, passes in zip(lengths, by_rank, strict=True):
        assert sorted(row for rows in passes for row in rows) == list(range(len(share)))
        for rows in passes:
            cost = budget.cost([share[row] for row in rows])
            assert rows == sorted(rows)
            assert budget.limit == 0 or cost <= budget.limit or len(rows) == 1


@given(st.lists(st.integers(1, 30), min_size=1, max_size=9), st.integers(30, 200))
def test_padded_passes_are_as_cheap_as_that_many_can_be(lengths: list[int], limit: int) -> None:
    # Among cuts of the rows, from short to long, into as many runs.
    [passes] = plan_passes([lengths], budget=Budget(limit=limit, model="padded"))
    ordered = sorted(lengths)

    def cheapest(rest: list[int], num_runs: int) -> int:
        if num_runs == 1:
            return len(rest) * rest[-1] if rest else 0
        return min(
            max(len(rest[:cut]) * max(rest[:cut], default=0), cheapest(rest[cut:], num_runs - 1))
            for cut in range(len(rest) + 1)
        )

    found = max(len(rows) * max(lengths[row] for row in rows) for rows in passes)
    assert found == cheapest(ordered, len(passes))


@given(st.lists(st.integers(1, 30), min_size=2, max_size=12), budgets, st.integers(1, 4))
def test_summed_passes_are_packed_bins_unless_equal_parts_are_smaller(
    lengths: list[int], budget: Budget, multiple_of: int
) -> None:
    lengths = lengths[: len(lengths) // multiple_of * multiple_of]
    budget = replace(budget, limit=budget.limit or 30, model="packed", order="as_packed")
    costs = row_units(lengths, budget)

    [passes] = plan_passes([lengths], budget=budget, multiple_of=multiple_of)

    capacity = int(budget.limit) * 1024
    packed = pack(costs, capacity=capacity, method=budget.packing, over_long="alone")
    expected = grow_bins(packed, costs, multiple_of=multiple_of) if packed else []
    if budget.balancing != "none" and len(expected) > 1:
        parts = balance(costs, num_parts=len(expected), method=budget.balancing)
        if all(parts) and largest_part(parts, costs) < largest_part(expected, costs):
            expected = parts
    assert passes == [sorted(rows) for rows in expected]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), budgets)
def test_every_order_has_the_same_passes(lengths: list[int], budget: Budget) -> None:
    [as_packed] = plan_passes([lengths], budget=replace(budget, order="as_packed"))
    [descending] = plan_passes([lengths], budget=replace(budget, order="largest_first"))
    [ends] = plan_passes([lengths], budget=replace(budget, order="small_at_both_ends"))

    weigh = max if budget.model == "padded" else budget.cost
    costs = [weigh([lengths[row] for row in rows]) for rows in ends]
    peak = costs.index(max(costs))
    assert sorted(as_packed) == sorted(descending) == sorted(ends)
    assert costs[: peak + 1] == sorted(costs[: peak + 1])
    assert costs[peak:] == sorted(costs[peak:], reverse=True)
    assert min(costs) in (costs[0], costs[-1])
