"""The services of docker-compose.yml as processes of this machine: same commands, same environment.

The volumes of the file are folders of one temporary folder, and ports are free ones of this
machine. Nothing else differs, so that the file is tested where no container engine runs.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

from turnstream_server.embedded import find_binary, free_port

REPOSITORY: Final = Path(__file__).parents[3]
FILE: Final = REPOSITORY / "docker-compose.yml"
VARIABLE: Final = re.compile(r"\$\{(\w+)(?::?-([^}]*))?\}")
"""A variable of the file, and its default."""

_CLI: Final = [sys.executable, "-P", "-m", "turnstream_server.cli"]
_STOP_S: Final = 60.0


def defaults() -> dict[str, str]:
    """Return the variables of `.env`."""
    lines = (REPOSITORY / ".env").read_text(encoding="utf-8").splitlines()
    pairs = (line.partition("=") for line in lines if line and not line.startswith("#"))
    return {name: value for name, _, value in pairs}


def compose_file() -> dict[str, Any]:
    """Return the content of docker-compose.yml, with the variables of `.env` in it."""
    known = defaults()
    text = VARIABLE.sub(lambda found: known[found[1]], FILE.read_text(encoding="utf-8"))
    return yaml.safe_load(text)


class Started(NamedTuple):
    """A service that runs as a process."""

    process: subprocess.Popen[bytes]
    environment: Mapping[str, str]
    log: Path

    def is_ready(self) -> bool:
        """Return whether the health command of the images reports the service as ready.

        The test fails with the log of a service that has ended.
        """
        assert self.process.poll() is None, self.log.read_text()
        done = subprocess.run(
            [sys.executable, "-IS", REPOSITORY / "deploy" / "ready.py"],
            env=dict(self.environment),
            capture_output=True,
            check=False,
            timeout=60,
        )
        return done.returncode == 0


class LocalStack:
    """Starts services of the file in a folder, and stops them in the reverse order at its end.

    Attributes:
        folder: has `volumes/<name>` for every volume of the file.
        store_port: port of the store.
        tls: certificate and key of a store that speaks TLS alone; None for one without TLS.
    """

    def __init__(self, folder: Path, *, tls: tuple[Path, Path] | None = None) -> None:
        self.folder = folder
        self.store_port = free_port()
        self.tls = tls
        self._services: dict[str, Any] = compose_file()["services"]
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> LocalStack:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def volume(self, name: str) -> Path:
        """Return the folder of a volume."""
        path = self.folder / "volumes" / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def store_url(self, user: str) -> str:
        """Return the address of the store for a user of it."""
        password = (self.volume(f"store-{user}") / "password").read_text()
        return self._at_store(f"redis://{user}:{password}@redis:6379")

    def start_store(self, *flags: str, binary: str | None = None) -> subprocess.Popen[bytes]:
        """Start the store with its users and its data, and return its process.

        Args:
            *flags: further settings of the server, which replace those of the file.
            binary: None takes redis-server, or Valkey where none is installed.
        """
        service = self._services["redis"]
        users, secrets = self.folder / "users.acl", self.folder / "secrets"
        secrets.mkdir(exist_ok=True)
        for volume, target in _volumes(service).items():
            if target.startswith("/secrets/") and not (place := secrets / target[9:]).exists():
                place.symlink_to(self.volume(volume))
        subprocess.run(["sh", REPOSITORY / "deploy/redis/users.sh", secrets, users], check=True)
        command = [
            *(binary or shutil.which("redis-server") or str(find_binary()), *service["command"]),
            *("--dir", str(self.volume("store")), "--bind", "127.0.0.1", "--aclfile", str(users)),
            *self._port_flags(),
            *flags,
        ]
        log = self.folder / "redis.log"
        return self._stack.enter_context(_running(command, {**os.environ}, log))

    def start(self, name: str, **changes: str) -> Started:
        """Start a service with the command and environment of the file, and these changes."""
        service = self._services[name]
        places = {target: str(self.volume(volume)) for volume, target in _volumes(service).items()}
        words = [_placed(word, places) for word in service["command"]]
        found = {key: _placed(str(each), places) for key, each in service["environment"].items()}
        found["TURNSTREAM_REDIS_URL"] = self._at_store(found["TURNSTREAM_REDIS_URL"])
        environment = {**os.environ, **_on_this_machine(found), **changes}
        log = self.folder / f"{name}.log"
        process = self._stack.enter_context(_running([*_CLI, *words], environment, log))
        return Started(process, environment, log)

    def _port_flags(self) -> list[str]:
        if self.tls is None:
            return ["--port", str(self.store_port)]
        cert, key = map(str, self.tls)
        files = ["--tls-cert-file", cert, "--tls-key-file", key, "--tls-auth-clients", "no"]
        return ["--port", "0", "--tls-port", str(self.store_port), *files]

    def _at_store(self, url: str) -> str:
        """Return the URL of the file for the store of this machine."""
        url = url.replace("redis:6379", f"127.0.0.1:{self.store_port}")
        if self.tls is None:
            return url
        return f"{url.replace('redis://', 'rediss://')}?ssl_ca_certs={self.tls[0]}"


def _volumes(service: Mapping[str, Any]) -> dict[str, str]:
    """Return the paths of the named volumes of a service."""
    parts = [each.split(":") for each in service["volumes"]]
    return {name: target for name, target, *_ in parts if not name.startswith(".")}


def _placed(text: str, places: Mapping[str, str]) -> str:
    """Return a text with the paths of volumes replaced by those of their folders."""
    for target, place in places.items():
        text = re.sub(rf"(^|=){re.escape(target)}(?=/|$)", rf"\g<1>{place}", text)
    return text


def _on_this_machine(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment with free ports, and an address at which this machine is reached."""
    metrics_host = environment["TURNSTREAM_METRICS_LISTEN"].rpartition(":")[0]
    return {
        **environment,
        "TURNSTREAM_METRICS_LISTEN": f"{metrics_host}:{free_port()}",
        "TURNSTREAM_BATCHER_PORT": str(free_port()),
        "TURNSTREAM_BATCHER_ADVERTISE": "127.0.0.1",  # this machine may have a name of no address
        "TURNSTREAM_HTTP_PORT": str(free_port()),
    }


@contextlib.contextmanager
def _running(
    command: list[str], environment: Mapping[str, str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program in the block; stop it by SIGTERM, and kill it after a minute."""
    with (
        log.open("ab") as output,
        subprocess.Popen(
            command, env=dict(environment), stdout=output, stderr=subprocess.STDOUT
        ) as process,
    ):
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_S)
            process.kill()
