"""Damaged requests, keys and HTTP bodies for one gateway and one batcher, with a judgement."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

import grpc
import httpx2
import psutil

from fuzz.bodies import (
    RUN,
    Body,
    arrow_bodies,
    call_bodies,
    damaged_body,
    damaged_json,
    json_bodies,
)
from fuzz.calls import REFUSALS, Answer, Metadata, send_any
from fuzz.damage import damaged
from turnstream.generator.transport.messages import MEDIA_TYPE as CALLS
from turnstream.store.client.addresses import with_key
from turnstream.store.client.api_keys import FILE_VARIABLE, METADATA
from turnstream.store.client.connection import connect
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.keys.records import ApiKey, KeyLimits, encode_key, key_id_of, new_secret
from turnstream_server.keys.store import KEYS, create_key
from turnstream_server.launch.stack import Service, Stack

MAX_BYTES: Final = 400_000_000
"""Memory limit of each process."""

MAX_GROWTH_BYTES: Final = 24_000_000
"""Growth of a process after the first quarter of the cases."""

_TIMEOUT_S: Final = 30.0
_PROBLEM: Final = "application/problem+json"
_ANSWERS: Final = {"application/json", CALLS}


@dataclass(slots=True, kw_only=True)
class Report:
    """The result of a campaign: its cases by outcome, problems, and the memory of each process.

    `growth_bytes` is the growth after the first quarter of the cases.
    """

    num_cases: int = 0
    outcomes: Counter[str] = field(default_factory=Counter[str])
    problems: list[str] = field(default_factory=list[str])
    peak_bytes: dict[str, int] = field(default_factory=dict[str, int])
    growth_bytes: dict[str, int] = field(default_factory=dict[str, int])


class ServiceCampaign:
    """Sends damaged requests to processes that require keys; ends them with its block."""

    def __init__(self, folder: Path, *, seed: int) -> None:
        self.report = Report()
        self._folder = folder
        self._seed = seed
        self._resources = contextlib.ExitStack()
        self._levels: dict[str, int] = {}
        self._kinds: dict[str, Callable[[random.Random], None]] = {
            "metadata": self._send_metadata,
            "request": self._send_request,
            "JSON": lambda rng: self._send_body(rng, self._json),
            "Arrow": lambda rng: self._send_body(rng, self._arrow),
            "commands": lambda rng: self._send_body(rng, self._commands),
            "stored key": self._damage_key,
        }

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._server = stack.enter_context(EmbeddedServer(self._folder / "data"))
            url = self._server.url
            self._client = stack.enter_context(connect(url))
            self._secret = create_key(self._client, "fuzz", roles=["admin"])
            environment = {FILE_VARIABLE: str(self._folder / "key")}
            processes = stack.enter_context(
                Stack(self._folder, store_url=url, environment=environment)
            )
            self._batcher = processes.start_batcher()
            self._channel = stack.enter_context(grpc.insecure_channel(self._batcher.address))
            self._gateway = processes.start_listening("gateway", "gateway", listen="127.0.0.1:0")
            address = f"http://{self._gateway.address}"
            self._http = stack.enter_context(
                httpx2.Client(base_url=f"{address}/v1/", timeout=_TIMEOUT_S)
            )
            self._resources = stack.pop_all()
        self._json, self._arrow = json_bodies(), arrow_bodies()
        self._commands = call_bodies(with_key(address, self._secret))
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._resources.close()

    def run(self, num_cases: int) -> Report:
        """Run so many cases, each kind in turn, and check the memory of the processes."""
        kinds = [*self._kinds]
        for number in range(num_cases):
            kind = kinds[number % len(kinds)]
            self._kind, self._number = kind, number
            self._kinds[kind](random.Random(self._seed * 1_000_003 + number))
            self.report.num_cases += 1
            if number == num_cases // 4:
                self._levels = self._resident_bytes()
        self._judge_memory()
        self._judge_service()
        return self.report

    def _send_metadata(self, rng: random.Random) -> None:
        """Send a call whose key is damaged; it must be refused as unknown."""
        text = _legal(damaged(self._secret.encode(), rng))
        entries: list[Metadata] = [
            [(METADATA, text)],
            [("authorization", f"Bearer {text}")],
            [("authorization", text), ("authorization", "Bearer")],
            [("authorization", _legal(damaged(f"Bearer {self._secret[::-1]}".encode(), rng)))],
            [(METADATA, text), ("authorization", f"Bearer {self._secret}")],
            [(f"{METADATA}-bin", damaged(self._secret.encode(), rng))],
        ]
        if text.strip() in ("", self._secret):  # an empty key is none: the other header counts
            return
        answer = send_any(self._channel, RUN, rng, metadata=rng.choice(entries), damages=False)
        self._count(answer.code)
        if answer.code != "UNAUTHENTICATED":
            self._add_problem(f"{answer}, expected UNAUTHENTICATED")

    def _send_request(self, rng: random.Random) -> None:
        run = rng.choice((RUN, "another", "x" * 200))
        metadata = [(METADATA, self._secret)]
        answer = send_any(self._channel, run, rng, metadata=metadata, damages=True)
        self._judge_call("", answer)

    def _send_body(self, rng: random.Random, bodies: list[Body]) -> None:
        body = damaged_body(rng.choice(bodies), rng)
        self._judge_answer(body.route, self._post(body, secret=self._secret))

    def _damage_key(self, rng: random.Random) -> None:
        """Damage a stored key, and send a request and a call with it."""
        secret = new_secret()
        limits = KeyLimits(1_000.0, 1e9, 1 << 20)
        key = ApiKey(key_id_of(secret), "damaged", frozenset({"admin"}), (RUN,), limits=limits)
        way = damaged_json if rng.random() < 0.7 else damaged
        stored = way(encode_key(key), rng)
        self._client.hset(KEYS, key.key_id, stored)
        try:
            self._judge_answer(f"{stored}", self._post(self._json[0], secret=secret))
            metadata = [(METADATA, secret)]
            answer = send_any(self._channel, RUN, rng, metadata=metadata, damages=False)
            self._judge_call(f"{stored}: ", answer)
        finally:
            self._client.hdel(KEYS, key.key_id)

    def _post(self, body: Body, *, secret: str) -> httpx2.Response | httpx2.TransportError:
        headers = {METADATA: secret, **body.headers}
        try:
            return self._http.post(body.route, content=body.content, headers=headers)
        except httpx2.TransportError as error:
            return error

    def _judge_call(self, what: str, answer: Answer) -> None:
        self._count(answer.code)
        if answer.code not in REFUSALS:
            self._add_problem(f"{what}{answer}")

    def _judge_answer(self, what: str, answer: httpx2.Response | httpx2.TransportError) -> None:
        """Check that an answer is a success, or a problem document that is no 5xx."""
        if isinstance(answer, httpx2.TransportError):
            self._add_problem(f"{what}: {answer!r}")
            return
        self._count(str(answer.status_code))
        media_type = answer.headers.get("content-type", "").partition(";")[0]
        expected = _ANSWERS if answer.is_success else {_PROBLEM}
        if answer.status_code >= 500 or media_type not in expected:
            self._add_problem(f"{what}: {answer.status_code} {media_type} {answer.text[:300]}")

    def _count(self, ended: str) -> None:
        self.report.outcomes[f"{self._kind}: {ended}"] += 1

    def _add_problem(self, text: str) -> None:
        self.report.problems.append(f"case {self._number}, {self._kind}: {text}")

    def _judge_memory(self) -> None:
        for name, num_bytes in self._resident_bytes().items():
            self.report.peak_bytes[name] = num_bytes
            growth = num_bytes - self._levels[name]
            self.report.growth_bytes[name] = growth
            if growth > MAX_GROWTH_BYTES or num_bytes > MAX_BYTES:
                text = f"{num_bytes / 1e6:.0f} MB, {growth / 1e6:.0f} MB more than after a quarter"
                self.report.problems.append(f"the {name} has {text}")

    def _judge_service(self) -> None:
        """Check that both processes still accept valid requests."""
        services: dict[str, Service] = {"batcher": self._batcher, "gateway": self._gateway}
        for name, service in services.items():
            if service.status is not None:
                self.report.problems.append(f"the {name} ended with status {service.status}")
        answer = self._post(self._json[0], secret=self._secret)
        if isinstance(answer, httpx2.TransportError) or answer.status_code >= 500:
            self.report.problems.append(f"a valid request at the end: {answer!r}")

    def _resident_bytes(self) -> dict[str, int]:
        """Return the resident memory of each process; 0 for one that has ended."""
        pids = {
            "batcher": self._batcher.pid,
            "gateway": self._gateway.pid,
            "store": self._server.pid,
        }
        return {name: psutil.Process(pid).memory_info().rss for name, pid in pids.items()}


def _legal(data: bytes) -> str:
    r"""Return the characters that a client may send in metadata.

    >>> _legal(b"tml-\x00a\xff b")
    'tml-a b'
    """
    return "".join(chr(each) for each in data if 0x20 <= each < 0x7F)
