"""Models and saved checkpoints."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest
import redis

from testkit.services.gateway_thread import GatewayThread
from testkit.training.canned_worker import CannedWorker
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.operations.models import BaseModel, read_model


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"base_model": "no/such"}, "base_model is 'no/such', which is not served; served: "),
        ({"lora_config": {"rank": 65}}, "lora_config.rank is 65, expected 1 to 64"),
        ({"lora_config": {"rank": 0}}, "lora_config.rank is 0"),
        ({"lora_config": {"rank": 8.5}}, "lora_config.rank"),
        ({"lora_config": {"seed": 2**63}}, "lora_config.seed"),
        (
            {"lora_config": {"train_attn": False, "train_mlp": False, "train_unembed": False}},
            "are all false",
        ),
        ({"optimizer_config": {"type": "dimuon"}}, "'dimuon' is not supported, only 'adamw'"),
        ({"model_seq_id": -1}, "model_seq_id"),
    ],
)
def test_a_model_that_cannot_be_made_is_refused(api: Any, change: dict[str, Any], words: str):
    content = {"session_id": api.session(), "model_seq_id": 0, "base_model": api.base.name}

    answer = api.post("create_model", **{**content, **change})

    assert answer.status_code == 400
    assert words in answer.json()["detail"]


def test_a_repeated_creation_is_the_same_model(api: Any, client: redis.Redis):
    content = {"session_id": api.session(), "model_seq_id": 0, "base_model": api.base.name}

    first, again = (api.answer("create_model", **content) for _ in range(2))
    other = api.post("create_model", **content, lora_config={"rank": 4})
    second = api.model(content["session_id"], 1)

    assert first == again
    assert other.status_code == 400
    models = [read_model(client, each) for each in (first["model_id"], second)]
    assert models[0].lora_rank == 32
    assert models[0].lora_seed != models[1].lora_seed


def test_workers_of_whole_models_ignore_the_rank(
    server: EmbeddedServer, gateway: GatewayThread, base: BaseModel, new_api: Callable[..., Any]
):
    whole = base._replace(max_rank=0, tokenizer_id="/models/byte")
    with CannedWorker(server.url, whole):
        api = new_api(gateway)

        info = api.answer("get_info", model_id=api.model())

    assert (info["is_lora"], info["lora_rank"]) == (False, None)
    assert info["model_data"] == {"model_name": base.name, "tokenizer_id": "/models/byte"}


def test_a_model_is_made_from_a_checkpoint(api: Any, client: redis.Redis):
    trained = api.model(lora_config={"rank": 16, "train_mlp": False})
    save = api.answer("save_weights", model_id=trained, seq_id=1, path="s")["request_id"]
    sampler_save = api.answer("save_weights_for_sampler", model_id=trained, seq_id=2, path="s")
    path = api.result(save)["path"]
    sampler_path = api.result(sampler_save["request_id"])["path"]
    content = {"session_id": api.session(), "model_seq_id": 0, "optimizer": True}

    made = api.answer("load_weights", **content, path=path, model_id=None, seq_id=None)
    content["model_seq_id"] = 1
    refused = [
        api.post("load_weights", **content, path=sampler_path),
        api.post("load_weights", **content, path=path, base_model="other"),
        api.post("load_weights", **content, path="s"),
    ]
    missing = api.post("load_weights", **content, path=path.replace("/s", "/t"))

    model = read_model(client, api.result(made["request_id"])["model_id"])
    assert (model.lora_rank, model.train_mlp) == (16, False)
    assert [each.status_code for each in refused] == [400] * 3
    assert missing.status_code == 404


def test_checkpoints_are_listed_changed_and_deleted(
    gateway: GatewayThread, worker: CannedWorker, new_api: Callable[..., Any]
):
    api = new_api(gateway, key="tml-checkpoints")
    model = api.model(user_metadata={"renderer_name": "role_colon"})
    saves = (("save_weights", {"ttl_seconds": 4000}), ("save_weights_for_sampler", {}))
    for number, (route, content) in enumerate(saves, 1):
        save = api.answer(route, model_id=model, seq_id=number, path="s1", **content)
        api.result(save["request_id"])
    folder = f"training_runs/{model}/checkpoints"

    statuses = {
        seconds: api.http.put(f"{folder}/weights/s1/ttl", json={"ttl_seconds": seconds}).status_code
        for seconds in (3599, 3600, 315_360_000, 315_360_001, None, "3600")
    }
    api.answer(f"{folder}/sampler_weights/s1/publish")
    run, listed = api.get(f"training_runs/{model}"), api.get("checkpoints")
    info = api.answer("weights_info", tinker_path=f"tinker://{model}/weights/s1")
    deleted = [api.http.delete(f"{folder}/weights/s1").status_code for _ in range(2)]
    api.http.delete(f"{folder}/sampler_weights/s1/publish")

    assert statuses == {
        3599: 400, 3600: 200, 315_360_000: 200, 315_360_001: 400, None: 200, "3600": 400
    }  # fmt: skip
    assert run["user_metadata"] == {"renderer_name": "role_colon"}
    assert run["last_checkpoint"]["checkpoint_id"] == "weights/s1"
    assert run["last_sampler_checkpoint"]["public"] is True
    assert datetime.fromisoformat(run["last_request_time"]).tzinfo is not None
    assert listed["cursor"] == {"offset": 0, "limit": 100, "total_count": 2}
    assert {each["checkpoint_type"] for each in listed["checkpoints"]} == {"training", "sampler"}
    assert {each["expires_at"] for each in listed["checkpoints"]} == {None}
    assert (info["base_model"], info["lora_rank"], info["train_mlp"]) == (api.base.name, 8, True)
    assert deleted == [204, 404]
    (left,) = api.get(folder)["checkpoints"]
    assert (left["checkpoint_id"], left["public"]) == ("sampler_weights/s1", False)
    assert api.http.delete(f"{folder}/other/s1").status_code == 404


def test_published_checkpoint_serves_other_keys_until_it_is_not(
    api: Any, gateway: GatewayThread, new_api: Callable[..., Any]
):
    model, other = api.model(), new_api(gateway, key="tml-reader")
    own_model, session = other.model(), other.session()
    save = api.answer("save_weights", model_id=model, seq_id=1, path="s1")["request_id"]
    path = api.result(save)["path"]
    publish = f"training_runs/{model}/checkpoints/weights/s1/publish"
    numbers = itertools.count(1)

    def uses() -> list[int]:
        number = next(numbers)
        load = {"model_id": own_model, "seq_id": number, "path": path, "optimizer": False}
        loaded = other.result(other.answer("load_weights", **load)["request_id"])
        new = {"session_id": session, "model_seq_id": number, "path": path}
        sampler = {"session_id": session, "sampling_session_seq_id": number, "model_path": path}
        return [
            400 if "error" in loaded else 200,
            other.post("load_weights", **new).status_code,
            other.post("create_sampling_session", **sampler).status_code,
            other.post("weights_info", tinker_path=path).status_code,
        ]

    before = uses()
    api.answer(publish)
    published = uses()
    changes = [
        other.http.delete(publish).status_code,
        other.http.delete(publish.removesuffix("/publish")).status_code,
        other.http.put(publish.replace("publish", "ttl"), json={"ttl_seconds": 4000}).status_code,
    ]
    api.http.delete(publish)

    assert before == [400, 404, 404, 404]
    assert published == [200] * 4
    assert changes == [404] * 3
    assert uses() == before


def test_runs_are_listed_in_pages(
    gateway: GatewayThread, worker: CannedWorker, new_api: Callable[..., Any]
):
    api = new_api(gateway, key="tml-pages")
    session = api.session()
    models = [api.model(session, number) for number in range(3)]

    page = api.get("training_runs?limit=2&offset=1&access_scope=owned")
    wrong = [api.http.get(f"training_runs?{query}") for query in ("limit=-1", "offset=x")]

    assert [each["training_run_id"] for each in page["training_runs"]] == models[1::-1]
    assert api.get("training_runs?limit=0")["training_runs"] == []
    assert page["cursor"] == {"offset": 1, "limit": 2, "total_count": 3}
    assert [each.status_code for each in wrong] == [422, 422]
    assert wrong[0].json()["detail"].startswith("query.limit: ")
    assert "got 'x'" in wrong[1].json()["detail"]


def test_sampling_sessions_are_made_of_served_weights(api: Any):
    model = api.model()
    save = api.answer("save_weights", model_id=model, seq_id=1, path="s")["request_id"]
    path = api.result(save)["path"]
    content = {"session_id": api.session(), "sampling_session_seq_id": 0}

    both = api.answer("create_sampling_session", **content, base_model="x", model_path=path)
    statuses = [
        api.post("create_sampling_session", **content, **source).status_code
        for source in ({}, {"base_model": "x"}, {"model_path": "x"}, {"model_path": f"{path}2"})
    ]

    assert api.get(f"samplers/{both['sampling_session_id']}")["model_path"] == path
    assert statuses == [400, 400, 400, 404]
