"""Options of the command line, and the settings of the jobs that train."""

from __future__ import annotations

import functools
import inspect
import secrets
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from turnstream.errors import InvalidConfigError

Settings = TypeVar("Settings")

_MAX_PORT = 65_535

Redis = Annotated[
    str,
    typer.Option(
        "--redis",
        metavar="URL",
        help="Address of the store. Default: TURNSTREAM_REDIS_URL, or redis://127.0.0.1:7379.",
        show_default=False,
    ),
]
Run = Annotated[str, typer.Option("--run", help="Name of the run; it must exist.")]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="Name of the run.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
SummaryFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Also write the summary here.")
]
Recordings = Annotated[
    Path, typer.Argument(metavar="FILE", help="Recorded trajectories, JSON lines or .gz.")
]
TokenizerFolder = Annotated[Path, typer.Option(help="Folder of the tokenizer.")]
Groups = Annotated[int, typer.Option("--groups", min=0, help="Number of groups; 0: all.")]
Dump = Annotated[
    Path | None, typer.Option("--dump", help="Folder for the rows of every mini-batch trained on.")
]
Threads = Annotated[
    int, typer.Option("--threads", min=0, help="Threads of torch; 0: the default of torch.")
]

BaseModels = Annotated[
    list[str],
    typer.Option(
        "--base-model",
        metavar="[NAME=]PATH",
        help="Folder of a base model, and its name for clients. Several are allowed.",
    ),
]
SharedFolder = Annotated[
    Path, typer.Option(help="Folder of all checkpoints, shared by all workers and samplers.")
]
ProcessName = Annotated[
    str,
    typer.Option(
        "--name",
        help="Name of this process; each one of its kind has another. Default: the host.",
        show_default=False,
    ),
]
Insecure = Annotated[
    bool,
    typer.Option("--insecure", help="Need no API key, also where other machines reach it."),
]
MetricsListen = Annotated[
    str,
    typer.Option(
        "--metrics-listen",
        metavar="[HOST:]PORT",
        help="Serve /metrics, /healthz and /readyz, on 127.0.0.1 by default. "
        "Default: TURNSTREAM_METRICS_LISTEN.",
        show_default=False,
    ),
]


Engines = Annotated[
    list[str] | None,
    typer.Option(
        "--engine",
        metavar="vllm=URL|sglang=URL|hosted=MODEL",
        help="Inference server for the model calls of agents. Several are allowed.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenOptions:
    """Options of a batcher or a gateway; `listen` is "host:port", None for the settings'."""

    redis_url: Redis = ""
    listen: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Where to listen; port 0: a free one.")
    ] = None
    address_file: Annotated[
        Path | None, typer.Option(help="Receives HOST:PORT once requests are served.")
    ] = None
    is_insecure: Insecure = False
    metrics_listen: MetricsListen = ""


def split_address(text: str, *, option: str, default_host: str = "") -> tuple[str, int]:
    """Return host and port of an address.

    Args:
        text: "host:port"; with a default host, "port" too.
        option: where the address was given.
        default_host: host of an address that has none.

    Raises:
        InvalidConfigError: it is no address.

    >>> split_address("9100", option="--metrics-listen", default_host="127.0.0.1")
    ('127.0.0.1', 9100)
    """
    host, _, number = text.rpartition(":")
    host = host or default_host
    if not host or not number.isdecimal() or int(number) > _MAX_PORT:
        raise InvalidConfigError(
            option, f"{text!r} is not HOST:PORT, such as 127.0.0.1:7600; port 0: a free one"
        )
    return host, int(number)


def with_options(
    kind: Callable[..., Settings],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator for a command that takes a dataclass: each annotated field is an option.

    Further parameters of the command stay options of their own.
    """
    hints = get_type_hints(kind, include_extras=True)
    annotated = [each for each in fields(kind) if hasattr(hints[each.name], "__metadata__")]  # pyright: ignore[reportArgumentType]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        _, *others = inspect.signature(command, eval_str=True).parameters.values()

        @functools.wraps(command)
        def run(**values: Any) -> None:
            given = {each.name: values.pop(each.name) for each in annotated}
            settings = kind(**{name: value for name, value in given.items() if value is not None})
            command(settings, **values)

        parameters = [
            inspect.Parameter(
                each.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=_default(each),
                annotation=hints[each.name],
            )
            for each in annotated
        ]
        others = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in others]
        run.__signature__ = inspect.Signature([*parameters, *others])  # pyright: ignore[reportAttributeAccessIssue]
        run.__annotations__ = {each.name: each.annotation for each in (*parameters, *others)}
        return run

    return decorate


def _default(field: Any) -> Any:
    """Return the default of an option; None for one that is made at each start."""
    if field.default is not MISSING:
        return field.default
    return inspect.Parameter.empty if field.default_factory is MISSING else None


def write_address(path: Path, address: str) -> None:
    """Write the address of a service to a file, which appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.draft")
    draft.write_text(address, encoding="utf-8")
    draft.replace(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """Settings of `turnstream demo`."""

    json_path: SummaryFile = None
    folder: Annotated[
        Path,
        typer.Option("--data-dir", help="Folder of the job; an earlier demo in it is removed."),
    ] = Path(".turnstream/demo")
    max_seconds: Annotated[
        float, typer.Option(min=1, help="Fail if the reward has not risen by then.")
    ] = 300.0
    seed: Annotated[int, typer.Option(help="Seed of weights, secrets and sampling.")] = 0
    num_generators: Annotated[
        int, typer.Option("--generators", min=1, help="Number of generator processes.")
    ] = 2
    goal: Annotated[
        float, typer.Option(min=0, max=1, help="Mean reward of the last tenth of the games.")
    ] = 0.8
    lora_rank: Annotated[
        int, typer.Option(min=0, help="Train a LoRA adapter of this rank; 0: all weights.")
    ] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """Settings of `turnstream replay`."""

    recordings: Recordings
    tokenizer: TokenizerFolder
    json_path: SummaryFile = None
    folder: Annotated[
        Path,
        typer.Option("--data-dir", help="Folder of the job; an earlier replay in it is removed."),
    ] = Path(".turnstream/replay")
    max_groups: Groups = 0
    num_processes: Annotated[
        int, typer.Option("--processes", min=1, help="Number of replay processes.")
    ] = 2
    batch_groups: Annotated[int, typer.Option(min=1, help="Groups of one training step.")] = 4
    with_logprobs: Annotated[
        bool, typer.Option("--logprobs", help="Send log-probabilities, by the first weights.")
    ] = False
    dump_folder: Dump = None
    max_seconds: Annotated[float, typer.Option(min=1, help="Longest duration, in seconds.")] = (
        3600.0
    )
    seed: Annotated[int, typer.Option(help="Seed of the weights.")] = 0
