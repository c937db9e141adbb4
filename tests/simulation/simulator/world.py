"""One thread that decides by a seed what happens next: which process runs, which call is served.

A call to the store is in flight from the moment when a process makes it until the world serves it;
its reply waits until the world lets the process run. Between any two such moments a process can be
killed or put to sleep, and a call, its reply or the whole connection can be lost (`faults`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError

from simulator.faults import NO_FAULTS, FaultRates, Faults
from simulator.processes import Main, Process, Request, Timers
from simulator.store.store import Store
from simulator.store.values import StoreError

EPOCH_MS = 1_700_000_000_000
_MAX_STEPS = 20_000
_MAX_STEP_S = 0.002
_IDLE_S = 0.05


@dataclass
class World:
    """The store, the processes, and chance.

    Attributes:
        synced: called when the disk has all of the store; its result is called after a power cut.
        lost: called when a publisher reports an acknowledged write as lost.
        served: name of the process whose call is carried out, or was last.
    """

    rng: random.Random
    fault_rates: FaultRates = NO_FAULTS
    store: Store = field(default_factory=Store)
    now_s: float = 0.0
    clock_ahead_ms: float = 0.0
    num_steps: int = 0
    problems: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    after_step: Callable[[], None] = lambda: None
    synced: Callable[[], Callable[[], None]] = lambda: lambda: None
    processes: list[Process] = field(default_factory=list)
    lost: Callable[[str, str], None] = lambda _, __: None
    rot: Callable[[], None] = lambda: None
    served: str = ""

    def __post_init__(self) -> None:
        self._runnable: list[Process] = []
        self._requests: list[Request] = []
        self._blocked: list[Request] = []
        self._stalled: list[Request] = []
        self.timers = Timers()
        self._faults = Faults(self)
        self.died: set[str] = set()
        self._num_seen = 0
        self.set_clock(ahead_ms=0.0)

    def start(self, name: str, main: Main) -> Process:
        """Start a process."""
        process = Process(self, name, main)
        self.processes.append(process)
        return process

    def must_keep_leases(self, name: str) -> bool:
        """Whether a process of this name runs, and nothing kept it from renewing its leases."""
        if self.counts.keys() & {"lose", "stall", "jump", "restart", "fill", "cut"}:
            return False
        return any(each.name == name and not each.asleep_until_s for each in self.processes)

    def fail(self, problem: str) -> None:
        """Record a violation, which ends the run."""
        self.problems.append(problem)

    def note(self, fault: str) -> None:
        """Count a fault."""
        self.counts[fault] = self.counts.get(fault, 0) + 1

    def wake(self, process: Process) -> None:
        """Queue a process that has something to run."""
        if not process.is_queued and not process.is_dead:
            process.is_queued = True
            self._runnable.append(process)

    def send(self, request: Request) -> None:
        """Queue a call of a process to the store."""
        if request.process.is_dead:
            request.answered.set_exception(RedisConnectionError("the process is dead"))
        elif request.start != self.store.num_starts:
            request.answered.set_exception(RedisConnectionError("the server closed it"))
        else:
            self._requests.append(request)

    def run_until(self, is_over: Callable[[], bool], *, longest_s: float) -> bool:
        """Run until the condition holds; return False if a limit comes first."""
        last, until_s = self.num_steps + _MAX_STEPS, self.now_s + longest_s
        while not self.problems:
            if is_over():
                return True
            if self.num_steps >= last or self.now_s >= until_s:
                return False
            self.step()
        return False

    is_dead = False  # for the timers, as a process

    def step(self) -> None:
        """Run a part of one process, or serve one call."""
        self.num_steps += 1
        random = self.rng.random
        self.now_s += random() * _MAX_STEP_S
        runnable, timers = self._runnable, self.timers
        if not runnable and not self._requests:
            next_s = timers.next_s
            self.now_s = max(self.now_s, self.now_s + _IDLE_S if next_s is None else next_s)
        self.store.now_ms = EPOCH_MS + self.now_s * 1000 + self.clock_ahead_ms
        if timers.first_s <= self.now_s:
            timers.fire_due(self.now_s)
        if self.fault_rates is not NO_FAULTS:
            self._faults.maybe_happen()
        requests = self._requests  # those that were lost are no longer here
        choices = len(runnable) + len(requests)
        if choices:
            chosen = int(random() * choices)
            if chosen < len(runnable):
                self._run(chosen)
            else:
                self._serve(requests.pop(chosen - len(runnable)))
        self.after_step()

    def kill(self, process: Process) -> None:
        """Kill a process; its sent calls may still arrive."""
        self._requests = [
            request
            for request in self._requests
            if request.process is not process
            or not (self._delay(request) or self.rng.random() < 0.5)
        ]
        self._blocked = [each for each in self._blocked if each.process is not process]
        process.kill()
        self.processes.remove(process)
        if process.is_queued:
            self._runnable.remove(process)
            process.is_queued = False

    def end(self) -> None:
        """Kill everything, and lose what is on its way."""
        self._requests.clear()
        self._stalled.clear()
        for process in [*self.processes]:
            self.kill(process)
        self._requests.clear()
        self.timers = Timers()  # nothing comes late any more

    def lose_connections(self) -> None:
        """Every call that is in flight fails; some were carried out before."""
        for blocked in self._blocked:
            _fail(blocked)
        self._blocked.clear()
        requests, self._requests = self._requests, []
        for stalled in self._stalled:
            _fail(stalled)
        self._stalled.clear()
        for request in requests:
            if self.rng.random() < 0.5:
                self._carry_out(request, self._some_of(request))
            _fail(request)

    def set_clock(self, *, ahead_ms: float) -> None:
        """Set the store's clock ahead of the simulated time."""
        self.clock_ahead_ms = ahead_ms
        self.store.now_ms = EPOCH_MS + self.now_s * 1000 + ahead_ms

    def stop_faults(self) -> None:
        """End the faults, for the rest of the run."""
        self.fault_rates = NO_FAULTS
        self._faults.end()

    def _run(self, position: int) -> None:
        process = self._runnable[position]
        if process.asleep_until_s > self.now_s:
            self._unqueue(position)
            return
        if self.rng.random() < 0.1:
            process.loop.run_ready(1 + int(self.rng.random() * 3))
        else:
            process.loop.run_ready()
        if not process.loop.ready:
            self._unqueue(self._runnable.index(process))

    def _unqueue(self, position: int) -> None:
        process = self._runnable[position]
        process.is_queued = False
        self._runnable[position] = self._runnable[-1]
        self._runnable.pop()

    # serving calls

    def _serve(self, request: Request) -> None:
        fault_rates, rng = self.fault_rates, self.rng
        if fault_rates.lose and rng.random() < fault_rates.lose:
            self.note("lose")
            if not self._delay(request):
                self._carry_out(request, self._some_of(request))
            _fail(request)
            return
        if fault_rates.stall and rng.random() < fault_rates.stall and _has_write(request):
            self._stall(request)
            return
        replies = self._carry_out(request, request.commands)
        if fault_rates.repeat and request.may_repeat and rng.random() < fault_rates.repeat:
            self.note("repeat")
            replies = self._carry_out(request, request.commands)
        _reply(request, replies)

    def _stall(self, request: Request) -> None:
        self.note("stall")
        arrives_s = self.now_s + self.rng.random() * self.fault_rates.longest_delay_s
        request.process.hangs_until_s = max(request.process.hangs_until_s, arrives_s)
        self._stalled.append(request)
        self.timers.add(arrives_s, partial(self._arrive_at_last, request), self)

    def _arrive_at_last(self, request: Request) -> None:
        if request in self._stalled:
            self._stalled.remove(request)
            _reply(request, self._carry_out(request, request.commands))

    def _delay(self, request: Request) -> bool:
        fault_rates = self.fault_rates
        if not fault_rates.late or self.rng.random() >= fault_rates.late:
            return False
        delay_s = self.rng.random() * fault_rates.longest_delay_s
        self.timers.add(self.now_s + delay_s, partial(self._arrive, request), self)
        return True

    def _arrive(self, request: Request) -> None:
        if request.start == self.store.num_starts:
            self.note("late")
            self._carry_out(request, request.commands)

    def _some_of(self, request: Request) -> Sequence[Sequence[bytes]]:
        """Those of the commands that are carried out although their reply is lost."""
        num_commands = len(request.commands)
        if request.is_whole:
            return request.commands if self.rng.random() < 0.5 else ()
        return request.commands[: self.rng.randrange(num_commands + 1)]

    def _carry_out(self, request: Request, commands: Sequence[Sequence[bytes]]) -> list[Any] | None:
        """The replies, in which errors stand as they are; None where the call waits for entries."""
        replies: list[Any] = []
        self.served = request.process.name
        for words in commands:
            if words[0] == b"XREAD" and b"BLOCK" in words[:4]:
                return self._block(request, words)
            replies.append(self.reply(words))
        if self._blocked and self.store.num_added != self._num_seen:
            self._num_seen = self.store.num_added
            self._serve_blocked()
        return replies

    def reply(self, words: Sequence[bytes]) -> Any:
        """Return the reply of the store, or its error."""
        try:
            return self.store.execute(words)
        except StoreError as error:
            return error

    def _block(self, request: Request, words: Sequence[bytes]) -> list[Any] | None:
        reply = self.store.execute(_without_block(words))
        if reply is not None:
            return [reply]
        if request.answered.done() or request.process.is_dead:
            return None
        self._blocked.append(request)
        ends_s = self.now_s + int(words[list(words).index(b"BLOCK") + 1]) / 1000
        self.timers.add(
            ends_s,
            lambda: self._unblock(request, None),
            request.process,
            lambda: request not in self._blocked,
        )
        return None

    def _serve_blocked(self) -> None:
        for request in [*self._blocked]:
            if request.answered.done():
                self._blocked.remove(request)
                continue
            reply = self.store.execute(_without_block(request.commands[0]))
            if reply is not None:
                self._unblock(request, reply)

    def _unblock(self, request: Request, reply: Any) -> None:
        if request in self._blocked:
            self._blocked.remove(request)
            _reply(request, [reply])


def _has_write(request: Request) -> bool:
    return any(words[0] in (b"EVALSHA", b"XADD") for words in request.commands)


def _reply(request: Request, replies: list[Any] | None) -> None:
    if replies is not None and not request.answered.done() and not request.process.is_dead:
        request.answered.set_result(replies)


def _fail(request: Request) -> None:
    if not request.answered.done() and not request.process.is_dead:
        request.answered.set_exception(RedisConnectionError("the connection was lost"))


def _without_block(words: Sequence[bytes]) -> list[bytes]:
    at = words.index(b"BLOCK")
    return [*words[:at], *words[at + 2 :]]
