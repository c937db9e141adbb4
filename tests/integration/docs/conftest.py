"""Pages whose code runs as printed, with a `turnstream up` on its default ports."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from testkit import wait_until

REPOSITORY = Path(__file__).parents[3]
CLI = [sys.executable, "-P", "-m", "turnstream_server.cli"]


class Page:
    """A document with blocks of Python and of commands.

    Attributes:
        path: file of the document.
        text: the whole document.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.text = path.read_text(encoding="utf-8")

    def blocks(self) -> list[tuple[int, str]]:
        """Return (line, code) of every Python block; those with a prompt are doctests."""
        found = re.finditer(r"^```python\n(.*?)^```", self.text, re.DOTALL | re.MULTILINE)
        blocks = [(self.text.count("\n", 0, each.start(1)), each[1]) for each in found]
        return [(line, code) for line, code in blocks if not code.startswith(">>>")]

    def commands(self) -> list[list[str]]:
        """Return the words of every command in the blocks of text, without its comment."""
        found = re.findall(r"^```text\n(.*?)^```", self.text, re.DOTALL | re.MULTILINE)
        lines = [line for block in found for line in block.splitlines()]
        return [line.partition("#")[0].split()[1:] for line in lines if line[:11] == "turnstream "]

    def announced_names(self) -> set[str]:
        """Return the names of the sentence "You bring `this` and `that`"."""
        sentences = re.findall(r"You bring ([^.]*)\.", self.text)
        return {name for each in sentences for name in re.findall(r"`(\w+)`", each)}


class Runner:
    """Runs the blocks of a page in one namespace.

    Attributes:
        names: the namespace.
        text: the whole page.
    """

    def __init__(self) -> None:
        self.names: dict[str, Any] = {}
        self.text = ""
        self._page: Page | None = None
        self._next = 0

    def open(self, name: str, **brought: Any) -> None:
        """Begin a page, with a stand-in for each name that its reader brings."""
        self._page = Page(REPOSITORY / name)
        assert self._page.announced_names() == brought.keys()
        self.text = self._page.text
        self.names.update(brought)

    def take_block(self) -> str:
        """Return the next block, a program that the test starts itself."""
        assert self._page is not None
        self._next += 1
        return self._page.blocks()[self._next - 1][1]

    def run_block(self) -> None:
        """Run the next block as it is printed."""
        assert self._page is not None
        line, code = self._page.blocks()[self._next]
        self._next += 1
        exec(compile("\n" * line + code, self._page.path, "exec"), self.names)

    def run_all(self) -> None:
        """Run all blocks that were not run."""
        assert self._page is not None
        while self._next < len(self._page.blocks()):
            self.run_block()

    def run_commands(self) -> str:
        """Run all commands of the page as printed; return what they printed."""
        assert self._page is not None
        commands = self._page.commands()
        assert commands
        return "".join(
            subprocess.run(
                [*CLI, *words],
                check=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=60,
                env={**os.environ, "COLUMNS": "80"},
            ).stdout
            for words in commands
        )


@pytest.fixture
def open_page() -> Callable[[Path], Page]:
    """Return what reads a page."""
    return Page


@contextlib.contextmanager
def _up(folder: Path, *words: str) -> Iterator[Path]:
    """Run `turnstream up` in a folder on its default ports; yield the file of its output."""
    output = folder / "up.txt"
    with output.open("w") as file:
        process = subprocess.Popen(
            [*CLI, "up", "--data-dir", str(folder / "up"), *words],
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_until(
            lambda: process.poll() is not None or "Ctrl-C stops" in output.read_text(),
            timeout_s=120,
            describe="`turnstream up`",
        )
        assert process.poll() is None, output.read_text()
        yield output
        assert process.poll() is None, output.read_text()
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        finally:
            process.kill()


@pytest.fixture
def own_folder(default_ports: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of the test, without settings in the environment."""
    _move_to(tmp_path, monkeypatch)
    return tmp_path


def _move_to(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("TURNSTREAM_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(folder)


@pytest.fixture
def up(own_folder: Path) -> Callable[..., contextlib.AbstractContextManager[Path]]:
    """`up(*words)` runs `turnstream up` in the folder of the test."""
    return functools.partial(_up, own_folder)


@pytest.fixture
def stack(up: Callable[..., contextlib.AbstractContextManager[Path]]) -> Iterator[None]:
    """An empty `turnstream up` on its default ports, in the folder of the test."""
    with up():
        yield


@pytest.fixture(scope="module")
def shared_stack(default_ports: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A `turnstream up` on its default ports, for all tests of a file: its start takes seconds."""
    folder = tmp_path_factory.mktemp("up")
    with pytest.MonkeyPatch.context() as monkeypatch:
        _move_to(folder, monkeypatch)
        with _up(folder):
            yield


@pytest.fixture
def runner(shared_stack: None, own_folder: Path) -> Runner:
    """Return what runs a page. The pages share a store, and no two of them a run."""
    return Runner()


@pytest.fixture
def new_runner() -> Callable[[], Runner]:
    """Return what makes a runner, for a page that needs a stack of its own."""
    return Runner
