"""Requests to plan again after damage, and their answers."""

from __future__ import annotations

import json
import time
import uuid
from typing import Any

import redis

from turnstream.errors import ConflictError, NotReadyError
from turnstream.store.client import keys
from turnstream.store.client.replies import translating
from turnstream_server.ledger.core.scan import RunScript
from turnstream_server.ledger.leadership.writes import Changes

_REQUEST = RunScript("request_replan", "planning", "frontier wake")


def request_replan(client: redis.Redis, run: str) -> str:
    """Request a replan from the first damaged step on; return the name of the pending request."""
    return _REQUEST.call(client, run, uuid.uuid4().hex).decode()


def await_replan(client: redis.Redis, run: str, request: str, *, wait_s: float) -> str:
    """Wait for the answer to a request; return the steps that are planned again.

    Raises:
        ConflictError: the leader refuses the request.
        NotReadyError: no leader has answered; the request stays.
    """
    end_s = time.monotonic() + wait_s
    while True:
        with translating():
            answer: Any = client.hget(keys.run_keys(run).frontier, "replanned")
        name, _, text = (answer or b"").decode().partition(":")
        if name == request:
            content: dict[str, str] = json.loads(text)
            if "refused" in content:
                raise ConflictError(content["refused"])
            return content.get("done", text)  # an earlier release has other fields
        if time.monotonic() >= end_s:
            raise NotReadyError(
                f"no batcher has answered within {wait_s:g} s; the request is kept, and the next "
                f"batcher that plans run {run!r} executes it"
            )
        time.sleep(0.2)


def answered(request: str, **content: str) -> Changes:
    """Return the writes that answer a pending request: `refused` or `done`, and a sentence."""
    changes = Changes()
    changes.expect("frontier", "replan", request.encode())
    changes.write("HDEL", "frontier", "replan")
    changes.write("HSET", "frontier", "replanned", f"{request}:{json.dumps(content)}")
    changes.wake()
    return changes
