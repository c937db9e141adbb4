"""The Tinker API as a client without an SDK calls it."""

from __future__ import annotations

from typing import Any

import httpx2

from testkit.services.gateway_thread import GatewayThread
from turnstream_server.operations.models import BaseModel


class Api:
    """Requests of one key.

    Args:
        gateway: where they go.
        base: the served base model.
        key: key of the caller; "" for none.
    """

    def __init__(self, gateway: GatewayThread, base: BaseModel, *, key: str) -> None:
        headers = {"Content-Type": "application/json"} | ({"X-API-Key": key} if key else {})
        self.base = base
        self.http = httpx2.Client(
            base_url=f"{gateway.base_url}/api/v1/", headers=headers, timeout=60
        )

    def post(self, route: str, **content: Any) -> httpx2.Response:
        """Return the response to a JSON body."""
        return self.http.post(route, json=content)

    def get(self, route: str) -> Any:
        """Return the answer of an accepted GET."""
        response = self.http.get(route)
        assert response.status_code == 200, response.text
        return response.json()

    def answer(self, route: str, **content: Any) -> Any:
        """Return the answer of an accepted request."""
        response = self.post(route, **content)
        assert response.status_code == 200, response.text
        return response.json()

    def result(self, request_id: str) -> Any:
        """Return the result of a request, as an old SDK does; 408 is repeated."""
        response = self.post("retrieve_future", request_id=request_id)
        while response.status_code == 408:
            response = self.post("retrieve_future", request_id=request_id)
        assert response.status_code == 200, response.text
        return response.json()

    def session(self) -> str:
        """Open a session, and return its id."""
        return self.answer("create_session", tags=[], user_metadata={"a": "b"})["session_id"]

    def model(self, session_id: str = "", number: int = 0, **fields: Any) -> str:
        """Make a model, and return its id once it exists."""
        content = {
            "session_id": session_id or self.session(),
            "model_seq_id": number,
            "base_model": self.base.name,
            "lora_config": {"rank": 8},
            **fields,
        }
        return self.result(self.answer("create_model", **content)["request_id"])["model_id"]

    def train(
        self,
        model_id: str,
        number: int,
        *,
        token: int = 5,
        loss: str = "cross_entropy",
        num_datums: int = 1,
        num_tokens: int = 2,
    ) -> httpx2.Response:
        """Submit a training call, as a release before 0.25 does."""
        targets = {"data": [token + place for place in range(num_tokens)], "dtype": "int64"}
        datum = {
            "model_input": {"chunks": [{"tokens": [token] * num_tokens}]},
            "loss_fn_inputs": {"target_tokens": targets},
        }
        sent = {"data": [datum] * num_datums, "loss_fn": loss}
        return self.post(
            "forward_backward", model_id=model_id, seq_id=number, forward_backward_input=sent
        )

    def sampler(self, session_id: str = "") -> str:
        """Make a sampling session of the base model, and return its id."""
        return self.answer(
            "create_sampling_session",
            session_id=session_id or self.session(),
            sampling_session_seq_id=0,
            base_model=self.base.name,
        )["sampling_session_id"]

    def sample(
        self,
        sampler_id: str,
        number: int,
        *,
        tokens: tuple[int, ...] = (1, 2),
        num_samples: int = 1,
        topk_sample_logprobs: int = 0,
        **params: Any,
    ) -> httpx2.Response:
        """Submit a sample of two tokens."""
        return self.post(
            "asample",
            sampling_session_id=sampler_id,
            seq_id=number,
            num_samples=num_samples,
            topk_sample_logprobs=topk_sample_logprobs,
            prompt={"chunks": [{"tokens": tokens, "type": "encoded_text"}]},
            sampling_params={"max_tokens": 2, **params},
        )
