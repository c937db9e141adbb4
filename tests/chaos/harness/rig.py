"""A store, batchers, generators and ranks as processes, and the ways to hurt them."""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import redis

from harness.checker import check
from harness.history import History, Line, Logs
from harness.invariants import read_plans
from harness.losses import lost_trajectories
from harness.proxy import own_host
from harness.stored import content_of
from testkit import wait_until
from turnstream.batching.config import BatchingConfig
from turnstream.store.client import keys
from turnstream.store.client.connection import connect
from turnstream.store.run.runs import close_run, create_run
from turnstream.types import RecoveryToken
from turnstream_server.embedded import EmbeddedServer, free_port
from turnstream_server.launch.stack import Service, Stack
from turnstream_server.ledger.core.frontier import Frontier, read_frontier
from turnstream_server.ledger.queries.ledger import LedgerCounts, read_ledger

LEASE_S = 1.0
"""Lease of a planner, short so that a successor starts soon."""

DOOMED_LEASE_S = 0.3
"""Lease of a batcher that leads alone until it dies."""

GENERATOR_LEASE_S = 30.0
"""Lease of a generator, longer than any process waits for a busy machine."""

PATIENCE_S = 180.0
"""Limit of every wait for an event that comes soon on a quiet machine."""

ENDLESS = 1_000_000
"""Groups of a generator that continues until the run is closed."""

CONFIG = BatchingConfig(
    batch_groups=4,
    mini_batch_groups=2,
    estimator="rloo",
    max_staleness=4,
    max_planned_ahead=2,
    max_tokens_per_micro_batch=64,
    lease_s=GENERATOR_LEASE_S,
    retain_checkpoints=1000,
)
"""Small batches of two mini-batches, whose baselines anybody can recompute. A trainer may go back
to any checkpoint."""

_FOLDER = Path(__file__).parents[1]


class _NewerStack(Stack):
    """Processes of the next minor release."""

    def start_program(self, name: str, command: Sequence[str]) -> Service:
        """Start `python -P -m MODULE ...` by that release."""
        return super().start_program(name, [*command[:3], "harness.newer", *command[3:]])


class Rig:
    """The processes of one run; a context manager that leaves none behind.

    Attributes:
        store_url: URL of the store for the processes; a test may put a proxy there.
        excused, cuts, centered_from: see History.
        loses_plans: whether plans are lost or withdrawn, and made again.
        loses_history: whether trained steps are lost too, so that the logs contain two histories.
        ranks: ranks of the newest session.
        environment: additional variables of the processes that are started next.
        is_newer: whether they are of the next minor release; see harness.newer.
    """

    run = "chaos"

    def __init__(
        self, folder: Path, server: EmbeddedServer, *, config: BatchingConfig = CONFIG
    ) -> None:
        self.folder = folder
        self.server = server
        self.store_url = server.url
        self.excused: set[str] = set()
        self.loses_plans = False
        self.loses_history = False
        self.cuts: list[float] = []
        self.centered_from = sys.maxsize
        self.ranks: list[Service] = []
        self.environment: dict[str, str] = {}
        self.is_newer = False
        self._logs = Logs(folder / "history")
        self._stacks: list[Stack] = []
        self._services: list[Service] = []
        self._generators: dict[str, Service] = {}
        self._numbers = itertools.count(1)
        self._host = own_host()
        self._ports: dict[str, int] = {}
        self.client: redis.Redis = connect(server.url)
        create_run(self.client, self.run, config)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._kill_all()
        for stack in self._stacks:
            stack.stop()
        self.client.close()

    def _kill_all(self) -> None:
        for service in self._services:
            service.kill()

    def start_batcher(
        self,
        name: str = "batcher",
        *,
        failpoint: str = "",
        lease_s: float = LEASE_S,
        waits: bool = True,
    ) -> Service:
        """Start a batcher; the same name again listens at the same address.

        Without `waits` it may die before it answers.
        """
        environment = {"TURNSTREAM_FAILPOINT": failpoint, "TURNSTREAM_LEASE_S": str(lease_s)}
        stack, listen = self.stack(**environment), self.address(name)
        if waits:
            return self.keep(stack.start_batcher(name, listen=listen))
        return self.keep(stack.start("batcher", name, listen=listen))

    def start_gateway(self, name: str = "gateway") -> Service:
        """Start a gateway; the same name again listens at the same address."""
        return self.keep(self.stack().start("gateway", name, listen=self.address(name)))

    def let_batcher_die(self, failpoint: str, *, name: str = "doomed") -> None:
        """Start a batcher, which may die before it answers, and wait for its death."""
        doomed = self.start_batcher(name, failpoint=failpoint, lease_s=DOOMED_LEASE_S, waits=False)
        self.wait(lambda: doomed.status is not None, f"the death at {failpoint}")
        assert doomed.status == -signal.SIGKILL, doomed.failure(f"{name} ended otherwise")

    def address(self, name: str = "batcher") -> str:
        """Return the address at which a batcher of this name listens."""
        return f"{self._host}:{self._ports.setdefault(name, free_port())}"

    def start_generator(
        self, writer: str = "w", *, groups: int, url: str = "", **options: object
    ) -> Service:
        """Start a generator of so many groups; see harness.generator for the options.

        `url` is the store by default, and may be that of a gateway.
        """
        url = url or self.store_url
        arguments = {"url": url, "run": self.run, "writer": writer, "groups": groups}
        service = self.start(f"generator-{writer}", "harness.generator", {**arguments, **options})
        self._generators[writer] = service
        return service

    def start_helper(self, **options: Any) -> Path:
        """Start a generator that adopts and plays refills until the returned file exists."""
        end = self.folder / "helped"
        self.start_generator("helper", groups=0, helps_until=end, **options)
        return end

    def kill_generator(self, writer: str) -> None:
        """Kill a generator that would never end."""
        self._generators[writer].kill()

    def start_ranks(
        self, dp_world_size: int = 1, *, targets: Sequence[str] = (), **options: object
    ) -> list[Service]:
        """Start all ranks of a new trainer session, each with a batcher if there are `targets`.

        See harness.rank for the options.
        """
        session = f"session-{next(self._numbers):03}"
        common = {"run": self.run, "session": session, "folder": self.folder / "trainer"}
        common |= {"dp-world-size": dp_world_size, "target": self.address(), **options}
        self.ranks = []
        for dp_rank in range(dp_world_size):
            own: dict[str, object] = {"dp-rank": dp_rank}
            if targets:
                own["target"] = targets[dp_rank]
            name = f"{session}-rank-{dp_rank}"
            self.ranks.append(self.start(name, "harness.rank", {**common, **own}))
        return self.ranks

    def keep(self, service: Service) -> Service:
        """Kill this process with the others."""
        self._services.append(service)
        return service

    def start(self, name: str, module: str, options: Mapping[str, object]) -> Service:
        """Start a module of the harness, which logs under this name."""
        log = self.folder / "history" / f"{name}.jsonl"
        command = [sys.executable, "-P", "-m", module, "--log", str(log)]
        for option, value in options.items():
            command += [f"--{option.replace('_', '-')}", str(value)]
        return self.keep(self.stack().start_program(name, command))

    def stack(self, **environment: str) -> Stack:
        """Return what starts processes with these variables."""
        folders = (str(_FOLDER), str(_FOLDER.parent), os.environ.get("PYTHONPATH"))
        path = os.pathsep.join(filter(None, folders))
        variables = {"PYTHONPATH": path, **self.environment, **environment}
        kind = _NewerStack if self.is_newer else Stack
        self._stacks.append(kind(self.folder, store_url=self.store_url, environment=variables))
        return self._stacks[-1]

    def history(self) -> History:
        """Return everything that generators and ranks have logged."""
        return self._history_of(self._logs.lines())

    def plans(self) -> list[Line]:
        """Return every plan that a batcher logged as written."""
        return read_plans(self.folder / "logs", run=self.run)

    def count(self, kind: str) -> int:
        """Return the number of logged lines of a kind."""
        return self._logs.count(kind)

    def ledger(self) -> LedgerCounts:
        """Return the counts of the ledger."""
        return read_ledger(self.client, self.run)

    def counts(self) -> dict[str, int]:
        """Return the same for the checker, without empty states."""
        ledger = self.ledger()
        states = {str(state): count for state, count in ledger.by_state.items() if count}
        return {"accepted": ledger.accepted, **states}

    def entry(self, trajectory_id: str) -> str:
        """Return the entry of a trajectory in the ledger; empty without one."""
        entry: Any = self.client.hget(keys.run_keys(self.run).ledger, trajectory_id)
        return (entry or b"").decode()

    def trained(self) -> set[str]:
        """Return the trajectories that a rank has received."""
        received = self.history().of("received")
        return {row["trajectory"] for line in received for row in line["rows"]}

    def frontier(self) -> Frontier:
        """Return the frontier of the run."""
        return read_frontier(self.client, self.run)

    def planned(self) -> int:
        """Return the newest step that has a manifest."""
        return self.frontier().planned

    def plan_hashes(self) -> dict[int, str]:
        """Return the hash of each step's manifest in the store."""
        found: Any = self.client.hgetall(keys.run_keys(self.run).batches)
        return {int(step): entry.decode().partition(":")[2] for step, entry in found.items()}

    def digest(self) -> dict[bytes, Any]:
        """Return the content of the store, without leases of services and clocks."""
        own = keys.run_keys(self.run)
        moving = {name.encode() for name in (own.leader, own.clock, own.observers, keys.BATCHERS)}
        names: Any = self.client.keys("*")
        return {name: content_of(self.client, name) for name in sorted({*names} - moving)}

    def wait(
        self, predicate: Callable[[], object], describe: str, *, timeout_s: float = PATIENCE_S
    ) -> None:
        """Wait until a predicate holds."""
        wait_until(predicate, timeout_s=timeout_s, describe=describe)

    def wait_for_lines(self, kind: str, count: int = 1) -> None:
        """Wait until so many lines of a kind were logged."""
        self.wait(lambda: self.count(kind) >= count, f"{count} {kind!r}")

    def join(self, services: Sequence[Service] | Service) -> None:
        """Wait until processes have exited with status 0."""
        for service in [services] if isinstance(services, Service) else services:
            service.wait(PATIENCE_S)
            service.check()

    def end_leases(self, *, ago_s: float = 0.0) -> None:
        """Let the leases of all open trajectories end so long ago. Their writers must be dead."""
        leases = keys.run_keys(self.run).leases
        now: Any = self.client.time()
        names: Any = self.client.zrange(leases, 0, -1)
        for name in names:
            self.client.zadd(leases, {name: (now[0] - ago_s) * 1000}, xx=True)

    def stop_store(self) -> None:
        """Stop the store without a loss; `server.restart` starts it again."""
        os.kill(self.server.pid, signal.SIGTERM)
        self.wait(lambda: not self.server.is_running, "the end of the store")

    def close_run(self) -> None:
        """Close the run, which ends its generators."""
        close_run(self.client, self.run)

    def drain(
        self,
        dp_world_size: int = 1,
        *,
        num_lost: int | None = 0,
        **options: object,
    ) -> None:
        """Wait for all generators, close the run, train it to its end, and prove the invariants.

        Generators lose `num_lost` trajectories to others; None does not count them.
        """
        for rank in self.ranks:
            rank.kill()
        ranks = self.start_ranks(dp_world_size, **{"checkpoint_every": 1, **options})
        for generator in self._generators.values():
            generator.wait(PATIENCE_S)
        self.close_run()
        self.join(ranks)
        self.check(is_drained=True)
        if num_lost is not None:
            assert len(self.lost_by_generators()) == num_lost, self.lost_by_generators()

    def lost_by_generators(self) -> list[str]:
        """Return the errors of generators that lost trajectories or groups in an open run."""
        refusals = [line for line in self.history().of("refused") if "error" in line.facts]
        ours = [line["error"] for line in refusals if line.process.startswith("generator-")]
        return [error for error in ours if error != "EndOfRunError"]

    def check(self, *, is_drained: bool = False) -> None:
        """Prove the invariants from the logs and one reading of the ledger."""
        ledger = self.ledger()
        ledger.check()
        self._check_history(counts=self.counts(), is_drained=is_drained)

    def check_end(self) -> None:
        """Prove the invariants of any test, also of one that wrote to the run itself."""
        self._kill_all()
        if self.server.is_running:
            self.ledger().check()
        if not self.loses_history:
            self._check_history()

    def _check_history(self, **options: Any) -> None:
        history = self._history_of([*self._logs.lines(), *self.plans()])
        check(history, loses_plans=self.loses_plans, **options)

    def _history_of(self, lines: Sequence[Line]) -> History:
        lost = lost_trajectories(lines, self.cuts, logs=self.folder / "logs") if self.cuts else ()
        return History(
            lines,
            excused=self.excused,
            cuts=self.cuts,
            lost=lost,
            centered_from=self.centered_from,
        )

    def checkpoint_of_store(self) -> int:
        """Return the newest step with a checkpoint whose plan the store has; 0 without one."""
        hashes = self.plan_hashes()
        for path in sorted((self.folder / "trainer").glob("*.token"), reverse=True):
            token = RecoveryToken.parse(path.read_text())
            if hashes.get(token.step) == token.chain_hash:
                return token.step
        return 0


def config(**fields: Any) -> BatchingConfig:
    return dataclasses.replace(CONFIG, **fields)
