"""HTTP doubles of inference servers, with request models of named releases.

The models have the fields that Turnstream sends, of those in vLLM 0.33.0
(`vllm/entrypoints/serve/lora/protocol.py`, `vllm/entrypoints/rl/online/api_router.py`,
`vllm/entrypoints/serve/dev`) and in SGLang 0.5.23 (`sglang/srt/managers/io_struct.py`). Any other
field is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from turnstream_server.http_server import HttpServer


@contextmanager
def serving(app: Any, *, port: int = 0) -> Iterator[str]:
    """Serve an ASGI application from a thread; yield its address."""
    with HttpServer(app, "127.0.0.1", port, option="port") as server:
        yield server.url


class Strict(BaseModel):
    """A request whose fields are all known."""

    model_config = ConfigDict(extra="forbid")


class PauseQuery(Strict):
    """vLLM: POST /pause."""

    mode: Literal["abort", "wait", "keep"] = "abort"


class CollectiveRpc(Strict):
    """vLLM: POST /collective_rpc."""

    method: str
    kwargs: dict[str, str] = {}


class UpdateWeightVersion(Strict):
    """vLLM: POST /update_weight_version."""

    new_version: str


class UnloadAdapter(Strict):
    """Both servers: POST /unload_lora_adapter, for vLLM below /v1."""

    lora_name: str


class SglangLoadAdapter(UnloadAdapter):
    """SGLang: POST /load_lora_adapter."""

    lora_path: str


class VllmLoadAdapter(SglangLoadAdapter):
    """vLLM: POST /v1/load_lora_adapter."""

    load_inplace: bool = False


class UpdateWeightFromDiskReqInput(Strict):
    """SGLang: POST /update_weights_from_disk."""

    model_path: str
    load_format: str | None = None
    abort_all_requests: bool = False
    weight_version: str | None = None
    flush_cache: bool = True


class CompletionRequest(Strict):
    """Both servers: the fields of POST /v1/completions that they share."""

    model: str
    prompt: list[int]
    max_tokens: int
    n: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    seed: int | None = None
    stop: list[str]
    stop_token_ids: list[int]
    ignore_eos: bool
    skip_special_tokens: bool
    logprobs: int
    return_token_ids: bool


class VllmCompletionRequest(CompletionRequest):
    """vLLM: POST /v1/completions."""

    return_tokens_as_token_ids: bool
    prompt_logprobs: int | None = None


class SglangCompletionRequest(CompletionRequest):
    """SGLang: POST /v1/completions."""

    no_stop_trim: bool
    lora_path: str | None = None


def sampled_token(seed: int | None, position: int) -> int:
    """Return the token that a double samples."""
    return (5 + 7 * position + (seed or 0)) % 50


def prompt_logprob(token: int) -> float:
    """Return the log-probability of a prompt token by a double, the same at each position."""
    return -1.0 - token / 100


class Double:
    """State of a server.

    Attributes:
        calls: paths of the calls that were understood, without listings, in order.
        faults: by path, the next responses in place of the true ones. A number is a status, a
            text is the body of a 200, None never answers.
        weight_version: the label of `weights`.
        completions: requests of completions, in order.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.faults: dict[str, list[int | str | None]] = {}
        self.weights = ""
        self.weight_version = "default"
        self.adapters: dict[str, str] = {}
        self.authorization: str | None = None
        self.is_paused = False
        self.completions: list[CompletionRequest] = []

    def app(self) -> Starlette:
        """Return the application."""
        routes = [Route(path, self._answer, methods=["POST"]) for path in self._handlers()]
        return Starlette(routes=[*routes, Route("/v1/models", self._answer, methods=["GET"])])

    def _handlers(self) -> dict[str, tuple[type[Strict], Any]]:
        raise NotImplementedError

    async def _answer(self, request: Request) -> Response:
        path = request.url.path
        self.authorization = request.headers.get("authorization")
        if faults := self.faults.get(path):
            return await _fault(faults.pop(0), request)
        if path == "/v1/models":
            cards: list[dict[str, Any]] = [{"id": "base", "max_model_len": 64, "parent": None}]
            cards += [{"id": name, "object": "model", "parent": "base"} for name in self.adapters]
            return JSONResponse({"object": "list", "data": cards})
        model, handle = self._handlers()[path]
        body = await request.body()
        try:
            asked = model.model_validate_json(body) if body else model(**request.query_params)
        except ValidationError as error:
            return JSONResponse({"detail": error.errors(include_url=False)}, status_code=422)
        self.calls.append(path)
        return handle(asked)

    def _complete(self, asked: Any) -> Response:
        """Sample `sampled_token`s until one is a stop token."""
        self.completions.append(asked)
        adapter = asked.lora_path if isinstance(self, SglangDouble) else asked.model
        if adapter not in (None, "base", *self.adapters):
            error = {"message": f"The model `{adapter}` does not exist.", "code": 404}
            return JSONResponse({"error": error}, status_code=404)
        choices = [self._choice(asked, index) for index in range(asked.n)]
        return JSONResponse({"model": asked.model, "choices": choices})

    def _choice(self, asked: Any, index: int) -> dict[str, Any]:
        tokens: list[int] = []
        while len(tokens) < asked.max_tokens and not {*tokens} & {*asked.stop_token_ids}:
            tokens.append(sampled_token(asked.seed, len(tokens)))
        is_stopped = bool({*tokens} & {*asked.stop_token_ids})
        top = [
            {f"token_id:{each}": -0.5, "token_id:60": -0.25, "token_id:61": -9} for each in tokens
        ]
        scores = [
            {str(each): {"logprob": prompt_logprob(each)}, "60": {"logprob": -0.25}}
            for each in asked.prompt
        ]
        is_scored = getattr(asked, "prompt_logprobs", None) is not None
        return {
            "index": index,
            "text": "",
            "logprobs": {
                "tokens": [""],
                "token_logprobs": [-0.5] * len(tokens),
                "top_logprobs": top,
            },
            "finish_reason": "stop" if is_stopped else "length",
            "token_ids": tokens,
            "prompt_token_ids": asked.prompt,
            "prompt_logprobs": [None, *scores[1:]] if is_scored else None,
        }


async def _fault(fault: int | str | None, request: Request) -> Response:
    if fault is None:
        await request.body()
        await request.receive()  # the client has closed the connection
        return Response(status_code=500)
    if isinstance(fault, str):
        return PlainTextResponse(fault)
    return JSONResponse({"error": {"message": f"injected {fault}"}}, status_code=fault)


class VllmDouble(Double):
    """vLLM 0.33.0 in development mode, with adapters that change at run time."""

    def _handlers(self) -> dict[str, tuple[type[Strict], Any]]:
        return {
            "/v1/completions": (VllmCompletionRequest, self._complete),
            "/pause": (PauseQuery, self._pause),
            "/resume": (Strict, self._resume),
            "/collective_rpc": (CollectiveRpc, self._collective_rpc),
            "/reset_prefix_cache": (Strict, self._reset),
            "/update_weight_version": (UpdateWeightVersion, self._update_version),
            "/v1/load_lora_adapter": (VllmLoadAdapter, self._load),
            "/v1/unload_lora_adapter": (UnloadAdapter, self._unload),
        }

    def _pause(self, _: PauseQuery) -> Response:
        self.is_paused = True
        return JSONResponse({"status": "paused"})

    def _resume(self, _: Strict) -> Response:
        self.is_paused = False
        return JSONResponse({"status": "resumed"})

    def _collective_rpc(self, asked: CollectiveRpc) -> Response:
        folder = asked.kwargs.get("weights_path", "")
        if asked.method != "reload_weights" or not (Path(folder) / "model.safetensors").is_file():
            error = {"message": f"no weights in {folder}", "type": "InternalServerError"}
            return JSONResponse({"error": error}, status_code=500)
        assert self.is_paused, "requests in progress would change their weights"
        self.weights = folder
        return JSONResponse({"results": [None]})

    def _reset(self, _: Strict) -> Response:
        return JSONResponse({"success": self.is_paused})

    def _update_version(self, asked: UpdateWeightVersion) -> Response:
        self.weight_version = asked.new_version
        return JSONResponse({"success": True, "new_version": asked.new_version})

    def _load(self, asked: VllmLoadAdapter) -> Response:
        if asked.lora_name in self.adapters and not asked.load_inplace:
            message = f"The lora adapter '{asked.lora_name}' has already been loaded."
            return JSONResponse({"error": {"message": message, "code": 400}}, status_code=400)
        self.adapters[asked.lora_name] = asked.lora_path
        return PlainTextResponse(f"Success: LoRA adapter '{asked.lora_name}' added successfully.")

    def _unload(self, asked: UnloadAdapter) -> Response:
        if self.adapters.pop(asked.lora_name, None) is None:
            message = f"The lora adapter '{asked.lora_name}' cannot be found."
            return JSONResponse({"error": {"message": message, "code": 404}}, status_code=404)
        return PlainTextResponse(f"Success: LoRA adapter '{asked.lora_name}' removed successfully.")


class SglangDouble(Double):
    """SGLang 0.5.23, started with dummy weights and `--enable-lora`."""

    def _handlers(self) -> dict[str, tuple[type[Strict], Any]]:
        return {
            "/v1/completions": (SglangCompletionRequest, self._complete),
            "/update_weights_from_disk": (UpdateWeightFromDiskReqInput, self._update),
            "/load_lora_adapter": (SglangLoadAdapter, self._load),
            "/unload_lora_adapter": (UnloadAdapter, self._unload),
        }

    def _update(self, asked: UpdateWeightFromDiskReqInput) -> Response:
        assert asked.flush_cache, "the cache of the old weights would be used"
        is_read = asked.load_format == "safetensors" and Path(asked.model_path).is_dir()
        if is_read:
            self.weights = asked.model_path
            self.weight_version = asked.weight_version or self.weight_version
        message = "Succeeded to update model weights." if is_read else "Failed to update weights."
        content = {"success": is_read, "message": message, "num_paused_requests": 0}
        return JSONResponse(content, status_code=200 if is_read else 400)

    def _load(self, asked: SglangLoadAdapter) -> Response:
        if asked.lora_name in self.adapters:
            return self._refuse(f"Failed to load LoRA adapter {asked.lora_name}: already loaded")
        self.adapters[asked.lora_name] = asked.lora_path
        return JSONResponse({"success": True, "loaded_adapters": self.adapters})

    def _unload(self, asked: UnloadAdapter) -> Response:
        if self.adapters.pop(asked.lora_name, None) is None:
            return self._refuse(f"LoRA with name {asked.lora_name} does not exist.")
        return JSONResponse({"success": True, "loaded_adapters": self.adapters})

    def _refuse(self, message: str) -> Response:
        return JSONResponse({"success": False, "error_message": message}, status_code=400)
