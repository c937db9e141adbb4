from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnstream.batching.packing.bins import Bins, Method, grow_bins, pack
from turnstream.batching.packing.microbatch import Budget, plan_passes
from turnstream.errors import BatchingError, RowTooLongError

METHODS: tuple[Method, ...] = Method.__args__
LENGTHS = [6, 3, 5, 7, 2, 4, 1, 8]

rows = st.lists(st.integers(1, 60), max_size=60)


def tokens(bins: Bins, lengths: list[int]) -> list[int]:
    return [sum(lengths[row] for row in bin_rows) for bin_rows in bins]


Choose = Callable[[list[tuple[int, int]]], int]


def scan(order: list[int], lengths: list[int], capacity: int, choose: Choose) -> Bins:
    """Put each row into a bin with space for it, chosen by (space, bin), or into a new one."""
    bins: Bins = []
    for row in order:
        spaces = [(capacity - used, k) for k, used in enumerate(tokens(bins, lengths))]
        fitting = [each for each in spaces if each[0] >= lengths[row]]
        chosen = choose(fitting) if fitting else len(bins)
        if chosen == len(bins):
            bins.append([])
        bins[chosen].append(row)
    return bins


def first(fitting: list[tuple[int, int]]) -> int:
    return fitting[0][1]


def fullest(fitting: list[tuple[int, int]]) -> int:
    return min(fitting)[1]


def emptiest(fitting: list[tuple[int, int]]) -> int:
    return min(fitting, key=lambda each: (-each[0], each[1]))[1]


def test_edge_case_42_ties_go_to_the_lower_index_first() -> None:
    # The reference puts the highest index first: [[1,3],[0,2],[4]] and [[3,2],[1,0]].
    assert pack([5, 5, 3, 3, 2], capacity=8, method="first_fit_decreasing") == [[0, 2], [1, 3], [4]]
    assert pack([4, 4, 4, 4], capacity=8) == [[0, 1], [2, 3]]


def test_edge_case_42_bins_grow_by_splitting_the_fullest() -> None:
    # The reference pops the last row of the largest bin: [[4,3],[0],[1],[2]] and
    # [[2,6,5],[1,4],[0],[3]].
    five = grow_bins(pack([2] * 5, capacity=10), [2] * 5, multiple_of=4)
    lengths = [6, 6, 6, 1, 1, 1, 1]
    packed = pack(lengths, capacity=8, method="first_fit_decreasing")

    assert five == [[0], [4], [2], [1, 3]]
    assert packed == [[0, 3, 4], [1, 5, 6], [2]]
    assert grow_bins(packed, lengths, multiple_of=4) == [[0], [3, 4], [1, 5, 6], [2]]


def test_edge_case_42_even_packer_of_the_reference_is_capped_by_chance() -> None:
    # Its soft cap gives [[0,2],[1,3],[4]]; ours packs for the cap first, and levels then.
    [passes] = plan_passes([[5, 5, 3, 3, 2]], budget=Budget(limit=8, model="packed"))

    assert passes == [[0, 4], [2, 3], [1]]


def test_edge_cases_43_and_44_capacity_counts_aligned_lengths() -> None:
    # The reference counts unaligned lengths: two rows of 3, aligned to 4, would fill 8 of 6.
    assert pack([3, 3], capacity=6, alignment=4) == [[0], [1]]
    assert pack([3, 3], capacity=8, alignment=4) == [[0, 1]]


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ([1], {"capacity": 0}, "must be at least 1"),
        ([1], {"capacity": 4, "alignment": 0}, "must be at least 1"),
        ([1, 0], {"capacity": 4}, "row 1 has 0 tokens"),
    ],
)
def test_impossible_bins_are_refused(
    lengths: list[int], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(BatchingError, match=message):
        pack(lengths, **options)
    with pytest.raises(RowTooLongError) as caught:
        pack([4, 11], capacity=10)
    assert caught.value.args == (1, 11, 10)
    for multiple_of, reason in (
        (0, "multiple_of=0 must be at least 1"),
        (-2, "multiple_of=-2 must be at least 1"),
        (4, "3 rows cannot fill 4 bins"),
    ):
        with pytest.raises(BatchingError, match=reason):
            grow_bins([[0], [1, 2]], [1, 1, 1], multiple_of=multiple_of)


def scan_next_fit(order: list[int], lengths: list[int], capacity: int) -> Bins:
    bins: Bins = []
    for row in order:
        if not bins or tokens(bins[-1:], lengths)[0] + lengths[row] > capacity:
            bins.append([])
        bins[-1].append(row)
    return bins


def scan_modified(order: list[int], lengths: list[int], capacity: int) -> Bins:
    """Johnson and Garey, phase by phase, looking at all rows each time; fractions as they are."""
    bins: Bins = [[row] for row in order if lengths[row] > capacity / 2]
    rest = [row for row in order if lengths[row] <= capacity / 2]

    def room(index: int) -> int:
        return capacity - sum(lengths[row] for row in bins[index])

    def put(row: int, index: int) -> None:
        rest.remove(row)
        bins[index].append(row)

    for index in range(len(bins)):
        medium = [
            row for row in rest if lengths[row] > capacity / 3 and lengths[row] <= room(index)
        ]
        if medium:
            put(medium[0], index)
    for index in reversed(range(len(bins))):
        small = [row for row in rest if capacity / 6 < lengths[row] <= capacity / 3]
        if len(bins[index]) == 1 and len(small) > 1:
            if lengths[small[-1]] + lengths[small[-2]] > room(index):
                continue
            put(small[-1], index)
            put(next(row for row in small[:-1] if lengths[row] <= room(index)), index)
    for index in range(len(bins)):
        while fitting := [row for row in rest if lengths[row] <= room(index)]:
            put(fitting[0], index)
    return bins + scan(rest, lengths, capacity, first)


@given(lengths=rows, capacity=st.integers(60, 75))
def test_every_method_finds_the_bins_of_a_plain_scan(lengths: list[int], capacity: int) -> None:
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))

    def found(method: Method) -> Bins:
        return pack(lengths, capacity=capacity, method=method)

    assert found("first_fit") == scan(list(range(len(lengths))), lengths, capacity, first)
    assert found("best_fit_decreasing") == scan(order, lengths, capacity, fullest)
    assert found("worst_fit_decreasing") == scan(order, lengths, capacity, emptiest)
    assert found("next_fit") == scan_next_fit(list(range(len(lengths))), lengths, capacity)
    assert found("first_fit_decreasing") == scan(order, lengths, capacity, first)
    assert found("modified_first_fit_decreasing") == scan_modified(order, lengths, capacity)


def slow_grow(bins: Bins, lengths: list[int], target: int) -> Bins:
    bins = [list(own) for own in bins]
    while len(bins) < target:
        sums = [sum(lengths[row] for row in own) if len(own) > 1 else -1 for own in bins]
        index = sums.index(max(sums))
        halves: Bins = [[], []]
        for row in sorted(bins[index], key=lambda row: (-lengths[row], row)):
            left, right = tokens(halves, lengths)
            halves[0 if left <= right else 1].append(row)
        bins[index : index + 1] = halves
    return bins


@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=12), more=st.integers(0, 6))
def test_growing_agrees_with_halving_the_fullest_by_looking_at_all(
    lengths: list[int], more: int
) -> None:
    bins = pack(lengths, capacity=60)
    target = min(len(bins) + more, len(lengths))

    grown = grow_bins(bins, lengths, multiple_of=1, at_least=target)

    assert grown == slow_grow(bins, lengths, target)


@given(
    lengths=rows,
    capacity=st.integers(1, 80),
    method=st.sampled_from(METHODS),
    alignment=st.sampled_from([1, 2, 16]),
)
def test_only_a_row_alone_is_ever_above_the_capacity(
    lengths: list[int], capacity: int, method: Method, alignment: int
) -> None:
    bins = pack(lengths, capacity=capacity, method=method, over_long="alone", alignment=alignment)

    assert sorted(row for own in bins for row in own) == list(range(len(lengths)))
    for own in bins:
        total = sum(-(-lengths[row] // alignment) * alignment for row in own)
        assert total <= capacity or len(own) == 1
