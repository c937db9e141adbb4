"""The event loop of one process, driven by the scheduler and the clock of the world."""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simulator.processes import Process


class _Handle(asyncio.Handle):
    """A callback of one loop: a third of what the class of asyncio takes to make."""

    def __init__(
        self,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        loop: ProcessLoop,
        context: Context | None,
    ) -> None:
        self._context = copy_context() if context is None else context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._repr = None
        self._source_traceback = None


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
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = _Handle(callback, args, self, context)
        self.ready.append(handle)
        process = self.process
        if not process.is_queued:
            process.world.wake(process)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        handle: Any = _Handle(callback, args, self, context)  # the world knows its time
        self.process.world.add_timer(when, handle, self.process)
        return handle

    def fire(self, handle: asyncio.Handle) -> None:
        """A timer is due."""
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
        task.add_done_callback(self._forget)
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
            self.process.world.blame(f"{self.process.name}: {context}")

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self.tasks.pop(task, None)


class Timers:
    """Handles by when they are due."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Any, Any]] = []
        self._count = 0

    def add(self, when_s: float, what: Any, owner: Any) -> None:
        """Remember something until its time."""
        self._count += 1
        heapq.heappush(self._heap, (when_s, self._count, what, owner))

    @property
    def first_s(self) -> float:
        """When the first is due, cancelled or not."""
        return self._heap[0][0] if self._heap else math.inf

    @property
    def next_s(self) -> float | None:
        """When the first is due that is not cancelled."""
        while self._heap:
            when_s, _, what, owner = self._heap[0]
            if not (what.cancelled() or owner.is_dead):
                return when_s
            heapq.heappop(self._heap)
        return None

    def take_due(self, now_s: float) -> list[tuple[Any, Any]]:
        """Those that are due, in order."""
        due: list[tuple[Any, Any]] = []
        while self._heap and self._heap[0][0] <= now_s:
            _, _, what, owner = heapq.heappop(self._heap)
            due.append((what, owner))
        return due


Main = Callable[["Process"], Coroutine[Any, Any, None]]
