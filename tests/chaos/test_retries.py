"""Faults 2 and 23: replies are lost, and every write is repeated."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import hiredis
import pytest

from harness.proxy import Proxy
from harness.rig import PATIENCE_S, Rig
from testkit.runs.scripts import script

pytestmark = [pytest.mark.e2e, pytest.mark.grpc, pytest.mark.timeout(600)]


@pytest.fixture
def proxied(rig: Rig) -> Iterator[Proxy]:
    """Start a proxy before the store that records all requests."""
    with Proxy(rig.server.url) as proxy:
        proxy.requests.is_recorded = True
        rig.store_url = proxy.url
        yield proxy


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

    for name in ("open_group", "append", "leader_write"):
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
    for answer in answers:
        if isinstance(answer, list):
            yield from _texts(answer)
        elif isinstance(answer, bytes | Exception):
            yield answer.decode(errors="replace") if isinstance(answer, bytes) else str(answer)


def _impatient(data: bytes) -> bytes:
    """The same commands; reads that would wait for news wait no longer than a millisecond."""
    return re.sub(rb"BLOCK\r\n\$\d+\r\n\d+", b"BLOCK\r\n$1\r\n1", data)
