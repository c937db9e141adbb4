"""Responses of vLLM 0.33.0 and SGLang 0.5.23, as recorded in `tests/shapes`, and their chunks."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from starlette.responses import JSONResponse, Response

from testkit.services.engine_model import (
    END,
    Knobs,
    Sample,
    decode,
    logprob,
    parse,
    version_spans,
)

Chunk = dict[str, Any]


class Answer(NamedTuple):
    """A call and the samples of its answer."""

    body: Mapping[str, Any]
    is_chat: bool
    prompt: list[int]
    samples: list[Sample]
    knobs: Knobs

    @property
    def has_logprobs(self) -> bool:
        """Return whether the answer has log-probabilities."""
        value = self.body.get("logprobs")
        return value is not None and value is not False and not self.knobs.omit_logprobs

    def usage(self) -> Chunk:
        """Return the usage."""
        sampled = sum(len(each.ids) for each in self.samples) + self.knobs.usage_offset
        return {
            "prompt_tokens": len(self.prompt),
            "total_tokens": len(self.prompt) + sampled,
            "completion_tokens": sampled,
            "prompt_tokens_details": None,
        }

    def logprobs(self, ids: Sequence[int]) -> Chunk | None:
        """Return the log-probabilities of a choice, or of a part of it."""
        if not self.has_logprobs:
            return None
        texts = [decode([each], with_special=True) for each in ids]
        values = [logprob(each) for each in ids]
        pairs = list(zip(texts, values, strict=True))
        if not self.is_chat:
            return {
                "text_offset": [*range(len(ids))],
                "token_logprobs": values,
                "tokens": texts,
                "top_logprobs": [{text: value} for text, value in pairs],
            }
        count = self.body.get("top_logprobs") or 0
        content = [
            {
                "token": text,
                "logprob": value,
                "bytes": list(text.encode()),
                "top_logprobs": [
                    {"token": text, "logprob": value, "bytes": list(text.encode())},
                    *(
                        {"token": f"t{at}", "logprob": -9.0 - at, "bytes": []}
                        for at in range(count)
                    ),
                ][:count],
            }
            for text, value in pairs
        ]
        return {"content": content}


class Shape(ABC):
    """The responses of one engine."""

    def __init__(self, knobs: Knobs) -> None:
        self.knobs = knobs
        self._number = 0

    @abstractmethod
    def error(self, status: int, message: str) -> Response:
        """Return an error of the engine."""

    @abstractmethod
    def model_card(self) -> Chunk:
        """Return the card of the model."""

    def refusal(self, body: Mapping[str, Any]) -> Response | None:
        """Return the answer to a body that the engine does not accept."""
        if body.get("stream_options") and not body.get("stream"):
            return self.error(400, "Stream options can only be defined when `stream=True`.")
        return None

    @abstractmethod
    def whole(self, answer: Answer) -> Chunk:
        """Return the answer to a call without a stream."""

    @abstractmethod
    def chunks(self, answer: Answer) -> Iterator[tuple[int, Chunk]]:
        """Yield each chunk with the position of its token; -1 before the first one."""

    def head(self, answer: Answer, *, is_chunk: bool = False) -> Chunk:
        """Return the first fields of a response or chunk."""
        self._number += not is_chunk
        kind = "chat.completion" if answer.is_chat else "text_completion"
        return {
            "id": f"{'chatcmpl' if answer.is_chat else 'cmpl'}-{self._number}",
            "object": f"{kind}.chunk" if is_chunk and answer.is_chat else kind,
            "created": int(time.time()),
            "model": self.knobs.model,
        }


def text_of(ids: Sequence[int], stop: str = "") -> str:
    """Return the text of a completion."""
    text = decode(ids)
    return text[: text.index(stop)] if stop and stop in text else text


def delta_of(one: Sample, count: int, *, reasoning: str) -> Chunk:
    """Return what token number `count` adds to the message of a choice."""
    is_last = count == len(one.ids)
    before = parse(one.ids[: count - 1])
    after = parse(one.ids[:count], stop=one.stop if is_last else "")
    delta: Chunk = {}
    if len(after.content) > len(before.content):
        delta["content"] = after.content[len(before.content) :]
    if after.reasoning and len(after.reasoning) > len(before.reasoning or ""):
        delta[reasoning] = after.reasoning[len(before.reasoning or "") :]
    if len(after.tool_calls) > len(before.tool_calls):
        place = len(before.tool_calls)
        delta["tool_calls"] = [{"index": place, **after.tool_calls[place]}]
    return delta


class VllmShape(Shape):
    """vLLM 0.33.0."""

    def error(self, status: int, message: str) -> Response:
        """Return an error of the engine."""
        kinds = {400: "BadRequestError", 401: "Unauthorized", 404: "NotFoundError"}
        kind = kinds.get(status, "InternalServerError")
        error = {"message": message, "type": kind, "param": None, "code": status}
        return JSONResponse({"error": error}, status_code=status)

    def model_card(self) -> Chunk:
        """Return the card of the model."""
        card = {"id": self.knobs.model, "object": "model", "created": 1_790_000_000}
        return {**card, "owned_by": "vllm", "parent": None, "max_model_len": self.knobs.max_length}

    def whole(self, answer: Answer) -> Chunk:
        """Return the answer to a call without a stream."""
        prompt_ids = answer.prompt if answer.body.get("return_token_ids") else None
        choices = [self._choice(answer, at, one) for at, one in enumerate(answer.samples)]
        response = {
            **self.head(answer),
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": "vllm-0.33.0-tp1",
            "usage": answer.usage(),
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }
        if answer.is_chat:
            return {**response, "prompt_logprobs": None, "prompt_token_ids": prompt_ids}
        for choice in choices:
            choice |= {"prompt_logprobs": None, "prompt_token_ids": prompt_ids}
        return response

    def _choice(self, answer: Answer, index: int, one: Sample) -> Chunk:
        choice: Chunk = {"index": index}
        if answer.is_chat:
            parsed = parse(one.ids, stop=one.stop)
            message: Chunk = {
                "role": "assistant",
                "content": None if parsed.tool_calls else parsed.content,
                "refusal": None,
                "annotations": None,
                "audio": None,
                "function_call": None,
                "reasoning": parsed.reasoning,
            }
            if parsed.tool_calls:
                message["tool_calls"] = parsed.tool_calls
            choice["message"] = message
        else:
            choice["text"] = text_of(one.ids, one.stop)
        return {
            **choice,
            "logprobs": answer.logprobs(one.ids),
            "finish_reason": one.finish_reason,
            "stop_reason": one.stop or None,
            "token_ids": one.ids if answer.body.get("return_token_ids") else None,
            "routed_experts": None,
            **self._versions(answer, one),
        }

    def _versions(self, answer: Answer, one: Sample) -> Chunk:
        if not answer.body.get("return_weight_versions"):
            return {}
        return {"weight_versions": version_spans(len(one.ids), self.knobs)}

    def chunks(self, answer: Answer) -> Iterator[tuple[int, Chunk]]:
        """Yield each chunk with the position of its token."""
        self._number += 1
        head = self.head(answer, is_chunk=True)
        has_ids = answer.body.get("return_token_ids")
        if answer.is_chat:
            for index in range(len(answer.samples)):
                delta = {"role": "assistant", "content": ""}
                first = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
                ids = {"prompt_token_ids": answer.prompt if has_ids else None}
                yield 0, {**head, "choices": [first], **ids}
        for number in range(max(len(each.ids) for each in answer.samples)):
            for index, one in enumerate(answer.samples):
                if number < len(one.ids):
                    part = self._part(answer, index, number)
                    if part is not None:
                        yield number, {**head, "choices": [part]}
        if (answer.body.get("stream_options") or {}).get("include_usage"):
            last = max(len(each.ids) for each in answer.samples) - 1
            yield last, {**head, "choices": [], "usage": answer.usage()}

    def _part(self, answer: Answer, index: int, number: int) -> Chunk | None:
        one, has_ids = answer.samples[index], answer.body.get("return_token_ids")
        is_last = number == len(one.ids) - 1
        part: Chunk = {"index": index, "logprobs": answer.logprobs(one.ids[number : number + 1])}
        part["finish_reason"] = one.finish_reason if is_last else None
        if has_ids:
            part["token_ids"] = one.ids[number : number + 1]
        if is_last:
            part["stop_reason"] = one.stop or None
            part |= self._versions(answer, one)
        if answer.is_chat:
            part["delta"] = delta_of(one, number + 1, reasoning="reasoning")
            is_shown = part["delta"] or is_last or has_ids or part["logprobs"]
            return part if is_shown else None
        before = text_of(one.ids[:number])
        part["text"] = text_of(one.ids[: number + 1], one.stop if is_last else "")[len(before) :]
        if number == 0 and has_ids:
            part["prompt_token_ids"] = answer.prompt
        return part


class SglangShape(Shape):
    """SGLang 0.5.23."""

    def error(self, status: int, message: str) -> Response:
        """Return an error of the engine."""
        kind = {400: "BadRequest", 401: "Unauthorized"}.get(status, "InternalServerError")
        error = {"object": "error", "message": message, "type": kind, "param": None, "code": status}
        return JSONResponse(error, status_code=status)

    def model_card(self) -> Chunk:
        """Return the card of the model."""
        card = {"id": self.knobs.model, "object": "model", "created": 1_790_000_000}
        return {
            **card, "owned_by": "sglang", "root": self.knobs.model, "parent": None,
            "max_model_len": self.knobs.max_length,
        }  # fmt: skip

    def refusal(self, body: Mapping[str, Any]) -> Response | None:
        """Refuse token ids in a stream of a chat."""
        if "messages" in body and body.get("stream") and body.get("return_token_ids"):
            reason = "return_token_ids is not supported with streaming on /v1/chat/completions."
            return self.error(400, reason)
        return None

    def whole(self, answer: Answer) -> Chunk:
        """Return the answer to a call without a stream."""
        choices = [self._choice(answer, at, one) for at, one in enumerate(answer.samples)]
        response = {
            **self.head(answer),
            "choices": choices,
            "usage": {**answer.usage(), "reasoning_tokens": 0},
            "metadata": {"weight_version": self.knobs.next_version or self.knobs.weight_version},
        }
        if extension := self._extension(answer):
            response["sglext"] = extension
        return response

    def _choice(self, answer: Answer, index: int, one: Sample) -> Chunk:
        choice: Chunk = {"index": index}
        if answer.is_chat:
            parsed = parse(one.ids, stop=one.stop)
            choice["message"] = {
                "role": "assistant",
                "content": None if parsed.tool_calls else parsed.content,
                "reasoning_content": parsed.reasoning,
                "tool_calls": parsed.tool_calls or None,
            }
        else:
            choice["text"] = text_of(one.ids, one.stop)
        choice |= {
            "logprobs": answer.logprobs(one.ids),
            "finish_reason": one.finish_reason,
            "matched_stop": self._matched(one),
        }
        if answer.body.get("return_token_ids"):
            name = "response_token_ids" if answer.is_chat else "token_ids"
            choice |= {"prompt_token_ids": answer.prompt, name: one.ids}
        return choice

    def _matched(self, one: Sample) -> int | str | None:
        return one.stop or (END if one.ids[-1] == END else None)

    def _extension(self, answer: Answer) -> Chunk:
        extension: Chunk = {}
        if answer.is_chat and answer.body.get("return_input_ids_in_sglext"):
            extension["input_ids"] = answer.prompt
        if answer.is_chat and answer.body.get("return_output_ids_in_sglext"):
            extension["output_ids"] = [each.ids for each in answer.samples]
        return extension

    def chunks(self, answer: Answer) -> Iterator[tuple[int, Chunk]]:
        """Yield chunks; those of a chat have no log-probabilities of tokens without text."""
        self._number += 1
        head = self.head(answer, is_chunk=True)
        last = max(len(each.ids) for each in answer.samples) - 1
        for number in range(last + 1):
            for index, one in enumerate(answer.samples):
                if number < len(one.ids):
                    for part in self._parts(answer, index, number):
                        yield number, {**head, "choices": [part], "usage": None}
        for index, one in enumerate(answer.samples if answer.is_chat else ()):
            end = {"finish_reason": one.finish_reason, "matched_stop": self._matched(one)}
            part = {"index": index, "delta": {}, "logprobs": None, **end}
            yield last, {**head, "choices": [part], "usage": None}
        if extension := self._extension(answer):
            yield last, {**head, "choices": [], "usage": None, "sglext": extension}
        if (answer.body.get("stream_options") or {}).get("include_usage"):
            yield last, {**head, "choices": [], "usage": answer.usage()}

    def _parts(self, answer: Answer, index: int, number: int) -> Iterator[Chunk]:
        one = answer.samples[index]
        is_last = number == len(one.ids) - 1
        logprobs = answer.logprobs(one.ids[number : number + 1])
        if answer.is_chat:
            end = {"finish_reason": None, "matched_stop": None}
            if number == 0:
                delta = {"role": "assistant", "content": ""}
                yield {"index": index, "delta": delta, "logprobs": None, **end}
            if delta := delta_of(one, number + 1, reasoning="reasoning_content"):
                yield {"index": index, "delta": delta, "logprobs": logprobs, **end}
            return
        before = text_of(one.ids[:number])
        text = text_of(one.ids[: number + 1], one.stop if is_last else "")[len(before) :]
        part: Chunk = {"index": index, "text": text, "logprobs": logprobs}
        part["finish_reason"] = one.finish_reason if is_last else None
        part["matched_stop"] = self._matched(one) if is_last else None
        if answer.body.get("return_token_ids"):
            part["token_ids"] = one.ids[number : number + 1]
            if number == 0:
                part["prompt_token_ids"] = answer.prompt
        yield part


SHAPES: Final[dict[str, type[Shape]]] = {"vllm": VllmShape, "sglang": SglangShape}
