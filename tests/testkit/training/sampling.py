"""Sampling sessions without a gateway, and folders of models to sample from."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import redis
import torch
from numpy.typing import NDArray

from testkit.waiting import wait_until
from turnstream.store.client.connection import connect_async
from turnstream_server.models.adapters import Adapters
from turnstream_server.models.byte_model import byte_model_spec, write_byte_model
from turnstream_server.models.policy import load_policy, save_policy
from turnstream_server.models.sampling_params import SampleResult, SamplingParams
from turnstream_server.models.spec import AdapterConfig
from turnstream_server.operations.keys import RequestId, sampler_keys, samples_key
from turnstream_server.operations.results import Failure, Result, decode_result
from turnstream_server.operations.samplers import (
    SampleRequest,
    SamplerRecord,
    cancel_sample,
    submit_sample,
    write_sampler,
)

_numbers = itertools.count()


class ModelFolders:
    """A base model, and snapshots below a shared folder: `one` and `two` adapters, `whole` ones.

    Attributes:
        base: folder of the base model, with a tokenizer.
        shared: folder of the snapshots `one`, `two`, `whole` and `other`.
    """

    def __init__(self, folder: Path) -> None:
        self.base, self.shared = folder / "base", folder / "shared"
        write_byte_model(self.base, byte_model_spec(hidden_size=32))
        for seed, name in enumerate(("one", "two"), 1):
            self.write_adapter(name, seed=seed)
        for seed, name in enumerate(("whole", "other"), 1):
            spec = byte_model_spec(hidden_size=32, seed=seed)
            save_policy(load_policy(spec), self.shared / name)

    def write_adapter(self, name: str, *, seed: int) -> None:
        """Write an adapter with random weights into a folder below `shared`."""
        adapter = Adapters(load_policy(self.base), self.base).add("one", AdapterConfig(rank=2))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for _, weight in adapter.named_parameters():
                weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))
        folder = self.shared / name
        folder.mkdir(parents=True)
        adapter.write(folder)

    def logprobs(
        self, name: str | None, token_ids: Sequence[int], *, temperature: float = 1.0
    ) -> NDArray[np.float64]:
        """Return the log-probabilities of tokens by one forward pass; the first is NaN."""
        folder = self.base if name is None else self.shared / name
        model = load_policy(folder).double()
        with torch.no_grad():
            logits = model(torch.tensor([token_ids]), use_cache=False).logits[0].double()
        logprobs_TV = (logits / temperature).log_softmax(-1)
        own = logprobs_TV[torch.arange(len(token_ids) - 1), list(token_ids[1:])].numpy()
        return np.concatenate(([np.nan], own))


class SamplingClient:
    """Sampling sessions of a base model of its own name."""

    def __init__(self, client: redis.Redis, url: str) -> None:
        self.base_model = f"tiny/byte-{next(_numbers)}"
        self._client = client
        self._url = url
        self._count = itertools.count(1)

    def submit(
        self, *calls: tuple[str | None, list[int], SamplingParams], repeat: int = 1
    ) -> list[RequestId]:
        """Queue samples of snapshots, with these prompts and parameters."""
        return asyncio.run(self._submit(calls, repeat))

    async def _submit(
        self, calls: Sequence[tuple[str | None, list[int], SamplingParams]], repeat: int
    ) -> list[RequestId]:
        sampled: list[RequestId] = []
        async with connect_async(self._url) as client:
            for folder, prompt, params in calls:
                number = next(self._count)
                name = f"{self.base_model}-{folder}:sample:0".replace("/", "-")
                record = SamplerRecord(name, self.base_model, "owner", folder=folder)
                write_sampler(self._client, record)
                for _ in range(repeat):
                    prompt_ids = np.array(prompt, np.int32)
                    await submit_sample(client, record, number, prompt_ids, params)
                sampled.append(RequestId(name, number))
        return sampled

    def cancel(self, sampled: RequestId) -> None:
        """Cancel a sample, as a gateway does."""

        async def call() -> None:
            async with connect_async(self._url) as client:
                await cancel_sample(client, sampled)

        asyncio.run(call())

    def stored(self, sampled: RequestId) -> Result | None:
        """Return the stored result of a sample, if there is one."""
        key = sampler_keys(sampled.target).results
        stored: Any = self._client.hget(key, str(sampled.number))
        return None if stored is None else decode_result(stored)

    def result(self, sampled: RequestId) -> SampleResult:
        """Wait for the result of a sample."""
        found = wait_until(lambda: self.stored(sampled), describe=f"{sampled}")
        assert isinstance(found, SampleResult), found
        return found

    def failure(self, sampled: RequestId) -> Failure:
        """Wait for the failure of a sample."""
        found = wait_until(lambda: self.stored(sampled), describe=f"{sampled}")
        assert isinstance(found, Failure), found
        return found

    def num_queued(self) -> int:
        """Return the number of samples that are not finished."""
        count: Any = self._client.xlen(samples_key(self.base_model))
        return count

    def num_running(self) -> int:
        """Return the number of samples that samplers have read and not finished."""
        pending: Any = self._client.xpending(samples_key(self.base_model), "samplers")
        return pending["pending"]


def sample_request(
    folder: str | None, prompt: Sequence[int], params: SamplingParams
) -> SampleRequest:
    """Return a request as a sampler reads it."""
    return SampleRequest(
        request_id=RequestId("S:sample:0", next(_numbers)),
        folder=None if folder is None else PurePosixPath(folder),
        prompt=np.array(prompt, np.int32),
        params=params,
    )
