"""A rollout: it adds tasks, takes them while it has free places, and runs their samples."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from turnstream.errors import (
    ConflictError,
    EndOfRunError,
    FencedError,
    InvalidConfigError,
    InvalidTurnError,
    NotReadyError,
    PromptsExhaustedError,
    ReleasedError,
    TurnstreamError,
)
from turnstream.store.client.cancellation import to_the_end
from turnstream.types import TrajectoryKey
from turnstream_server.rollout.files import RolloutFolder, tail
from turnstream_server.rollout.gateway_calls import Caller, RunCalls, TakenTask
from turnstream_server.rollout.options import RolloutOptions
from turnstream_server.rollout.outcomes import NUM_FIRST, FirstSamples, RolloutFailedError
from turnstream_server.rollout.progress import Progress
from turnstream_server.rollout.samples import OpenSample, SampleRunner
from turnstream_server.rollout.tasks_file import portions

_HELD_S: Final = 2.0
"""Time for which a request for a task is held: a stop waits for it."""

_REPORT_S: Final = 10
_CHECK_S: Final = 1.0
_LEFT: Final = "the rollout was stopped"
_KILLED: Final = "the rollout was killed"
_REFUSED: Final = "its seal was refused"
_ENDED_ELSEWHERE: Final = (ConflictError, FencedError, EndOfRunError, ReleasedError)


class Rollout:
    """One rollout. `say` prints a line; `check` raises if a process that it needs has failed."""

    def __init__(
        self,
        options: RolloutOptions,
        folder: RolloutFolder,
        calls: RunCalls,
        *,
        say: Callable[[str], None],
        check: Callable[[], None],
    ) -> None:
        self._options = options
        self._folder = folder
        self._calls = calls
        self._call = Caller()
        self._say, self._check = say, check
        self._runner = SampleRunner(options, folder, calls, self._call, say)
        self._progress = Progress()
        self._first = FirstSamples()
        self._places = asyncio.Semaphore(options.num_parallel)
        self._num_samples = 0
        self._changed = asyncio.Event()
        self._has_begun = asyncio.Event()
        self._start_s = time.monotonic()

    async def run(self) -> None:
        """Run until no prompt is left, or the run is closed. A cancellation stops the agents.

        Raises:
            RolloutFailedError: the first samples have all failed alike.
            InvalidConfigError: the run has other prompts than `--tasks`.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                for body in self._folder.left_open():
                    await self._end_task(body | {"reason": _KILLED})
                adding = tasks.create_task(self._add())
                await self._has_begun.wait()
                reporting = tasks.create_task(self._report())
                await self._take_all(tasks, adding)
                reporting.cancel()
        except BaseExceptionGroup as errors:
            raise _first_of(errors) from None
        finally:
            prompts = None
            with contextlib.suppress(TurnstreamError):
                prompts = await self._call.once(self._calls.prompts)
            self._say(self._progress.summary(self._elapsed_s, prompts))
            self._call.close()

    @property
    def _elapsed_s(self) -> float:
        return time.monotonic() - self._start_s

    async def _add(self) -> None:
        """Add the prompts of the file to the run."""
        if (path := self._options.tasks) is None:
            self._has_begun.set()
            return
        try:
            for first, prompts in portions(path, num_samples=self._options.num_samples):
                await self._call(self._calls.add, prompts, first)
                self._has_begun.set()
        except ConflictError as error:
            text = (
                f"run {self._options.run!r} has other prompts than {path} with --samples "
                f"{self._options.num_samples}: {error}"
            )
            raise InvalidConfigError("--tasks", text) from error

    async def _take_all(self, tasks: asyncio.TaskGroup, adding: asyncio.Task[None]) -> None:
        """Take tasks until none is left, and wait until their samples have ended."""
        working: set[asyncio.Task[None]] = set()
        while True:
            await self._free_place()
            try:
                task = await self._next_task()
            except NotReadyError as error:
                self._progress.waits = "; ".join(each.sentence for each in error.reasons)
                self._progress.waits = self._progress.waits or str(error)
            except PromptsExhaustedError:
                if adding.done():
                    break
                await asyncio.sleep(_CHECK_S)
            except EndOfRunError:
                break
            else:
                self._progress.waits = ""
                self._num_samples += len(task.trajectories)
                working = {each for each in working if not each.done()}
                working.add(tasks.create_task(self._work(task)))
        if working:
            await asyncio.wait(working)

    async def _free_place(self) -> None:
        while self._num_samples >= self._options.num_parallel:
            self._changed.clear()
            await self._changed.wait()

    async def _next_task(self) -> TakenTask:
        """Take a task. One that comes after a cancellation is abandoned."""
        taking = asyncio.create_task(self._call(self._calls.next_task, _HELD_S))
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:
            await asyncio.wait([taking], timeout=2 * _HELD_S)
            if taking.done() and taking.exception() is None:
                await self._end_task(taking.result().end_body(_LEFT))
            taking.cancel()
            raise

    async def _work(self, task: TakenTask) -> None:
        """Run the samples of a task, and abandon what is open of it at an error."""
        self._progress.num_working += 1
        self._folder.begin(task.group_id, task.payload, task.end_body(_KILLED))
        num_lost = self._progress.num_lost
        try:
            async with asyncio.TaskGroup() as samples:
                for key in task.trajectories:
                    samples.create_task(self._sample(task, key))
        except BaseException:
            await to_the_end(self._end_task(task.end_body(_LEFT)))
            raise
        finally:
            self._progress.num_working -= 1
        self._progress.num_tasks += 1
        if self._progress.num_lost > num_lost:
            await self._end_task(task.end_body(_REFUSED))
        self._folder.end(task.group_id)

    async def _end_task(self, body: Mapping[str, Any]) -> None:
        """Abandon what is open of a task. Its note stays while the gateway is away."""
        try:
            await self._call.once(self._calls.end_task, body)
        except _ENDED_ELSEWHERE:
            pass
        except TurnstreamError as error:
            self._say(f"{body['group_id']} was not abandoned: {error}")
            return
        self._folder.end(body["group_id"])

    async def _sample(self, task: TakenTask, key: TrajectoryKey) -> None:
        try:
            sample = await self._runner.open(task, key)
            async with self._places:
                await self._finish(sample)
        except (*_ENDED_ELSEWHERE, InvalidTurnError) as error:
            self._progress.num_lost += 1
            self._say(f"{key.readable_name} is lost: {error}")
        finally:
            self._num_samples -= 1
            self._changed.set()

    async def _finish(self, sample: OpenSample) -> None:
        self._progress.num_agents += 1
        try:
            end = await self._runner.run(sample)
        finally:
            self._progress.num_agents -= 1
        if self._first.all_failed(end.reason):
            output = self._folder.files_of(sample.key).output
            text = f"the first {NUM_FIRST} samples have all failed: {end.reason}; see {output}"
            raise RolloutFailedError("\n  ".join([text, *tail(output).splitlines()[-10:]]))
        await self._runner.seal(sample, end)
        self._progress.count(end)

    async def _report(self) -> None:
        """Print a line every 10 s."""
        while True:
            for _ in range(round(_REPORT_S / _CHECK_S)):
                self._check()
                await asyncio.sleep(_CHECK_S)
            prompts = await self._call(self._calls.prompts)
            waits = self._call.trouble or self._progress.waits
            self._say(self._progress.line(self._elapsed_s, prompts, waits=waits))


def _first_of(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first error that is no group."""
    first = errors.exceptions[0]
    return _first_of(first) if isinstance(first, BaseExceptionGroup) else first
