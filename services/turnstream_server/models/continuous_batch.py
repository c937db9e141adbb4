"""Continuous batching: sequences join and quit the running batch at any decode step.

One thread owns a batch. `sampler.py` has the thread. Sequences of several adapters wait in one
queue, and run in one lane for each adapter. A step has a forward pass for each lane, so all
sequences get one token.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel

from turnstream.errors import InvalidConfigError, RejectedError
from turnstream_server.models.decoding import (
    Prefix,
    check_model,
    decode_step,
    prefill,
    prefill_passes,
    prompt_logprobs,
)
from turnstream_server.models.kv_cache import RowCache
from turnstream_server.models.sampling import choose_tokens
from turnstream_server.models.sampling_requests import (
    SampleRequest,
    SampleSequence,
    SharedPrefix,
)

if TYPE_CHECKING:
    from turnstream_server.models.adapters import Adapters


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """Bounds of the running batch.

    Attributes:
        max_sequences: sequences that run at the same time.
        max_cached_tokens: running sequences times the longest of them, in tokens that it may reach.
            The buffers of keys and values have at most 1.6 times as many cells.
    """

    max_sequences: int = 64
    max_cached_tokens: int = 1 << 16

    def __post_init__(self) -> None:
        for name in ("max_sequences", "max_cached_tokens"):
            if getattr(self, name) < 1:
                raise InvalidConfigError(name, f"{getattr(self, name)} is below 1")


def num_admitted(waiting: Sequence[int], running: Sequence[int], *, limits: BatchLimits) -> int:
    """Return how many waiting sequences, from the first on, fit to the running ones.

    Arguments are the most tokens of each sequence. The first one that does not fit holds back
    those after it, so that every sequence starts at some time.

    >>> num_admitted([10, 10, 50, 10], [20], limits=BatchLimits(max_cached_tokens=100))
    2
    """
    width, count = max(running, default=0), len(running)
    for index, length in enumerate(waiting):
        width, count = max(width, length), count + 1
        if count > limits.max_sequences or count * width > limits.max_cached_tokens:
            return index
    return len(waiting)


@dataclass(slots=True, kw_only=True)
class _Lane:
    """The running sequences of one adapter, and the policy version of its weights."""

    version: int
    rows: list[SampleSequence] = field(default_factory=list[SampleSequence])
    cache: RowCache = field(default_factory=RowCache)

    def clear(self) -> list[SampleSequence]:
        """Remove and return all rows."""
        rows, self.rows, self.cache = self.rows, [], RowCache()
        return rows

    def keep(self, is_kept: Sequence[bool]) -> None:
        """Remove rows; the last rows take their places."""
        for row in reversed([row for row, kept in enumerate(is_kept) if not kept]):
            self.cache.remove(row)
            self.rows[row] = self.rows[-1]
            self.rows.pop()


class ContinuousBatch:
    """The running and the waiting sequences of a model, and of adapters of it.

    Attributes:
        model: the policy.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        version: int,
        limits: BatchLimits,
        adapters: Adapters | None = None,
    ) -> None:
        check_model(model)
        self.model = model
        self._adapters = adapters
        self._limits = limits
        self._waiting: deque[SampleSequence] = deque()
        self._lanes = {"": _Lane(version=version)}

    @property
    def is_idle(self) -> bool:
        """Whether no sequence waits or runs."""
        return not self._waiting and not self.running

    @property
    def running(self) -> list[SampleSequence]:
        """The running sequences of all adapters."""
        return [sequence for lane in self._lanes.values() for sequence in lane.rows]

    def has(self, adapter: str) -> bool:
        """Return whether requests may name this adapter; "" is the model itself."""
        return adapter in self._lanes

    def version(self, adapter: str) -> int:
        """Return the policy version of the weights of an adapter."""
        return self._lanes[adapter].version

    def add(self, request: SampleRequest) -> None:
        """Add the sequences of a request after all waiting ones."""
        if not self.has(request.adapter):
            request.fail(RejectedError(f"the adapter {request.adapter!r} was removed"))
            return
        try:
            sequences = request.sequences()
        except Exception as error:  # noqa: BLE001 - the tokenizer reads the prompt here
            request.fail(error)
            return
        request.num_waiting = len(sequences)
        self._waiting.extend(sequences)

    @torch.inference_mode()
    def step(self) -> None:
        """Sample one token for every running sequence, and start the waiting ones that fit.

        An error of the model fails the requests of its forward pass and no others.
        """
        for adapter, lane in self._lanes.items():
            if lane.rows:
                with self._using(adapter):
                    self._decode(lane)
        admitted = self._admit()
        for adapter in dict.fromkeys(each.request.adapter for each in admitted):
            with self._using(adapter):
                self._start([each for each in admitted if each.request.adapter == adapter])

    def restart(self, model: PreTrainedModel, *, version: int, adapter: str = "") -> None:
        """Continue running sequences with another model, or with changed weights.

        Their keys and values are computed again, so each new token has exactly the distribution of
        the new weights. These sequences come before all waiting ones. Weights of an adapter change
        its own sequences; those of the model, which is adapter "", change all.
        """
        if self._adapters is not None and model is not self.model:
            raise InvalidConfigError("model", "it is not the one of the adapters")
        check_model(model)
        with self._using(adapter):
            self.model = model  # an unknown adapter was refused
        self._lanes.setdefault(adapter, _Lane(version=version)).version = version
        for sequence in self._waiting:
            if adapter in ("", sequence.request.adapter):
                sequence.request.shared = None
        changed = [lane for name, lane in self._lanes.items() if adapter in ("", name)]
        rows = [sequence for lane in changed for sequence in lane.clear()]
        self._waiting.extendleft(reversed(rows))

    def remove(self, adapter: str) -> None:
        """Fail the requests of an adapter with RejectedError, and forget its version."""
        error = RejectedError(f"the adapter {adapter!r} was removed")
        for sequence in (*self._lanes.pop(adapter).rows, *self._waiting):
            if sequence.request.adapter == adapter:
                sequence.request.fail(error)

    def end_all(self, error: Exception | None = None) -> None:
        """Fail every request with an error, or cancel it without one."""
        running = [sequence for lane in self._lanes.values() for sequence in lane.clear()]
        for sequence in itertools.chain(running, self._waiting):
            if error is None:
                sequence.request.cancel()
            else:
                sequence.request.fail(error)
        self._waiting.clear()

    def _using(self, adapter: str) -> AbstractContextManager[None]:
        return nullcontext() if self._adapters is None else self._adapters.using(adapter)

    def _decode(self, lane: _Lane) -> None:
        try:
            last_ids = [each.token_ids[-1] for each in lane.rows]
            logits_BV = decode_step(self.model, lane.cache, last_ids)
        except Exception as error:  # noqa: BLE001 - requests after these do not depend on them
            for sequence in lane.clear():
                sequence.request.fail(error)
            return
        lane.keep(self._advance(lane.rows, logits_BV))

    def _admit(self) -> list[SampleSequence]:
        """Return the sequences that start now, in the order of their requests."""
        while self._waiting and self._waiting[0].request.is_over():
            self._waiting.popleft()
        first = itertools.islice(self._waiting, self._limits.max_sequences)
        running = [each.max_length for each in self.running]
        count = num_admitted([e.max_length for e in first], running, limits=self._limits)
        admitted = [self._waiting.popleft() for _ in range(count)]
        for sequence in admitted:
            sequence.request.num_waiting -= not sequence.token_ids
        return [each for each in admitted if not each.request.is_over()]

    def _start(self, sequences: Sequence[SampleSequence]) -> None:
        """Compute the prompts of one adapter's sequences, and sample the next token of each.

        New samples of one request share the forward pass over their prompt.
        """
        groups: dict[SampleRequest | SampleSequence, list[SampleSequence]] = {}
        for each in sequences:
            groups.setdefault(each if each.token_ids else each.request, []).append(each)
        pending: list[list[SampleSequence]] = []
        for key, group in groups.items():
            if isinstance(key, SampleRequest) and key.shared:
                self._join(group, [key.shared] * len(group))
                key.shared = key.shared if key.num_waiting else None
            else:
                pending.append(group)
        for rows in prefill_passes([len(group[0].prefix_ids()) for group in pending]):
            self._prefill([pending[row] for row in rows])

    def _prefill(self, groups: Sequence[list[SampleSequence]]) -> None:
        """Run one forward pass over a prompt of each group. If it fails, each prompt runs alone."""
        try:
            prefixes = prefill(self.model, [group[0].prefix_ids() for group in groups])
        except Exception as error:  # noqa: BLE001 - other requests do not depend on these
            if len(groups) == 1:
                groups[0][0].request.fail(error)
            else:
                for group in groups:
                    self._prefill([group])
            return
        for group, prefix in zip(groups, prefixes, strict=True):
            self._score_prompt(group[0].request, prefix)
        rows = [each for group in groups for each in group]
        starts = [
            SharedPrefix(prefix.logits_V, prefix.states())
            for group, prefix in zip(groups, prefixes, strict=True)
            for _ in group
        ]
        for sequence, start in zip(rows, starts, strict=True):
            request = sequence.request
            if request.num_waiting and not sequence.token_ids and not request.shared:
                request.shared = start.copy()
        self._join(rows, starts)

    def _score_prompt(self, request: SampleRequest, prefix: Prefix) -> None:
        """Compute the log-probabilities of a prompt, if the request asks for them."""
        if request.wants_prompt_logprobs:
            request.prompt_version = self.version(request.adapter)
            request.prompt = prompt_logprobs(
                self.model,
                prefix,
                request.prompt_ids,
                temperature=request.params.logprob_temperature,
                num_topk=request.params.topk_prompt_logprobs,
            )

    def _join(self, rows: Sequence[SampleSequence], starts: Sequence[SharedPrefix]) -> None:
        """Sample a token after each prompt; unfinished sequences become rows of the batch."""
        is_unfinished = self._advance(rows, torch.stack([each.logits_V for each in starts]))
        for sequence, start, is_alive in zip(rows, starts, is_unfinished, strict=True):
            if is_alive:
                lane = self._lanes[sequence.request.adapter]
                lane.cache.append(start.states)
                lane.rows.append(sequence)

    def _advance(self, rows: Sequence[SampleSequence], logits_BV: Tensor) -> list[bool]:
        """Add a token to every sequence; return which of them are unfinished."""
        params = [each.request.params for each in rows]
        chosen = choose_tokens(logits_BV, params=params, draws=[each.draw() for each in rows])
        num_topk = max(each.topk_sample_logprobs for each in params)
        top_logprobs_BK, top_ids_BK = chosen.logprobs_BV.topk(num_topk, dim=-1)
        topk = zip(top_ids_BK.tolist(), top_logprobs_BK.tolist(), strict=True)
        columns = chosen.token_ids_B.tolist(), chosen.logprobs_B.tolist(), topk
        return [
            self._add(sequence, token, logprob, likely)
            for sequence, token, logprob, likely in zip(rows, *columns, strict=True)
        ]

    def _add(
        self,
        sequence: SampleSequence,
        token_id: int,
        logprob: float,
        topk: tuple[list[int], list[float]],
    ) -> bool:
        try:
            version = self.version(sequence.request.adapter)
            sequence.add(token_id, logprob, version=version, topk=topk)
        except Exception as error:  # noqa: BLE001 - for example of the tokenizer
            sequence.request.fail(error)
        return not sequence.is_finished and not sequence.request.is_over()
