"""Faults 2 and 23: replies are lost, and every call is repeated, by gRPC and as scripts."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import grpc
import hiredis
import pytest

from harness.proxy import Outcome, Proxy, Repeated, Repeater
from harness.rig import PATIENCE_S, Rig, config
from testkit.scripts import script
from turnstream.store.client import keys
from turnstream.wire.v1 import batches_pb2 as wire
from turnstream.worker import ObserverStream

pytestmark = [pytest.mark.e2e, pytest.mark.grpc, pytest.mark.timeout(600)]

StartRig = Callable[..., Rig]
NUM_STEPS = 5
AHEAD = config(max_planned_ahead=NUM_STEPS, max_staleness=NUM_STEPS)
"""All steps are planned before the trainer's first call."""


@pytest.fixture
def proxied(rig: Rig) -> Iterator[Proxy]:
    """Start a proxy before the store that records all requests."""
    with Proxy(rig.server.url) as proxy:
        proxy.requests.is_recorded = True
        rig.store_url = proxy.url
        yield proxy


@pytest.fixture
def planned(start_rig: StartRig) -> Rig:
    rig = start_rig(config=AHEAD)
    rig.start_batcher()
    rig.join(rig.start_generator(groups=4 * NUM_STEPS))
    rig.wait(lambda: rig.planned() == NUM_STEPS, "all plans")
    return rig


def test_replies_lost_after_the_write_leave_one_copy(rig: Rig, proxied: Proxy) -> None:
    # Fault 2: connections are cut again and again behind a request that has arrived.
    places = (0, 60, 5, 70, 10, 80, 15, 90)
    proxied.break_replies(places, request=script("append").sha.encode())

    rig.join(rig.start_generator(groups=20))

    (done,) = rig.history().of("done")
    assert proxied.num_breaks == len(places)
    assert done["duplicates"] > 0
    rig.store_url = rig.server.url
    rig.start_batcher()
    rig.drain()


def test_calls_sent_three_times_have_the_outcome_of_single_calls(planned: Rig) -> None:
    with Repeater(planned.address()) as repeater:
        planned.join(
            planned.start_ranks(2, target=repeater.address, checkpoint_every=1, max_steps=NUM_STEPS)
        )
        _observe(planned, repeater.address)
        calls = [call for call in repeater.calls if _is_answered(call)]
        before = planned.digest()
        late = repeater.send_again(calls, num_copies=3)

    assert [call for call in calls if len(_lasting(call)) > 1] == []
    assert {_name(call) for call in calls} == {
        *("Start", "Get", "Stepped", "Committed", "AnnounceVersion", "Observe", "Observed"),
        "Check",  # a stream sends it before its first Get
    }
    assert _seen(planned) == NUM_STEPS
    assert _without_wake(planned.digest()) == _without_wake(before)
    for first, again in zip(calls, late, strict=True):
        if _name(first) == "Start":  # the trainer is further, so this is a second one
            assert {outcome.code for outcome in again.outcomes} == {grpc.StatusCode.ALREADY_EXISTS}
        elif _name(first) == "Observe":  # the observer has received everything since
            assert len({*again.outcomes}) == 1
            assert {*again.outcomes} != {*first.outcomes}
        else:
            assert {*again.outcomes} == _lasting(first), _name(first)
    planned.drain(2)


def _observe(rig: Rig, target: str) -> None:
    with ObserverStream(target, rig.run, "audit", first_step=1, timeout_s=PATIENCE_S) as observer:
        for mini_batch in observer:
            if mini_batch.is_last and observer.seen() == NUM_STEPS:
                return
    raise AssertionError("the run ended before all was seen")


def _seen(rig: Rig) -> int:
    entry: Any = rig.client.hget(keys.run_keys(rig.run).observers, "audit")
    return int(entry.split(b":")[0])


def _is_answered(call: Repeated) -> bool:
    """Return whether a call succeeded; a call for a batch after the last does not."""
    return any(outcome.code is grpc.StatusCode.OK for outcome in call.outcomes)


def _lasting(call: Repeated) -> set[Outcome]:
    if _name(call) == "Stepped":  # the other rank may step between two copies of the call
        late = grpc.StatusCode.DEADLINE_EXCEEDED
        return {outcome for outcome in call.outcomes if outcome.code is not late}
    if _name(call) != "Start":
        return {*call.outcomes}
    return {
        replace(outcome, messages=tuple(map(_without_newest_version, outcome.messages)))
        for outcome in call.outcomes
    }


def _without_newest_version(reply: bytes) -> bytes:
    """The other rank may announce a version between two answers."""
    started = wire.StartReply.FromString(reply)
    started.ClearField("newest_version")
    return started.SerializeToString()


def _name(call: Repeated) -> str:
    return call.method.rpartition("/")[2]


def test_repeated_requests_of_a_generator_and_a_batcher_change_nothing(
    rig: Rig, proxied: Proxy
) -> None:
    # Three copies of all of it at once.
    batcher = rig.start_batcher()
    rig.join(rig.start_generator(groups=16))
    rig.join(rig.start_ranks(1, max_steps=4, checkpoint_every=1))
    batcher.kill()
    rig.store_url = rig.server.url
    before = rig.digest()
    sent = b"".join(proxied.requests.recorded)

    answers = _replay(rig, proxied, copies=3)

    names = ("open_group", "append", "leader_write", "announce_version", "stepped", "committed")
    for name in names:
        assert sent.count(script(name).sha.encode()) >= 4, name
    assert "DUPLICATE" in [*_texts(answers)]
    assert rig.digest() == before
    rig.start_batcher()
    rig.drain()


def _replay(rig: Rig, proxied: Proxy, *, copies: int) -> list[Any]:
    """Send every recorded connection again, so many times at once; gives what is answered."""
    answers: list[Any] = []
    port = int(rig.server.url.rpartition(":")[2].partition("/")[0])

    def send(data: bytes) -> None:
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as again:
            again.sendall(_impatient(data) + b"*1\r\n$4\r\nQUIT\r\n")
            reader = hiredis.Reader()
            while got := again.recv(1 << 16):
                reader.feed(got)
                while (answer := reader.gets()) is not False:
                    answers.append(answer)

    senders = [
        threading.Thread(target=send, args=(data,), daemon=True)
        for data in [bytes(each) for each in proxied.requests.recorded]
        for _ in range(copies)
    ]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join(PATIENCE_S)
    assert not any(sender.is_alive() for sender in senders)
    return answers


def _texts(answers: Iterable[Any]) -> Iterator[str]:
    """Each text and error, also those in lists."""
    for answer in answers:
        if isinstance(answer, list):
            yield from _texts(answer)
        elif isinstance(answer, bytes | Exception):
            yield answer.decode(errors="replace") if isinstance(answer, bytes) else str(answer)


def _impatient(data: bytes) -> bytes:
    """The same commands; reads that would wait for news wait no longer than a millisecond."""
    return re.sub(rb"BLOCK\r\n\$\d+\r\n\d+", b"BLOCK\r\n$1\r\n1", data)


def _without_wake(digest: Any) -> dict[Any, Any]:
    """Return a digest without wake streams: a repeated call may write an entry there."""
    return {key: value for key, value in digest.items() if not key.endswith(b":wake")}
