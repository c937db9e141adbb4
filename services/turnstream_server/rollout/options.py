"""Options of `turnstream rollout`."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final
from urllib.parse import quote

import typer

from turnstream.errors import InvalidConfigError
from turnstream_server.options import Engines, Redis, RunArgument

GATEWAY_VARIABLE: Final = "TURNSTREAM_GATEWAY_URL"
MAX_PARALLEL: Final = 1_024
MAX_SAMPLES: Final = 4_096
"""The largest group. Its constant is not imported here: every command would load numpy."""

LONGEST_TIMEOUT_S: Final = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutOptions:
    """Settings of one rollout."""

    run: RunArgument
    command: Annotated[
        list[str],
        typer.Argument(metavar="COMMAND", help="The agent, started once for each sample."),
    ]
    gateway: Annotated[
        str,
        typer.Option(
            metavar="URL",
            envvar=GATEWAY_VARIABLE,
            help="A gateway with engines. Not together with --engine.",
        ),
    ] = ""
    engines: Engines = None
    tasks: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Adds each line, a JSON object, as a prompt. Default: the prompts of the run.",
        ),
    ] = None
    num_samples: Annotated[
        int,
        typer.Option("--samples", min=1, max=MAX_SAMPLES, help="Samples of each line of --tasks."),
    ] = 8
    reward: Annotated[
        str,
        typer.Option(
            metavar="COMMAND",
            help="Shell command that prints the reward of a sample on its last line. "
            "Without it, rewards are posted later.",
        ),
    ] = ""
    timeout_s: Annotated[
        float,
        typer.Option(
            "--timeout", min=1, max=LONGEST_TIMEOUT_S, help="Seconds after which an agent is ended."
        ),
    ] = 1_800.0
    num_parallel: Annotated[
        int, typer.Option("--parallel", min=1, max=MAX_PARALLEL, help="Agents at the same time.")
    ] = 8
    policy: Annotated[
        str,
        typer.Option(
            metavar="MODEL", help="Model whose calls are stored. Default: the calls of every model."
        ),
    ] = ""
    logs: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Output of the agents. Default: .turnstream/rollout/RUN."
        ),
    ] = None
    redis_url: Redis = ""

    @property
    def folder(self) -> Path:
        """Return the folder of the logs."""
        name = quote(self.run, safe="~")
        return (self.logs or Path(".turnstream/rollout") / name).absolute()


def check_options(options: RolloutOptions) -> None:
    """Refuse options that do not fit together. Engines replace a gateway of the environment.

    Raises:
        InvalidConfigError: names the option that is missing or wrong.
    """
    from_environment = os.environ.get(GATEWAY_VARIABLE, "") == options.gateway
    if options.engines and options.gateway and not from_environment:
        raise InvalidConfigError("--engine", "use either --engine or --gateway")
    if not options.engines and not options.gateway:
        raise InvalidConfigError(
            "--gateway",
            "the rollout needs a gateway: name one with --gateway URL or TURNSTREAM_GATEWAY_URL, "
            "or start one with --engine vllm=URL",
        )
    if shutil.which(options.command[0]) is None:
        raise InvalidConfigError("COMMAND", f"{options.command[0]!r} is no program")
