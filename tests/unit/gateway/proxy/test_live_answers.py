"""The answer of a model call, which requests follow while it grows."""

from __future__ import annotations

import asyncio
from typing import Any

from turnstream_server.gateway.proxy.live_answers import Answer


class Client:
    """A request, with the messages that it was sent and an event of its leaving."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.sent: list[Any] = []

    async def receive(self) -> Any:
        """Return the message of a client that leaves, once it has left."""
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        """Keep a message of the answer."""
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        """Return the body so far."""
        return b"".join(each.get("body", b"") for each in self.sent)


def follow(answer: Answer) -> tuple[Client, asyncio.Task[None]]:
    client = Client()
    return client, asyncio.create_task(answer.send_to(client.receive, client.send))


async def turns(num: int = 10) -> None:
    for _ in range(num):
        await asyncio.sleep(0)


async def test_late_request_gets_the_answer_from_its_start():
    answer = Answer()
    early, first = follow(answer)
    await turns()
    assert early.sent == []

    answer.begin(200, "text/event-stream", {"x-test": "1"})
    answer.add(b"a")
    await turns()
    assert early.body == b"a"
    late, second = follow(answer)
    answer.add(b"b")
    answer.end()
    await asyncio.gather(first, second)

    assert (early.body, late.body) == (b"ab", b"ab")
    start = {"type": "http.response.start", "status": 200}
    headers = [(b"content-type", b"text/event-stream"), (b"x-test", b"1")]
    assert late.sent[0] == {**start, "headers": headers}
    assert [each["more_body"] for each in late.sent[1:]][-1] is False
    assert answer.was_taken


async def test_answer_waits_for_a_request_that_follows_it():
    answer = Answer()
    answer.begin(200, "application/json")
    client, following = follow(answer)
    await turns()
    client.left.set()
    await following

    was_followed = await answer.wait_for_follower(timeout_s=0.01)
    waiting = asyncio.create_task(answer.wait_for_follower(timeout_s=30.0))
    await turns()
    another, following = follow(answer)
    is_followed = await waiting
    answer.end()
    await following

    assert (was_followed, is_followed, answer.was_taken) == (False, True, True)
    assert another.sent[-1]["more_body"] is False


async def test_request_that_leaves_has_not_taken_the_answer():
    answer = Answer()
    answer.begin(200, "application/json")
    answer.add(b"{")
    client, following = follow(answer)
    await turns()
    client.left.set()
    await following

    assert (client.body, answer.num_followers, answer.was_taken) == (b"{", 0, False)


async def test_answer_that_ends_before_its_begin_has_failed():
    answer = Answer()
    client, task = follow(answer)
    await turns()

    answer.end()
    await task

    assert client.sent[0]["status"] == 500
