"""The files that a turn passes, traced: against their list in ARCHITECTURE.md, and their number."""

from __future__ import annotations

import dataclasses
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest
import torch
from google.protobuf.message import Message

import turnstream
import turnstream_server
from testkit.requests.ingest import IngestClient, turn_fields
from testkit.services.batchers import BatcherThread
from testkit.services.gateway_thread import GatewayThread
from testkit.turns import turn
from turnstream.store.client.scripts import Command
from turnstream_server.embedded import EmbeddedServer

pytestmark = [pytest.mark.redis, pytest.mark.grpc]

RESPONSE = [1_002_003, 1_004_005, 1_006_007]
"""Tokens that nothing else in the process contains."""
MARKS = [
    " ".join(map(str, RESPONSE)).encode(),
    *(np.array(RESPONSE, dtype=dtype).tobytes() for dtype in ("<i4", "<i8")),
]

FOLDERS = {
    "": Path(turnstream.__file__).parent,
    "server/": Path(turnstream_server.__file__).parent,
}
ARCHITECTURE = Path(__file__).parents[3] / "ARCHITECTURE.md"
MAX_FILES = 40

MAX_SERVER_FILES = 18
"""Modules of the server that run during one request; each further one is one more to read."""


def short(path: Path) -> str | None:
    """Return the path as ARCHITECTURE.md writes it; None for files outside the packages."""
    for prefix, folder in FOLDERS.items():
        if path.is_relative_to(folder):
            return prefix + path.relative_to(folder).as_posix()
    return None


def parts(value: Any) -> Iterator[Any]:
    """Yield the arrays, bytes and values that a value consists of."""
    match value:
        case torch.Tensor():
            yield value.detach().numpy()
        case Message():
            yield value.SerializeToString()
        case pa.Buffer():
            yield value.to_pybytes()
        case pa.RecordBatch():
            yield from value.columns
        case pa.Array():
            yield from (buffer for buffer in value.buffers() if buffer is not None)
        case list() | tuple():
            items = cast(list[Any], value)
            if items and all(type(item) is int for item in items):
                yield " ".join(map(str, items)).encode()
            else:
                yield from items[:64]
        case dict():
            yield from cast(Mapping[Any, Any], value).values()
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from (getattr(value, each.name, None) for each in dataclasses.fields(value))
        case _:
            pass


def holds_turn(value: Any, depth: int = 5) -> bool:
    """Return whether a value has the turn's tokens: as numbers, in an array, or encoded."""
    if isinstance(value, (np.ndarray, memoryview)):
        value = value.tobytes()
    if isinstance(value, (bytes, bytearray)):
        return any(mark in value for mark in MARKS)
    return depth > 0 and any(holds_turn(part, depth - 1) for part in parts(value))


class Trace:
    """A profile function that notes files with a function one of whose variables has the turn.

    A script counts if an argument of its call has the turn.
    """

    def __init__(self) -> None:
        self.files: set[str] = set()
        self._names: dict[CodeType, str | None] = {}
        scripts = [path for folder in FOLDERS.values() for path in folder.rglob("*.lua")]
        self._scripts = {path.stem: short(path) for path in scripts}

    def __call__(self, frame: FrameType, event: str, value: Any) -> None:
        """Check the variables of a function of the packages when it returns or yields."""
        if event != "return":
            return
        code = frame.f_code
        if code not in self._names:
            self._names[code] = short(Path(code.co_filename))
        name = self._names[code]
        if name is None:
            return
        variables = [value, *frame.f_locals.values()]
        if name not in self.files and any(map(holds_turn, variables)):
            self.files.add(name)
        for each in variables:
            if isinstance(each, Command) and holds_turn(each.args):
                self.files.add(str(self._scripts[each.script.name]))


def train_one_turn(url: str) -> None:
    """Append a turn and its continuation, and make tensors of them, as README.md shows it."""
    run = turnstream.connect(url).create_run("path", batch_groups=1)
    with run.publisher() as publisher, publisher.group("g", num_samples=2) as group:
        for sample, trajectory in enumerate(group):
            for prompt_ids in ([1, 2], [1, 2, *RESPONSE, 4]):
                trajectory.append(prompt_ids, RESPONSE, logprobs=[-0.5] * 3, policy_version=0)
            trajectory.seal(reward=float(sample))
    run.close()
    with run.batches() as batches:
        for step in batches:
            for mini_batch in step:
                assert mini_batch.to_torch().input_ids_BT.shape == (2, 9)
            step.done()
            step.commit()


def test_files_of_a_turn_are_listed_in_architecture() -> None:
    section = ARCHITECTURE.read_text(encoding="utf-8").split("## The files of a turn\n")[1]
    listed = re.findall(r"^\d+\. `([^`]+)`", section.split("\n## ")[0], re.MULTILINE)
    trace = Trace()

    with EmbeddedServer() as server:
        threading.setprofile(trace)
        sys.setprofile(trace)
        try:
            with BatcherThread(server.url):
                train_one_turn(server.url)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    assert sorted(trace.files) == sorted(listed)
    assert len(listed) <= MAX_FILES


def test_request_with_a_trajectory_passes_few_server_files() -> None:
    names: dict[CodeType, str | None] = {}
    passed: set[str] = set()
    is_traced = False

    def trace(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if is_traced and event == "call" and code not in names:
            names[code] = name = short(Path(code.co_filename))
            if name is not None and name.startswith("server/"):
                passed.add(name)

    turns = [turn_fields(turn("ab", "CD")), turn_fields(turn("abCDe", "F"))]
    item = {"sample": 0, "num_samples": 1, "turns": turns, "reward": 1.0}
    with EmbeddedServer() as server:
        turnstream.connect(server.url).create_run("path", batch_groups=2)
        threading.setprofile(trace)
        try:
            with GatewayThread(server.url) as gateway, IngestClient(gateway, "path") as ingest:
                results = ingest.results("trajectories", {"group_id": "before", **item})
                is_traced = True
                results += ingest.results("trajectories", {"group_id": "traced", **item})
                is_traced = False
        finally:
            threading.setprofile(None)

    assert {each["status"] for each in results} == {201}
    assert len(passed) <= MAX_SERVER_FILES, sorted(passed)
    assert "server/gateway/rest/ingest/delivery.py" in passed
