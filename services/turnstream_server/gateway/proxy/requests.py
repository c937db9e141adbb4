"""Bodies for engines, and their answers as agents get them. Pure functions; no text is tokenized.

An engine is asked for token ids, log-probabilities, versions of weights and usage in addition. The
agent gets those fields only where it asked for them itself. The fields are those of vLLM 0.33.0 and
SGLang 0.5.23.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal, NamedTuple

from turnstream.errors import InvalidConfigError
from turnstream.types.names import quoted
from turnstream_server.gateway.config import EngineKind

Route = Literal["chat/completions", "completions"]

MAX_CHOICES: Final = 64
"""Most choices of one call (`n`)."""

_IDS: Final = ("token_ids", "response_token_ids", "prompt_token_ids")
_SGLEXT_IDS: Final = ("input_ids", "output_ids")

_REFUSED: Final = {
    "echo": "the answer would repeat the prompt; send echo=false",
    "use_beam_search": "the tokens of beams are not sampled; send use_beam_search=false",
    "prompt_embeds": "a prompt without token ids cannot be stored; send prompt",
}
"""Options that the proxy refuses, unless they are null or false."""


class Wanted(NamedTuple):
    """The fields that an agent asked for itself.

    Attributes:
        logprobs: log-probabilities of the choices.
        usage: the usage; a whole answer always has it.
        ids: token ids of prompt and choices.
        sglext: fields with token ids in the extension of SGLang.
        weight_versions: the versions of the weights of each choice.
    """

    logprobs: bool
    usage: bool
    ids: bool
    sglext: frozenset[str]
    weight_versions: bool


def wanted_of(body: Mapping[str, Any]) -> Wanted:
    """Return the fields that a body asks for.

    >>> wanted_of({"logprobs": 0, "stream": True})[:3]
    (True, False, False)
    """
    logprobs, options = body.get("logprobs"), body.get("stream_options")
    include_usage = isinstance(options, Mapping) and options.get("include_usage")
    return Wanted(
        logprobs=logprobs is not None and logprobs is not False,
        usage=not body.get("stream") or bool(include_usage),
        ids=bool(body.get("return_token_ids")),
        sglext=frozenset(name for name in _SGLEXT_IDS if body.get(f"return_{name}_in_sglext")),
        weight_versions=bool(body.get("return_weight_versions")),
    )


def engine_body(body: Mapping[str, Any], *, route: Route, kind: EngineKind) -> dict[str, Any]:
    """Return the body for an engine, which asks for everything that a turn has.

    Only vLLM is asked for a stream. Streams of SGLang name no version of the weights, and their
    chat chunks omit the log-probabilities of tokens without text, such as the last one. See
    `chunks_of` for agents that asked for a stream. No `stop` is refused: both engines return the
    tokens of a text that they cut off.

    Raises:
        InvalidConfigError: an option whose answer cannot be stored; `field` is its name.
    """
    _check(body, route=route)
    asked = {**body, "return_token_ids": True}
    if route == "chat/completions":
        asked["logprobs"] = True
    elif asked.get("logprobs") is None:
        asked["logprobs"] = 1
    if kind == "vllm":
        asked["return_weight_versions"] = True
        if body.get("stream"):
            asked["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}
    else:
        asked["stream"] = False
        asked.pop("stream_options", None)
    return asked


def answered(part: Mapping[str, Any], wanted: Wanted) -> dict[str, Any] | None:
    """Return a response or chunk as the agent gets it; None for a chunk that only we asked for.

    >>> wanted = wanted_of({"stream": True})
    >>> answered({"choices": [{"delta": {"content": "4"}, "token_ids": [19]}]}, wanted)
    {'choices': [{'delta': {'content': '4'}}]}
    >>> answered({"choices": [], "usage": {"prompt_tokens": 2}}, wanted)
    """
    hidden = _hidden(wanted)
    kept = _without(part, hidden)
    if not wanted.usage:
        kept.pop("usage", None)
    if isinstance(extension := part.get("sglext"), Mapping):
        kept["sglext"] = {
            name: value
            for name, value in extension.items()
            if name not in _SGLEXT_IDS or name in wanted.sglext
        }
        if not kept["sglext"]:
            del kept["sglext"]
    if not isinstance(choices := part.get("choices"), list):
        return kept
    kept["choices"] = [_choice(each, hidden, wanted) for each in choices]
    had_ours = bool(choices or part.get("usage") or part.get("sglext"))
    has_others = kept.get("usage") is not None or "sglext" in kept
    is_ours = had_ours and not has_others and all(map(_is_empty, kept["choices"]))
    return None if is_ours else kept


def chunks_of(response: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a whole response as the chunks of a stream, the usage in a last one without choices.

    >>> response = {"object": "text_completion", "choices": [{"index": 0, "text": "4"}], "usage": 1}
    >>> for chunk in chunks_of(response): chunk
    {'object': 'text_completion', 'choices': [{'index': 0, 'text': '4'}]}
    {'object': 'text_completion', 'choices': [], 'usage': 1}
    """
    is_chat = response.get("object") == "chat.completion"
    head = {
        name: response[name] for name in ("id", "object", "created", "model") if name in response
    }
    if is_chat:
        head["object"] = "chat.completion.chunk"
    others = _without(response, (*head, "choices", "usage"))
    for choice in response["choices"]:
        for part in _chat_parts(choice) if is_chat else (choice,):
            yield {**head, "choices": [part], **others}
            others = {}  # once is enough
    yield {**head, "choices": [], "usage": response.get("usage")}


def _chat_parts(choice: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the choice of a chat completion in two parts; the second has the reason of its end."""
    delta = {name: value for name, value in choice["message"].items() if value is not None}
    if calls := delta.get("tool_calls"):
        delta["tool_calls"] = [{"index": place, **each} for place, each in enumerate(calls)]
    ending = ("finish_reason", "stop_reason", "matched_stop")
    whole = _without(choice, ("message", *ending))
    yield {**whole, "delta": delta, "finish_reason": None}
    end = {name: choice[name] for name in ending if name in choice}
    yield {"index": choice.get("index", 0), "delta": {}, "logprobs": None, **end}


def _hidden(wanted: Wanted) -> tuple[str, ...]:
    ids = () if wanted.ids else _IDS
    return ids if wanted.weight_versions else (*ids, "weight_versions")


def _choice(choice: Mapping[str, Any], hidden: tuple[str, ...], wanted: Wanted) -> dict[str, Any]:
    kept = _without(choice, hidden)
    if not wanted.logprobs and "logprobs" in kept:
        kept["logprobs"] = None
    if isinstance(delta := kept.get("delta"), Mapping):
        kept["delta"] = _without(delta, hidden)
    return kept


def _is_empty(choice: Mapping[str, Any]) -> bool:
    """Whether a choice of a chunk has nothing for the agent."""
    names = {name for name, value in choice.items() if value is not None}
    return choice.get("delta") == {} and names <= {"index", "delta"}


def _without(part: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in part.items() if name not in names}


def _check(body: Mapping[str, Any], *, route: Route) -> None:
    for name, reason in _REFUSED.items():
        if body.get(name):
            raise InvalidConfigError(name, f"{quoted(body[name])} is not supported: {reason}")
    if body.get("include_reasoning") is False:
        message = "false is not supported: the engine would omit the tokens of the reasoning"
        raise InvalidConfigError("include_reasoning", message)
    _check_type(body, "stream", bool)
    _check_type(body, "stream_options", Mapping)
    _check_type(body.get("stream_options") or {}, "include_usage", bool, path="stream_options.")
    _check_count(body, "n", most=MAX_CHOICES)
    _check_count(body, "best_of", most=1)
    if route == "chat/completions":
        _check_type(body, "logprobs", bool)
        if body.get("top_logprobs") and not body.get("logprobs"):
            raise InvalidConfigError("top_logprobs", "it needs logprobs=true")
        return
    _check_type(body, "logprobs", int)
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int):
        message = f"it has {len(prompt)} prompts, and a call may have one; send a call for each"
        raise InvalidConfigError("prompt", message)


def _check_type(body: Mapping[str, Any], name: str, kind: type, *, path: str = "") -> None:
    """Refuse a field of another type; null is as good as none."""
    value = body.get(name)
    is_other_bool = isinstance(value, bool) and kind is int
    if value is not None and (is_other_bool or not isinstance(value, kind)):
        expected = {bool: "true or false", int: "a whole number"}.get(kind, "an object")
        raise InvalidConfigError(f"{path}{name}", f"{quoted(value)} is not {expected}")


def _check_count(body: Mapping[str, Any], name: str, *, most: int) -> None:
    _check_type(body, name, int)
    value = body.get(name)
    if value is not None and not 1 <= value <= most:
        limit = f"from 1 to {most}" if most > 1 else "1, the only supported value"
        raise InvalidConfigError(name, f"{value} is not {limit}")
