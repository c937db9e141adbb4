"""One model call of an agent: sent to an engine, stored, and only then answered whole.

Parts of the answer are passed on as they come. Those that end a choice are held until the turns are
stored. So an agent that has an answer whole has a stored one.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Final

from turnstream.errors import InvalidTurnError, TurnstreamError
from turnstream.responses.openai_servers import JoinedStream
from turnstream_server.gateway.bodies import Parsers
from turnstream_server.gateway.proxy.engines import EngineAnswer, Engines
from turnstream_server.gateway.proxy.failures import add_error
from turnstream_server.gateway.proxy.live_answers import EVENTS, JSON, Answer
from turnstream_server.gateway.proxy.recording import Recording
from turnstream_server.gateway.proxy.requests import Route, Wanted, answered, wanted_of
from turnstream_server.gateway.proxy.sse import DONE, event_bytes
from turnstream_server.gateway.proxy.turns import IncompleteError, num_tokens_of, turns_of
from turnstream_server.gateway.proxy.versions import NewestVersions
from turnstream_server.keys.sessions import Session

_IN_LOOP_TOKENS: Final = 4_096
"""Sampled tokens of an answer whose turns are made in the event loop."""

WAIT_FOR_AGENT_S: Final = 60.0
"""Time for which a whole answer waits for its agent, which may have lost its connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCall:
    """A request of an agent for a model.

    Attributes:
        content: the JSON of `body`.
        is_retry: the agent says that it sends the request again.
    """

    session: Session
    route: Route
    body: bytes
    content: Mapping[str, Any]
    is_retry: bool

    @property
    def model(self) -> str:
        """Return the model that is asked for; "" for a value that is no text."""
        model = self.content.get("model")
        return model if isinstance(model, str) else ""

    @property
    def is_stored(self) -> bool:
        """Whether it is a call of the policy; a call of another model is only passed on."""
        return self.session.policy in ("", self.model)


class CallRunner:
    """Runs model calls."""

    def __init__(self, engines: Engines, versions: NewestVersions, parsers: Parsers) -> None:
        self._engines = engines
        self._versions = versions
        self._parsers = parsers

    async def run(self, call: ModelCall, name: str, recording: Recording, answer: Answer) -> str:
        """Fill the answer of a call; return why it is incomplete, "" for a whole one.

        Errors of the engine and the store are the answer.
        """
        try:
            if call.is_stored:
                await self._store(call, name, recording, answer)
            else:
                await self._pass_on(call, answer)
        except (TurnstreamError, IncompleteError) as error:
            add_error(answer, error)
            return str(error) or type(error).__name__
        return ""

    async def _store(
        self, call: ModelCall, name: str, recording: Recording, answer: Answer
    ) -> None:
        newest = await self._versions.newest(call.session.run)
        wanted, held = wanted_of(call.content), list[bytes]()
        async with self._called(call) as engine:
            if engine.is_stream:
                response = await _streamed(engine, wanted, answer, held)
            else:
                response = await engine.whole()
                held.append(_json(answered(response, wanted)))
        make = functools.partial(
            turns_of, response, call=name, model=call.model, newest_version=newest
        )
        is_short = num_tokens_of(response) <= _IN_LOOP_TOKENS
        turns = (
            make() if is_short else await self._parsers.in_thread(make, owner=call.session.owner)
        )
        if not await answer.wait_for_follower(timeout_s=WAIT_FOR_AGENT_S):
            raise IncompleteError("the agent has left before its answer was whole")
        await recording.append(turns)
        if not answer.status:
            answer.begin(200, JSON)
        for part in held:
            answer.add(part)
        answer.end()

    async def _pass_on(self, call: ModelCall, answer: Answer) -> None:
        """Answer a call of another model, of which nothing is stored."""
        async with self._called(call) as engine:
            if engine.is_stream:
                answer.begin(200, EVENTS)
                async for chunk in engine.chunks():
                    answer.add(event_bytes(chunk))
                answer.add(DONE)
            else:
                whole = await engine.whole()
                answer.begin(200, JSON)
                answer.add(_json(whole))
        answer.end()

    def _called(self, call: ModelCall) -> AbstractAsyncContextManager[EngineAnswer]:
        session = call.session
        name = f"{session.run}/{session.key.trajectory_id}"
        return self._engines.call(
            call.route, call.content, session=name, is_captured=call.is_stored
        )


async def _streamed(
    engine: EngineAnswer, wanted: Wanted, answer: Answer, held: list[bytes]
) -> Mapping[str, Any]:
    """Pass on the parts of a stream, but for those in `held`; return the whole response."""
    joined = JoinedStream()
    answer.begin(200, EVENTS)
    async for chunk in engine.chunks():
        joined.add(chunk)
        ends = any(each.get("finish_reason") for each in chunk.get("choices") or ())
        if (part := answered(chunk, wanted)) is None:
            continue
        if held or ends:
            held.append(event_bytes(part))
        else:
            answer.add(event_bytes(part))
    held.append(DONE)
    try:
        return joined.response()
    except InvalidTurnError as error:
        raise IncompleteError(str(error)) from error


def _json(content: Any) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()
