"""Samples of several adapters of one base model at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from turnstream.errors import InvalidConfigError, RejectedError
from turnstream_server.models.adapters import Adapter, Adapters
from turnstream_server.models.continuous_batch import ContinuousBatch
from turnstream_server.models.fair_turns import BatchLimits
from turnstream_server.models.policy import load_policy, save_policy
from turnstream_server.models.sampler import Sampler
from turnstream_server.models.sampling_params import SampledSequence, SampleResult, SamplingParams
from turnstream_server.models.sampling_requests import SampleRequest, limits_of, new_request
from turnstream_server.models.spec import AdapterConfig, SmallModelSpec

VOCAB_SIZE = 64
NAMES = ["", "one", "other"]
VERSIONS = {"": 3, "one": 5, "other": 9}
PARAMS = SamplingParams(max_tokens=12, seed=4, num_samples=2, stop_ids=(), prompt_logprobs=True)


class Served:
    """A base model with two adapters, in memory and as folders.

    Attributes:
        added: adapters, under their names.
        folders: folders of the base model, which is "", and of the adapters.
    """

    def __init__(self, folder: Path) -> None:
        self.base = folder / "base"
        save_policy(load_policy(SmallModelSpec(vocab_size=VOCAB_SIZE, hidden_size=32)), self.base)
        self.model = load_policy(self.base)
        self.adapters = Adapters(self.model, self.base)
        self.folders = {"": self.base} | {name: folder / name for name in NAMES[1:]}
        self.added: dict[str, Adapter] = {}
        for seed, name in enumerate(NAMES[1:]):
            adapter = self.adapters.add(name, AdapterConfig(rank=2, seed=seed))
            change(adapter, seed=seed)
            self.folders[name].mkdir()
            adapter.write(self.folders[name])
            self.added[name] = adapter

    def alone(self, name: str, prompt: list[int]) -> SampleResult:
        """Return the result of a sampler that has the weights of one adapter alone."""
        with Sampler(load_policy(self.folders[name])) as sampler:
            return sampler.submit(prompt, PARAMS).result(60)


def change(adapter: Adapter, *, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, weight in adapter.named_parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator))


@pytest.fixture
def served(tmp_path: Path) -> Served:
    return Served(tmp_path)


@pytest.fixture
def sampler(served: Served) -> Iterator[Sampler]:
    limits = BatchLimits(max_sequences=7)
    with Sampler(served.model, adapters=served.adapters, version=3, limits=limits) as made:
        for name in NAMES[1:]:
            made.update_weights(VERSIONS[name], lambda: served.model, adapter=name)
        yield made


def require_equal(found: SampleResult, expected: SampleResult, *, version: int) -> None:
    for mine, theirs in zip(found.sequences, expected.sequences, strict=True):
        assert mine.token_ids.tolist() == theirs.token_ids.tolist()
        np.testing.assert_allclose(mine.logprobs, theirs.logprobs, atol=1e-5)
        assert mine.version_runs == ((version, 12),)
    assert found.prompt_version == version
    assert found.prompt_logprobs is not None
    assert expected.prompt_logprobs is not None
    np.testing.assert_allclose(found.prompt_logprobs, expected.prompt_logprobs, atol=1e-5)


def test_unknown_adapter_is_refused_by_its_name(served: Served, sampler: Sampler) -> None:
    with pytest.raises(InvalidConfigError, match="adapter: 'third' was not added"):
        sampler.submit([1], PARAMS, adapter="third")
    with pytest.raises(InvalidConfigError, match="adapter: the base model has no adapter 'third'"):
        sampler.update_weights(1, lambda: served.model, adapter="third")
    with pytest.raises(InvalidConfigError, match="model: it is not the one of the adapters"):
        sampler.update_weights(6, lambda: load_policy(served.base), adapter="one")
    with (
        Sampler(load_policy(served.base)) as plain,
        pytest.raises(InvalidConfigError, match="'one', but the sampler has no adapters"),
    ):
        plain.update_weights(1, lambda: served.model, adapter="one")

    result = sampler.submit([1], PARAMS, adapter="one").result(60)

    require_equal(result, served.alone("one", [1]), version=5)


def test_removed_adapter_ends_its_requests_and_no_others(served: Served, sampler: Sampler) -> None:
    long = SamplingParams(max_tokens=400, num_samples=6, stop_ids=())
    removed = [sampler.submit([1], long, adapter="one") for _ in range(3)]
    kept = sampler.submit([1], PARAMS, adapter="other")

    sampler.remove_adapter("one")

    for future in removed:
        with pytest.raises(RejectedError, match="the adapter 'one' was removed"):
            future.result(60)
    require_equal(kept.result(60), served.alone("other", [1]), version=9)
    with pytest.raises(InvalidConfigError, match="'one' was not added"):
        sampler.submit([1], adapter="one")
    with pytest.raises(InvalidConfigError, match="'one' was not added"):
        sampler.remove_adapter("one")

    def load() -> PreTrainedModel:
        served.adapters.load("one", served.folders["other"])
        return served.model

    sampler.update_weights(11, load, adapter="one")
    again = sampler.submit([1], PARAMS, adapter="one")
    require_equal(again.result(60), served.alone("other", [1]), version=11)


# Step by step, in this thread.


@pytest.fixture
def batch_of(served: Served) -> Callable[..., ContinuousBatch]:
    """Return the maker of a batch that has both adapters."""

    def make(**limits: int) -> ContinuousBatch:
        batch = ContinuousBatch(
            served.model, version=3, limits=BatchLimits(**limits), adapters=served.adapters
        )
        for name in NAMES[1:]:
            batch.restart(served.model, version=VERSIONS[name], adapter=name)
        return batch

    return make


def add(batch: ContinuousBatch, adapter: str, *, max_tokens: int) -> SampleRequest:
    params = SamplingParams(max_tokens=max_tokens, seed=0, stop_ids=())
    limits = limits_of(batch.model, max_tokens=512)
    request = new_request([1], params, limits=limits, tokenizer=None, adapter=adapter)
    batch.add(request)
    return request


def only(request: SampleRequest) -> SampledSequence:
    (sequence,) = request.future.result(timeout=0).sequences
    return sequence


def test_request_after_the_removal_of_its_adapter_fails(
    batch_of: Callable[..., ContinuousBatch],
) -> None:
    batch = batch_of()
    batch.remove("one")

    late = add(batch, "one", max_tokens=2)

    assert batch.is_idle
    with pytest.raises(RejectedError, match="the adapter 'one' was removed"):
        late.future.result(timeout=0)


def test_each_step_gives_every_adapter_a_token(batch_of: Callable[..., ContinuousBatch]) -> None:
    batch = batch_of()
    crowd = [add(batch, "one", max_tokens=50) for _ in range(9)]
    short = [add(batch, name, max_tokens=5) for name in NAMES]

    for _ in range(5):
        batch.step()

    assert all(request.future.done() for request in short)
    assert not any(request.future.done() for request in crowd)


def test_new_weights_of_an_adapter_restart_its_own_sequences(
    served: Served, batch_of: Callable[..., ContinuousBatch]
) -> None:
    batch = batch_of()
    requests = {name: add(batch, name, max_tokens=6) for name in NAMES}
    for _ in range(3):
        batch.step()

    change(served.added["one"], seed=8)
    batch.restart(served.model, version=6, adapter="one")
    for _ in range(3):
        batch.step()

    runs = {name: only(request).version_runs for name, request in requests.items()}
    assert runs == {"": ((3, 6),), "one": ((5, 3), (6, 3)), "other": ((9, 6),)}
    require_exact_end(served, only(requests["one"]))


def require_exact_end(served: Served, sequence: SampledSequence) -> None:
    """Check tokens 3 to 5 against one pass with the present weights of adapter "one"."""
    ids = [1, *sequence.token_ids.tolist()]
    with torch.no_grad(), served.adapters.using("one"):
        logprobs_TV = served.model(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = logprobs_TV[range(3, 6), ids[4:]].numpy()
    np.testing.assert_allclose(sequence.logprobs[3:], expected, atol=1e-5)


def test_new_base_weights_restart_the_sequences_of_adapters(
    served: Served, batch_of: Callable[..., ContinuousBatch]
) -> None:
    batch = batch_of()
    request = add(batch, "one", max_tokens=6)
    for _ in range(3):
        batch.step()

    with torch.no_grad():
        for weight in served.model.get_input_embeddings().parameters():
            weight.mul_(1.5)
    batch.restart(served.model, version=4)
    for _ in range(3):
        batch.step()

    assert only(request).version_runs == ((5, 6),)
    require_exact_end(served, only(request))
