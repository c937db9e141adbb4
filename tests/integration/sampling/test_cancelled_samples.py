"""Samples that are cancelled through a gateway, while an engine samples them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import redis

from testkit import wait_until
from testkit.requests.tinker_api import Api
from testkit.services import gateways
from testkit.services.gateway_thread import GatewayThread
from testkit.training.sampling import ModelFolders, SamplingClient
from turnstream_server.models.continuous_batch import ContinuousBatch
from turnstream_server.operations.models import BaseModel, register_base
from turnstream_server.sampling import service
from turnstream_server.sampling.snapshots import Snapshots

new_gateway, gateway = gateways.new_gateway, gateways.gateway


class Steps:
    """Decode steps that run only as the test lets them.

    Attributes:
        sizes: running sequences at the beginning of each step.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        self.is_free = False
        self._may_run = threading.Semaphore(0)
        plain = ContinuousBatch.step

        def step(batch: ContinuousBatch) -> None:
            if not self.is_free:
                self._may_run.acquire()
            self.sizes.append(len(batch.running))
            plain(batch)

        monkeypatch.setattr(ContinuousBatch, "step", step)

    def run(self, count: int) -> list[int]:
        """Run as many steps; return the running sequences at the beginning of each."""
        wanted = len(self.sizes) + count
        for _ in range(count):
            self._may_run.release()
        wait_until(lambda: len(self.sizes) == wanted, describe=f"{count} steps")
        return self.sizes[-count:]

    def close(self) -> None:
        """Let all further steps run."""
        self.is_free = True
        self._may_run.release()


def test_cancelled_sample_is_in_one_more_step_at_most(
    models: ModelFolders,
    client: redis.Redis,
    sessions: SamplingClient,
    gateway: GatewayThread,
    looping: Callable[..., AbstractContextManager[None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "_CHECK_S", 1e9)  # the notice alone
    steps = Steps(monkeypatch)
    base = BaseModel(sessions.base_model, 4096, 300, tokenizer_id="", max_rank=0)
    register_base(client, base)
    api = Api(gateway, base, key="tml-own")

    def sample() -> tuple[str, str]:
        """Submit a long sample in a session of its own; return the ids of session and request."""
        session = api.session()
        sent = api.sample(api.sampler(session), 1, max_tokens=4000, stop=[], seed=1)
        return session, sent.json()["request_id"]

    with (
        api.http,
        Snapshots(models.base, shared=models.shared) as engine,
        looping(client, base.name, engine),
        contextlib.closing(steps),
    ):
        (_, cancelled), (finished, _), (_, last) = (sample() for _ in range(3))
        wait_until(lambda: sessions.num_running() == 3, describe="three samples")
        wait_until(lambda: steps.run(1) == [3], describe="a step of three sequences")

        api.answer("cancel_future", request_id=cancelled)
        wait_until(lambda: sessions.num_queued() == 2, describe="the end of the cancelled one")
        assert steps.run(2) == [3, 2]

        api.answer(f"sessions/{finished}/finish", reason={"type": "success"})
        wait_until(lambda: sessions.num_queued() == 1, describe="the end of its session's sample")
        assert steps.run(2) == [2, 1]

        api.answer("cancel_future", request_id=last)
