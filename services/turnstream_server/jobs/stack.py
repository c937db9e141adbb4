"""The processes of one job: started in order, watched, and stopped in the reverse order.

Every process runs in a session of its own, so that Ctrl-C reaches the supervisor alone, and holds
a pipe from it as standard input: when the supervisor is gone, the input ends and the process with
it (see `end_when_stdin_closes`). The output of a process goes to `logs/<name>.log`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

from turnstream.errors import InvalidConfigError, TurnstreamError

_LOG_LINES_IN_ERRORS = 20
_POLL_S = 0.05
_STOP_S = 8.0

_DEFAULT_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",  # models are read from local folders only
    # glibc would hand every large tensor back to the kernel: a third of a step was page faults.
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
    "OMP_WAIT_POLICY": "PASSIVE",  # on busy cores, torch's spinning threads made steps 15 x slower
    "PYTHONUNBUFFERED": "1",  # a log that is complete also after SIGKILL
    "TOKENIZERS_PARALLELISM": "false",  # the processes of a job share the cores already
}


class ServiceFailedError(TurnstreamError):
    """A process of the job ended, or was not ready in time; `log_lines` are its last words."""

    def __init__(self, message: str, log_lines: tuple[str, ...] = ()) -> None:
        super().__init__(message, log_lines)
        self.message = message
        self.log_lines = log_lines

    def __str__(self) -> str:
        return "\n  ".join((self.message, *self.log_lines))


class Service:
    """One process of a job."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log_path: Path) -> None:
        self.name = name
        self.log_path = log_path
        self._process = process

    @property
    def pid(self) -> int:
        """Process id, which is also the id of its process group."""
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        return self._process.poll()

    def check(self) -> None:
        """Raise if the process failed."""
        if self.status:
            how = f"status {self.status}" if self.status > 0 else _signal_name(-self.status)
            raise self.failure(f"{self.name} ended with {how}")

    def failure(self, message: str) -> ServiceFailedError:
        """The error that says `message` and where the log is, with its last lines."""
        text = self.log_path.read_text(encoding="utf-8", errors="replace")
        lines = tuple(text.splitlines()[-_LOG_LINES_IN_ERRORS:])
        return ServiceFailedError(f"{message}; its log is {self.log_path}", lines)

    def ask_to_stop(self) -> None:
        """SIGTERM; the process stops by itself."""
        if self.status is None:
            self._process.terminate()

    def wait(self, timeout_s: float) -> None:
        """Wait for the end, at most until the deadline."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise self.failure(f"{self.name} was not done after {timeout_s:.0f} s") from error

    def kill(self) -> None:
        """End the process and everything it started, at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()


class Stack:
    """The processes of a job; a context manager that leaves none behind.

    Args:
        folder: the job's folder; logs and temporary files stay inside it.
        environment: variables of every process, beside those of this one.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self._environment = environment or {}
        self._services: list[Service] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        with uninterrupted():
            self.stop()

    def start(self, name: str, arguments: Sequence[str]) -> Service:
        """Start `turnstream <arguments>` as a process called `name`."""
        command = [sys.executable, "-P", "-m", "turnstream_server.cli"]
        return self.start_program(name, [*command, *arguments, "--end-with-stdin"])

    def start_program(self, name: str, command: Sequence[str]) -> Service:
        """Start any program; it should end when its standard input does."""
        log_path = self.folder / "logs" / f"{name}.log"
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log:
            process = subprocess.Popen(  # noqa: S603 - our own command
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._full_environment(),
                start_new_session=True,
            )
        service = Service(name, process, log_path)
        self._services.append(service)
        return service

    def check(self) -> None:
        """Raise if any process failed."""
        for service in self._services:
            service.check()

    def wait_for_file(self, path: Path, *, of: Service, timeout_s: float) -> str:
        """The text of a file that a service writes when it is ready."""
        for _ in self.watch(timeout_s=timeout_s):
            if path.is_file():
                return path.read_text(encoding="utf-8").strip()
            if of.status is not None:
                raise of.failure(f"{of.name} ended before it was ready")
        raise of.failure(f"{of.name} was not ready after {timeout_s:.0f} s")

    def wait_for_all(self, services: Sequence[Service], *, timeout_s: float) -> None:
        """Wait until each of these has exited with status 0."""
        for _ in self.watch(timeout_s=timeout_s):
            if all(service.status is not None for service in services):
                self.check()  # one may have failed since `watch` checked
                return
        for service in services:
            service.wait(0.0)

    def watch(self, *, timeout_s: float, every_s: float = _POLL_S) -> Iterator[float]:
        """Seconds since the start, again and again until the deadline; fails with any process."""
        start_s = time.monotonic()
        while (elapsed_s := time.monotonic() - start_s) < timeout_s:
            self.check()
            yield elapsed_s
            time.sleep(every_s)

    def stop(self) -> None:
        """Stop what still runs, the last started first; kill what does not stop in 8 s."""
        for service in reversed(self._services):
            service.ask_to_stop()
        deadline_s = time.monotonic() + _STOP_S
        for service in reversed(self._services):
            with contextlib.suppress(ServiceFailedError):
                service.wait(max(0.0, deadline_s - time.monotonic()))
            service.kill()
        self._services.clear()

    def _full_environment(self) -> dict[str, str]:
        scratch = self.folder / "tmp"
        scratch.mkdir(parents=True, exist_ok=True)
        folders = dict.fromkeys(("TMPDIR", "HF_HOME", "XDG_CACHE_HOME"), str(scratch))
        return {**_DEFAULT_ENVIRONMENT, **os.environ, **folders, **self._environment}


@contextlib.contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """Inside the block SIGTERM and Ctrl-C raise KeyboardInterrupt, so that all is cleaned up.

    A Ctrl-C that the caller's shell has ignored stays ignored.
    """

    def interrupt(_signal: int, _frame: object) -> None:
        raise KeyboardInterrupt

    names = [signal.SIGTERM]
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        names.append(signal.SIGINT)  # no matter whether a module is imported: see __main__.py
    before = [signal.signal(name, interrupt) for name in names]
    try:
        yield
    finally:
        for name, handler in zip(names, before, strict=True):
            signal.signal(name, handler)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Inside the block Ctrl-C and SIGTERM do nothing: it undoes what they interrupted before."""
    names = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(name, signal.SIG_IGN) or signal.SIG_DFL for name in names]
    try:
        yield
    finally:
        for name, handler in zip(names, before, strict=True):
            signal.signal(name, handler)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


_GRACE_S = 5.0


def end_when_stdin_closes() -> None:
    """Ask this process to end (SIGTERM) once its standard input ends; end it 5 s later anyway.

    The supervisor holds the only write end of that pipe and writes nothing, so its death, of
    whatever kind, is the end of the input. The grace is bounded because a clean stop may be
    waiting for a store that went with the supervisor.
    """
    threading.Thread(target=_watch, name="orphan-watch", daemon=True).start()


def _watch() -> None:
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(_GRACE_S)
    os._exit(1)


_MARK = ".turnstream-job"


@contextlib.contextmanager
def job_folder(folder: Path, *, job: str) -> Iterator[Path]:
    """Lock and empty the folder of a job; its files stay after the job.

    It is made if it is missing, and what an earlier run of the same job left is removed.
    """
    folder = folder.absolute()
    mark = folder / _MARK
    _check_is_ours(folder, mark, job)
    folder.mkdir(parents=True, exist_ok=True)
    with mark.open("a+", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidConfigError("data_dir", f"another {job} is at work in {folder}") from None
        _empty(folder)
        lock.truncate(0)
        lock.write(f"{job}\n")
        lock.flush()
        yield folder


def _check_is_ours(folder: Path, mark: Path, job: str) -> None:
    if not folder.exists():
        return
    is_ours = mark.is_file() and mark.read_text(encoding="utf-8").strip() == job
    if not is_ours and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidConfigError("data_dir", f"{folder} holds something else than a {job}")


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != _MARK:
            path.unlink()
