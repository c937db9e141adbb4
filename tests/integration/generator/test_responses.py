"""Responses of engines come through a publisher into the store with the same tokens."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import turnstream
from testkit.stores import Store
from turnstream.batching.merge.merging import turn_prompts
from turnstream.generator import Publisher
from turnstream.types import TrajectoryKey

pytestmark = pytest.mark.redis


SHAPES = Path(__file__).parents[2] / "shapes"
PROMPT = [151644, 872, 30, 151645]
RESPONSE = [19, 17, 151645]
LOGPROBS = [-0.25, -0.5, -0.125]


def next_output() -> Any:
    """A RequestOutput of vLLM, of a second turn: the tokens of the first and two of a tool."""
    candidates = [{5: SimpleNamespace(logprob=-1.5)}, {6: SimpleNamespace(logprob=-0.75)}]
    completion = SimpleNamespace(token_ids=[5, 6], logprobs=candidates, finish_reason="length")
    prompt = [*PROMPT, *RESPONSE, 21, 22]
    return SimpleNamespace(prompt_token_ids=prompt, outputs=[completion])


def check(stored: Any) -> None:
    """Both turns are stored whole; the second is found to continue the first."""
    first, second = stored.turns(TrajectoryKey("g", 0))
    prompts = [prompt.tolist() for prompt in turn_prompts([first, second])]
    assert prompts == [PROMPT, [*PROMPT, *RESPONSE, 21, 22]]
    assert [turn.response_ids.tolist() for turn in (first, second)] == [RESPONSE, [5, 6]]
    assert [turn.logprobs.tolist() for turn in (first, second)] == [LOGPROBS, [-1.5, -0.75]]
    assert second.token_ids.tolist() == [21, 22, 5, 6]


def test_turns_of_responses_are_stored_with_their_tokens(store: Store) -> None:
    run = store.new_run()
    response = json.loads((SHAPES / "vllm-0.33.0-chat.json").read_text())

    with (
        Publisher(store.url, run) as publisher,
        publisher.trajectory("g", 0, num_samples=1) as writer,
    ):
        writer.append(**turnstream.from_openai(response), policy_version=7)
        writer.append(**turnstream.from_vllm(next_output()), policy_version=8)
        writer.seal(reward=1.0, status="truncated")

    check(store.read(run))
