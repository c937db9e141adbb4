"""Snapshots that are loaded, unloaded, loaded again and gone."""

from __future__ import annotations

import shutil
from concurrent.futures import Future
from pathlib import Path

import pytest

from testkit.training.sampling import ModelFolders, sample_request
from turnstream.errors import InvalidConfigError, RunNotFoundError, TurnstreamError
from turnstream_server.models.sampling_params import SampleResult, SamplingParams
from turnstream_server.sampling.snapshots import Snapshots

PROMPT = [*b"abc"]
PARAMS = SamplingParams(max_tokens=8, seed=1, stop_ids=())


def start(
    engine: Snapshots, name: str | None, params: SamplingParams = PARAMS
) -> Future[SampleResult]:
    return engine.submit(sample_request(name, PROMPT, params))


def tokens(engine: Snapshots, name: str | None) -> list[int]:
    return start(engine, name).result(60).sequences[0].token_ids.tolist()


def test_oldest_snapshots_are_unloaded_and_load_again(models: ModelFolders) -> None:
    names = [None, "one", "whole", "two", "other"]
    with Snapshots(models.base, shared=models.shared) as engine:
        expected = [tokens(engine, name) for name in names]
        assert engine.num_loaded == 4

    with Snapshots(models.base, shared=models.shared, max_adapters=1, max_models=1) as engine:
        for _ in range(2):
            assert [tokens(engine, name) for name in names] == expected
            assert engine.num_loaded == 2


def test_snapshot_with_unfinished_samples_is_not_unloaded(models: ModelFolders) -> None:
    long = SamplingParams(max_tokens=300, stop_ids=())
    with Snapshots(models.base, shared=models.shared, max_adapters=1) as engine:
        tokens(engine, "one")
        running = [start(engine, "one", long) for _ in range(4)]
        waiting = start(engine, "two")
        assert len(tokens(engine, None)) == 8

        assert len(waiting.result(60).sequences[0].token_ids) == 8
        for future in running:
            assert len(future.result(0).sequences[0].token_ids) == 300


def test_cancelled_samples_free_their_snapshot(models: ModelFolders) -> None:
    endless = SamplingParams(max_tokens=4000, stop_ids=(), num_samples=4096)
    with Snapshots(models.base, shared=models.shared, max_adapters=1) as engine:
        # The first loads the snapshot. The snapshot of the second waits for it.
        loading, later = start(engine, "one", endless), start(engine, "two", endless)
        assert len(tokens(engine, None)) == 8

        assert loading.cancel()
        assert later.cancel()

        assert len(tokens(engine, "two")) == 8


def test_folder_that_is_replaced_or_gone_is_not_sampled_from(
    models: ModelFolders, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    shutil.copytree(models.shared / "one", shared / "saved")
    with Snapshots(models.base, shared=shared) as engine:
        first = tokens(engine, "saved")
        shutil.rmtree(shared / "saved")
        with pytest.raises(RunNotFoundError, match="the checkpoint saved is gone"):
            start(engine, "saved")

        shutil.copytree(models.shared / "two", shared / "saved")
        assert tokens(engine, "saved") != first


def test_snapshot_that_does_not_load_harms_no_others(models: ModelFolders, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shutil.copytree(models.shared / "one", shared / "good")
    shutil.copytree(models.shared / "one", shared / "damaged")
    (shared / "damaged/adapter_model.safetensors").write_bytes(b"")
    (shared / "empty").mkdir()
    with Snapshots(models.base, shared=shared) as engine:
        plain, good = tokens(engine, None), tokens(engine, "good")
        for name in ("damaged", "empty"):
            with pytest.raises(TurnstreamError, match=f"{name} does not load"):
                tokens(engine, name)

        assert (tokens(engine, None), tokens(engine, "good")) == (plain, good)
        assert engine.num_loaded == 1


def test_stop_string_without_a_tokenizer_is_refused(models: ModelFolders, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(models.base, base)
    (base / "tokenizer.json").unlink()
    params = SamplingParams(max_tokens=3, stop_strings=("\n",))
    with Snapshots(base, shared=models.shared) as engine:
        with pytest.raises(InvalidConfigError, match=r"stop: '\\n' needs a tokenizer.json"):
            start(engine, "one", params)
        assert len(tokens(engine, "one")) == 8
