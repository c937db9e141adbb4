from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnstream.batching.packing.balance import Method, Parts, balance, largest_part
from turnstream.errors import BatchingError

weights_and_parts = st.tuples(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 6))


@pytest.mark.parametrize(
    ("weights", "method", "expected"),
    [
        ([8, 7, 6, 5, 4], "longest_first", [[8, 5, 4], [7, 6]]),
        ([8, 7, 6, 5, 4], "karmarkar_karp", [[4, 7, 5], [8, 6]]),
        ([1, 2, 3, 4, 5, 20], "longest_first", [[20, 2, 1], [5, 4, 3]]),
        ([1, 2, 3, 4, 5, 20], "karmarkar_karp", [[20, 3, 1], [5, 4, 2]]),
    ],
)
def test_balances_the_golden_vectors(
    weights: list[int], method: Method, expected: list[list[int]]
) -> None:
    parts = balance(weights, num_parts=2, method=method, equal_count=len(weights) == 6)

    assert [[weights[item] for item in part] for part in parts] == expected


@pytest.mark.parametrize(
    ("num_parts", "message"), [(2, "5 items do not divide into 2"), (0, "num_parts=0")]
)
def test_impossible_parts_are_refused(num_parts: int, message: str) -> None:
    with pytest.raises(BatchingError, match=message):
        balance([1] * 5, num_parts=num_parts, equal_count=True)


@given(weights_and_parts)
def test_parts_without_a_method_are_consecutive_items(drawn: tuple[list[int], int]) -> None:
    weights, num_parts = drawn

    parts = balance(weights, num_parts=num_parts, method="none")

    assert [item for part in parts for item in part] == list(range(len(weights)))
    assert {len(part) for part in parts} <= {
        -(-len(weights) // num_parts),
        len(weights) // num_parts,
    }


@given(weights_and_parts, st.sampled_from(Method.__args__), st.booleans())
def test_every_item_is_in_one_part(
    drawn: tuple[list[int], int], method: Method, equal_count: bool
) -> None:
    weights, num_parts = drawn
    weights = weights[: len(weights) // num_parts * num_parts]

    parts = balance(weights, num_parts=num_parts, method=method, equal_count=equal_count)

    assert len(parts) == num_parts
    assert not equal_count or {len(part) for part in parts} == {len(weights) // num_parts}
    assert sorted(item for part in parts for item in part) == list(range(len(weights)))


@given(weights_and_parts)
def test_auto_is_never_worse_than_either_method(drawn: tuple[list[int], int]) -> None:
    weights, num_parts = drawn

    best = largest_part(balance(weights, num_parts=num_parts), weights)

    for method in ("longest_first", "karmarkar_karp"):
        assert best <= largest_part(balance(weights, num_parts=num_parts, method=method), weights)


def slow_longest_first(weights: list[int], num_parts: int, room: int) -> Parts:
    parts: Parts = [[] for _ in range(num_parts)]
    for item in sorted(range(len(weights)), key=lambda item: (-weights[item], item)):
        open_parts = [part for part in range(num_parts) if len(parts[part]) < room]
        sums = [sum(weights[other] for other in parts[part]) for part in open_parts]
        parts[open_parts[sums.index(min(sums))]].append(item)
    return parts


@given(weights_and_parts, st.booleans())
def test_longest_first_agrees_with_looking_at_every_part(
    drawn: tuple[list[int], int], equal_count: bool
) -> None:
    weights, num_parts = drawn
    if equal_count:
        weights = weights[: len(weights) // num_parts * num_parts]
    room = len(weights) // num_parts if equal_count else len(weights)

    parts = balance(weights, num_parts=num_parts, method="longest_first", equal_count=equal_count)

    assert parts == slow_longest_first(weights, num_parts, room)


def slow_differencing(states: list[list[tuple[int, list[int]]]]) -> list[int]:
    """Sums of the parts: the two widest states are merged, heaviest to lightest, again and again.

    Among states of equal spread and largest set the older one goes first.
    """
    states = [sorted(state, key=lambda one: -one[0]) for state in states]
    while len(states) > 1:
        widths = [(s[-1][0] - s[0][0], -s[0][0], place) for place, s in enumerate(states)]
        first, second = (place for *_, place in sorted(widths)[:2])
        merged = [
            (a[0] + b[0], a[1] + b[1])
            for a, b in zip(states[first], reversed(states[second]), strict=True)
        ]
        states = [s for place, s in enumerate(states) if place not in (first, second)]
        states.append(sorted(merged, key=lambda one: -one[0]))
    return [total for total, _ in states[0]]


@given(st.lists(st.integers(0, 99), min_size=1, max_size=12), st.integers(1, 4), st.booleans())
def test_differencing_agrees_with_looking_at_every_state(
    weights: list[int], num_parts: int, equal_count: bool
) -> None:
    if equal_count:
        weights = weights * num_parts
        order = sorted(range(len(weights)), key=lambda item: (weights[item], item))
        states = [
            [(weights[item], [item]) for item in order[start : start + num_parts]]
            for start in range(0, len(order), num_parts)
        ]
    else:
        states = [[(w, [item]), *[(0, [])] * (num_parts - 1)] for item, w in enumerate(weights)]

    parts = balance(weights, num_parts=num_parts, method="karmarkar_karp", equal_count=equal_count)

    assert [sum(weights[item] for item in part) for part in parts] == slow_differencing(states)
