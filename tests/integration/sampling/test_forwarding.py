"""Samples that inference servers compute: requests, adapters, results and refusals."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from testkit.services.inference_servers import (
    Double,
    SglangDouble,
    VllmDouble,
    prompt_logprob,
    sampled_token,
    serving,
)
from testkit.training.sampling import ModelFolders, sample_request
from turnstream.errors import InvalidConfigError, RunNotFoundError, TurnstreamError
from turnstream_server.models.sampling_params import SampleResult, SamplingParams, StopReason
from turnstream_server.sampling.forwarding import Forwarder

KINDS: dict[str, type[Double]] = {"vllm": VllmDouble, "sglang": SglangDouble}


class Forwarding:
    """A forwarder of one server."""

    def __init__(self, kind: str, double: Double, forwarder: Forwarder) -> None:
        self.kind = kind
        self.double = double
        self.forwarder = forwarder

    def sample(self, folder: str | None, prompt: list[int], **params: object) -> SampleResult:
        """Return the result of a sample."""
        values = SamplingParams(**params)  # pyright: ignore[reportArgumentType] - by their names
        return self.forwarder.submit(sample_request(folder, prompt, values)).result(60)


@pytest.fixture(params=KINDS)
def forwarding(request: pytest.FixtureRequest, models: ModelFolders) -> Iterator[Forwarding]:
    double = KINDS[request.param]()
    with (
        serving(double.app()) as url,
        Forwarder([f"{request.param}={url}"], shared=models.shared, max_adapters=1) as forwarder,
    ):
        yield Forwarding(request.param, double, forwarder)


def test_forwarded_samples_have_the_tokens_of_the_server(forwarding: Forwarding) -> None:
    result = forwarding.sample("one", [1, 2], max_tokens=5, num_samples=2, temperature=0.5)
    seeded = forwarding.sample(None, [1, 2], seed=7, num_samples=3, max_tokens=4, stop_ids=())
    stopped = forwarding.sample(None, [1], stop_ids=(sampled_token(None, 2),))
    rest = forwarding.sample(None, [1, 2], stop_strings=("x",))

    expected = [sampled_token(None, position) for position in range(5)]
    for each in result.sequences:
        assert each.token_ids.tolist() == expected
        np.testing.assert_array_equal(each.logprobs, np.full(5, -0.5, np.float32))
        assert each.stop_reason is StopReason.LENGTH
    plain, *own, stop, last = forwarding.double.completions
    assert (plain.temperature, plain.n, plain.seed, plain.ignore_eos) == (0.5, 2, None, False)
    assert {(each.n, each.ignore_eos) for each in own} == {(1, True)}
    assert len({each.seed for each in own}) == 3
    assert len(seeded.sequences) == 3
    assert stopped.sequences[0].stop_reason is StopReason.STOP
    assert stop.stop_token_ids == [sampled_token(None, 2)]
    assert (last.stop, last.max_tokens) == (["x"], 62)
    assert len(rest.sequences[0].token_ids) == 62


def test_adapters_load_once_and_again_after_a_restart(
    forwarding: Forwarding, models: ModelFolders
) -> None:
    double = forwarding.double
    for name in ("one", "one", "two"):
        forwarding.sample(name, [1], max_tokens=1)

    ((loaded, path),) = double.adapters.items()
    assert loaded.startswith("two@")
    assert path == str(models.shared / "two")
    assert sum(call.endswith("/load_lora_adapter") for call in double.calls) == 2
    double.adapters.clear()
    forwarding.sample("two", [1], max_tokens=1)
    assert [*double.adapters] == [loaded]


def test_failing_server_is_asked_again_and_refusals_are_reported(
    forwarding: Forwarding, models: ModelFolders, tmp_path: Path
) -> None:
    faults = forwarding.double.faults
    faults["/v1/completions"] = [503]
    assert forwarding.sample(None, [1], max_tokens=1).sequences

    faults["/v1/completions"] = [400]
    with pytest.raises(InvalidConfigError, match=r"sampling_params: .*injected 400"):
        forwarding.sample(None, [1], max_tokens=1)
    with pytest.raises(InvalidConfigError, match="max_tokens: 1 prompt tokens and 64"):
        forwarding.sample(None, [1], max_tokens=64)
    with pytest.raises(RunNotFoundError, match="the checkpoint none is gone"):
        forwarding.sample("none", [1])
    with pytest.raises(InvalidConfigError, match="whole is a whole model"):
        forwarding.sample("whole", [1])
    route = "/v1/load_lora_adapter" if forwarding.kind == "vllm" else "/load_lora_adapter"
    faults[route] = [404]
    with pytest.raises(TurnstreamError, match="one does not load"):
        forwarding.sample("one", [1])


def test_most_likely_tokens_and_prompts_are_those_of_vllm(models: ModelFolders) -> None:
    with (
        serving(VllmDouble().app()) as url,
        Forwarder([f"vllm={url}"], shared=models.shared) as forwarder,
    ):
        params = SamplingParams(
            max_tokens=2,
            prompt_logprobs=True,
            topk_prompt_logprobs=2,
            topk_sample_logprobs=2,
            temperature=0,
        )
        result = forwarder.submit(sample_request(None, [3, 4, 5], params)).result(60)

    scores = [np.nan, prompt_logprob(4), prompt_logprob(5)]
    np.testing.assert_allclose(np.asarray(result.prompt_logprobs), scores, rtol=1e-6)
    assert result.topk_prompt_logprobs is not None
    assert result.topk_prompt_logprobs.token_ids.tolist() == [[0, 0], [60, 4], [60, 5]]
    topk = result.sequences[0].topk
    assert topk is not None
    assert topk.token_ids.tolist() == [[60, sampled_token(None, at)] for at in range(2)]
    np.testing.assert_array_equal(topk.logprobs, [[-0.25, -0.5]] * 2)


@pytest.mark.parametrize(
    ("kind", "field", "params"),
    [
        ("vllm", "top_p", {"top_p": 0.5}),
        ("vllm", "top_k", {"top_k": 5}),
        ("vllm", "prompt_logprobs", {"prompt_logprobs": True, "temperature": 0.5}),
        ("sglang", "prompt_logprobs", {"prompt_logprobs": True}),
        ("sglang", "topk_prompt_logprobs", {"topk_prompt_logprobs": 2}),
        ("sglang", "topk_sample_logprobs", {"topk_sample_logprobs": 2}),
    ],
)
def test_unsupported_field_is_refused_by_its_name(
    kind: str, field: str, params: dict[str, float], tmp_path: Path
) -> None:
    with (
        Forwarder([f"{kind}=http://127.0.0.1:9"], shared=tmp_path) as forwarder,
        pytest.raises(InvalidConfigError, match=f"^{field}: .* is not supported"),
    ):
        forwarder.submit(sample_request(None, [1], SamplingParams(**params)))  # pyright: ignore[reportArgumentType]
