"""Checks of the fields of a request that becomes a chat completion. Pure functions.

A field that would change the prompt, and that a chat completion does not have, is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final, cast

from turnstream.errors import InvalidConfigError
from turnstream.types.names import quoted

_ENGINE_OPTIONS: Final = (
    "model",
    "stream",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "min_tokens",
    "stop_token_ids",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "chat_template_kwargs",
)
"""Fields that are passed on. Most of them are options of engines, for `extra_body` of a client."""


def engine_options(
    body: Mapping[str, Any], *, translated: Collection[str], ignored: Collection[str]
) -> dict[str, Any]:
    """Return the fields of a body that are passed on as they are.

    >>> engine_options({"seed": 1, "metadata": {}}, translated=(), ignored=("metadata",))
    {'seed': 1}

    Args:
        body: the request of an agent. A field with null counts as absent.
        translated: fields that the caller translates.
        ignored: fields that change nothing.

    Raises:
        InvalidConfigError: any other field; `field` is its name.
    """
    given = {name: value for name, value in body.items() if value is not None}
    for name in given.keys() - {*_ENGINE_OPTIONS, *translated, *ignored}:
        raise unsupported(name, given[name])
    options = {name: given[name] for name in _ENGINE_OPTIONS if name in given}
    if options.get("stream"):
        options["stream_options"] = {"include_usage": True}
    return options


def unsupported(field: str, value: object, why: str = "a chat completion has no such field") -> Any:
    """Return the error for a value that has no translation."""
    return InvalidConfigError(field, f"{quoted(value)} is not supported: {why}")


def as_object(value: object, field: str) -> dict[str, Any]:
    """Return a value that is a JSON object; InvalidConfigError for any other."""
    if not isinstance(value, dict):
        raise InvalidConfigError(field, f"{quoted(value)} is no object")
    return cast("dict[str, Any]", value)


def as_text(value: object, field: str) -> str:
    """Return a value that is a text; InvalidConfigError for any other."""
    if not isinstance(value, str):
        raise InvalidConfigError(field, f"{quoted(value)} is no text")
    return value


def texts(value: object, field: str) -> list[str]:
    """Return a list of texts; InvalidConfigError for any other value."""
    if not isinstance(value, list):
        raise InvalidConfigError(field, f"{quoted(value)} is no list")
    listed = cast("list[object]", value)
    return [as_text(each, f"{field}[{place}]") for place, each in enumerate(listed)]


def objects(value: object, field: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each object of a list with its path; InvalidConfigError for anything else.

    >>> [*objects([{"type": "text"}], "system")]
    [('system[0]', {'type': 'text'})]
    """
    if not isinstance(value, list):
        raise InvalidConfigError(field, f"{quoted(value)} is no list")
    for place, each in enumerate(cast("list[object]", value)):
        path = f"{field}[{place}]"
        yield path, as_object(each, path)


def joined_parts(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return the content of a chat message: a text for a single text, else the parts.

    >>> joined_parts([{"type": "text", "text": "hi"}])
    'hi'
    """
    if len(parts) == 1 and parts[0]["type"] == "text":
        return parts[0]["text"]
    return parts or ""


def answer_message(
    texts: list[str], *, reasoning: list[str], calls: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return the chat message of an earlier answer, whose parts are joined again."""
    content = "".join(texts)
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:  # the names of vLLM and of SGLang
        message["reasoning"] = message["reasoning_content"] = "".join(reasoning)
    if calls:
        message |= {"content": content or None, "tool_calls": calls}
    return message


def chat_tool(tool: Mapping[str, Any], path: str, *, parameters: str) -> dict[str, Any]:
    """Return a tool of a chat completion; `parameters` is the field with the JSON schema."""
    function = {
        "name": as_text(tool.get("name"), f"{path}.name"),
        "description": tool.get("description"),
        "parameters": tool.get(parameters),
        "strict": tool.get("strict"),
    }
    given = {name: value for name, value in function.items() if value is not None}
    return {"type": "function", "function": given}
