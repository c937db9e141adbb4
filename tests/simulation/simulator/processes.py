"""A process, and what it has on its way to the store."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from simulator.loops import Main, ProcessLoop

if TYPE_CHECKING:
    from simulator.world import World


class Process:
    """A loop and its tasks, which can be killed.

    Attributes:
        begun: trajectories that it started; it neither starts them again nor adopts them.
        hangs_until_s: time at which its slow call arrives.
        given_up: started trajectories that it abandoned; a store that forgot this may give them
            again.
    """

    def __init__(self, world: World, name: str, main: Main) -> None:
        self.world = world
        self.name = name
        self.is_dead = False
        self.is_queued = False
        self.asleep_until_s = self.hangs_until_s = 0.0
        self.begun: set[Any] = set()
        self.given_up: set[Any] = set()
        self.loop = ProcessLoop(self)
        self.task = self.loop.create_task(main(self), name=name)

    @property
    def is_over(self) -> bool:
        """Whether its work is done, or it was killed."""
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
            self.world.blame(f"{self.name} cannot be ended: {[*self.loop.tasks]}")
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


@dataclass(eq=False, slots=True)
class LateCall:
    """A call that is carried out after its caller has stopped waiting."""

    request: Request

    def cancelled(self) -> bool:
        """It arrives."""
        return False


@dataclass(eq=False, slots=True)
class StalledCall(LateCall):
    """A slow call whose caller waits."""


@dataclass(eq=False, slots=True)
class BlockedRead:
    """An XREAD that waits for entries."""

    request: Request
    is_over: bool = False

    def cancelled(self) -> bool:
        """Whether it was answered."""
        return self.is_over
