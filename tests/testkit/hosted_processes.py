"""The processes that host models, each restarted at the same address and in the same folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Self

import redis

from testkit.sdks import BASE, Hosting
from testkit.waiting import wait_until
from turnstream.store.client.connection import connect
from turnstream_server.embedded import free_port
from turnstream_server.launch.stack import Service, Stack
from turnstream_server.models.byte_model import byte_model_spec, write_byte_model
from turnstream_server.operations.models import read_bases

READY_S: Final = 180.0

_READY_LINES: Final = {
    "batcher": "batcher listens",
    "gateway": "gateway listens",
    "engine": " serves ",
    "sampler": "sampler ready",
}
"""A part of the log line of each service that it writes when it is ready."""

SERVICES: Final = (*_READY_LINES,)


class HostedProcesses:
    """A batcher, a gateway, an engine and a sampler; a context manager that leaves none behind."""

    def __init__(self, folder: Path, *, store_url: str, checkpoint_every: int = 8) -> None:
        base, shared = folder / "byte", folder / "models"
        write_byte_model(base, byte_model_spec(hidden_size=32))
        listen = {name: f"127.0.0.1:{free_port()}" for name in ("batcher", "gateway")}
        self.hosting = Hosting(listen["gateway"], base, folder, shared)
        own = {"base_model": f"{BASE}={base}", "folder": shared}
        self._options: dict[str, dict[str, Any]] = {
            "batcher": {"listen": listen["batcher"]},
            "gateway": {"listen": listen["gateway"]},
            "engine": {**own, "checkpoint_every": checkpoint_every, "threads": 1},
            "sampler": {**own, "threads": 1},
        }
        self._store_url = store_url
        self._services: dict[str, Service] = {}
        self._read_from: dict[str, int] = {}
        self._client: redis.Redis = connect(store_url)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for service in self._services.values():
            service.kill()
        self._client.close()

    def start(self, name: str, *, failpoint: str = "") -> None:
        """Start a service that does not run any more, and may kill itself at a failpoint."""
        if name in self._services:
            self._services[name].kill()  # also closes its pipe
        environment = {"TURNSTREAM_FAILPOINT": failpoint, "OMP_NUM_THREADS": "1"}
        stack = Stack(self.hosting.folder, store_url=self._store_url, environment=environment)
        log = self.hosting.folder / "logs" / f"{name}.log"
        self._read_from[name] = log.stat().st_size if log.exists() else 0
        self._services[name] = stack.start(name, name, **self._options[name])

    def start_all(self, **failpoints: str) -> None:
        """Start all services, and wait until the base model is served."""
        for name in SERVICES:
            self.start(name, failpoint=failpoints.get(name, ""))
        for name in SERVICES:
            self.wait_until_ready(name)
        wait_until(lambda: read_bases(self._client), READY_S, "a base model")

    def status(self, name: str) -> int | None:
        """Return the exit status of a service; None while it runs."""
        return self._services[name].status

    def wait_until_ready(self, name: str) -> None:
        """Wait until a service that was started has written that it is ready."""
        service = self._services[name]

        def is_ready() -> bool:
            service.check()
            with service.log_path.open("rb") as log:
                log.seek(self._read_from[name])
                return _READY_LINES[name].encode() in log.read()

        wait_until(is_ready, READY_S, f"a ready {name}")
