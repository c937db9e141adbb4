"""The code of the page on tasks runs as it stands, on a real store and a real batcher."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import redis

from turnstream.batching.config import BatchingConfig
from turnstream.store.runs import close_run, create_run
from turnstream.store.tasks import read_prompt_counts
from turnstream.testing import wait_until
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.jobs.services import start_batcher, store_environment
from turnstream_server.jobs.stack import Stack

PAGE = Path(__file__).parents[3] / "docs/tasks.md"


@pytest.mark.grpc
def test_the_code_of_the_page_on_tasks_runs(
    own_server: EmbeddedServer, own_client: redis.Redis, tmp_path: Path
) -> None:
    add, work = (
        block.replace("redis://localhost:6379", own_server.url)
        for block in re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    )
    config = BatchingConfig(batch_groups=1, mini_batch_groups=1, drop_zero_variance=True)
    create_run(own_client, "demo", config)
    seen: list[bytes] = []

    def play(payload: bytes) -> tuple[list[int], list[int], float]:
        seen.append(payload)
        if len(seen) == 4:
            close_run(own_client, "demo")  # whoever takes tasks need not wait for more
        return [1], [2], 1.0

    # Both prompts are filtered: nobody trains here, and so nothing that is planned is ever over.
    names: dict[str, Any] = {"play": play}

    with Stack(tmp_path, store_environment(own_server.url)) as stack:
        start_batcher(stack, name="batcher")
        exec(add, names)
        exec(add, names)
        exec(work.replace("wait_s=1)", "wait_s=20)"), names)
        wait_until(
            lambda: read_prompt_counts(own_client, "demo").num_filtered == 2,
            timeout_s=20,
            describe="both prompts are filtered",
        )

    assert read_prompt_counts(own_client, "demo").num_added == 2
    assert seen == [b"What is 6 times 7?"] * 2 + [b"What is 6 times 8?"] * 2
