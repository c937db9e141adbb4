"""The processes of one job: started in order, watched, and stopped in the reverse order.

Every process runs in a session of its own, so that Ctrl-C reaches the supervisor alone. Its
standard input is a pipe from the supervisor: when the supervisor is gone, the input ends and the
process with it (see `end_when_stdin_closes`). The output of a process goes to `logs/<name>.log`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from turnstream.errors import TurnstreamError

_LOG_LINES_IN_ERRORS = 20
_POLL_S = 0.05
_READY_S = 120.0
_STOP_S = 8.0
_GRACE_S = 5.0

_DEFAULT_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",  # models are read from local folders only
    "OMP_WAIT_POLICY": "PASSIVE",  # on busy cores, torch's spinning threads made steps 15 x slower
    "PYTHONUNBUFFERED": "1",  # a log that is complete also after SIGKILL
    "TOKENIZERS_PARALLELISM": "false",  # the processes of a job share the cores already
}

_ALLOCATOR_OF_TENSORS = {
    # glibc would hand every large tensor back to the kernel: a third of a step was page faults.
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
}

_WITHOUT_TENSORS = frozenset({"batcher", "gateway", "replayer"})
ALLOCATOR_OF_BUFFERS = {
    # By default glibc raises both thresholds up to the largest buffer, and keeps free memory in an
    # arena of each thread. At 128 KiB a body of 3 MB costs 3 times the CPU: asyncio reads 256 KiB.
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(512 << 10),
    "MALLOC_TRIM_THRESHOLD_": str(4 << 20),
}
"""Variables of services without tensors; deploy/Dockerfile has them too."""


class ServiceFailedError(TurnstreamError):
    """A process of the job ended, or was not ready in time; the end of its log is in the text."""


class Service:
    """One process of a job.

    Attributes:
        address: host and port of a batcher or gateway once it answers; empty for other services.
    """

    def __init__(self, name: str, process: subprocess.Popen[bytes], log_path: Path) -> None:
        self.name = name
        self.log_path = log_path
        self.address = ""
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
            how = f"status {self.status}" if self.status > 0 else f"signal {-self.status}"
            raise self.failure(f"{self.name} ended with {how}")

    def failure(self, message: str) -> ServiceFailedError:
        """Return the error with this message, the path of the log and its last lines."""
        text = self.log_path.read_text(encoding="utf-8", errors="replace")
        lines = text.splitlines()[-_LOG_LINES_IN_ERRORS:]
        return ServiceFailedError("\n  ".join([f"{message}; its log is {self.log_path}", *lines]))

    def ask_to_stop(self) -> None:
        """Send SIGTERM; the process stops by itself."""
        if self.status is None:
            self._process.terminate()

    def wait(self, timeout_s: float) -> None:
        """Wait for the end; ServiceFailedError after `timeout_s`."""
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
        store_url: store of the services. It travels in the environment, because it may have a
            password.
        environment: further variables of every process.
    """

    def __init__(
        self, folder: Path, *, store_url: str = "", environment: Mapping[str, str] | None = None
    ) -> None:
        self.folder = folder
        self._environment = dict(environment or {})
        if store_url:
            self._environment["TURNSTREAM_REDIS_URL"] = store_url
        self._services: list[Service] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        with uninterrupted():
            self.stop()

    def start_batcher(self, name: str = "batcher", *, listen: str = "127.0.0.1:0") -> Service:
        """Start a batcher, and return when it answers."""
        return self.start_listening("batcher", name, listen=listen)

    def start_listening(
        self, kind: str, name: str, *arguments: str, waits: bool = True, **options: object
    ) -> Service:
        """Start a service that writes its address to a file, and return once it has.

        Without `waits`, return at once; `wait_for_address` waits.
        """
        address_file = self._address_file(name)
        address_file.unlink(missing_ok=True)
        service = self.start(kind, name, *arguments, address_file=address_file, **options)
        if waits:
            self.wait_for_address(service)
        return service

    def wait_for_address(self, service: Service) -> None:
        """Wait until a service has written its address to its file."""
        path = self._address_file(service.name)
        service.address = self.wait_for_file(path, of=service, timeout_s=_READY_S)

    def _address_file(self, name: str) -> Path:
        return self.folder / f"{name}.address"

    def start(self, kind: str, name: str, *arguments: str, **options: object) -> Service:
        """Start `turnstream serve <kind>` as a process called `name`.

        `dump=path` becomes `--dump path`; an option that is None is omitted.
        """
        command = [sys.executable, "-P", "-m", "turnstream_server.cli", "serve", kind, *arguments]
        for option, value in options.items():
            if value is not None:
                command += [f"--{option.replace('_', '-')}", str(value)]
        return self.start_program(name, [*command, "--end-with-stdin"])

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
                env={**_allocator(command), **self._full_environment()},
                start_new_session=True,
            )
        self._services.append(Service(name, process, log_path))
        return self._services[-1]

    def check(self) -> None:
        """Raise if any process failed."""
        for service in self._services:
            service.check()

    def wait_for_file(self, path: Path, *, of: Service, timeout_s: float) -> str:
        """Return the text of a file that a service writes when it is ready."""
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
                break
        self.check()  # one may have failed since `watch` checked
        for service in services:
            service.wait(0.0)

    def watch(self, *, timeout_s: float, every_s: float = _POLL_S) -> Iterator[float]:
        """Yield the elapsed seconds at intervals until the deadline; raise if a process fails."""
        start_s = time.monotonic()
        while (elapsed_s := time.monotonic() - start_s) < timeout_s:
            self.check()
            yield elapsed_s
            time.sleep(every_s)

    def stop(self) -> None:
        """Stop the processes, the last started first; kill those that still run after 8 s."""
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
        # The services of one machine cannot all listen on one port.
        inherited = {k: v for k, v in os.environ.items() if k != "TURNSTREAM_METRICS_LISTEN"}
        return {**_DEFAULT_ENVIRONMENT, **inherited, **folders, **self._environment}


def _allocator(command: Sequence[str]) -> dict[str, str]:
    """Return the variables of the allocator of a program."""
    has_tensors = _WITHOUT_TENSORS.isdisjoint(command)
    return _ALLOCATOR_OF_TENSORS if has_tensors else ALLOCATOR_OF_BUFFERS


@contextlib.contextmanager
def _handling(handler: Any, *numbers: int) -> Iterator[None]:
    """Handle these signals by `handler` in the block."""
    before = [signal.signal(number, handler) or signal.SIG_DFL for number in numbers]
    try:
        yield
    finally:
        for number, old in zip(numbers, before, strict=True):
            signal.signal(number, old)


def terminate_as_interrupt() -> contextlib.AbstractContextManager[None]:
    """Raise KeyboardInterrupt at SIGTERM and Ctrl-C in the block, so that all is cleaned up.

    A Ctrl-C that the caller's shell has ignored stays ignored.
    """

    def interrupt(_signal: int, _frame: object) -> None:
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        return _handling(interrupt, signal.SIGTERM)
    return _handling(interrupt, signal.SIGTERM, signal.SIGINT)  # also in an import: see __main__.py


def uninterrupted() -> contextlib.AbstractContextManager[None]:
    """Ignore Ctrl-C and SIGTERM in the block, which cleans up after an earlier one."""
    return _handling(signal.SIG_IGN, signal.SIGINT, signal.SIGTERM)


def end_when_stdin_closes() -> None:
    """Send this process SIGTERM once its standard input ends, and end it 5 s later anyway.

    The supervisor holds the only write end of that pipe and writes nothing, so its death is the
    end of the input. The grace is bounded because a clean stop may be waiting for a store that
    ended with the supervisor.
    """

    def watch() -> None:
        while os.read(0, 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(_GRACE_S)
        os._exit(1)

    threading.Thread(target=watch, name="orphan-watch", daemon=True).start()
