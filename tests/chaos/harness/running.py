"""The processes of a long run."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field

from harness.machine import Machine
from harness.proxy import Proxy
from harness.rig import ENDLESS, Rig
from turnstream_server.embedded import Durability
from turnstream_server.launch.stack import Service

REFUSED = 3
"""Exit status of a rank that got a typed error. It may need an older checkpoint."""


class InVainError(Exception):
    """A fault took no effect, because it met no process."""


@dataclass(slots=True, kw_only=True)
class Stack:
    """The processes of a long run.

    Attributes:
        store_proxy: proxy before the store, for generators and batchers.
        batcher_proxy: proxy before the first batcher, for ranks.
        gateways: the gateways; every second generator writes over HTTP.
        clock_s: error of the store's clock.
    """

    rig: Rig
    machine: Machine
    store_proxy: Proxy
    batcher_proxy: Proxy
    rng: random.Random
    durability: Durability
    batchers: dict[str, Service] = field(default_factory=dict[str, Service])
    gateways: dict[str, Service] = field(default_factory=dict[str, Service])
    generators: dict[str, Service] = field(default_factory=dict[str, Service])
    num_started: int = 0
    clock_s: float = 0.0

    def start(self) -> None:
        """Start two batchers, a gateway, two generators and the ranks."""
        self.gateways["gateway"] = self.rig.start_gateway()
        self.batchers["other"] = self.rig.start_batcher("other", waits=False)
        self.batchers["batcher"] = self.rig.start_batcher()
        for _ in range(2):
            self.start_generator()
        self.start_ranks()

    def start_generator(self) -> None:
        """Start a generator with a new name, which also adopts most trajectories of dead ones.

        Every second one writes over HTTP.
        """
        writer = f"own{self.num_started}"
        url = f"http://{self.rig.address('gateway')}" if self.num_started % 2 else ""
        self.num_started += 1
        options = {"adopts_every": 2, "never_adopts_one_in": 4}
        service = self.rig.start_generator(writer, groups=ENDLESS, url=url, pause_s=0.1, **options)
        self.generators[writer] = service

    def start_ranks(self) -> None:
        """Kill the current ranks, and start a new session of one to four ranks."""
        was_refused = any(rank.status == REFUSED for rank in self.rig.ranks)
        for rank in self.rig.ranks:
            rank.kill()
        self.rig.start_ranks(
            self.rng.randint(1, 4),
            target=self.batcher_proxy.address,
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
        for name, gateway in self.gateways.items():
            if gateway.status is not None:
                self.gateways[name] = self.rig.start_gateway(name)
        for writer, generator in list(self.generators.items()):
            if generator.status is not None:
                del self.generators[writer]
                self.start_generator()

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
