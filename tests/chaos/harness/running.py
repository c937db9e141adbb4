"""The processes of a long run, and its random choices."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from harness.episodes import prompt_payload
from harness.machine import Machine
from harness.proxy import Proxy
from harness.rig import ENDLESS, Rig
from turnstream.errors import StoreUnavailableError
from turnstream.store.run.runs import resume_run
from turnstream.store.run.tasks import Prompt, add_prompts, read_prompt_counts
from turnstream_server.embedded import Durability
from turnstream_server.jobs.stack import Service

Choice = TypeVar("Choice")

AWAITS_ONE_IN = 8
"""One trajectory in so many gets its reward from another process."""

LATE_S = 12.0
"""Delay of some of these rewards, longer than their deadline."""

NUM_PROMPTS = 100
"""Prompts that a run has left, at least half of them: generators never wait for one."""

REFUSED = 3
"""Exit status of a rank that got a typed error. It may need an older checkpoint."""


class InVainError(Exception):
    """A fault took no effect, because it met no process."""


class Draws:
    """Random choices of which each comes once before any comes again; `rng` decides the order."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self._bags: dict[str, list[int]] = {}

    def draw(self, bag: str, choices: Sequence[Choice]) -> Choice:
        """Return one of the choices of a bag."""
        left = self._bags.setdefault(bag, [])
        if not left:
            left += self.rng.sample(range(len(choices)), len(choices))
        return choices[left.pop()]


@dataclass(slots=True, kw_only=True)
class Stack:
    """The processes of a long run.

    Attributes:
        store: proxy before the store, for generators and batchers.
        door: proxy before the first batcher, for ranks.
        clock_s: error of the store's clock.
    """

    rig: Rig
    machine: Machine
    store: Proxy
    door: Proxy
    draws: Draws
    durability: Durability
    batchers: dict[str, Service] = field(default_factory=dict[str, Service])
    generators: dict[str, Service] = field(default_factory=dict[str, Service])
    poster: Service | None = None
    num_started: int = 0
    clock_s: float = 0.0

    @property
    def rng(self) -> random.Random:
        """The source of independent random choices."""
        return self.draws.rng

    @property
    def ends(self) -> Path:
        """A file that appears when the run is to end."""
        return self.rig.folder / "ends"

    def start(self) -> None:
        """Start two batchers, two generators, one of which takes tasks, and the ranks."""
        self.batchers["other"] = self.rig.start_batcher("other", waits=False)
        self.batchers["batcher"] = self.rig.start_batcher()
        self.give_prompts()
        for kind in ("own", "task"):
            self.start_generator(kind)
        self.start_ranks()
        self.start_poster()

    def start_poster(self) -> None:
        """Start a process that posts rewards, some of them late."""
        self.num_started += 1
        writer = f"poster-{self.num_started:03}"
        options = {"url": self.rig.store_url, "run": self.rig.run, "writer": writer}
        options |= {"late_s": LATE_S, "hurries_at": self.ends}
        self.poster = self.rig.start(writer, "harness.poster", options)

    def start_generator(self, kind: str) -> None:
        """Start a generator with a new name.

        The kind "own" brings its prompts, and evaluates now and then. The kind "task" takes tasks
        of the run. Both adopt most of the trajectories of dead generators.
        """
        writer = f"{kind}{self.num_started}"
        self.num_started += 1
        more = {"evaluates_every": 8} if kind == "own" else {"takes_tasks": 1}
        more |= {"awaits_one_in": AWAITS_ONE_IN, "takes_over_every": 2, "leaves_one_in": 4}
        service = self.rig.start_generator(writer, groups=ENDLESS, pause_s=0.1, **more)
        self.generators[writer] = service

    def start_ranks(self) -> None:
        """Kill the current ranks, and start a new session of one to four ranks."""
        was_refused = any(rank.status == REFUSED for rank in self.rig.ranks)
        for rank in self.rig.ranks:
            rank.kill()
        self.rig.start_ranks(
            self.rng.randint(1, 4),
            target=self.door.address,
            checkpoint_every=3,
            timeout_s=15,
            update_s=0.02,
            from_step=self.rig.checkpoint_of_store() if was_refused and self.rig.cuts else -1,
        )

    def mend(self) -> None:
        """Restart every process that has ended, as a supervisor does."""
        self.mend_services()
        if any(rank.status is not None for rank in self.rig.ranks):
            self.start_ranks()

    def mend_services(self) -> None:
        """Restart every process that has ended, except ranks."""
        for name, batcher in self.batchers.items():
            if batcher.status is not None:
                self.batchers[name] = self.rig.start_batcher(name)
        for writer, generator in list(self.generators.items()):
            if generator.status is not None:
                del self.generators[writer]
                self.start_generator(writer.rstrip("0123456789"))
        if self.poster is not None and self.poster.status is not None:
            self.start_poster()
        self.give_prompts()

    def give_prompts(self) -> None:
        """Add prompts before they run out; a store without memory gets them later."""
        client, run = self.rig.client, self.rig.run
        with contextlib.suppress(StoreUnavailableError):
            counts = read_prompt_counts(client, run)
            if counts.num_left > NUM_PROMPTS // 2:
                return
            first = counts.num_added + 1
            uids = [f"p{number}" for number in range(first, first + NUM_PROMPTS)]
            prompts = [
                Prompt(prompt_uid=uid, payload=prompt_payload(uid), num_samples=2) for uid in uids
            ]
            add_prompts(client, run, prompts, first=first)

    def restart_store(self, *, power_off: bool = False) -> None:
        """Send SIGKILL and restart; a power cut also loses unsynced data.

        A store under everysec may answer before it has written.
        """
        server = self.rig.server
        server.kill()
        if power_off:
            self.machine.lose_power(server.data_dir)
        if self.durability == "everysec":
            self.rig.cuts.append(time.monotonic())
        server.restart()
        if power_off:
            resume_run(self.rig.client, self.rig.run)  # the cut may have taken the last resumption

    def strike_beside(self) -> None:
        """Kill a generator or the poster, and replace it."""
        assert self.poster is not None
        generator = self.rng.choice([*self.generators.values()])
        self.draws.draw("beside", (self.poster, generator)).kill()
        self.mend_services()
