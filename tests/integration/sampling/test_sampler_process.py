"""The process `turnstream serve sampler`."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from testkit import wait_until
from testkit.services.forked import popen
from testkit.training.sampling import ModelFolders, SamplingClient, sample_request
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.models.sampling_params import SamplingParams
from turnstream_server.sampling.snapshots import Snapshots

PROMPT = [*b"once"]


def params(number: int) -> SamplingParams:
    """Return parameters: the first samples are short, and the others are unfinished then."""
    return SamplingParams(seed=number, max_tokens=8 if number < 3 else 120, stop_ids=())


@contextlib.contextmanager
def sampler(
    url: str, base_model: str, models: ModelFolders, log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    words = ["serve", "sampler", "--redis", url, "--base-model", f"{base_model}={models.base}"]
    words += ["--folder", str(models.shared), "--name", "s0", "--threads", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (
        log.open("ab") as written,
        popen(
            [sys.executable, "-m", "turnstream_server.cli", *words], stderr=written, env=environment
        ) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.slow
def test_killed_sampler_restarts_and_each_sample_has_one_result(
    models: ModelFolders,
    client: redis.Redis,
    server: EmbeddedServer,
    sessions: SamplingClient,
    tmp_path: Path,
) -> None:
    """Takes more than 5 s: a sampler is killed and restarted, and all samples are repeated."""
    calls = [(("one", "two", None)[number % 3], PROMPT, params(number)) for number in range(40)]
    sampled = sessions.submit(*calls)

    with sampler(server.url, sessions.base_model, models, tmp_path / "log") as process:
        wait_until(
            lambda: process.poll() is not None or any(map(sessions.stored, sampled)),
            timeout_s=90,
            describe="the first result",
        )
        process.kill()
        process.wait()
    early = {each: sessions.stored(each) for each in sampled if sessions.stored(each)}
    assert 0 < len(early) < len(sampled), (tmp_path / "log").read_text()
    with sampler(server.url, sessions.base_model, models, tmp_path / "log") as process:
        wait_until(lambda: sessions.stored(sampled[-1]), timeout_s=90, describe="the last result")
        results = [sessions.result(each) for each in sampled]
        wait_until(lambda: sessions.num_queued() == 0, describe="an empty queue")
        process.terminate()
        assert process.wait(10) == 0

    with Snapshots(models.base, shared=models.shared) as engine:
        again = [engine.submit(sample_request(*call)) for call in calls]
        for result, future in zip(results, again, strict=True):
            expected = future.result(60).sequences[0].token_ids.tolist()
            assert result.sequences[0].token_ids.tolist() == expected
