"""The command `turnstream rollout`."""

from __future__ import annotations

import typer

from turnstream_server.cli.options import console, environment, interruptible
from turnstream_server.options import with_options
from turnstream_server.rollout.options import RolloutOptions

app = typer.Typer()


@app.command(rich_help_panel="Jobs")
@with_options(RolloutOptions)
def rollout(options: RolloutOptions) -> None:
    """Run an agent for each sample of the tasks of a run, and reward it.

    The agent is any command that uses the OpenAI API. It gets OPENAI_BASE_URL, OPENAI_API_KEY and
    TURNSTREAM_TASK_FILE. A restart continues where the rollout was.
    """
    from turnstream_server.rollout.service import run_rollout

    screen = console()
    with interruptible():
        status = run_rollout(
            environment(),
            options,
            lambda text: screen.print(text, soft_wrap=True, highlight=False),
        )
    if status:
        typer.echo("interrupted", err=True)
    raise typer.Exit(status)
