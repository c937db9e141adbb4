"""A process and its event loop, driven by the scheduler and the clock of the world."""

from __future__ import annotations

import asyncio
import functools
import heapq
import math
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextvars import Context
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simulator.world import World


_Callback = Callable[..., object]


class _Task(asyncio.Task[Any]):
    """A task whose place in a set is a matter of the seed, and not of its address."""

    number = 0

    def __hash__(self) -> int:
        return self.number


class ProcessLoop(asyncio.AbstractEventLoop):
    """The parts of an event loop that asyncio's tasks, futures and timeouts need."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.ready: deque[asyncio.Handle] = deque()
        self.tasks: dict[asyncio.Task[Any], None] = {}  # ordered, unlike a set

    def run_ready(self, most: float = math.inf) -> None:
        """Run at most so many of the callbacks that are ready, or become ready by that."""
        asyncio._set_running_loop(self)
        try:
            while self.ready and most > 0:
                most -= 1
                handle = self.ready.popleft()
                if not handle.cancelled():
                    handle._run()
        finally:
            asyncio._set_running_loop(None)

    def time(self) -> float:
        return self.process.world.now_s

    def call_soon(
        self, callback: _Callback, *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self.ready.append(handle)
        process = self.process
        if not process.is_queued:
            process.world.wake(process)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(
        self, delay: float, callback: _Callback, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: _Callback, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        fire = functools.partial(self._fire, handle)
        self.process.world.timers.add(when, fire, self.process, handle.cancelled)
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Nothing: the timers skip a cancelled handle."""

    def _fire(self, handle: asyncio.Handle) -> None:
        if not handle.cancelled():
            self.ready.append(handle)
            self.process.world.wake(self.process)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self, coro: Any, *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[Any]:
        task = _Task(coro, loop=self, name=name, context=context)
        task.number = self.process.world.rng.getrandbits(16)
        self.tasks[task] = None
        task.add_done_callback(lambda done: self.tasks.pop(done, None))
        return task

    def run_in_executor(  # type: ignore[override]  # there are no threads here
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - the waiting task gets it
            future.set_exception(error)
        return future

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self.process.is_dead:
            self.process.world.fail(f"{self.process.name}: {context}")


class Timers:
    """Functions by when they are due; those of a dead owner are not called."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[], object], Any, Callable[[], bool]]] = []
        self._count = 0

    def add(
        self,
        when_s: float,
        fire: Callable[[], object],
        owner: Any,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        self._count += 1
        heapq.heappush(self._heap, (when_s, self._count, fire, owner, is_cancelled))

    @property
    def first_s(self) -> float:
        return self._heap[0][0] if self._heap else math.inf

    @property
    def next_s(self) -> float | None:
        """When the first is due that is not cancelled."""
        while self._heap:
            when_s, _, _, owner, is_cancelled = self._heap[0]
            if not (is_cancelled() or owner.is_dead):
                return when_s
            heapq.heappop(self._heap)
        return None

    def fire_due(self, now_s: float) -> None:
        """Call those that are due, in order."""
        due: list[Any] = []
        while self._heap and self._heap[0][0] <= now_s:
            due.append(heapq.heappop(self._heap))
        for _, _, fire, owner, _ in due:
            if not owner.is_dead:
                fire()


Main = Callable[["Process"], Coroutine[Any, Any, None]]


class Process:
    """A loop and its tasks, which can be killed."""

    def __init__(self, world: World, name: str, main: Main) -> None:
        self.world = world
        self.name = name
        self.is_dead = False
        self.is_queued = False
        self.asleep_until_s = self.hangs_until_s = 0.0
        self.loop = ProcessLoop(self)
        self.task = self.loop.create_task(main(self), name=name)

    @property
    def is_over(self) -> bool:
        return self.is_dead or self.task.done()

    def kill(self) -> None:
        """End it as by SIGKILL: not one more byte of it reaches the store."""
        self.is_dead = True
        for _ in range(50):
            for task in [*self.loop.tasks]:
                task.cancel()
            self.loop.run_ready()
            if not self.loop.tasks:
                break
        else:
            self.world.fail(f"{self.name} cannot be ended: {[*self.loop.tasks]}")
        if self.task.done() and not self.task.cancelled():
            self.task.exception()


@dataclass(eq=False, slots=True)
class Request:
    """Commands of a process on their way to the store.

    Attributes:
        start: number of the store's start to which their connection leads.
        is_whole: whether they are one transaction.
        may_repeat: whether the client may resend them.
    """

    process: Process
    commands: Sequence[Sequence[bytes]]
    answered: asyncio.Future[list[Any]]
    start: int
    is_whole: bool = False
    may_repeat: bool = True
