"""Programs of the project as forks of a process that has imported what they need.

An import of torch and transformers takes seconds of a core. `popen` takes the place of
`subprocess.Popen`: the process that it returns is a child of the caller as any other.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import inspect
import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

_CLI: Final = "turnstream_server.cli"
_SERVER: Final = "turnstream_server"
_MODELS: Final = [f"{_SERVER}.models.policy", "transformers.models.qwen2.modeling_qwen2"]
_IMPORTS: Final = {
    "batcher": [f"{_SERVER}.batcher.serving.service"],
    "gateway": [f"{_SERVER}.gateway.service"],
    "engine": [f"{_SERVER}.engine.service", *_MODELS],
    "trainer": [f"{_SERVER}.trainer.service", *_MODELS],
    "sampler": [f"{_SERVER}.sampling.service", *_MODELS],
    "generator": [f"{_SERVER}.generators.live", *_MODELS],
}
"""Modules that a service imports in the course of its start."""

_CLI_IMPORTS: Final = [
    f"{_SERVER}.{name}"
    for name in ("bootstrap", "cli.dead", "cli.key", "cli.run", "cli.serve", "cli.store")
]
_OTHER_IMPORTS: Final = {
    "harness.generator": ["harness.episodes", "turnstream.generator"],
    "harness.rank": ["harness.episodes", "turnstream.worker"],
    "sdk_program.py": ["tinker"],
}
_SET_CHILD_SUBREAPER: Final = 36
_MAX_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class Request:
    """A program to start: a module for `-m` or a file, and modules to import before the fork."""

    module: str
    words: list[str]
    imports: list[str]
    folder: str = ""
    environment: dict[str, str] = field(default_factory=dict[str, str])
    is_new_session: bool = False

    @classmethod
    def of(cls, command: Sequence[Any]) -> Request | None:
        """Return the request for a command of the project's programs; None for another one."""
        python, *words = map(str, command)
        words = words[1:] if words[:1] == ["-P"] else words
        if python != sys.executable or not words:
            return None
        if words[0] == "-m":
            words = words[1:]
        module = words[0]
        imports = _OTHER_IMPORTS.get(Path(module).name)
        if module == _CLI and words[1:2] == ["serve"]:
            imports = _IMPORTS.get(words[2])
        if imports is None:
            return None
        return cls(module, words[1:], [*_CLI_IMPORTS, *imports])


def popen(command: Sequence[Any], **options: Any) -> subprocess.Popen[Any]:
    """Start a program of the project by a fork, and any other one as `subprocess.Popen` does.

    A program with libraries that must be loaded first (LD_PRELOAD) is not forked. Only Linux can
    make the caller the parent of a fork.
    """
    environment = options.get("env") or os.environ
    can_fork = sys.platform == "linux" and "LD_PRELOAD" not in environment
    is_forked = can_fork and Request.of(command) is not None
    return (_ForkedPopen if is_forked else subprocess.Popen)(command, **options)


class Subprocess:
    """Takes the place of the module `subprocess` in `turnstream_server.launch.stack`."""

    PIPE, STDOUT, TimeoutExpired = subprocess.PIPE, subprocess.STDOUT, subprocess.TimeoutExpired
    Popen = staticmethod(popen)


class _ForkedPopen(subprocess.Popen[Any]):
    """A process that a `_ForkServer` forks, and that is then given to this process."""

    def _execute_child(self, *args: Any) -> None:
        start: Any = getattr(subprocess.Popen, "_execute_child")  # noqa: B009 - it is private
        given = inspect.signature(start).bind(self, *args).arguments
        request = Request.of(given["args"])
        assert request is not None
        request = replace(
            request,
            folder=str(Path(given["cwd"] or "").absolute()),
            environment={**(os.environ if given["env"] is None else given["env"])},
            is_new_session=bool(given["start_new_session"]),
        )
        ends = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        fds = [number if end == -1 else end for number, end in enumerate(ends)]
        self.pid = _FORK_SERVER.start(request, fds)
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        close: Any = getattr(self, "_close_pipe_fds")  # noqa: B009 - it is private
        close(*(given[name] for name in pipes))


class _ForkServer:
    """Starts the process that forks at the first request, and ends it with this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._control: socket.socket | None = None

    def start(self, request: Request, fds: Sequence[int]) -> int:
        """Start a program with these descriptors as 0, 1 and 2; return its process id."""
        with self._lock:
            if self._control is None:
                self._control = self._begin()
            set_subreaper(True)
            try:
                socket.send_fds(self._control, [json.dumps(asdict(request)).encode()], fds)
                answers = [self._control.recv(_MAX_BYTES) for _ in range(2)]
            finally:
                set_subreaper(False)
        assert answers[1] == b"parted", "the process that forks has ended: see its traceback"
        return int(answers[0])

    def _begin(self) -> socket.socket:
        own, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Some libraries read these where they are imported.
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        with its:
            process = subprocess.Popen(
                [sys.executable, "-m", "testkit.services.forked", str(its.fileno())],
                stdin=subprocess.DEVNULL,
                env=environment,
                pass_fds=[its.fileno()],
            )
        atexit.register(self._end, process, own)
        return own

    @staticmethod
    def _end(process: subprocess.Popen[bytes], control: socket.socket) -> None:
        control.close()
        process.wait()


_FORK_SERVER: Final = _ForkServer()


def set_subreaper(is_on: bool) -> None:
    """Let this process become the parent of processes below it whose parent ends; or no longer."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_SET_CHILD_SUBREAPER, int(is_on), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def next_program(control: socket.socket) -> Request | None:
    """Fork for each request; return the request in the fork, and None when the caller has ended.

    The parent of a fork ends at once, so that the caller becomes its parent.
    """
    while True:
        data, fds, _, _ = socket.recv_fds(control, _MAX_BYTES, 3)
        if not data:
            return None
        request = Request(**json.loads(data))
        for name in request.imports:
            importlib.import_module(name)
        gc.freeze()
        if not (middle := os.fork()):
            if child := os.fork():
                control.send(str(child).encode())
                os._exit(0)
            _become(request, fds)
            return request
        for each in fds:
            os.close(each)
        os.waitpid(middle, 0)
        control.send(b"parted")


def _become(request: Request, fds: Sequence[int]) -> None:
    """Take on session, files, folder and environment of a program."""
    if request.is_new_session:
        os.setsid()
    for number, each in enumerate(fds):
        os.dup2(each, number)
    os.closerange(3, max(fds) + 1)
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    paths = request.environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in paths if path and path not in sys.path]
    tempfile.tempdir = None
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False, errors="backslashreplace")


def _run(request: Request) -> None:
    """Run a program as `python -m` does, or `python FILE`."""
    sys.argv = [request.module, *request.words]
    if request.module.endswith(".py"):
        runpy.run_path(request.module, run_name="__main__")
    else:
        sys.modules.pop(request.module, None)
        runpy.run_module(request.module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        program = next_program(requests)
        if program is None:
            sys.exit()
        requests.detach()  # closed by `_become`
    _run(program)
