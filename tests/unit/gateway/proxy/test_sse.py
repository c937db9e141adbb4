"""Server-sent events: any cuts of the bytes, as a naive reader of whole streams finds them."""

from __future__ import annotations

import itertools
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnstream_server.gateway.proxy.sse import (
    DONE,
    Event,
    EventReader,
    EventStreamError,
    event_bytes,
)

_BREAKS = st.sampled_from(["\n", "\r", "\r\n"])
_TEXTS = st.text(st.sampled_from("ab:{} \tä\u2028"), max_size=6)
_LINES = st.one_of(
    st.just(""),
    _TEXTS,
    st.builds("data:{}".format, _TEXTS),
    st.builds("data: {}".format, _TEXTS),
    st.builds("event: {}".format, _TEXTS),
    st.builds(": {}".format, _TEXTS),
    st.sampled_from(["data", "event", "id: 7", "retry: 5", "DATA: x"]),
)
_STREAMS = st.lists(st.tuples(_LINES, _BREAKS)).map(
    lambda lines: "".join(itertools.chain.from_iterable(lines)).encode()
)


def naive_events(stream: bytes) -> list[Event]:
    """Return the events of a whole stream, line by line."""
    events: list[Event] = []
    data: list[str] = []
    name = ""
    *lines, _ = re.split("\r\n|\r|\n", stream.decode())
    for line in lines:
        if not line:
            if data:
                events.append(Event("\n".join(data).encode(), name))
            data, name = [], ""
            continue
        field, _, value = line.partition(":")
        value = value[1:] if value[:1] == " " else value
        if field == "data":
            data.append(value)
        if field == "event":
            name = value
    return events


def read(stream: bytes, cuts: list[int]) -> list[Event]:
    """Return the events of a stream that arrives in parts."""
    reader = EventReader()
    places = [0, *sorted(cuts), len(stream)]
    parts = [stream[start:end] for start, end in itertools.pairwise(places)]
    return [event for part in parts for event in reader.feed(part)]


@given(_STREAMS, st.lists(st.integers(0, 200)))
def test_any_cuts_give_the_events_of_a_naive_reader(stream: bytes, cuts: list[int]) -> None:
    cuts = [min(each, len(stream)) for each in cuts]
    assert read(stream, cuts) == naive_events(stream)
    assert read(stream, list(range(len(stream)))) == naive_events(stream)


@given(st.lists(st.dictionaries(_TEXTS, _TEXTS | st.integers() | st.none())))
def test_written_events_are_read_again(contents: list[dict[str, object]]) -> None:
    stream = b"".join([*(event_bytes(each, name="part") for each in contents), DONE])
    *events, last = EventReader().feed(stream)
    assert last.is_done
    assert [(each.name, each.json()) for each in events] == [("part", each) for each in contents]


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b"7", b"\xff", b"[DONE]"])
def test_data_that_is_no_object_is_an_error(data: bytes) -> None:
    with pytest.raises(EventStreamError, match="an event is no JSON"):
        Event(data).json()


def test_too_large_events_are_refused_at_their_limit() -> None:
    whole = b"data: " + b"x" * 50 + b"\ndata: " + b"y" * 49 + b"\n\n"
    assert len(EventReader(max_event_bytes=100).feed(whole)[0].data) == 100
    for stream in (whole, b"data: " + b"x" * 100 + b"\n", b":" + b"x" * 100):
        with pytest.raises(EventStreamError, match="more than 99 bytes"):
            EventReader(max_event_bytes=99).feed(stream)
    reader = EventReader(max_event_bytes=99)
    assert [reader.feed(b"data: " + b"x" * 90 + b"\n\n: " + b"y" * 90 + b"\n") for _ in range(3)]


def test_time_is_linear_in_the_bytes_of_one_event() -> None:
    def seconds(num_bytes: int) -> float:
        reader, start_s = EventReader(), time.process_time()
        for _ in range(num_bytes // 4):
            reader.feed(b"data")
        assert reader.feed(b":1\n\n") == []  # its field has another name
        return time.process_time() - start_s

    # 8 times the bytes: 64 times the time if each cut copied what is there already.
    assert min(seconds(1 << 19) for _ in range(3)) < 24 * min(seconds(1 << 16) for _ in range(3))
