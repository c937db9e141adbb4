"""Services as processes whose metrics, health and log are read from outside."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from testkit.services.forked import popen
from testkit.services.scrapes import Scrape, scraped
from testkit.waiting import wait_until
from turnstream_server.embedded import free_port

_START_S = 100.0


@dataclass
class Process:
    """A service as a process, with its metrics at `port` and a log of JSON lines."""

    popen: subprocess.Popen[bytes]
    port: int
    address_file: Path
    log_path: Path

    @property
    def address(self) -> str:
        """Return the address, once the service answers."""
        wait_until(self.address_file.exists, _START_S, describe="the address of the service")
        return self.address_file.read_text()

    def get(self, path: str, **headers: str) -> tuple[int, str]:
        """Status and body of a request to the listener; 0 before it listens."""
        url = f"http://127.0.0.1:{self.port}{path}"
        try:
            request = urllib.request.Request(url, headers=headers)
            with urllib.request.urlopen(request, timeout=20) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def reasons(self) -> dict[str, str]:
        """The reason of each dependency that is needed and not ready."""
        _, body = self.get("/readyz")
        if not body:
            return {"listener": "is away"}
        found = json.loads(body)["dependencies"]
        return {k: each["reason"] for k, each in found.items() if each["needed"] and each["reason"]}

    def wait_until_ready(self) -> None:
        """Return when /readyz has the status 200."""
        wait_until(lambda: not self.reasons(), _START_S, describe=f"readiness: {self.log_path}")

    def scrape(self, **headers: str) -> Scrape:
        """Return the metrics."""
        status, text = self.get("/metrics", **headers)
        assert status == 200
        return scraped(text)

    def lines(self) -> list[dict[str, Any]]:
        """The whole lines of the log."""
        whole, _, _ = self.log_path.read_text().rpartition("\n")
        return [json.loads(line) for line in whole.splitlines()]

    def stop(self) -> None:
        """Stop it, as SIGTERM does."""
        self.popen.terminate()
        self.popen.wait(30)


class Processes(contextlib.ExitStack):
    """Services of one store, killed at the end; `folder` is for logs."""

    def __init__(self, url: str, folder: Path, **environment: str) -> None:
        super().__init__()
        self._folder = folder
        self._environment = {
            "TURNSTREAM_REDIS_URL": url,
            "TURNSTREAM_LOG_FORMAT": "json",
            "OMP_NUM_THREADS": "1",
            **environment,
        }

    def __enter__(self) -> Self:
        return self

    def start(self, kind: str, *words: str, **environment: str) -> Process:
        """Start `turnstream serve <kind>`, with metrics on a free port."""
        port, address_file = free_port(), self._folder / f"{kind}.address"
        log_path = self._folder / f"{kind}.log"
        command = [sys.executable, "-m", "turnstream_server.cli", "serve", kind, *words]
        command += ["--metrics-listen", str(port)]
        if kind in ("batcher", "gateway"):
            command += ["--listen", "127.0.0.1:0", "--address-file", str(address_file)]
        log = self.enter_context(log_path.open("wb"))
        variables = {**os.environ, **self._environment, **environment}
        process = popen(command, stderr=log, env=variables, cwd=self._folder)
        self.callback(process.wait)
        self.callback(process.kill)
        return Process(process, port, address_file, log_path)
