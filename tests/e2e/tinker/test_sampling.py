"""Samples, listings and checkpoints, as the real SDK sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest
import torch

from testkit.requests.datums import as_sent, random_data
from testkit.requests.sdks import BASE, RELEASES, Hosting, Sdk
from turnstream_server.models.policy import load_adapter, load_policy

PROMPT: Final = list(b"hello, ")


@pytest.fixture(scope="module")
def state(sdk: Callable[..., Sdk]) -> str:
    """A saved model, none of whose factors is zero."""
    return sdk().run(BASE, "first_state", data=as_sent(random_data(0, (30, 40))), name="sampled")


@pytest.mark.parametrize("release", RELEASES)
def test_samples_have_the_logprobs_of_the_saved_weights(
    release: str, hosting: Hosting, sdk: Callable[..., Sdk], state: str
) -> None:
    """Takes more than 5 s: the services that host models start, and the SDK."""
    result, about = sdk(release).run_all(
        BASE, [("sampled", {"state": state, "prompt": PROMPT}), ("capabilities", {})]
    )

    assert about["models"] == [BASE]
    assert (about["model_name"], about["lora_rank"]) == (BASE, 4)
    trained: Any = load_adapter(hosting.saved(state)).model
    first, second = result["trained"]
    assert first[0] != second[0]
    for tokens, logprobs, reason in result["trained"]:
        assert reason == "length"
        np.testing.assert_allclose(logprobs, _logprobs(trained, tokens, 0.5), atol=1e-4)
    assert result["again"] == result["trained"]
    assert result["by_path"] == result["trained"]
    base: Any = load_policy(hosting.base)
    ((tokens, logprobs, _),) = result["base"]
    np.testing.assert_allclose(logprobs, _logprobs(base, tokens, 1.0), atol=1e-4)
    assert result["base"][0][0] != result["trained"][0][0]
    _check_stops(result)
    _check_prompt(result, trained)
    words = ["max_tokens", "stop", "temperature"]
    for word, error in zip(words, result["errors"], strict=True):
        assert word in error[1]


def _check_stops(result: dict[str, Any]) -> None:
    ((greedy, _, _),) = result["greedy"]
    ((tokens, _, reason),) = result["stopped"]
    end = greedy.index(greedy[2]) + 1
    assert (tokens, reason) == (greedy[:end], "stop")
    ((tokens, _, reason),) = result["string"]
    stops = [place for place, token in enumerate(tokens) if token in set(b"AEQ")]
    assert reason == "stop"
    assert stops == [len(tokens) - 1]


def _check_prompt(result: dict[str, Any], trained: Any) -> None:
    rows = _rows(trained, PROMPT, 1.0)[:-1]
    wanted = rows[range(len(rows)), PROMPT[1:]]
    assert result["prompt_logprobs"][0] is None
    np.testing.assert_allclose(result["prompt_logprobs"][1:], wanted, atol=1e-4)
    np.testing.assert_allclose(result["compute"][1:], wanted, atol=1e-4)
    assert result["topk"][0] is None
    for found, row in zip(result["topk"][1:], rows, strict=True):
        best = np.argsort(-row)[:3]
        assert [token for token, _ in found] == best.tolist()
        np.testing.assert_allclose([value for _, value in found], row[best], atol=1e-4)


def _logprobs(model: Any, tokens: list[int], temperature: float) -> Any:
    rows = _rows(model, [*PROMPT, *tokens], temperature)
    return rows[range(len(PROMPT) - 1, len(rows) - 1), tokens]


@torch.no_grad()
def _rows(model: Any, tokens: list[int], temperature: float) -> Any:
    logits = model(torch.tensor([tokens])).logits[0].double() / temperature
    return torch.log_softmax(logits, dim=-1).numpy()


@pytest.mark.parametrize("release", RELEASES)
def test_runs_and_checkpoints_are_listed_changed_and_deleted(
    release: str, sdk: Callable[..., Sdk]
) -> None:
    # Of a key without exports, whose kind older releases do not know.
    result = sdk(release, api_key="tml-listed").run(BASE, "listed")

    model_id, base, rank, metadata = result["run"]
    assert (base, rank, metadata["renderer_name"]) == (BASE, 4, "role_colon")
    assert ":train:" in model_id
    assert result["before"] == ["sampler_weights/sampler", "weights/kept"]
    assert result["types"] == ["sampler", "training"]
    assert result["public"] == [True]
    assert result["after"] == ["sampler_weights/sampler"]
    assert result["listed"]
    assert result["in_runs"]
    assert result["weights_info"] == [BASE, True, 4]
    assert "kept" in result["gone"][1]
