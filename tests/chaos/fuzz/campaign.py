"""Thousands of damaged runs and requests on one store and one batcher, with a judgement."""

from __future__ import annotations

import contextlib
import random
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import grpc

from fuzz.calls import call_damaged
from fuzz.damage import EVENTS, KINDS, LEDGER, PLAN, TURNS, Spot, damage_run
from fuzz.runs import (
    AFTER,
    NUM_GROUPS,
    Rows,
    Trained,
    make_run,
    publish,
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
from turnstream.store.run.runs import close_run
from turnstream_server.embedded import EmbeddedServer, free_port
from turnstream_server.launch.stack import Stack
from turnstream_server.ledger.admin.deletion import delete_run
from turnstream_server.ledger.core.frontier import read_frontier

CHUNK: Final = 16
"""Damaged runs that are trained at once."""

CALLS_PER_CASE: Final = 2

MAX_BYTES: Final = 400_000_000
"""Memory limit of the batcher, and of the store."""

PLANNED_KINDS: Final = (PLAN, LEDGER)
"""Kinds of damage to a run that is planned; other runs are damaged before a batcher reads them."""

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
    rng: random.Random
    rows: Rows
    spot: Spot | None = None
    trained: Trained = field(default_factory=Trained)

    @property
    def outcome(self) -> str:
        """The kind of damage and the end of the run, for the summary."""
        error = self.trained.error
        ended = "trained to its end" if error is None else type(error).__name__
        return f"{self.spot.kind if self.spot else 'control'}: {ended}"


@dataclass(slots=True, kw_only=True)
class Report:
    """The result of a campaign: its cases by end, violations, and the memory of each process.

    `growth_bytes` is the growth after the first quarter of the cases, of processes that last.
    """

    num_cases: int = 0
    outcomes: Counter[str] = field(default_factory=Counter[str])
    problems: list[str] = field(default_factory=list[str])
    peak_bytes: dict[str, int] = field(default_factory=dict[str, int])
    growth_bytes: dict[str, int] = field(default_factory=dict[str, int])


class Campaign:
    """Damages runs in chunks; a context manager that leaves no process behind."""

    def __init__(self, folder: Path, *, seed: int) -> None:
        self.report = Report()
        self._folder = folder
        self._seed = seed
        self._address = f"127.0.0.1:{free_port()}"
        self._resources = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._server = stack.enter_context(EmbeddedServer(self._folder / "data"))
            self._url = self._server.url
            self._client = stack.enter_context(connect(self._url))
            self._stack = stack.enter_context(
                Stack(self._folder, store_url=self._url, environment=_LEASE)
            )
            self._resources = stack.pop_all()
        self._start_batcher()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._resources.close()

    def _start_batcher(self) -> None:
        self._batcher = self._stack.start_batcher(listen=self._address)

    def run(self, num_cases: int) -> Report:
        """Run a chunk without damage, and then this many cases."""
        number = 0
        while self.report.num_cases < num_cases:
            self._run_chunk(range(number, number + CHUNK), is_damaged=number > 0)
            number += CHUNK
        return self.report

    def _run_chunk(self, numbers: range, *, is_damaged: bool) -> None:
        """Make, damage and train a few runs; send damaged requests at the same time."""
        kinds = {number: KINDS[number % len(KINDS)] for number in numbers}
        cases = {n: self._make_case(n) for n, kind in kinds.items() if kind in PLANNED_KINDS}
        for number, case in cases.items():
            self._plan(case, is_trained=kinds[number] == LEDGER)
        self._batcher.ask_to_stop()
        self._batcher.wait(_READY_S)
        cases |= {n: self._make_case(n) for n, kind in kinds.items() if kind not in PLANNED_KINDS}
        for number, case in cases.items():
            if is_damaged:
                case.spot = damage_run(self._client, case.run, kinds[number], case.rng)
        self._start_batcher()
        with ThreadPoolExecutor(CHUNK) as pool:
            trained = [pool.submit(self._train, case) for case in cases.values()]
            if is_damaged:
                self._call(numbers)
            for each in trained:
                each.result()
        self.report.num_cases += len(cases) * is_damaged
        for case in cases.values():
            self._judge(case)
            self._remove(case.run)
        self._judge_processes()

    def _make_case(self, number: int) -> Case:
        rng, name = random.Random(self._seed * 1_000_003 + number), f"fuzz-{number}"
        return Case(run=name, rng=rng, rows=make_run(self._url, name, rng))

    def _plan(self, case: Case, *, is_trained: bool) -> None:
        """Wait for all plans of a run; train all steps but the last, or none."""
        wait_until(
            lambda: read_frontier(self._client, case.run).planned == NUM_GROUPS,
            timeout_s=_READY_S,
            describe=f"the plans of {case.run}",
        )
        if is_trained:
            steps = NUM_GROUPS - 1
            case.trained = train(self._address, case.run, timeout_s=_READY_S, max_steps=steps)

    def _train(self, case: Case) -> None:
        """Write one more group, close the run, and train it to its end."""
        name, before = case.run, case.trained
        try:
            case.rows |= publish(self._url, name, [AFTER], case.rng)
            close_run(self._client, name)
        except TurnstreamError as error:
            case.trained = Trained(error=error, rows=before.rows)
            return
        case.trained = train(self._address, name, timeout_s=_WAIT_S, token=before.token)
        case.trained.rows = before.rows + case.trained.rows

    def _judge(self, case: Case) -> None:
        forged = case.spot is not None and case.spot.damage.is_forged
        problems = wrong_rows(case.rows, case.trained, checks_reward=not forged)
        problems += _stops(case)
        self.report.outcomes[case.outcome] += 1
        error = case.trained.error
        self.report.problems += [
            f"{case.run} ({case.spot}): {each}; ended by {error!r}" for each in problems
        ]

    def _call(self, numbers: range) -> None:
        """Send damaged requests for a run that exists and for others."""
        with grpc.insecure_channel(self._address) as channel:
            for number in [number for number in numbers for _ in range(CALLS_PER_CASE)]:
                rng = random.Random(-self._seed * 1_000_003 - self.report.num_cases)
                run = rng.choice((f"fuzz-{number}", "another", "x" * 200))
                answer = call_damaged(channel, run, rng)
                self.report.num_cases += 1
                self.report.outcomes[f"request: {answer.code}"] += 1
                if not answer.is_typed:
                    self.report.problems.append(f"request of case {number}: {answer}")

    def _remove(self, name: str) -> None:
        with contextlib.suppress(TurnstreamError):  # its state is damaged
            delete_run(self._client, name)
        found: Any = [*self._client.keys(f"ts:{{{name}}}*"), *self._client.keys(f"ts:{{{name}/*")]
        if found:
            self._client.delete(*found)
        self._client.srem(keys.RUNS, keys.encode_name(name))

    def _judge_processes(self) -> None:
        """Check that the batcher lives, and the peak memory of both processes."""
        if self._batcher.status is not None:
            self.report.problems.append(f"the batcher ended with status {self._batcher.status}")
            return
        for name, pid in (("batcher", self._batcher.pid), ("store", self._server.pid)):
            status = Path(f"/proc/{pid}/status").read_text()
            (kib,) = re.findall(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
            peak = max(self.report.peak_bytes.get(name, 0), int(kib) * 1024)
            self.report.peak_bytes[name] = peak
            if peak > MAX_BYTES:
                self.report.problems.append(f"the {name} took {peak / 1e6:.0f} MB")


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
