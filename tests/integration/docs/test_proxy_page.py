"""The page of the capture proxy, whose stack has an engine."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import turnstream
from testkit.services.engine_doubles import engine_double

if TYPE_CHECKING:
    from tests.integration.docs.conftest import Runner

pytestmark = [
    pytest.mark.redis,
    pytest.mark.grpc,
    # Waiting for other tests that need the same ports is part of the time.
    pytest.mark.timeout(400),
    pytest.mark.xdist_group("default-ports"),
]

AGENT = """
import openai

client = openai.OpenAI()
client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hi"}])
"""


def test_proxy_runs_as_printed(
    up: Callable[..., Any],
    new_runner: Callable[[], Runner],
    own_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Takes more than 5 s: it starts a stack with an engine, and four agents."""
    page = new_runner()
    rewards = itertools.count(0.0)
    page.open("docs/proxy.md", score=lambda: next(rewards))
    (own_folder / "agent.py").write_text(AGENT)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")

    with engine_double("vllm") as engine, up("--engine", engine.address):
        page.run_all()

        with turnstream.connect().run("agents").batches() as batches:
            (mini_batch,) = next(iter(batches))
        assert sorted(mini_batch.rows.reward.tolist()) == [0.0, 1.0, 2.0, 3.0]
