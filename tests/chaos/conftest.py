"""A store and a rig around it, for every test of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from harness.rig import Rig
from turnstream_server.embedded import EmbeddedServer


@pytest.fixture
def start_rig(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    """Return `start_rig(config=..., **options of the server)`, which starts a store with a run.

    The invariants are checked at the end of every test.
    """
    rigs: list[Rig] = []
    with ExitStack() as stack:

        def start(*, config: Any = None, data_dir: Path | None = None, **options: Any) -> Rig:
            folder = data_dir or tmp_path / "store"
            server = stack.enter_context(EmbeddedServer(folder, **options))
            more = {} if config is None else {"config": config}
            rigs.append(stack.enter_context(Rig(tmp_path, server, **more)))
            return rigs[-1]

        yield start
        for rig in rigs:
            rig.check_end()


@pytest.fixture
def rig(start_rig: Callable[..., Rig]) -> Rig:
    return start_rig()
