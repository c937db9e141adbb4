"""Continuous batching: sequences join and quit the running batch at any decode step.

One thread owns a batch. `sampler.py` has the thread. Sequences wait in one queue for each share,
and run in one lane for each adapter. A step has a forward pass for each lane, so all sequences get
one token. `fair_turns.py` has the rule by which they start, and pause for those of other shares.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel

from turnstream.errors import InvalidConfigError, RejectedError
from turnstream_server.models.decoding import (
    PREFILL,
    Prefix,
    PrefixStates,
    RowCache,
    check_model,
    decode_step,
    prefill,
    prefill_passes,
    prompt_logprobs,
)
from turnstream_server.models.fair_turns import BatchLimits, Share, next_turn
from turnstream_server.models.sampling import choose_tokens
from turnstream_server.models.sampling_requests import SampleRequest, SampleSequence, SharedPrefix

if TYPE_CHECKING:
    from turnstream_server.models.adapters import Adapters


class WaitingSequences:
    """New requests, and sequences that have run before and come first.

    Sequences of a request are made when they start: a request may have thousands of them.
    """

    def __init__(self) -> None:
        self._queues: dict[Share, deque[SampleRequest | SampleSequence]] = {}

    def __bool__(self) -> bool:
        return bool(self._queues)

    def add(self, request: SampleRequest) -> None:
        """Add the sequences of a request after all of its share."""
        self._queues.setdefault(request.share, deque()).append(request)

    def add_first(self, sequences: Iterable[SampleSequence]) -> None:
        """Add sequences that have run, before all of their shares, in this order."""
        for each in reversed([*sequences]):
            self._queues.setdefault(each.request.share, deque()).appendleft(each)

    def first(self) -> dict[Share, SampleRequest | SampleSequence]:
        """Return the first of each share that is not over, the longest waiting share first."""
        for share, queue in [*self._queues.items()]:
            while queue and _request(queue[0]).is_over():
                queue.popleft()
            if not queue:
                del self._queues[share]
        return {share: queue[0] for share, queue in self._queues.items()}

    def take(self, share: Share) -> SampleSequence | None:
        """Remove and return the first sequence of a share, which is the last in turn then.

        Returns None if it cannot be made; its request has failed.
        """
        queue = self._queues.pop(share)
        first = queue.popleft()
        sequence = first if isinstance(first, SampleSequence) else _made(first)
        if isinstance(first, SampleRequest) and first.num_waiting and not first.is_over():
            queue.appendleft(first)
        if queue:
            self._queues[share] = queue
        return sequence

    def requests(self) -> Iterator[SampleRequest]:
        """Yield the request of each entry; one may come several times."""
        return (_request(each) for queue in self._queues.values() for each in queue)

    def paused(self) -> Iterator[SampleSequence]:
        """Yield the sequences that have run."""
        entries = (each for queue in self._queues.values() for each in queue)
        return (each for each in entries if isinstance(each, SampleSequence))

    def clear(self) -> None:
        """Remove all entries."""
        self._queues.clear()


def _made(request: SampleRequest) -> SampleSequence | None:
    try:
        return request.next_sequence()
    except Exception as error:  # noqa: BLE001 - the tokenizer reads the prompt here
        request.fail(error)
        return None


def _request(entry: SampleRequest | SampleSequence) -> SampleRequest:
    return entry if isinstance(entry, SampleRequest) else entry.request


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

    def join(self, sequence: SampleSequence, states: PrefixStates) -> None:
        """Add a sequence as the last row."""
        self.cache.append(states)
        self.rows.append(sequence)

    def keep(self, is_kept: Sequence[bool]) -> None:
        """Remove rows; the last rows take their places."""
        for row in reversed([row for row, kept in enumerate(is_kept) if not kept]):
            self.remove(row)

    def remove(self, row: int) -> None:
        """Remove a row; the last row takes its place."""
        self.cache.remove(row)
        self.rows[row] = self.rows[-1]
        self.rows.pop()


class ContinuousBatch:
    """The running and the waiting sequences of a model, and of adapters of it."""

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
        self._waiting = WaitingSequences()
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
        """Add the sequences of a request after all waiting ones of its share."""
        if not self.has(request.adapter):
            request.fail(RejectedError(f"the adapter {request.adapter!r} was removed"))
            return
        self._waiting.add(request)

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
        the new weights. These sequences come before all waiting ones of their shares. Weights of
        an adapter change its own sequences; those of the model, which is adapter "", change all.
        """
        if self._adapters is not None and model is not self.model:
            raise InvalidConfigError("model", "it is not the one of the adapters")
        check_model(model)
        with self._using(adapter):
            self.model = model  # an unknown adapter was refused
        self._lanes.setdefault(adapter, _Lane(version=version)).version = version
        for request in self._waiting.requests():
            if adapter in ("", request.adapter):
                request.shared = None
        for sequence in self._waiting.paused():
            if adapter in ("", sequence.request.adapter):
                sequence.paused = None
        changed = [lane for name, lane in self._lanes.items() if adapter in ("", name)]
        self._waiting.add_first(sequence for lane in changed for sequence in lane.clear())

    def remove(self, adapter: str) -> None:
        """Fail the requests of an adapter with RejectedError, and forget its version."""
        error = RejectedError(f"the adapter {adapter!r} was removed")
        running = [each.request for each in self._lanes.pop(adapter).rows]
        for request in (*running, *self._waiting.requests()):
            if request.adapter == adapter:
                request.fail(error)

    def end_all(self, error: Exception | None = None) -> None:
        """Fail every request with an error, or cancel it without one."""
        running = [each.request for lane in self._lanes.values() for each in lane.clear()]
        for request in itertools.chain(running, self._waiting.requests()):
            if error is None:
                request.cancel()
            else:
                request.fail(error)
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
        """Return the sequences that start now, in turn over shares, of one pass over prompts."""
        admitted: list[SampleSequence] = []
        num_tokens = 0
        while first := self._waiting.first():
            running = [*admitted, *self.running]
            turn = next_turn(
                {share: each.max_length for share, each in first.items()},
                [(each.request.share, each.max_length) for each in running],
                limits=self._limits,
            )
            if turn is None:
                break
            head = first[turn.share]
            is_known = any(each.request is head for each in admitted)
            num_tokens += 0 if is_known else head.num_uncached
            if admitted and num_tokens > PREFILL.limit:
                break
            for place in turn.paused:
                self._pause(running[place])
            if (sequence := self._waiting.take(turn.share)) is not None:
                admitted.append(sequence)
        return admitted

    def _pause(self, sequence: SampleSequence) -> None:
        """Stop a running sequence until its next turn; its cache may have to be computed again."""
        lane = self._lanes[sequence.request.adapter]
        row = lane.rows.index(sequence)
        num_kept = sum(each.num_cached for each in self._waiting.paused() if each.paused)
        if num_kept + sequence.num_cached <= self._limits.max_cached_tokens:
            sequence.paused = lane.cache.states(row)
        lane.remove(row)
        self._waiting.add_first([sequence])

    def _start(self, sequences: Sequence[SampleSequence]) -> None:
        """Compute the prompts of an adapter's sequences, and sample the next token of new ones."""
        groups: dict[SampleRequest | SampleSequence, list[SampleSequence]] = {}
        for each in sequences:
            if each.paused:
                self._lanes[each.request.adapter].join(each, each.paused)
                each.paused = None
                continue
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
                self._lanes[sequence.request.adapter].join(sequence, start.states)

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
