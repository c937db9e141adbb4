"""Responses of inference engines in the shapes of their releases, and outputs of vLLM."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SHAPES = Path(__file__).parents[2] / "shapes"
PROMPT = [151644, 872, 30, 151645]
RESPONSE = [19, 17, 151645]
LOGPROBS = [-0.25, -0.5, -0.125]
PLAIN = {"prompt_ids": PROMPT, "response_ids": RESPONSE, "logprobs": LOGPROBS}
TURN = PLAIN | {"status": "completed"}


def shape(name: str) -> dict[str, Any]:
    """The JSON of one response."""
    return json.loads((SHAPES / f"{name}.json").read_text())


def as_object(response: dict[str, Any]) -> Any:
    """The same as attributes; the openai package leaves fields that it does not have as JSON."""
    made = json.loads(json.dumps(response), object_hook=lambda fields: SimpleNamespace(**fields))
    if "sglext" in response:
        made.sglext = response["sglext"]
    return made


@dataclass
class Logprob:
    """vLLM 0.33.0: `vllm.logprobs.Logprob`."""

    logprob: float
    rank: int | None = 1
    decoded_token: str | None = None


@dataclass
class FlatLogprobs:
    """vLLM 0.33.0: `vllm.logprobs.FlatLogprobs`, of `SamplingParams(flat_logprobs=True)`."""

    start_indices: list[int]
    end_indices: list[int]
    token_ids: list[int]
    logprobs: list[float]

    def __len__(self) -> int:
        return len(self.start_indices)


@dataclass
class CompletionOutput:
    """vLLM 0.33.0: `vllm.outputs.CompletionOutput`, its fields that matter here."""

    index: int = 0
    token_ids: Any = field(default_factory=lambda: list(RESPONSE))
    logprobs: Any = field(default_factory=lambda: candidates(RESPONSE, LOGPROBS))
    cumulative_logprob: float | None = sum(LOGPROBS)
    finish_reason: str | None = "stop"
    weight_versions: Any = None
    routed_experts: Any = None

    def finished(self) -> bool:
        """Whether it is; a method here, an attribute of RequestOutput."""
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """vLLM 0.33.0: `vllm.outputs.RequestOutput`, its fields that matter here."""

    outputs: list[CompletionOutput]
    prompt_token_ids: list[int] | None = field(default_factory=lambda: list(PROMPT))
    finished: bool = True


def candidates(token_ids: list[int], logprobs: list[float]) -> list[dict[int, Logprob]]:
    """For each position the sampled token and a likelier one."""
    pairs = zip(token_ids, logprobs, strict=True)
    return [{token: Logprob(value, 2), 7: Logprob(-0.01)} for token, value in pairs]


def output(*completions: CompletionOutput) -> RequestOutput:
    return RequestOutput(list(completions or [CompletionOutput()]))
