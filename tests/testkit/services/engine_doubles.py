"""Engine doubles: HTTP servers that answer as vLLM 0.33.0 and SGLang 0.5.23 do, streamed or not.

`engine_double("vllm")` serves from a thread, `engine_process("vllm")` from a process that can be
killed. `PUT /knobs` changes `Knobs` of a running double.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import httpx2
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from testkit.services.engine_model import Knobs, prompt_of, sample
from testkit.services.engine_shapes import SHAPES, Answer, Shape
from testkit.services.inference_servers import serving
from testkit.waiting import wait_until

_TESTS: Final = Path(__file__).parents[2]


class CutError(Exception):
    """The double ends the connection."""


class Streamed(Response):
    """Parts of a body; the connection ends where they raise CutError."""

    def __init__(self, parts: AsyncIterator[bytes], headers: Mapping[str, str]) -> None:
        super().__init__(headers=dict(headers))
        self.raw_headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]
        if "content-length" in headers:
            self.raw_headers.append((b"content-length", headers["content-length"].encode()))
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the parts until the client disconnects."""
        sending = asyncio.create_task(self._send(send))
        leaving = asyncio.create_task(_disconnect(receive))
        await asyncio.wait([sending, leaving], return_when=asyncio.FIRST_COMPLETED)
        for task in (sending, leaving):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sending

    async def _send(self, send: Send) -> None:
        """Send the parts; an application that returns early is disconnected."""
        headers: Any = self.raw_headers
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        with contextlib.suppress(CutError):
            async for part in self._parts:
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b""})


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EngineApp:
    """State of a double.

    Attributes:
        bodies: bodies of the calls, in order.
        headers: headers of the calls, in order.
    """

    def __init__(self, kind: str, knobs: Knobs, *, is_process: bool = False) -> None:
        self.knobs = knobs
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.num_running = 0
        self._shape: Shape = SHAPES[kind](knobs)
        self._is_process = is_process

    def app(self) -> Starlette:
        """Return the application."""
        routes = [
            Route(f"/v1/{path}", self._complete, methods=["POST"])
            for path in ("chat/completions", "completions")
        ]
        return Starlette(
            routes=[
                *routes,
                Route("/v1/models", self._models, methods=["GET"]),
                Route("/knobs", self._turn, methods=["PUT"]),
                Route("/calls", self._calls, methods=["GET"]),
            ]
        )

    def turn(self, **values: Any) -> None:
        """Change knobs."""
        for name, value in values.items():
            assert name in {each.name for each in dataclasses.fields(Knobs)}, name
            setattr(self.knobs, name, value)

    async def _turn(self, request: Request) -> Response:
        self.turn(**await request.json())
        return JSONResponse(dataclasses.asdict(self.knobs))

    async def _calls(self, _: Request) -> Response:
        calls = {"bodies": self.bodies, "headers": self.headers, "num_running": self.num_running}
        return JSONResponse(calls)

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._shape.model_card()]})

    async def _complete(self, request: Request) -> Response:
        self.headers.append(dict(request.headers))
        self.bodies.append(body := await request.json())
        if (refusal := self._refusal(request, body)) is not None:
            return refusal
        is_chat = "messages" in body
        prompt = prompt_of(body, self.knobs)
        if len(prompt) >= self.knobs.max_length:
            limit = f"This model's maximum context length is {self.knobs.max_length} tokens."
            return self._shape.error(400, f"{limit} Your prompt has {len(prompt)} tokens.")
        samples = [sample(body, prompt, at, self.knobs) for at in range(body.get("n") or 1)]
        answer = Answer(body, is_chat, prompt, samples, self.knobs)
        if body.get("stream"):
            headers = {"content-type": "text/event-stream; charset=utf-8"}
            return Streamed(self._events(answer), headers)
        content = json.dumps(self._shape.whole(answer)).encode()
        headers = {"content-type": "application/json", "content-length": str(len(content))}
        return Streamed(self._whole(answer, content), headers)

    def _refusal(self, request: Request, body: Mapping[str, Any]) -> Response | None:
        knobs, shape = self.knobs, self._shape
        if knobs.api_key and request.headers.get("authorization") != f"Bearer {knobs.api_key}":
            return shape.error(401, "Unauthorized")
        if knobs.is_paused:
            return shape.error(503, "The engine is paused for a weight update.")
        if knobs.fail:
            return shape.error(status := knobs.fail.pop(0), f"injected {status}")
        if body.get("model") not in (None, knobs.model):
            return shape.error(404, f"The model `{body.get('model')}` does not exist.")
        return shape.refusal(body)

    async def _whole(self, answer: Answer, content: bytes) -> AsyncIterator[bytes]:
        """Yield a whole body, a half of it if the double dies while it samples."""
        async with self._running():
            for number in range(max(len(each.ids) for each in answer.samples)):
                await asyncio.sleep(self.knobs.delay_s)
                if number == self.knobs.die_after:
                    yield content[: len(content) // 2]
                    self._die()
        yield content

    async def _events(self, answer: Answer) -> AsyncIterator[bytes]:
        async with self._running():
            number = -1
            for step, chunk in self._shape.chunks(answer):
                while number < step:
                    number += 1
                    await asyncio.sleep(self.knobs.delay_s)
                    if number == self.knobs.die_after:
                        self._die()
                yield f"data: {json.dumps(chunk)}\n\n".encode()
        if not self.knobs.cut_done:
            yield b"data: [DONE]\n\n"

    @contextlib.asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1

    def _die(self) -> None:
        if self._is_process:
            os.kill(os.getpid(), signal.SIGKILL)
        raise CutError


class EngineDouble:
    """A running double, in a thread or in a process.

    Attributes:
        kind: "vllm" or "sglang".
        url: its address.
        process: its process; None in a thread.
    """

    def __init__(self, kind: str, url: str, process: subprocess.Popen[bytes] | None = None) -> None:
        self.kind = kind
        self.url = url
        self.process = process

    @property
    def address(self) -> str:
        """Return the text of `--engine`."""
        return f"{self.kind}={self.url}"

    def turn(self, **knobs: Any) -> None:
        """Change knobs."""
        httpx2.put(f"{self.url}/knobs", json=knobs).raise_for_status()

    @property
    def bodies(self) -> list[dict[str, Any]]:
        """Return the bodies of the calls, in order."""
        return self._calls()["bodies"]

    @property
    def headers(self) -> list[dict[str, str]]:
        """Return the headers of the calls, in order."""
        return self._calls()["headers"]

    @property
    def num_running(self) -> int:
        """Return the number of calls in progress."""
        return self._calls()["num_running"]

    def _calls(self) -> dict[str, Any]:
        return httpx2.get(f"{self.url}/calls").json()

    def kill(self) -> None:
        """SIGKILL the process."""
        assert self.process is not None, "it serves from a thread"
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def engine_double(kind: str, *, port: int = 0, **knobs: Any) -> Iterator[EngineDouble]:
    """Serve a double from a thread."""
    with serving(EngineApp(kind, Knobs(**knobs)).app(), port=port) as url:
        yield EngineDouble(kind, url)


@contextlib.contextmanager
def engine_process(
    kind: str, folder: Path, *, port: int = 0, **knobs: Any
) -> Iterator[EngineDouble]:
    """Serve a double from a process; its address is written to a file in `folder`."""
    file = folder / f"{kind}-{os.urandom(4).hex()}.address"
    command = [sys.executable, "-m", "testkit.services.engine_doubles", kind, str(file)]
    environment = {**os.environ, "PYTHONPATH": str(_TESTS)}
    with subprocess.Popen([*command, "--port", str(port)], env=environment) as process:
        try:
            wait_until(file.exists, describe="the address of the double")
            double = EngineDouble(kind, file.read_text(), process)
            if knobs:
                double.turn(**knobs)
            yield double
        finally:
            process.kill()


@contextlib.contextmanager
def large_engine(num_bytes: int = 8_000_000) -> Iterator[str]:
    """Serve a double whose answers have so many bytes; yield the text of `--engine`."""
    entry = {"token": "t", "logprob": -0.5, "bytes": [116], "top_logprobs": []}
    num_tokens = num_bytes // (len(json.dumps(entry)) + 8) // 64
    ids = [7] * num_tokens

    async def answer(request: Request) -> Response:
        asked = await request.body()
        is_chat = request.url.path.endswith("chat/completions")
        part = {"message": {"role": "assistant", "content": "t"}} if is_chat else {"text": "t"}
        logprobs = {"content": [entry] * num_tokens}
        if not is_chat:
            logprobs = {"tokens": ["t"] * num_tokens, "token_logprobs": [-0.5] * num_tokens}
        choices = [
            {
                "index": index,
                "finish_reason": "stop",
                "token_ids": ids,
                "logprobs": logprobs,
                **part,
                **({} if is_chat else {"prompt_token_ids": [1]}),
            }
            for index in range(64)
        ]
        content = {"id": "c", "choices": choices, "prompt_token_ids": [len(asked)]}
        return JSONResponse({"object": "chat.completion" if is_chat else "", **content})

    paths = ("chat/completions", "completions")
    app = Starlette(routes=[Route(f"/v1/{path}", answer, methods=["POST"]) for path in paths])
    with serving(app) as url:
        yield f"vllm={url}"


def main() -> None:
    """Serve until the process is killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=[*SHAPES])
    parser.add_argument("file", type=Path)
    parser.add_argument("--port", type=int, default=0)
    given = parser.parse_args()
    with serving(EngineApp(given.kind, Knobs(), is_process=True).app(), port=given.port) as url:
        draft = given.file.with_suffix(".draft")
        draft.write_text(url)
        draft.rename(given.file)
        signal.pause()


if __name__ == "__main__":
    main()
