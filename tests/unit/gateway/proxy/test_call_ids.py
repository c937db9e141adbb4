"""Names of model calls."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from turnstream_server.gateway.proxy.call_ids import (
    call_id,
    new_call,
    request_hash,
    superseded_turns,
)


def test_call_ids_are_names_of_64_characters_at_most() -> None:
    name = call_id(new_call(request_hash("chat/completions", b"{}"), is_retry=True), 63)

    assert len(name) <= 64
    assert name.isascii()
    assert name.count(".") == 3


@given(st.lists(st.tuples(st.sampled_from("ab"), st.booleans(), st.integers(1, 3)), max_size=8))
def test_retry_supersedes_all_choices_of_the_call_before(
    calls: list[tuple[str, bool, int]],
) -> None:
    named: dict[str, int] = {}
    expected: set[int] = set()
    last: dict[str, list[int]] = {}
    for request, is_retry, num_choices in calls:
        call = new_call(request, is_retry=is_retry)
        turns = [len(named) + choice for choice in range(num_choices)]
        named |= {call_id(call, choice): turn for choice, turn in enumerate(turns)}
        if is_retry:
            expected.update(last.get(request, []))
        last[request] = turns

    assert superseded_turns(named) == expected
