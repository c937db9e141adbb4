"""Shared fixtures: length of searches, servers, runs, and checks for leftovers."""

from __future__ import annotations

import fcntl
import functools
import importlib.util
import itertools
import os
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import redis
from hypothesis import Phase, settings

from testkit import wait_until
from testkit.runs.stored_keys import declared_type
from testkit.services import cpu_report, forked, servers
from turnstream.batching.config import BatchingConfig
from turnstream.store.client.connection import connect
from turnstream.store.run.runs import create_run
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.launch import stack

# Examples differ from run to run at a desk, where a new failure is welcome, and never on CI.
# No deadlines: two busy cores make one example slow and the next one fast.
settings.register_profile("dev", max_examples=25, deadline=None)
settings.register_profile("ci", settings.get_profile("dev"), derandomize=True)
settings.register_profile("campaign", settings.get_profile("dev"), max_examples=500)
# A check for any failing example needs no small one.
unshrunk = [phase for phase in Phase if phase not in (Phase.shrink, Phase.explain)]
settings.register_profile("any", settings.get_profile("dev"), max_examples=100, phases=unshrunk)
settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev")
)

# Programs that tests start import `testkit` too.
_TESTS = str(Path(__file__).parent)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), _TESTS)))

# Several processes test at a time, with small models: more threads of torch wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell that runs the tests in the background makes them ignore Ctrl-C, and so would every process
# that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

REPOSITORY = Path(__file__).parents[1]

_SERVERS = ["server", "own_server", "unix_server"]
_MARKS = {"redis": {*_SERVERS, "cluster_at"}, "grpc": {"cluster", "cluster_at"}}
"""Marks of tests by the fixtures that they use."""

_numbers = itertools.count(1)
_checked_keys: dict[int, set[bytes]] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--cpu-report FILE`."""
    parser.addoption(cpu_report.OPTION, metavar="FILE", help="write the CPU seconds of each test")


def pytest_configure(config: pytest.Config) -> None:
    """Measure the tests where this is asked for."""
    cpu_report.register(config)


@pytest.hookimpl(tryfirst=True)  # before `-m` selects by marks
def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Mark the tests by the fixtures and the servers that they use."""
    for item in items:
        for mark, names in _MARKS.items():
            if not names.isdisjoint(getattr(item, "fixturenames", ())):
                item.add_marker(mark)
        if servers.runs_in_the_campaign(item):
            item.add_marker("campaign")


server = servers.shared_server
own_server = servers.own_embedded_server


@pytest.fixture
def unix_server() -> Iterator[EmbeddedServer]:
    """The embedded store behind a unix socket."""
    with servers.UnixServer(binary=servers.binary_of("valkey")) as server:
        yield server


@pytest.fixture
def client(server: EmbeddedServer) -> Iterator[redis.Redis]:
    """A client of `server`."""
    with connect(server.url) as client:
        yield client


@pytest.fixture
def own_client(own_server: EmbeddedServer) -> Iterator[redis.Redis]:
    """A client of `own_server`."""
    with connect(own_server.url) as client:
        yield client


class Past:
    """The append-only file of a server as it was at some moment."""

    def __init__(self, server: EmbeddedServer) -> None:
        with connect(server.url) as client:
            wait_until(lambda: servers.is_written(client), describe="the write to the file")
        (self._path,) = server.data_dir.glob("appendonlydir/*.incr.aof")
        self._server = server
        self._num_bytes = self._path.stat().st_size

    def come_back(self) -> None:
        """The server is killed, and started with what the file had then."""
        self._server.kill()
        with self._path.open("r+b") as file:
            file.truncate(self._num_bytes)
        self._server.restart()


@pytest.fixture
def past_of() -> Callable[[EmbeddedServer], Past]:
    """`past_of(server)` gives what the server has now, to come back to, as after a power cut."""
    return Past


@pytest.fixture
def new_run() -> Callable[..., str]:
    """`new_run(client, batch_groups=..., ...)` creates a run and gives its name.

    Without arguments a run has capacity for two hundred groups.
    """

    def make(client: redis.Redis, *, batch_groups: int = 100, **fields: Any) -> str:
        run = f"run-{next(_numbers)}"
        config = BatchingConfig(batch_groups=batch_groups, mini_batch_groups=batch_groups, **fields)
        create_run(client, run, config)
        return run

    return make


@pytest.fixture(scope="session", autouse=True)
def _forked_services() -> Iterator[None]:
    """Fork what a `Stack` of a test starts: imports take seconds of a core."""
    with patch.object(stack, "subprocess", forked.Subprocess):
        yield


@pytest.fixture(autouse=True)
def only_declared_keys(request: pytest.FixtureRequest) -> Iterator[None]:
    """No test leaves a key in a store that the key schema does not declare, with its type."""
    names = [name for name in _SERVERS if name in request.fixturenames]
    servers: list[EmbeddedServer] = [request.getfixturevalue(name) for name in names]
    yield
    for server in servers:
        if server.is_running:
            with connect(server.url) as client:
                assert _undeclared(client, _checked_keys.setdefault(server.pid, set())) == {}


def _undeclared(client: redis.Redis, checked: set[bytes]) -> dict[str, str]:
    names: Any = client.keys("*")
    new = [name for name in names if name not in checked]
    types = {name.decode(): _type(client, name) for name in new}
    checked.update(new)
    return {name: kind for name, kind in types.items() if declared_type(name) != kind}


def _type(client: redis.Redis, name: bytes) -> str:
    kind: Any = client.type(name)
    return kind.decode()


@pytest.fixture(scope="module")
def default_ports() -> Iterator[None]:
    """Hold the default ports of `turnstream up`: files that use them run one at a time."""
    with (Path(tempfile.gettempdir()) / "turnstream-default-ports.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for port in (7379, 7600, 7601):
            wait_until(
                functools.partial(_is_free, port),
                timeout_s=120,
                describe=f"port {port}: end the program that listens there",
            )
        yield


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The folder of recorded trajectories; skips where there is none."""
    folder = Path(os.environ.get("TURNSTREAM_TEST_DATA", REPOSITORY.parent / "shared/data"))
    if not (folder / "tokenizer/tokenizer.json").is_file():
        pytest.skip("no recorded trajectories: name their folder in TURNSTREAM_TEST_DATA")
    return folder


@pytest.fixture(scope="session")
def stats(data_folder: Path) -> ModuleType:
    """The loader that comes with the recorded trajectories, to compare with."""
    spec = importlib.util.spec_from_file_location("stats", data_folder / "stats.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer with the ChatML tokens, trained on one sentence."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokens = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[AddedToken(token, special=True) for token in tokens],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the user and the assistant", "assistant\n\n"], trainer)
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"pad_token": "<|pad|>"}')
    return folder
