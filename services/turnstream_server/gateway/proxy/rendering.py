"""Prompts of hosted models out of messages, by the tokenizer and chat template of their folder.

transformers is imported once a hosted model is called.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from turnstream.errors import InvalidConfigError, MissingExtraError
from turnstream.types.names import quoted
from turnstream_server.gateway.proxy.requests import Route


class ModelTokenizer:
    """The tokenizer of a model folder, for one thread at a time."""

    def __init__(self, tokenizer: Any, name: str) -> None:
        self._tokenizer = tokenizer
        self._name = name

    @classmethod
    def load(cls, folder: str) -> ModelTokenizer:
        """Return the tokenizer of a folder, or of a name that is in the local cache.

        Raises:
            InvalidConfigError: it cannot be read.
            MissingExtraError: transformers is not installed.
        """
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            needed_by, server = "an engine of the kind hosted", "turnstream-server"
            raise MissingExtraError(needed_by, "transformers", "trainer", server) from error
        try:
            return cls(AutoTokenizer.from_pretrained(folder, local_files_only=True), folder)
        except (OSError, ValueError, KeyError) as error:
            message = f"the tokenizer of {folder} cannot be read: {error}"
            raise InvalidConfigError("--engine", message) from error

    @property
    def end_id(self) -> int | None:
        """Return the token that ends a text; None if there is none."""
        return self._tokenizer.eos_token_id

    def prompt(self, body: Mapping[str, Any], *, route: Route) -> list[int]:
        """Return the prompt of a call; InvalidConfigError for one that cannot be rendered."""
        if route == "chat/completions":
            return self._rendered(body)
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            (prompt,) = prompt
        if isinstance(prompt, str):
            return self._tokenizer(prompt)["input_ids"]
        if isinstance(prompt, list) and all(type(each) is int for each in prompt):
            return prompt
        raise InvalidConfigError("prompt", f"{quoted(prompt)} is neither a text nor token ids")

    def _rendered(self, body: Mapping[str, Any]) -> list[int]:
        from jinja2 import TemplateError

        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise InvalidConfigError("messages", f"{quoted(messages)} is no list of messages")
        if not self._tokenizer.chat_template:
            message = f"{self._name} has no chat template; send a prompt to /v1/completions"
            raise InvalidConfigError("messages", message)
        try:
            return self._tokenizer.apply_chat_template(
                [_message(each) for each in messages],
                tools=body.get("tools"),
                add_generation_prompt=True,
                return_dict=False,
                **(body.get("chat_template_kwargs") or {}),
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            message = f"the chat template of {self._name} refuses them: {error}"
            raise InvalidConfigError("messages", message) from error

    def text(self, ids: Sequence[int], *, stops: Sequence[str]) -> str:
        """Return the text of tokens without special ones, cut before the first stop string."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        places = [place for stop in stops if (place := text.find(stop)) >= 0]
        return text[: min(places, default=len(text))]

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token."""
        return self._tokenizer.batch_decode([[each] for each in ids])


def _message(message: Any) -> dict[str, Any]:
    """Return a message as templates expect it: content as text, arguments of calls as objects."""
    if not isinstance(message, Mapping) or "role" not in message:
        raise ValueError(f"{quoted(message)} is no message with a role")
    content = message.get("content")
    if isinstance(content, list):
        if others := [each for each in content if each.get("type") != "text"]:
            raise ValueError(f"content has {quoted(others[0].get('type'))}, expected text alone")
        content = "".join(each["text"] for each in content)
    rendered = {**message, "content": content or ""}
    if calls := message.get("tool_calls"):
        rendered["tool_calls"] = [_call(each) for each in calls]
    return rendered


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    with contextlib.suppress(ValueError, TypeError):
        if isinstance(arguments := json.loads(function["arguments"]), dict):
            function["arguments"] = arguments
    return {**call, "function": function}
