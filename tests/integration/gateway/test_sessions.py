"""Sessions: their end, by the client or by silence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from testkit import wait_until
from testkit.services.gateway_thread import GatewayThread
from testkit.training.canned_worker import CannedWorker


def test_a_session_without_heartbeats_is_closed(
    worker: CannedWorker, new_gateway: Callable[..., GatewayThread], new_api: Callable[..., Any]
):
    api = new_api(new_gateway(session_silence_s=1.0))
    silent, alive = api.session(), api.session()
    model, sampler = api.model(silent), api.sampler(silent)
    trained = api.train(model, 1).json()["request_id"]
    sampled = api.sample(sampler, 1).json()["request_id"]
    statuses: list[int] = []

    def is_closed() -> bool:
        statuses.append(api.post("session_heartbeat", session_id=alive).status_code)
        return api.train(model, 2).status_code == 400

    wait_until(is_closed)
    polls = [api.post("retrieve_future", request_id=each) for each in (trained, sampled)]
    beat = api.post("session_heartbeat", session_id=silent)
    sample = api.sample(sampler, 2)

    assert set(statuses) == {200}
    wait_until(lambda: api.post("retrieve_future", request_id=trained).status_code == 410)
    assert {each.status_code for each in polls} <= {200, 410}
    assert (beat.status_code, sample.status_code) == (410, 400)
    assert "no heartbeat" in beat.json()["detail"]


def test_a_finished_session_takes_no_work_and_keeps_its_first_reason(api: Any):
    session = api.session()
    model, sampler = api.model(session), api.sampler(session)
    trained = api.train(model, 1).json()["request_id"]

    for reason, detail in (("errored", "out of coffee"), ("success", None)):
        api.answer(f"sessions/{session}/finish", reason={"type": reason}, detail=detail)
    refused = [
        api.train(model, 2),
        api.sample(sampler, 1),
        api.post("save_weights", model_id=model, seq_id=2, path="s"),
        api.post("create_model", session_id=session, model_seq_id=3, base_model=api.base.name),
    ]

    assert [each.status_code for each in refused] == [400] * 4
    assert all("errored: out of coffee" in each.json()["detail"] for each in refused)
    assert api.post("session_heartbeat", session_id=session).status_code == 410
    assert api.result(trained)["metrics"] == {"loss:sum": 11.0}


def test_a_session_lists_its_models_and_samplers(api: Any):
    api.model()  # in an older session, which is listed after this one
    session = api.answer(
        "create_session",
        tags=["a"],
        user_metadata={"text": "x", "number": 3},
        sdk_version="0.38.0",
        display_name="run.py",
    )["session_id"]
    model = api.model(session)
    save = {"sampling_session_seq_id": 5, "kind": "inflight"}
    saved = api.answer("save_weights_for_sampler", model_id=model, seq_id=1, **save)

    sampler = api.result(saved["request_id"])["sampling_session_id"]

    assert api.get(f"sessions/{session}") == {
        "training_run_ids": [model],
        "sampler_ids": [sampler],
        "user_metadata": {"text": "x", "number": "3"},
        "display_name": "run.py",
    }
    assert api.get("sessions?limit=1")["sessions"] == [session]
    assert api.get(f"samplers/{sampler}") == {
        "sampler_id": f"{session}:sample:5",
        "base_model": api.base.name,
        "model_path": None,
    }


def test_the_client_receives_its_settings(api: Any):
    config = api.answer("client/config", sdk_version="0.38.0")
    dynamic = api.answer("client/dynamic_config", sdk_version="0.38.0")
    telemetry = api.answer("telemetry", events=[], session_id="sessionless-1")
    unknown = api.post("session_heartbeat", session_id="none")
    no_text = api.http.post("session_heartbeat", content=b'{"session_id": "\\ud800"}')

    assert config["parallel_fwdbwd_chunks"] is True
    assert dynamic["sample_cancel_enabled"] is False
    assert telemetry == {"status": "accepted"}
    assert (unknown.status_code, no_text.status_code) == (404, 400)
