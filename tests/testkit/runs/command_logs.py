"""Command logs of hosted models in a store, written by programs without an event loop."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from typing import Any, Final, Self

import redis
import redis.asyncio

from turnstream.store.client.connection import connect, connect_async
from turnstream_server.operations.contents import CreateModel, OperationKind
from turnstream_server.operations.keys import RequestId, model_keys
from turnstream_server.operations.log import ModelLog, Run, submit
from turnstream_server.operations.models import ModelRecord, create_model
from turnstream_server.operations.results import Answer, Failure, decode_result
from turnstream_server.operations.sessions import Session, add_member, open_session

BASE: Final = "tiny/byte"
OWNER: Final = "0123456789abcdef0123456789abcdef"

DONE: Final = Answer({"done": True})

_numbers = itertools.count(1)

Call = Callable[[redis.asyncio.Redis], Coroutine[Any, Any, Any]]


class CommandLogs:
    """A gateway and workers of one store; a context manager."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.client = connect(url)
        self._runner = asyncio.Runner()
        self._async = connect_async(url)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._runner.run(self._async.aclose())
        self._runner.close()
        self.client.close()

    def do(self, call: Call) -> Any:
        """Return the result of an asynchronous call with a client."""
        return self._runner.run(call(self._async))

    def new_session(self) -> str:
        """Open a session, and return its id."""
        session_id = f"s{next(_numbers)}"
        self.do(lambda client: open_session(client, Session(session_id, OWNER)))
        return session_id

    def new_model(self, session_id: str | None = None, *, base_model: str = BASE) -> str:
        """Create a model, and return its id."""
        session_id = session_id or self.new_session()
        model_id = f"{session_id}:train:{next(_numbers)}"
        self.do(lambda client: add_member(client, session_id, model_id))
        record = ModelRecord(model_id, base_model, OWNER, lora_rank=4)
        content = CreateModel(path=None, optimizer=False)
        self.do(lambda client: create_model(client, record, content))
        return model_id

    def submit(
        self,
        model_id: str,
        number: int,
        kind: OperationKind = "optim_step",
        content: bytes = b"c",
        *,
        refusal: Failure | None = None,
    ) -> RequestId:
        """Submit a command, and return its request id."""
        return self.do(
            lambda client: submit(client, model_id, number, kind, content, refusal=refusal)
        )

    def acquire(self, model_id: str, worker: str = "w0", *, lease_s: float = 60.0) -> ModelLog:
        """Return the log of a model for a worker."""
        return ModelLog.acquire(self.client, model_id, worker=worker, lease_s=lease_s)

    def results(self, model_id: str) -> dict[int, Any]:
        """Return the stored results of a model by number."""
        stored: Any = self.client.hgetall(model_keys(model_id).results)
        return {int(number): decode_result(data) for number, data in stored.items()}

    def numbers_with_bodies(self, model_id: str) -> set[int]:
        """Return the numbers of the commands whose contents are stored."""
        names: Any = self.client.hkeys(model_keys(model_id).bodies)
        return {int(name) for name in names}


def run_all(log: ModelLog) -> list[Run]:
    """Finish all that waits; return what was run."""
    ran: list[Run] = []
    while isinstance(work := log.take(), Run):
        log.finish(dict.fromkeys(work.numbers, DONE))
        ran.append(work)
    return ran
