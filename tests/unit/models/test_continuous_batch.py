"""Admission, restarts, cancelled and failing requests, step by step in this thread."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from turnstream.errors import InvalidConfigError
from turnstream_server.models.continuous_batch import ContinuousBatch
from turnstream_server.models.fair_turns import ANYONE, BatchLimits, Share
from turnstream_server.models.logprobs import hidden_and_head
from turnstream_server.models.policy import load_policy
from turnstream_server.models.sampling_params import SampledSequence, SamplingParams
from turnstream_server.models.sampling_requests import (
    ModelLimits,
    SampleRequest,
    limits_of,
    new_request,
)
from turnstream_server.models.spec import SmallModelSpec

VOCAB_SIZE = 64


def make_model(seed: int = 0, architecture: str = "llama") -> PreTrainedModel:
    spec = SmallModelSpec(
        architecture=architecture, vocab_size=VOCAB_SIZE, hidden_size=32, seed=seed
    )
    return load_policy(spec)


def make_batch(model: PreTrainedModel | None = None, **limits: int) -> ContinuousBatch:
    return ContinuousBatch(model or make_model(), version=0, limits=BatchLimits(**limits))


def add(
    batch: ContinuousBatch,
    prompt_ids: Sequence[int],
    max_tokens: int = 5,
    *,
    tokenizer: Tokenizer | None = None,
    share: Share = ANYONE,
    **params: Any,
) -> SampleRequest:
    own = SamplingParams(**{"max_tokens": max_tokens, "seed": 0, "stop_ids": ()} | params)
    limits = limits_of(batch.model, max_tokens=512)
    request = new_request(prompt_ids, own, limits=limits, tokenizer=tokenizer, share=share)
    batch.add(request)
    return request


def run(batch: ContinuousBatch, *, steps: int = 1000) -> int:
    """Step until nothing is left, at most `steps` times; return the number of steps."""
    for step in range(steps):
        if batch.is_idle:
            return step
        batch.step()
    return steps


def only(request: SampleRequest) -> SampledSequence:
    (sequence,) = request.future.result(timeout=0).sequences
    return sequence


@contextmanager
def recorded_passes(model: PreTrainedModel) -> Iterator[list[tuple[int, ...]]]:
    """Yield the shapes (B, T) of all forward passes of the block."""
    shapes: list[tuple[int, ...]] = []
    hidden_and_head(model, input_ids=torch.zeros(1, 1, dtype=torch.long))  # tries the head once

    def record(_: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        shapes.append(tuple(inputs[0].shape))

    hook = model.get_input_embeddings().register_forward_pre_hook(record)
    try:
        yield shapes
    finally:
        hook.remove()


def test_paused_sequences_continue_without_a_pass_and_equal_undisturbed_ones() -> None:
    prompt = [5, 6, 7, 8]
    batch, alone = make_batch(max_sequences=4), make_batch(max_sequences=4)
    expected, disturbed = (add(each, prompt, 12, num_samples=4) for each in (alone, batch))
    run(alone)
    for _ in range(3):
        batch.step()

    with recorded_passes(batch.model) as shapes:
        for number in range(3):
            add(batch, [number] * 2, 3, num_samples=2, share=Share("b", "1"))
            batch.step()
            assert len(batch.running) == 4
        run(batch)

    assert [shape for shape in shapes if shape[1] > 1] == [(1, 2)] * 3
    found, wanted = (each.future.result(timeout=0).sequences for each in (disturbed, expected))
    for own, other in zip(found, wanted, strict=True):
        assert own.token_ids.tolist() == other.token_ids.tolist()
        np.testing.assert_allclose(own.logprobs, other.logprobs, atol=1e-5)


def test_step_computes_one_pass_of_prompts_for_any_number_of_requests() -> None:
    # Prompts of like length share a pass, of limited size.
    for sizes, expected in (([400] * 8, 5 * 400), ((3, 4, 5), 3 * 5)):
        batch = make_batch()
        for size in sizes:
            add(batch, [1] * size, 4)

        with recorded_passes(batch.model) as shapes:
            batch.step()

        assert sum(rows * width for rows, width in shapes) == expected
        assert len(shapes) == 1


def test_batch_never_exceeds_its_bounds_and_starts_in_order() -> None:
    rng = np.random.default_rng(0)
    batch = make_batch(max_sequences=4, max_cached_tokens=80)
    requests = [
        add(batch, rng.integers(0, VOCAB_SIZE, size=rng.integers(1, 30)).tolist(), int(number))
        for number in rng.integers(1, 30, size=20)
    ]
    started: list[int] = []

    with recorded_passes(batch.model) as shapes:
        while not batch.is_idle:
            batch.step()
            running = {id(each.request): each for each in batch.running}
            lengths = [each.max_length for each in running.values()]
            assert len(lengths) <= 4
            assert len(lengths) * max(lengths, default=0) <= 80
            order = [n for n, each in enumerate(requests) if id(each) in running]
            started += [n for n in order if n not in started]

    assert all(request.future.done() for request in requests)
    assert started == sorted(started)
    assert max(rows for rows, width in shapes if width == 1) > 1


def test_sequences_join_and_quit_at_any_step() -> None:
    batch = make_batch()
    first = add(batch, [1], 6)
    batch.step()
    second = add(batch, [2], 2)

    with recorded_passes(batch.model) as shapes:
        run(batch)

    assert len(only(first).token_ids) == 6
    assert len(only(second).token_ids) == 2
    # The prompt of the second; then both run, and the first alone.
    assert shapes == [(1, 1), (1, 1), (2, 1), (1, 1), (1, 1), (1, 1)]


def test_samples_of_a_prompt_share_one_pass_over_it() -> None:
    batch = make_batch(max_sequences=3)
    prompt = list(range(9))
    request = add(batch, prompt, 4, num_samples=8)

    with recorded_passes(batch.model) as shapes:
        run(batch)

    assert [shape for shape in shapes if shape[1] > 1] == [(1, 9)]
    tokens = [tuple(each.token_ids) for each in request.future.result(timeout=0).sequences]
    assert len(set(tokens)) == 8
    alone = make_batch()
    again = add(alone, prompt, 4, num_samples=8)
    run(alone)
    assert [tuple(e.token_ids) for e in again.future.result(timeout=0).sequences] == tokens


def test_restart_samples_the_rest_from_the_new_weights() -> None:
    old, new = make_model(), make_model(seed=1)
    batch = make_batch(old, max_sequences=2)
    requests = [add(batch, [number, 7], 8, seed=number, num_samples=3) for number in range(2)]
    for _ in range(3):
        batch.step()

    batch.restart(new, version=5)
    run(batch, steps=5)

    # The two restarted ones came first, and are finished.
    assert [len(each.token_ids) for each in batch.running] == [1, 1]
    assert [each.num_waiting for each in requests] == [0, 2]
    run(batch)

    sequences = [request.future.result(timeout=0).sequences for request in requests]
    runs = [each.version_runs for own in sequences for each in own]
    assert runs == [((0, 3), (5, 5))] * 2 + [((5, 8),)] * 4
    for number, own in enumerate(sequences):
        for sequence in own:
            ids = torch.tensor([[number, 7, *sequence.token_ids.tolist()]])
            for version, model in ((0, old), (5, new)):
                scores_TV = model(input_ids=ids).logits[0].log_softmax(-1).detach()
                expected = scores_TV[torch.arange(1, 9), ids[0, 2:]].numpy()
                versions = np.repeat(*np.array(sequence.version_runs).T)
                found = sequence.logprobs[versions == version]
                np.testing.assert_allclose(found, expected[versions == version], atol=1e-5)


def test_cancelled_request_frees_its_slot_at_the_next_step() -> None:
    batch = make_batch(max_sequences=1)
    running, waiting, last = (add(batch, [number], 3) for number in range(3))
    batch.step()

    running.future.cancel()
    waiting.future.cancel()
    steps = run(batch)

    assert steps == 3
    assert len(only(last).token_ids) == 3
    done, _ = concurrent.futures.wait([running.future, waiting.future], timeout=0)
    assert len(done) == 2


def test_failing_prompt_ends_its_own_request_alone() -> None:
    model = make_model()

    def refuse(_: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        if (inputs[0] == 63).any():
            raise MemoryError("no memory for 63")

    model.get_input_embeddings().register_forward_pre_hook(refuse)
    batch = make_batch(model)
    good, bad, later = (add(batch, prompt) for prompt in ([1, 2], [1, 63], [2]))

    run(batch)

    assert isinstance(bad.future.exception(timeout=0), MemoryError)
    assert len(only(good).token_ids) == len(only(later).token_ids) == 5


def test_failing_step_ends_the_running_requests_and_no_waiting_one() -> None:
    model = make_model()
    batch = make_batch(model, max_sequences=2)
    failures = [RuntimeError("device lost")]

    def fail_once(_: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        if inputs[0].shape[1] == 1 and failures:  # the prompts have two tokens
            raise failures.pop()

    model.get_input_embeddings().register_forward_pre_hook(fail_once)
    requests = [add(batch, [number, 7], 4) for number in range(3)]

    run(batch)

    errors = [each.future.exception(timeout=0) for each in requests]
    assert [type(error) for error in errors] == [RuntimeError, RuntimeError, type(None)]


def test_nan_of_one_row_reaches_no_other_row() -> None:
    model = make_model()

    def greedy(prompt: Sequence[int]) -> list[int]:
        batch = make_batch(model)
        request = add(batch, prompt, 4, temperature=0)
        run(batch)
        return only(request).token_ids.tolist()

    broken = greedy([0] * 16)[0]
    prompts = [[number] * length for length in (16, 1) for number in range(1, 40)]
    expected = [(prompt, greedy(prompt)) for prompt in prompts]
    healthy = [each for each in expected if broken not in (*each[0], *each[1])]
    long, short = healthy[0], healthy[-1]
    assert (len(long[0]), len(short[0])) == (16, 1)
    embeddings: Any = model.get_input_embeddings()
    with torch.no_grad():
        embeddings.weight[broken] = torch.nan
    batch = make_batch(model)
    requests = [add(batch, prompt, 4, temperature=0) for prompt in (long[0], [0] * 16)]
    for _ in range(2):
        batch.step()

    # It gets the cells of the failed row. The last of them is a NaN, which it must not see.
    requests.append(add(batch, short[0], 4, temperature=0))
    batch.step()
    run(batch)

    error = requests[1].future.exception(timeout=0)
    assert isinstance(error, InvalidConfigError)
    assert "NaN for token 1" in str(error)
    assert only(requests[0]).token_ids.tolist() == long[1]
    assert only(requests[2]).token_ids.tolist() == short[1]


class BrokenTokenizer:
    """Fails after some calls, as the Python decoder of a tokenizer may do."""

    def __init__(self, num_calls: int) -> None:
        self._num_calls = num_calls

    def decode(self, *_: Any, **__: Any) -> str:
        """Return no text, or fail."""
        self._num_calls -= 1
        if self._num_calls < 0:
            raise ValueError("not decodable")
        return ""


@pytest.mark.parametrize("num_calls", [0, 2, 6])
def test_failing_tokenizer_ends_its_own_request_alone(num_calls: int) -> None:
    # At the prompt, at a token, and at the text of the finished sequence.
    batch = make_batch()
    tokenizer: Any = BrokenTokenizer(num_calls)
    bad = add(batch, [1, 2], tokenizer=tokenizer, stop_strings=("a",))
    good = add(batch, [1, 2])

    run(batch)

    assert isinstance(bad.future.exception(timeout=0), ValueError)
    assert len(only(good).token_ids) == 5


LIMITS = ModelLimits(vocab_size=64, max_positions=20, end_ids=(7,))


@pytest.mark.parametrize(
    ("prompt_ids", "params", "field", "shown"),
    [
        ([], {}, "prompt_ids", r"\(0,\)"),
        ([[1]], {}, "prompt_ids", r"\(1, 1\)"),
        ([0.5], {}, "prompt_ids", "float64"),
        ([1, 64], {}, "prompt_ids", "64 at position 1"),
        ([-1], {}, "prompt_ids", "-1 at position 0"),
        ([1] * 20, {}, "max_tokens", "20 prompt tokens and 1 .* context of 20"),
        ([1] * 10, {"max_tokens": 11}, "max_tokens", "10 prompt tokens and 11 .* of 20"),
        ([1], {"stop_ids": (64,)}, "stop_ids", "64"),
        ([1], {"top_k": 65}, "top_k", "65"),
        ([1], {"topk_prompt_logprobs": 65}, "topk_prompt_logprobs", "65"),
        ([1], {"topk_sample_logprobs": 65}, "topk_sample_logprobs", "65"),
        ([1], {"stop_strings": ("end",)}, "stop_strings", "'end' needs a tokenizer"),
    ],
)
def test_invalid_request_is_refused_with_field_and_value(
    prompt_ids: Any, params: dict[str, Any], field: str, shown: str
) -> None:
    with pytest.raises(InvalidConfigError, match=shown) as raised:
        new_request(prompt_ids, SamplingParams(**params), limits=LIMITS, tokenizer=None)

    assert raised.value.field == field


def test_batch_limits_are_positive() -> None:
    with pytest.raises(InvalidConfigError, match="max_cached_tokens: 0"):
        BatchLimits(max_cached_tokens=0)


@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        ("bloom", {"hidden_size": 32, "n_layer": 1, "n_head": 2}, "takes no position_ids"),
        ("mamba", {"hidden_size": 32, "num_hidden_layers": 1}, "takes no position_ids|layers of"),
    ],
)
def test_models_whose_rows_cannot_be_batched_are_refused(
    kind: str, settings: dict[str, int], reason: str
) -> None:
    config = AutoConfig.for_model(kind, vocab_size=VOCAB_SIZE, **settings)
    model = AutoModelForCausalLM.from_config(config).eval()

    with pytest.raises(InvalidConfigError, match=reason):
        make_batch(model)
