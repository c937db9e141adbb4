"""Saved checkpoints of hosted models: bit-exact, refused to others, removed when due."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pyrage
import pytest
import redis
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from testkit.training.hosted import OWNER, STEP, ModelHost, datums, save
from turnstream.store.client.connection import connect_async
from turnstream_server.engine.loop import remove_due
from turnstream_server.models.folders import is_adapter_folder
from turnstream_server.operations.checkpoints import (
    CheckpointPath,
    delete_checkpoint,
    folder_of,
    read_checkpoint,
    session_folder,
)
from turnstream_server.operations.contents import (
    CreateModel,
    LoadWeights,
    SaveExternal,
    SaveForSampler,
)
from turnstream_server.operations.samplers import SamplerRecord, read_sampler

A, B, C = datums(1, 5, 3), datums(2, 4), datums(3, 6, 2)


@pytest.mark.parametrize("full", [False, True])
def test_loaded_checkpoint_continues_bit_exactly(model_host: ModelHost, full: bool) -> None:
    fields: dict[str, Any] = {"lora_rank": 0} if full else {}
    model = model_host.make(A, STEP, save("mid"), B, STEP, save("end"), **fields)
    model_host.run(model, full=full)
    mid, end = model.saved("mid"), model.saved("end")

    load = LoadWeights(model.path("mid"), optimizer=True)
    model.submit(C, load, save("back"), B, STEP, save("again"))
    create = CreateModel(path=model.path("mid"), optimizer=True)
    other = model_host.make(B, STEP, save("end"), create=create, **fields)
    model_host.run(model, other, full=full)

    assert not equal(mid, end)
    assert equal(model.saved("back"), mid)
    assert equal(model.saved("again"), end)
    assert equal(other.saved("end"), end)
    assert other.answer(0).content == {
        "path": str(model.path("mid")),
        "model_id": other.record.model_id,
        "type": "load_weights",
    }


def test_load_without_optimizer_begins_with_zero_moments(model_host: ModelHost) -> None:
    model = model_host.make(A, STEP, save("mid"))
    model.submit(LoadWeights(model.path("mid"), optimizer=False), save("back"), B, STEP)

    model_host.run(model)

    mid, back = model.saved("mid"), model.saved("back")
    assert int(back.pop("steps")) == 0
    assert all(".lora_" in name for name in back)
    assert all(torch.equal(mid[name], value) for name, value in back.items())
    assert model.answer(4).content["type"] == "load_weights"
    assert model.answer(7).content["metrics"]["skipped"] == 0


def test_checkpoints_of_another_kind_or_owner_are_refused(model_host: ModelHost) -> None:
    sampler = SaveForSampler("s", None, "snapshot", None, {})
    owner = model_host.make(A, STEP, save("mid"), sampler)
    model_host.run(owner)
    path = owner.path("mid")
    load, missing = LoadWeights(path, optimizer=True), LoadWeights(owner.path("no"), optimizer=True)
    of_sampler = LoadWeights(path._replace(kind="sampler_weights", name="s"), optimizer=False)

    stranger = model_host.make(load, A, STEP, owner="owner-b")
    other_rank = model_host.make(load, lora_rank=2)
    same = model_host.make(missing, of_sampler, A, STEP)
    model_host.run(stranger, other_rank, same)

    assert "no checkpoint" in stranger.failure(1).error
    assert stranger.answer(3).content["metrics"]["skipped"] == 0
    assert "lora_rank of the checkpoint" in other_rank.failure(1).error
    assert "is 4, expected 2" in other_rank.failure(1).error
    assert "no checkpoint" in same.failure(1).error
    assert "expected .../weights/<name>" in same.failure(2).error
    assert same.answer(4).content["metrics"]["skipped"] == 0


def test_taken_name_is_refused_unless_it_is_replaced(
    model_host: ModelHost, client: redis.Redis
) -> None:
    model = model_host.make(save("a"), A, STEP, save("a"), save("b", overwrite=True))
    model.submit(save("a", overwrite=True))

    model_host.run(model)

    assert model.failure(4).category == "user"
    assert "name is 'a'" in model.failure(4).error
    assert equal(model.saved("a"), model.saved("b"))
    saved = read_checkpoint(client, OWNER, model.path("a"))
    assert saved.request_id.endswith(":train:0:6")
    assert (saved.base_model, saved.lora_rank, saved.expires_ms) == (model_host.name, 4, None)
    assert saved.size_bytes > 1000


def test_exported_adapter_is_read_by_peft_on_its_base_model(
    model_host: ModelHost, client: redis.Redis, tmp_path: Path
) -> None:
    identity: Any = pyrage.x25519.Identity.generate()  # pyright: ignore[reportAttributeAccessIssue]
    model = model_host.make(A, STEP, save("kept"), SaveExternal("out", 3600, []))
    model.submit(SaveExternal("secret", None, [str(identity.to_public())]))
    model.submit(SaveExternal("out", None, []), B, STEP)

    model_host.run(model)

    path = CheckpointPath(model.record.model_id, "external_weights", "out")
    assert model.answer(4).content == {"path": str(path), "type": "save_weights_external"}
    plain, secret = (
        model_host.root / folder_of(each) for each in (path, path._replace(name="secret"))
    )
    assert {each.name for each in secret.iterdir()} == {
        f"{each.name}.age" for each in plain.iterdir()
    }
    for each in plain.iterdir():
        encrypted = (secret / f"{each.name}.age").read_bytes()
        assert pyrage.decrypt(encrypted, [identity]) == each.read_bytes()  # pyright: ignore[reportAttributeAccessIssue]
    config = json.loads((plain / "adapter_config.json").read_bytes())
    assert config["base_model_name_or_path"] == model_host.name
    base = AutoModelForCausalLM.from_pretrained(model_host.base)
    tuned = PeftModel.from_pretrained(base, plain).state_dict()
    kept = {name: value for name, value in model.saved("kept").items() if ".lora_" in name}
    for name, value in kept.items():
        torch.testing.assert_close(tuned[name.replace(".weight", ".default.weight")], value)
    saved = read_checkpoint(client, OWNER, path)
    assert saved.size_bytes == sum(each.stat().st_size for each in plain.iterdir())
    assert saved.expires_ms == saved.created_ms + 3_600_000
    assert "name is 'out'" in model.failure(6).error
    assert model.answer(8).content["metrics"]["skipped"] == 0


def test_weights_for_samplers_have_a_path_or_a_session(model_host: ModelHost) -> None:
    named = SaveForSampler("s", None, "snapshot", 3600, {"k": "v"})
    anonymous = SaveForSampler("", 7, "snapshot", None, {})
    model = model_host.make(A, STEP, named, anonymous)

    model_host.run(model)

    model_id = model.record.model_id
    session = model.session
    path = CheckpointPath(model_id, "sampler_weights", "s")
    assert model.answer(3).content["path"] == str(path)
    answer = model.answer(4).content
    assert (answer["sampling_session_id"], answer["path"]) == (f"{session}:sample:7", None)
    folder = session_folder(model_id, 7)
    expected = SamplerRecord(f"{session}:sample:7", model_host.name, OWNER, folder=str(folder))
    assert (
        run_async(model_host, lambda client: read_sampler(client, f"{session}:sample:7"))
        == expected
    )
    for each in (folder, folder_of(path)):
        assert is_adapter_folder(model_host.root / each)
        assert not (model_host.root / each / "optimizer.pt").exists()


def test_deleted_checkpoint_is_removed_and_its_name_is_free(
    model_host: ModelHost, client: redis.Redis
) -> None:
    model = model_host.make(save("a"))
    model_host.run(model)
    folder = model_host.root / folder_of(model.path("a"))
    delete_checkpoint(client, OWNER, model.path("a"))

    remove_due(client, model_host.root, is_held=lambda _: False)
    kept_for_its_worker = folder.is_dir()
    remove_due(client, model_host.root, is_held=lambda _: True)
    removed = not folder.exists()
    model.submit(save("a"))
    model_host.run(model)

    assert kept_for_its_worker
    assert removed
    assert model.answer(2).content["path"] == str(model.path("a"))
    assert folder.is_dir()


def test_ended_session_unloads_its_model_and_keeps_its_saves(model_host: ModelHost) -> None:
    model = model_host.make(A, STEP, save("kept"), SaveForSampler("", 0, "snapshot", None, {}))
    other = model_host.make(A)
    durable = model_host.root / "models"

    def ends_it() -> bool:
        if len(model.stored_results()) == model.num_operations:
            model.end_session()
        return len(other.stored_results()) == 2 and len([*durable.iterdir()]) == 1

    model_host.run(until=ends_it)
    other.submit(B, STEP)
    model_host.run(other)

    assert "kept" in [each.name for each in model_host.root.glob("saved/*/weights/*")]
    assert [*model_host.root.glob("saved/*/session_weights")] == []
    assert other.answer(3).content["metrics"]["skipped"] == 0


def test_files_of_a_session_that_ended_without_a_worker_are_removed(model_host: ModelHost) -> None:
    model = model_host.make(A, STEP)
    model_host.run(model)
    durable = model_host.root / "models"
    had_files = [*durable.iterdir()] != []

    model.end_session()
    model_host.run(until=lambda: [*durable.iterdir()] == [])

    assert had_files


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(value, other[name]) for name, value in one.items()
    )


def run_async(model_host: ModelHost, call: Any) -> Any:
    async def connected() -> Any:
        async with connect_async(model_host.url) as client:
            return await call(client)

    return asyncio.run(connected())
