from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import testkit
from turnstream.errors import BatchingError
from turnstream.worker.tensors import LeftPaddedTensors, to_torch
from turnstream_server.models import logprobs
from turnstream_server.models.logprobs import response_logprobs, response_scores

ModelOf = Callable[[str], PreTrainedModel]
ARCHITECTURES = ["qwen2", "llama", "gpt2", "gemma2"]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_rows_of_different_lengths_score_as_each_alone_by_all_logits(
    model_of: ModelOf, architecture: str
) -> None:
    model = model_of(architecture)
    texts = ["abcDEfG", "aB", "abcdefghIJ"]
    tensors = to_torch(testkit.mini_batch(*texts))

    scores_BR = response_logprobs(model, tensors, mask_BR=tensors.loss_mask_BR, temperature=0.7)

    for row, text in enumerate(texts):
        expected = _logprobs_by_all_logits(model, text, temperature=0.7)
        actual = scores_BR[row][tensors.loss_mask_BR[row]]
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert not scores_BR[~tensors.loss_mask_BR].any()


@pytest.mark.parametrize("architecture", ["qwen2", "gemma2"])
@pytest.mark.parametrize("chunk_values", [1 << 24, 3 * 128])
def test_entropies_are_those_of_all_logits_in_chunks_too(
    model_of: ModelOf, architecture: str, chunk_values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(architecture)
    monkeypatch.setattr(logprobs, "_CHUNK_VALUES", chunk_values)
    tensors = to_torch(testkit.mini_batch("abcDEfGHIJ", "aB"))
    mask_BR = tensors.loss_mask_BR

    scores = response_scores(model, tensors, mask_BR=mask_BR, temperature=0.7)
    scores.entropies_BR.sum().backward()

    alone_BR = response_logprobs(model, tensors, mask_BR=mask_BR, temperature=0.7)
    assert torch.equal(scores.logprobs_BR, alone_BR)
    ids = testkit.ids("abcDEfGHIJ").tolist()
    logits_TV = model(input_ids=torch.tensor([ids])).logits[0].double() / 0.7
    entropies_T = torch.distributions.Categorical(logits=logits_TV).entropy()[2:-1]
    expected = entropies_T[mask_BR[0]].float()
    torch.testing.assert_close(scores.entropies_BR[0][mask_BR[0]], expected, rtol=1e-4, atol=1e-5)
    assert (scores.entropies_BR[~mask_BR] == 0).all()
    assert all(each.grad is not None for each in model.parameters())


def test_chunks_give_the_same_values_and_gradients(
    model_of: ModelOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("qwen2")
    tensors = to_torch(testkit.mini_batch("abcDEfGHIJ", "aB"))
    whole, expected = _scores_and_gradient(model, tensors)

    monkeypatch.setattr(logprobs, "_CHUNK_VALUES", 3 * 128)
    chunked, gradient = _scores_and_gradient(model, tensors)

    torch.testing.assert_close(chunked, whole)
    for name, value in expected.items():
        scale = value.abs().max().item()
        torch.testing.assert_close(gradient[name], value, rtol=1e-5, atol=1e-5 * scale, msg=name)


def test_no_more_logits_are_made_than_fit_in_a_chunk(
    model_of: ModelOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("qwen2")
    tensors = to_torch(testkit.mini_batch("ab" + "CD" * 50 + "ef" * 50))
    sizes: list[int] = []
    head = model.get_output_embeddings()
    assert head is not None
    hook = head.register_forward_hook(lambda _, __, logits: sizes.append(logits.numel()))
    monkeypatch.setattr(logprobs, "_CHUNK_VALUES", 8 * 128)

    with hook:
        _scores_and_gradient(model, tensors)

    assert max(sizes) == 8 * 128
    assert sum(sizes) == 2 * 100 * 128  # once forward, once for the gradient; none for "ef"


def test_a_mask_of_zeros_gives_zeros_that_can_be_differentiated(model_of: ModelOf) -> None:
    model = model_of("qwen2")
    tensors = to_torch(testkit.mini_batch("ab|c", "a|b"))

    scores_BR = response_logprobs(model, tensors, mask_BR=tensors.loss_mask_BR)
    scores_BR.sum().backward()

    assert not scores_BR.any()
    assert all(w.grad is None or not w.grad.any() for w in model.parameters())


def test_a_wanted_token_without_a_prompt_is_refused(model_of: ModelOf) -> None:
    tensors = to_torch(testkit.mini_batch("abC", "|dE"))

    with pytest.raises(BatchingError, match="prompt is empty"):
        response_logprobs(model_of("qwen2"), tensors, mask_BR=tensors.response_mask_BR)


def _logprobs_by_all_logits(model: PreTrainedModel, text: str, *, temperature: float) -> Tensor:
    """Return those of the capital letters, from the whole row's logits and without any padding."""
    ids = torch.from_numpy(testkit.ids(text)).long()
    scores_TV = torch.log_softmax(model(input_ids=ids[None]).logits[0] / temperature, dim=-1)
    wanted = [position for position, letter in enumerate(text) if letter.isupper()]
    return torch.stack([scores_TV[position - 1, ids[position]] for position in wanted])


def _scores_and_gradient(
    model: PreTrainedModel, rows: LeftPaddedTensors
) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    scores_BR = response_logprobs(model, rows, mask_BR=rows.loss_mask_BR)
    scores_BR.square().sum().backward()
    gradients = {n: w.grad.clone() for n, w in model.named_parameters() if w.grad is not None}
    model.zero_grad()
    return scores_BR.detach(), gradients
