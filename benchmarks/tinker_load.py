"""Many samplers and large training calls of one session: the second part of tinker_api.py.

`--role client` is the process of the tinker SDK. `measure_load` starts it, and reads the memory of
all processes.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import statistics
import threading
import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from hosting import Client, Hosted
from processes import Role, resident_mb, serve_role

HERE = Path(__file__)
READ_EVERY_S = 0.25
SAMPLED = 16
"""Tokens of a sample."""

# ------------------------------------------------------------------------------ the client


class Warnings(logging.Handler):
    """Keeps the warnings of the SDK: a missed heartbeat is one of them."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the text of a record."""
        self.texts.append(record.getMessage())


class LoadClient:
    """One session of the SDK with a model and many sampling clients."""

    def __init__(self, config: dict[str, Any]) -> None:
        import tinker

        self._tinker = tinker
        self._config = config
        self._warnings = Warnings()
        logging.getLogger("tinker").addHandler(self._warnings)
        self._service = tinker.ServiceClient()
        base = config["base_model"]
        self._model = self._service.create_lora_training_client(base_model=base, rank=1).result()
        made = [
            self._service.create_sampling_client(base_model=base)
            for _ in range(config["num_samplers"])
        ]
        self._samplers = [each.result() for each in made]
        self._data = self._make_data(config["num_data"], config["length"])

    def work(self, message: dict[str, Any]) -> dict[str, Any]:
        """Run the load, or step the optimizer until a durable checkpoint covers all calls."""
        if "steps" in message:
            for _ in range(message["steps"]):
                call = self._model.forward_backward(self._data[:1], "importance_sampling")
                self._model.optim_step(self._tinker.AdamParams(learning_rate=0.0)).result()
                call.result()
            return {}
        return asyncio.run(self._load()) | {"warnings": self._warnings.texts}

    async def _load(self) -> dict[str, Any]:
        """Send all bodies, and at the same time the samples."""
        began_s = time.monotonic()
        samples_s: list[float] = []
        failures: list[str] = []
        sampling = asyncio.gather(
            *(self._sample(each, samples_s, failures) for each in self._samplers)
        )
        sampled_s = asyncio.ensure_future(self._seconds(sampling, began_s))
        calls = [
            self._model.forward(self._data, "importance_sampling")
            for _ in range(self._config["num_bodies"])
        ]
        for call in calls:
            try:
                await call
            except Exception as error:  # noqa: BLE001 - counted
                failures.append(f"forward: {error!r}")
        return {
            "bodies_s": time.monotonic() - began_s,
            "samples_s": await sampled_s,
            "num_samples": len(samples_s),
            "sample_median_s": statistics.median(samples_s),
            "sample_longest_s": max(samples_s),
            "failures": failures,
        }

    async def _seconds(self, work: Awaitable[Any], began_s: float) -> float:
        await work
        return time.monotonic() - began_s

    async def _sample(self, sampler: Any, samples_s: list[float], failures: list[str]) -> None:
        """Keep one sample in flight."""
        prompt = self._tinker.ModelInput.from_ints(tokens=list(range(32)))
        params = self._tinker.SamplingParams(max_tokens=SAMPLED, stop=[])
        for _ in range(self._config["samples_each"]):
            began_s = time.monotonic()
            try:
                result = await sampler.sample(prompt=prompt, num_samples=1, sampling_params=params)
            except Exception as error:  # noqa: BLE001 - counted
                failures.append(f"sample: {error!r}")
                continue
            if len(result.sequences[0].tokens) != SAMPLED:
                failures.append(f"sample: {len(result.sequences[0].tokens)} tokens")
            samples_s.append(time.monotonic() - began_s)

    def _make_data(self, num_data: int, length: int) -> list[Any]:
        tensor, rng = self._tinker.TensorData, np.random.default_rng(0)
        tokens = rng.integers(0, 256, length + 1)
        inputs = {
            "target_tokens": tensor.from_numpy(tokens[1:]),
            "logprobs": tensor.from_numpy(rng.normal(-5.5, 0.3, length).astype(np.float32)),
            "advantages": tensor.from_numpy(rng.normal(size=length).astype(np.float32)),
        }
        text = self._tinker.ModelInput.from_ints(tokens=tokens[:-1].tolist())
        return [self._tinker.Datum(model_input=text, loss_fn_inputs=inputs)] * num_data


# ------------------------------------------------------------------------------ measuring


@dataclass(slots=True)
class Memory:
    """Memory of the processes in MB, and the age of the newest heartbeat.

    Attributes:
        peak: most of each process, and most bytes of data in the store.
        oldest_beat_s: longest time since the newest heartbeat of the session.
        answers_s: time of each answer of the gateway to a call without work.
    """

    peak: dict[str, float] = field(default_factory=dict[str, float])
    oldest_beat_s: float = 0.0
    answers_s: list[float] = field(default_factory=list[float])


def memory_mb(hosted: Hosted, client: Any) -> dict[str, float]:
    """Return the resident memory of each process, and the data of the store, in MB."""
    found = {name: resident_mb(pid) for name, pid in hosted.pids.items()}
    of_store: dict[str, Any] = client.info("memory")
    return found | {"data in the store": of_store["used_memory"] / 2**20}


@contextmanager
def watched(hosted: Hosted, memory: Memory) -> Iterator[None]:
    """Read the memory, and the heartbeats of the only session, all the time in the block."""
    stopped = threading.Event()
    thread = threading.Thread(target=_watch, args=(hosted, memory, stopped))
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def _watch(hosted: Hosted, memory: Memory, stopped: threading.Event) -> None:
    from turnstream.store.client.connection import connect
    from turnstream_server.operations.keys import ALIVE

    gateway = Client(hosted.address)
    with connect(hosted.store_url) as client:
        while True:
            for name, value in memory_mb(hosted, client).items():
                memory.peak[name] = max(value, memory.peak.get(name, 0.0))
            now: Any = client.time()
            beats: Any = client.zrange(ALIVE, 0, -1, withscores=True)
            newest_s = max((score for _, score in beats), default=0.0) / 1e3
            age_s = now[0] + now[1] / 1e6 - newest_s
            memory.oldest_beat_s = max(memory.oldest_beat_s, age_s)
            began_s = time.perf_counter()
            gateway.call("client/config", sdk_version="0.38.0")
            memory.answers_s.append(time.perf_counter() - began_s)
            if stopped.wait(READ_EVERY_S):
                return


def measure_load(hosted: Hosted, sizes: dict[str, float], *, base_model: str) -> dict[str, Any]:
    """Return the answers of the client, and the memory at each stage."""
    from turnstream.store.client.connection import connect
    from turnstream_server.launch.up import API_KEY

    environment = {
        "TINKER_BASE_URL": f"http://{hosted.address}",
        "TINKER_API_KEY": API_KEY,
        "TINKER_TELEMETRY": "0",
        "HF_HUB_OFFLINE": "1",
    }
    config = {"base_model": base_model, "environment": environment, **sizes}
    role = Role(HERE, "client", config)
    memory = Memory()
    with connect(hosted.store_url) as client:
        stages = {"before": memory_mb(hosted, client)}
        with watched(hosted, memory):
            role.send({})
            found = role.receive()
        stages |= {"peak": memory.peak, "all answered": memory_mb(hosted, client)}
        role.send({"steps": 8})
        role.receive()
        time.sleep(sizes["settle_s"])
        stages["covered"] = memory_mb(hosted, client)
        role.stop()
        close_sessions(hosted.store_url)
        time.sleep(sizes["settle_s"])
        stages["session closed"] = memory_mb(hosted, client)
    return {
        **sizes,
        **found,
        "oldest_beat_s": memory.oldest_beat_s,
        "answer_median_ms": 1e3 * statistics.median(memory.answers_s),
        "answer_longest_ms": 1e3 * max(memory.answers_s),
        "memory_mb": stages,
    }


def close_sessions(store_url: str) -> None:
    """Close all sessions, as a gateway does after ten minutes without a heartbeat."""
    from turnstream.store.client.connection import connect_async
    from turnstream_server.operations.sessions import close_silent

    async def close() -> None:
        async with connect_async(store_url) as client:
            for _ in range(2):  # the first call finds that they are silent
                await close_silent(client, silence_s=1.0)
                await asyncio.sleep(1.5)

    time.sleep(1.5)
    asyncio.run(close())


def main() -> None:
    """Serve as the client."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--role", choices=["client"], required=True)
    parser.parse_args()
    os.environ.setdefault("PYTHONDONTWRITEBYTECODE", "1")
    serve_role(lambda config: LoadClient(config).work)


if __name__ == "__main__":
    main()
