"""Requests to the REST API, and the messages of its event streams."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple, Self

import httpx2

from testkit.services.gateway_thread import GatewayThread


class RestApi:
    """A client of a gateway; without a `writer`, its name is that of the key."""

    def __init__(self, gateway: GatewayThread, *, key: str = "", writer: str = "") -> None:
        headers = {"X-API-Key": key, "X-Turnstream-Writer": writer}
        self.http = httpx2.Client(
            base_url=f"{gateway.base_url}/v1/",
            headers={name: value for name, value in headers.items() if value},
            timeout=60,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.http.close()

    def get(self, path: str, **query: Any) -> Any:
        """Return the content of an accepted GET."""
        return content_of(self.http.get(path, params=query))

    def post(self, path: str, **fields: Any) -> Any:
        """Return the content of an accepted POST of a JSON object."""
        return content_of(self.http.post(path, json=fields))

    def refused(self, method: str, path: str, status: int, **fields: Any) -> dict[str, Any]:
        """Return the problem document of a refused request."""
        response = self.http.request(method, path, json=fields or None)
        assert response.status_code == status, response.text
        assert response.headers["content-type"] == "application/problem+json"
        problem = response.json()
        assert problem["status"] == status
        return problem


class Message(NamedTuple):
    """A message of an event stream; a comment is its event `comment`."""

    id: str
    event: str
    data: Any


def messages_of(response: httpx2.Response) -> Iterator[Message]:
    """Yield the messages of an event stream as they come, until it ends."""
    fields: dict[str, str] = {}
    for line in response.iter_lines():
        if line:
            name, _, value = line.partition(": ")
            fields[name or "event"] = value if name else "comment"
            continue
        data = fields.get("data")
        yield Message(
            fields.get("id", ""), fields["event"], None if data is None else json.loads(data)
        )
        fields = {}


def content_of(response: httpx2.Response) -> Any:
    """Return the content of an accepted request."""
    assert response.is_success, response.text
    return response.json()
