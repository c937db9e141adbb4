"""What a store holds of a run, read back; and a proxy that loses replies."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis

from turnstream.batching.merge import turn_prompts
from turnstream.records.events import decode_event
from turnstream.records.turns import decode_turn
from turnstream.store import keys
from turnstream.types import Event, SealedTrajectory, StoredTurn, TrajectoryKey


class RunReader:
    """Reads what generators wrote to one run."""

    def __init__(self, client: redis.Redis, run: str) -> None:
        self.client = client
        self.run = run
        self.keys = keys.run_keys(run)

    def events(self) -> list[Event]:
        """All events, in order."""
        entries: Any = self.client.xrange(self.keys.events)
        return [decode_event(fields[b"r"]) for _, fields in entries]

    def sealed(self) -> list[TrajectoryKey]:
        """The keys of all seals that were posted, in order."""
        return [event.key for event in self.events() if isinstance(event, SealedTrajectory)]

    def ledger(self) -> dict[str, str]:
        """Where every trajectory is, by its id."""
        found: Any = self.client.hgetall(self.keys.ledger)
        return {name.decode(): state.decode() for name, state in found.items()}

    def states(self) -> dict[str, str]:
        """The same, without reasons, epochs and writers."""
        return {name: entry.partition(":")[0] for name, entry in self.ledger().items()}

    def counts(self) -> dict[str, int]:
        """How many trajectories are in which state; states without any are left out."""
        found: Any = self.client.hgetall(self.keys.counts)
        return {name.decode(): int(count) for name, count in found.items() if int(count)}

    def records(self, key: TrajectoryKey) -> list[bytes]:
        """What is stored of one trajectory."""
        names = keys.trajectory_keys(self.run, keys.trajectory_id(key))
        entries: Any = self.client.xrange(names.turns)
        expected = [f"0-{number}".encode() for number in range(1, len(entries) + 1)]
        assert [entry_id for entry_id, _ in entries] == expected
        return [fields[b"r"] for _, fields in entries]

    def turns(self, key: TrajectoryKey) -> list[StoredTurn]:
        """The turns of one trajectory, without the seal."""
        records = self.records(key)
        return [decode_turn(record) for record in records if record[2:3] == b"T"]

    def spelled(self, key: TrajectoryKey) -> list[tuple[str, str]]:
        """Full prompt and response of every turn, as letters."""
        turns = self.turns(key)
        return [
            (letters(prompt), letters(turn.response_ids))
            for prompt, turn in zip(turn_prompts(turns), turns, strict=True)
        ]

    def frees_capacity(self, *, stepped: int) -> None:
        """What the planner does when a step is taken."""
        self.client.hset(self.keys.frontier, "stepped", stepped)
        self.client.xadd(self.keys.wake, {"w": ""}, maxlen=1, approximate=False)


def letters(ids: Any) -> str:
    """Tokens as text."""
    return "".join(chr(token) for token in ids.tolist())


@pytest.fixture
def read() -> Callable[[redis.Redis, str], RunReader]:
    """`read(client, run)` reads a run back."""
    return RunReader


class Proxy:
    """Stands between a client and a server, and can lose what the server answers."""

    def __init__(self, server_url: str) -> None:
        address = urlsplit(server_url)
        self._server = (address.hostname or "", address.port or 0)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = [self._listener]
        self._loses_next = threading.Event()
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    @property
    def url(self) -> str:
        """Where clients connect."""
        return f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"

    def lose_next_reply(self) -> None:
        """Cut the connection of whoever is answered next, before the answer arrives."""
        self._loses_next.set()

    @property
    def has_lost(self) -> bool:
        """Whether the reply that was to be lost is lost."""
        return not self._loses_next.is_set()

    def close(self) -> None:
        """Close every connection and wait for the threads."""
        for opened in self._sockets:
            close(opened)
        for thread in self._threads:
            thread.join(5)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._server)
                self._sockets += [client, server]
                self._start(lambda c=client, s=server: self._pump(c, s, is_reply=False))
                self._start(lambda c=client, s=server: self._pump(s, c, is_reply=True))

    def _pump(self, source: socket.socket, sink: socket.socket, *, is_reply: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if is_reply and self._loses_next.is_set():
                    self._loses_next.clear()
                    break
                sink.sendall(data)
        close(source)
        close(sink)

    def _start(self, target: Callable[[], None]) -> None:
        self._threads.append(threading.Thread(target=target, daemon=True))
        self._threads[-1].start()


def close(opened: socket.socket) -> None:
    """Close a socket under the thread that reads it."""
    with contextlib.suppress(OSError):
        opened.shutdown(socket.SHUT_RDWR)
    opened.close()


@pytest.fixture
def proxy_to() -> Iterator[Callable[[str], Proxy]]:
    """`proxy_to(url)` starts a proxy."""
    with contextlib.ExitStack() as stack:

        def start(url: str) -> Proxy:
            proxy = Proxy(url)
            stack.callback(proxy.close)
            return proxy

        yield start


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """Publishers end their threads."""
    yield
    assert [t.name for t in threading.enumerate() if t.name.startswith("turnstream")] == []
