"""Settings of a sampler process. The command line has an option for each annotated field.

Without torch and numpy, so that the command line answers at once.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Final
from urllib.parse import urlsplit

import typer

from turnstream.errors import InvalidConfigError
from turnstream_server.models.spec import parse_bases
from turnstream_server.options import BaseModels, ProcessName, Redis, SharedFolder, Threads

SERVER_KINDS: Final = ("vllm", "sglang")
"""Kinds of inference servers to which samples can be forwarded."""

_DTYPES: Final = ("auto", "float32", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerOptions:
    """One process that samples from base models and from snapshots of models trained on them.

    Attributes:
        push_api_key: bearer token for the servers of `forward`; empty: none.

    Raises:
        InvalidConfigError: a setting cannot work; names the setting and its value.
    """

    base_model: BaseModels
    folder: SharedFolder
    redis_url: Redis = ""
    sampler: ProcessName = field(default_factory=socket.gethostname)
    device: Annotated[
        str, typer.Option(help="Device of the weights; auto: cuda, or cpu without it.")
    ] = "auto"
    dtype: Annotated[
        str,
        typer.Option(
            metavar="auto|float32|bfloat16", help="Type of the weights; auto: bfloat16 on CUDA."
        ),
    ] = "auto"
    max_adapters: Annotated[
        int, typer.Option(min=1, help="Adapters of a base model that are loaded at one time.")
    ] = 16
    max_models: Annotated[
        int, typer.Option(min=1, help="Whole models, besides each base model, that are loaded.")
    ] = 2
    num_threads: Threads = 0
    forward: Annotated[
        list[str],
        typer.Option(
            metavar="vllm=URL|sglang=URL",
            help="Sample with a running inference server, and not the folder of the base model. It "
            "sees --folder at the same path. Several are allowed. vLLM needs --logprobs-mode "
            "processed_logprobs; SGLang repeats seeds with --enable-deterministic-inference.",
        ),
    ] = field(default_factory=list[str])
    """Servers in place of an own sampler.

    Log-probabilities must be those of softmax(logits / temperature).

    - vLLM reports them with `--logprobs-mode processed_logprobs`. `top_k` and `top_p` narrow them
      there, and are refused. Those of prompts are of temperature 1; others are refused.
    - SGLang reports them unless SGLANG_RETURN_ORIGINAL_LOGPROB is set. It has none of prompts, and
      no most likely tokens.
    """
    push_api_key: str = ""

    def __post_init__(self) -> None:
        names = parse_bases(self.base_model)
        if self.dtype not in _DTYPES:
            raise InvalidConfigError("--dtype", f"{self.dtype!r} is not {', '.join(_DTYPES)}")
        if self.forward and len(names) > 1:
            message = f"{len(names)} base models, and one sampler forwards those of one"
            raise InvalidConfigError("--forward", message)
        for target in self.forward:
            parse_forward(target)


def parse_forward(target: str) -> tuple[str, str]:
    """Return kind and address of an inference server; InvalidConfigError for another text.

    >>> parse_forward("vllm=http://10.0.0.7:8000/")
    ('vllm', 'http://10.0.0.7:8000')
    """
    kind, _, url = target.partition("=")
    with suppress(ValueError):  # the port is no number
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        if kind in SERVER_KINDS and is_address:
            return kind, url.rstrip("/")
    message = f"{target!r} is not vllm=URL or sglang=URL, such as vllm=http://10.0.0.7:8000"
    raise InvalidConfigError("--forward", message)
