"""One model call of an agent: sent to an engine, stored, and only then answered whole.

Parts of the answer are passed on as they come. Those that end a choice are held until the turns are
stored. So an agent that has an answer whole has a stored one.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Final, Literal

from turnstream.errors import InvalidTurnError, TurnstreamError
from turnstream.responses.openai_servers import JoinedStream
from turnstream_server.gateway.bodies import Parsers
from turnstream_server.gateway.proxy.answer_blocks import AnswerFormat, PlainFormat
from turnstream_server.gateway.proxy.anthropic_api import MessageFormat
from turnstream_server.gateway.proxy.engines import EngineAnswer, Engines
from turnstream_server.gateway.proxy.failures import add_error
from turnstream_server.gateway.proxy.live_answers import EVENTS, JSON, Answer, json_bytes
from turnstream_server.gateway.proxy.recording import Recording
from turnstream_server.gateway.proxy.requests import Route, wanted_of
from turnstream_server.gateway.proxy.responses_api import ResponseFormat
from turnstream_server.gateway.proxy.turns import IncompleteError, num_tokens_of, turns_of
from turnstream_server.gateway.proxy.versions import NewestVersions
from turnstream_server.keys.sessions import Session

_IN_LOOP_TOKENS: Final = 4_096
"""Sampled tokens of an answer whose turns are made in the event loop."""

WAIT_FOR_AGENT_S: Final = 60.0
"""Time for which a whole answer waits for its agent, which may have lost its connection."""


Api = Literal["chat/completions", "completions", "messages", "responses"]
"""Path of a route of agents. The last two are chat completions for engines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCall:
    """A request of an agent for a model.

    Attributes:
        body: the request, as it was sent.
        content: the JSON of the completion that an engine gets, before `engine_body`.
        is_retry: the agent says that it sends the request again.
    """

    session: Session
    api: Api
    body: bytes
    content: Mapping[str, Any]
    is_retry: bool

    @property
    def model(self) -> str:
        """Return the model that is asked for; "" for a value that is no text."""
        model = self.content.get("model")
        return model if isinstance(model, str) else ""

    @property
    def route(self) -> Route:
        """Return the route of an engine."""
        return "completions" if self.api == "completions" else "chat/completions"

    @property
    def is_stored(self) -> bool:
        """Whether it is a call of the policy; a call of another model is only passed on."""
        return self.session.policy in ("", self.model)

    def new_format(self) -> AnswerFormat:
        """Return the format of its answer."""
        if self.api == "messages":
            return MessageFormat(self.content)
        if self.api == "responses":
            return ResponseFormat(self.content)
        return PlainFormat(wanted_of(self.content) if self.is_stored else None)


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
        form = call.new_format()
        try:
            if call.is_stored:
                await self._store(call, name, recording, answer, form)
            else:
                await self._pass_on(call, answer, form)
        except (TurnstreamError, IncompleteError) as error:
            add_error(answer, error, form)
            return str(error) or type(error).__name__
        return ""

    async def _store(
        self,
        call: ModelCall,
        name: str,
        recording: Recording,
        answer: Answer,
        form: AnswerFormat,
    ) -> None:
        newest = await self._versions.newest(call.session.run)
        held: list[bytes] = []
        async with self._called(call) as engine:
            if engine.is_stream:
                response = await _streamed(engine, form, answer, held)
            else:
                response = await engine.whole()
                held.append(json_bytes(form.whole(response)))
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

    async def _pass_on(self, call: ModelCall, answer: Answer, form: AnswerFormat) -> None:
        """Answer a call of another model, of which nothing is stored."""
        async with self._called(call) as engine:
            if engine.is_stream:
                answer.begin(200, EVENTS)
                async for chunk in engine.chunks():
                    answer.add(form.chunk(chunk))
                answer.add(form.end())
            else:
                whole = json_bytes(form.whole(await engine.whole()))
                answer.begin(200, JSON)
                answer.add(whole)
        answer.end()

    def _called(self, call: ModelCall) -> AbstractAsyncContextManager[EngineAnswer]:
        session = call.session
        name = f"{session.run}/{session.key.trajectory_id}"
        return self._engines.call(
            call.route, call.content, session=name, is_captured=call.is_stored
        )


async def _streamed(
    engine: EngineAnswer, form: AnswerFormat, answer: Answer, held: list[bytes]
) -> Mapping[str, Any]:
    """Pass on the parts of a stream, but for those in `held`; return the whole response."""
    joined = JoinedStream()
    answer.begin(200, EVENTS)
    async for chunk in engine.chunks():
        joined.add(chunk)
        ends = any(each.get("finish_reason") for each in chunk.get("choices") or ())
        if not (part := form.chunk(chunk)):
            continue
        if held or ends:
            held.append(part)
        else:
            answer.add(part)
    held.append(form.end())
    try:
        return joined.response()
    except InvalidTurnError as error:
        raise IncompleteError(str(error)) from error
