"""Thousands of damaged runs and requests on one store and one batcher, with a judgement."""

from __future__ import annotations

import contextlib
import random
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple, Self

import grpc
import redis

from fuzz.calls import call_damaged
from fuzz.damage import EVENTS, KINDS, LEDGER, PLAN, TURNS, Spot, damage_run
from fuzz.runs import (
    AFTER,
    NUM_GROUPS,
    Rows,
    Trained,
    copy_run,
    make_run,
    publish,
    run_keys_of,
    train,
    wrong_rows,
)
from testkit import wait_until
from turnstream.errors import (
    BatcherUnavailableError,
    FencedError,
    NotReadyError,
    TurnstreamError,
)
from turnstream.store.client import keys
from turnstream.store.client.connection import connect
from turnstream.store.run.runs import close_run, list_run
from turnstream_server.bus.admin.deletion import delete_run
from turnstream_server.bus.core.frontier import read_frontier
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.jobs.stack import Service, Stack

CHUNK: Final = 16
"""Damaged runs that are offered at once."""

CALLS_PER_CASE: Final = 2

GROWTH_LIMIT_BYTES: Final = 200_000_000

_LEASE = {"TURNSTREAM_LEASE_S": "1"}
_WAIT_S: Final = 8.0
"""A run without a mini-batch for this long counts as stopped."""

_READY_S: Final = 60.0
_OF_ANOTHER_RELEASE: Final = ("newer release", "older release")
_NAMED: Final = ("damaged", "config revision")
"""Words of reasons that name the damage. A forged plan may name a revision that the run lacks."""


@dataclass(slots=True, kw_only=True)
class Case:
    """One damaged run, with the rows that it may serve; a control has no damage."""

    run: str
    rows: Rows
    spot: Spot | None
    trained: Trained

    @property
    def outcome(self) -> str:
        """The kind of damage and the end of the run, for the summary."""
        error = self.trained.error
        ended = "trained to its end" if error is None else type(error).__name__
        return f"{self.spot.kind if self.spot else 'control'}: {ended}"


@dataclass(slots=True, kw_only=True)
class Report:
    """The result of a campaign: its cases by end, violations, and the growth of each process."""

    num_cases: int = 0
    outcomes: Counter[str] = field(default_factory=Counter[str])
    problems: list[str] = field(default_factory=list[str])
    growth_bytes: dict[str, int] = field(default_factory=dict[str, int])


class Place(NamedTuple):
    """A store with a batcher, and a client of the store."""

    server: EmbeddedServer
    batcher: Service
    client: redis.Redis


class Campaign:
    """Damages runs in chunks; a context manager that leaves no process behind."""

    def __init__(self, folder: Path, *, seed: int) -> None:
        self.report = Report()
        self._folder = folder
        self._seed = seed
        self._resources = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._fresh = stack.enter_context(EmbeddedServer(self._folder / "fresh"))
            self._builder = stack.enter_context(_place(self._folder / "builder"))
            self._subject = stack.enter_context(_place(self._folder / "subject"))
            target = self._subject.batcher.address
            self._fresh_client = stack.enter_context(connect(self._fresh.url))
            self._channel = stack.enter_context(grpc.insecure_channel(target))
            self._resources = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._resources.close()

    def run(self, num_cases: int) -> Report:
        """Run a chunk without damage, and then this many cases."""
        self._chunk(range(CHUNK), is_damaged=False)
        before = self._memory("VmRSS")
        number = CHUNK
        while self.report.num_cases < num_cases:
            self._chunk(range(number, number + CHUNK), is_damaged=True)
            number += CHUNK
        peaks = self._memory("VmHWM")
        self.report.growth_bytes = {name: peaks[name] - before[name] for name in peaks}
        self._judge_processes()
        return self.report

    def _chunk(self, numbers: range, *, is_damaged: bool) -> None:
        """Make, damage, offer and train a few runs; send damaged requests at the same time."""
        cases = [self._case(number, is_damaged=is_damaged) for number in numbers]
        with ThreadPoolExecutor(CHUNK) as pool:
            trained = [pool.submit(self._train, case) for case in cases]
            if is_damaged:
                self._call(numbers)
            for each in trained:
                each.result()
        self.report.num_cases += len(cases) * is_damaged
        for case in cases:
            self._judge(case)
            self._remove(case.run)

    def _case(self, number: int, *, is_damaged: bool) -> Case:
        """Make a run, copy it to the store under test, and damage it there."""
        rng = random.Random(self._seed * 1_000_003 + number)
        kind = KINDS[number % len(KINDS)]
        name = f"fuzz-{number}"
        is_planned = kind in (PLAN, LEDGER)
        server = self._builder.server if is_planned else self._fresh
        source = self._builder.client if is_planned else self._fresh_client
        rows = make_run(server.url, name, rng)
        case = Case(run=name, rows=rows, spot=None, trained=Trained())
        if is_planned:
            wait_until(
                lambda: read_frontier(source, name).planned == NUM_GROUPS,
                timeout_s=_READY_S,
                describe=f"the plans of {name}",
            )
        if kind == LEDGER:
            address = self._builder.batcher.address
            case.trained = train(address, name, timeout_s=_READY_S, max_steps=NUM_GROUPS - 1)
        copy_run(source, self._subject.client, name)
        _delete(source, name)
        if is_damaged:
            case.spot = damage_run(self._subject.client, name, kind, rng)
        return case

    def _train(self, case: Case) -> None:
        """Offer a run, write one more group, close the run, and train it to its end."""
        name, url = case.run, self._subject.server.url
        before = case.trained
        list_run(self._subject.client, name)  # the batchers find it
        try:
            case.rows |= publish(url, name, [AFTER], random.Random(name))
            close_run(self._subject.client, name)
        except TurnstreamError as error:
            case.trained = Trained(error=error, rows=before.rows)
            return
        target = self._subject.batcher.address
        case.trained = train(target, name, timeout_s=_WAIT_S, token=before.token)
        case.trained.rows = before.rows + case.trained.rows

    def _judge(self, case: Case) -> None:
        forged = case.spot is not None and case.spot.damage.is_forged
        problems = wrong_rows(case.rows, case.trained, checks_reward=not forged)
        problems += _stops(case)
        self.report.outcomes[case.outcome] += 1
        told = f"{case.run} ({case.spot}): "
        error = case.trained.error
        self.report.problems += [f"{told}{each}; ended by {error!r}" for each in problems]

    def _call(self, numbers: range) -> None:
        """Send damaged requests for a run that exists and for others."""
        for number in numbers:
            rng = random.Random(-self._seed * 1_000_003 - number)
            for _ in range(CALLS_PER_CASE):
                run = rng.choice((f"fuzz-{number}", "another", "x" * 200))
                answer = call_damaged(self._channel, run, rng)
                self.report.num_cases += 1
                self.report.outcomes[f"request: {answer.code}"] += 1
                if not answer.is_typed:
                    self.report.problems.append(f"request of case {number}: {answer}")

    def _remove(self, name: str) -> None:
        with contextlib.suppress(TurnstreamError):
            delete_run(self._subject.client, name)
        _delete(self._subject.client, name)

    def _judge_processes(self) -> None:
        report = self.report
        status = self._subject.batcher.status
        if status is not None:
            report.problems.append(f"the batcher has ended with status {status}")
        for name, growth in report.growth_bytes.items():
            if growth > GROWTH_LIMIT_BYTES:
                report.problems.append(f"the {name} grew by {growth / 1e6:.0f} MB")

    def _memory(self, what: str) -> dict[str, int]:
        """Return a line of /proc/<pid>/status for each process, in bytes."""
        found: dict[str, int] = {}
        pids = {"batcher": self._subject.batcher.pid, "store": self._subject.server.pid}
        for name, pid in pids.items():
            status = Path(f"/proc/{pid}/status").read_text()
            (kib,) = re.findall(rf"^{what}:\s+(\d+) kB$", status, re.MULTILINE)
            found[name] = int(kib) * 1024
        return found


def _stops(case: Case) -> list[str]:
    """Return a problem if the run stopped without a reason that names its damage."""
    error = case.trained.error
    if case.spot is None:
        return [] if error is None else ["a run without damage has stopped"]
    if AFTER in case.trained.group_ids:
        return []
    if isinstance(error, FencedError):
        return []  # a request of the campaign was valid and began a session
    if isinstance(error, BatcherUnavailableError):
        return ["no batcher answered"]
    says = f"{error} {getattr(error, 'reasons', '')}"
    if any(each in says for each in _OF_ANOTHER_RELEASE):
        return []
    if case.spot.kind in (EVENTS, TURNS):
        return ["its planner has stopped"]
    is_named = any(each in says for each in _NAMED)
    if error is None or (isinstance(error, NotReadyError) and not is_named):
        return ["it has stopped without a reason"]
    return []


def _delete(client: redis.Redis, name: str) -> None:
    found = run_keys_of(client, name)
    if found:
        client.delete(*found)
    client.srem(keys.RUNS, keys.encode_name(name))


@contextlib.contextmanager
def _place(folder: Path) -> Iterator[Place]:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(EmbeddedServer(folder / "data"))
        services = stack.enter_context(Stack(folder, store_url=server.url, environment=_LEASE))
        client = stack.enter_context(connect(server.url))
        yield Place(server, services.start_batcher(), client)
