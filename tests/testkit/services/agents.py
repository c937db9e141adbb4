"""Agents with a session key, as a rollout starts them."""

from __future__ import annotations

from typing import Any, NamedTuple

import httpx2
import openai


class Agent(NamedTuple):
    """A session key, and the client of an agent that has it."""

    base_url: str
    key: str

    def client(self, **options: Any) -> Any:
        """Return the `openai.OpenAI` that an agent makes out of its environment."""
        return openai.OpenAI(base_url=self.base_url, api_key=self.key, **options)

    def ask(self, text: str, **options: Any) -> Any:
        """Return the chat completion for one message."""
        messages = [{"role": "user", "content": text}]
        return self.client(max_retries=0).chat.completions.create(
            model="policy", messages=messages, **options
        )

    def send(self, method: str, route: str, **options: Any) -> httpx2.Response:
        """Return the response to a request."""
        headers = {"Authorization": f"Bearer {self.key}"}
        return httpx2.request(method, f"{self.base_url}/{route}", headers=headers, **options)
