"""The commands `turnstream serve ...`: every service as a process of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from turnstream.errors import InvalidConfigError
from turnstream_server.cli.options import environment, group, interruptible
from turnstream_server.engine.options import EngineOptions
from turnstream_server.generators.config import LiveGeneratorConfig, ReplayConfig
from turnstream_server.options import Engines, ListenOptions, MetricsListen, with_options
from turnstream_server.sampling.config import SamplerOptions
from turnstream_server.trainer.config import TrainerConfig

app = group("Services, one process each.")

EndWithStdin = Annotated[
    bool,
    typer.Option(
        "--end-with-stdin",
        hidden=True,
        callback=lambda wanted: _end_with_stdin() if wanted else None,
        is_eager=True,
    ),
]


@app.command()
@with_options(ListenOptions)
def batcher(options: ListenOptions, *, end_with_stdin: EndWithStdin = False) -> None:
    """Plan, assemble and serve the batches of every run in the store."""
    from turnstream_server import bootstrap

    bootstrap.start_batcher(environment(), options)


@app.command()
@with_options(ListenOptions)
def gateway(
    options: ListenOptions,
    *,
    folder: Annotated[
        Path | None,
        typer.Option(help="Shared folder of the workers; without it no weights are downloaded."),
    ] = None,
    url: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="Address at which agents reach the gateway, if it is behind a proxy. "
            "Default: TURNSTREAM_HTTP_URL, or the Host of the request.",
        ),
    ] = "",
    engine: Engines = None,
    engine_timeout: Annotated[
        float, typer.Option(min=1, help="Longest silence of an engine during a call, in seconds.")
    ] = 600.0,
    end_with_stdin: EndWithStdin = False,
) -> None:
    """Serve the Tinker API over HTTP."""
    from turnstream_server import bootstrap

    bootstrap.start_gateway(
        environment(),
        options,
        folder=folder,
        url=url,
        engines=engine or (),
        engine_timeout_s=engine_timeout,
    )


@app.command()
@with_options(TrainerConfig)
def trainer(
    config: TrainerConfig,
    *,
    preset: Annotated[
        str | None,
        typer.Option(help="`guessing`: create the run of the demo, with its model and its rates."),
    ] = None,
    end_with_stdin: EndWithStdin = False,
) -> None:
    """Train a policy on the batches of a run."""
    from turnstream_server import bootstrap
    from turnstream_server.generators.guessing import preset_config, preset_policy, preset_rates

    if preset not in (None, "guessing"):
        message = f"{preset!r} is no preset; the only one is guessing"
        raise InvalidConfigError("--preset", message)
    if (config.policy is None) == (preset is None):
        raise InvalidConfigError("--policy", "use either --policy or --preset")
    if preset:
        rates = preset_rates(lora_rank=config.lora_rank)
        found = {name: rate for name, rate in rates.items() if getattr(config, name) is None}
        config = replace(config, small_model=preset_policy(seed=config.seed), **found)
    new_run = None
    if preset:
        new_run = preset_config(estimator="dr_grpo" if config.critic is None else "gae")
    bootstrap.start_trainer(environment(), config, new_run=new_run)


@app.command()
@with_options(LiveGeneratorConfig)
def generator(
    config: LiveGeneratorConfig,
    *,
    metrics_listen: MetricsListen = "",
    end_with_stdin: EndWithStdin = False,
) -> None:
    """Play the guessing game with the newest weights of the run."""
    from turnstream_server import bootstrap

    bootstrap.start_live_generator(environment(), config, metrics_listen=metrics_listen)


@app.command()
@with_options(ReplayConfig)
def replayer(
    config: ReplayConfig,
    *,
    metrics_listen: MetricsListen = "",
    end_with_stdin: EndWithStdin = False,
) -> None:
    """Publish recorded trajectories into a run, turn by turn."""
    from turnstream_server import bootstrap

    with interruptible():
        bootstrap.start_replay(environment(), config, metrics_listen=metrics_listen)


@app.command()
@with_options(EngineOptions)
def engine(
    options: EngineOptions,
    *,
    metrics_listen: MetricsListen = "",
    end_with_stdin: EndWithStdin = False,
) -> None:
    """Train hosted models, as clients of the Tinker API ask."""
    from turnstream_server import bootstrap

    bootstrap.start_engine(environment(), options, metrics_listen=metrics_listen)


@app.command()
@with_options(SamplerOptions)
def sampler(
    options: SamplerOptions,
    *,
    metrics_listen: MetricsListen = "",
    end_with_stdin: EndWithStdin = False,
) -> None:
    """Sample from base models and their snapshots, for clients of the Tinker API."""
    from turnstream_server import bootstrap

    bootstrap.start_sampler(environment(), options, metrics_listen=metrics_listen)


def _end_with_stdin() -> None:
    from turnstream_server.launch.stack import end_when_stdin_closes

    end_when_stdin_closes()
