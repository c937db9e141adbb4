"""The code of the page on responses runs as it stands, on a real store."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import redis

import turnstream
from turnstream.batching.config import BatchingConfig
from turnstream.generator import Publisher
from turnstream.records.turns import decode_turn
from turnstream.store import keys
from turnstream.store.runs import create_run
from turnstream_server.embedded import EmbeddedServer

PAGE = Path(__file__).parents[3] / "docs/responses.md"
SHAPE = Path(__file__).parents[2] / "shapes/vllm-0.33.0-chat.json"


def blocks(url: str) -> list[str]:
    """The Python blocks of the page, with the address of this test."""
    found = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    return [block.replace("redis://localhost:6379", url) for block in found]


def stored(client: redis.Redis, trajectory_id: str) -> list[tuple[list[int], list[int]]]:
    """New prompt tokens and response of every turn of a trajectory."""
    entries: Any = client.xrange(keys.trajectory_keys("demo", trajectory_id).turns)
    records = [fields[b"r"] for _, fields in entries]
    turns = [decode_turn(record) for record in records if record[2:3] == b"T"]
    return [(turn.new_prompt_ids.tolist(), turn.response_ids.tolist()) for turn in turns]


def test_the_code_for_servers_stores_a_turn(
    own_server: EmbeddedServer, own_client: redis.Redis
) -> None:
    create_run(own_client, "demo", BatchingConfig(batch_groups=1, mini_batch_groups=1))
    sent: list[dict[str, Any]] = []

    def create(**request: Any) -> Any:
        sent.append(request)
        return json.loads(SHAPE.read_text(), object_hook=lambda fields: SimpleNamespace(**fields))

    completions = SimpleNamespace(create=create)
    names = {
        "client": SimpleNamespace(chat=SimpleNamespace(completions=completions)),
        "messages": [{"role": "user", "content": "What is 6 times 7?"}],
        "score": lambda text: float(text == "42"),
    }

    exec(blocks(own_server.url)[0], names)

    assert [request["extra_body"] for request in sent] == [{"return_token_ids": True}]
    assert stored(own_client, "visit-1/0/0") == [([151644, 872, 30, 151645], [19, 17, 151645])]


def test_the_code_for_vllm_stores_both_outputs(
    own_server: EmbeddedServer, own_client: redis.Redis
) -> None:
    create_run(own_client, "demo", BatchingConfig(batch_groups=1, mini_batch_groups=1))
    outputs = [
        SimpleNamespace(
            index=index,
            token_ids=[token],
            logprobs=[{token: SimpleNamespace(logprob=-1.0)}],
            finish_reason="stop",
        )
        for index, token in enumerate((5, 6))
    ]
    output = SimpleNamespace(prompt_token_ids=[1, 2], outputs=outputs)

    with Publisher(own_server.url, "demo") as publisher, contextlib.ExitStack() as stack:
        names = {
            "turnstream": turnstream,
            "prompt": "What is 6 times 7?",
            "llm": SimpleNamespace(generate=lambda prompt, parameters: [output]),
            "SamplingParams": SimpleNamespace,
            "writers": [
                stack.enter_context(publisher.trajectory("visit-1", sample, num_samples=2))
                for sample in range(2)
            ],
        }
        exec(blocks(own_server.url)[1], names)
        publisher.flush(30)

        assert stored(own_client, "visit-1/0/0") == [([1, 2], [5])]
        assert stored(own_client, "visit-1/1/0") == [([1, 2], [6])]
