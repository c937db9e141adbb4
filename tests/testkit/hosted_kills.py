"""SIGKILL of the services of hosted models at random moments of a training run.

`python -m testkit.hosted_kills --moments 20 --seed 1` with `tests` on PYTHONPATH. One client makes
some undisturbed runs, and then one run for each moment. It is drawn uniformly over the time of the
shortest undisturbed run. If a run ends before its moment, it is one more undisturbed run, and the
moment is drawn again. The gateway and the engine are killed in turn. A fifth as many further runs
kill the sampler, the batcher, or several services at once. A killed service is restarted at once. A
run ends as one of:

- `equal`: saved weights and all results equal those of an undisturbed run, bit for bit
- `honest error`: the client raised an error of its SDK, shown below the line
- `FAILURE`: everything else
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import resource
import secrets
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NamedTuple

from rich.console import Console

from testkit.hosted_processes import HostedProcesses
from testkit.recipe_runs import RUN_S, RecipeClient, Result, outcome
from turnstream_server.embedded import EmbeddedServer

NUM_ROUNDS: Final = 25

_NUM_UNDISTURBED: Final = 3

_OTHERS: Final = (
    ("sampler",),
    ("batcher",),
    ("gateway", "engine"),
    ("gateway", "batcher", "engine", "sampler"),
)
_HEADER: Final = f"{'#':>3}  {'moment':>8}  {'services':<34}{'log at the kill':<34}"
_COLUMNS: Final = f"{_HEADER}{'restart':>8}  {'run':>8}  outcome"


class Moment(NamedTuple):
    """A time at which services are killed.

    Attributes:
        services: names of those that are killed.
        share: share of the time of the shortest undisturbed run.
    """

    services: tuple[str, ...]
    share: float


class Row(NamedTuple):
    """The result of one moment.

    Attributes:
        moment_s: seconds after the start of the run.
        position: the log of the model at the kill.
        restart_s: seconds from the kill until the services were ready.
        run_s: seconds of the whole run.
        verdict: see `outcome`.
        reason: text of an error or a difference.
    """

    moment_s: float
    services: tuple[str, ...]
    position: str
    restart_s: float
    run_s: float
    verdict: str
    reason: str

    def line(self, number: int) -> str:
        """Return the line of the table."""
        services = "+".join(self.services)
        text = f"{number:>3}  {self.moment_s:>6.2f} s  {services:<34}{self.position:<34}"
        text += f"{self.restart_s:>6.1f} s  {self.run_s:>6.1f} s  {self.verdict}"
        return f"{text}\n     {self.reason}" if self.reason else text


class Campaign:
    """Runs of one client, each with a kill.

    Args:
        processes: they run.
        rng: draws the moments.
        report: receives a line of text.
    """

    def __init__(
        self, processes: HostedProcesses, *, rng: random.Random, report: Callable[[str], None]
    ) -> None:
        self._processes = processes
        self._rng = rng
        self._report = report
        self._numbers = itertools.count(1)
        self._client = RecipeClient(processes.hosting)
        self._reference: Result = {}
        self._duration_s = math.inf

    def run(self, num_moments: int) -> list[Row]:
        """Return a row for each moment; report each at once."""
        try:
            for number in range(_NUM_UNDISTURBED):
                result = self._client.run(f"undisturbed-{number}", num_rounds=NUM_ROUNDS)
                self._add_undisturbed(result)
            self._report(_COLUMNS)
            return [self._row(each) for each in _moments(self._rng, num_moments)]
        finally:
            self._client.close()

    def _add_undisturbed(self, result: Result) -> None:
        """Require that an undisturbed run equals the first one, and shorten the time of moments."""
        self._reference = self._reference or result
        hosting = self._processes.hosting
        verdict, reason = outcome(hosting, result, self._reference)
        assert verdict == "equal", reason
        self._duration_s = min(self._duration_s, result["seconds"])
        position = self._processes.position(self._client.model_id)
        assert position is not None
        seconds, commands = result["seconds"], position.submitted
        self._report(f"     undisturbed: {seconds:.2f} s, {commands} commands, equal")

    def _row(self, moment: Moment) -> Row:
        number = next(self._numbers)
        while (row := self._disturbed(f"{number}", moment)) is None:
            moment = moment._replace(share=self._rng.random())
        self._report(row.line(number))
        return row

    def _disturbed(self, name: str, moment: Moment) -> Row | None:
        """Kill services in a run, and wait for its end; None if it ended before the kill."""
        client, processes = self._client, self._processes
        moment_s = moment.share * self._duration_s
        client.start(name, num_rounds=NUM_ROUNDS)
        if (early := client.wait(moment_s)) is not None:
            self._add_undisturbed(early)
            return None
        processes.kill(*moment.services)
        position = self._position()
        restart_s = processes.kill_and_restart(*moment.services)
        result = client.wait(RUN_S)
        verdict, reason = outcome(processes.hosting, result, self._reference)
        if result is None:
            client.close()
            self._client = RecipeClient(processes.hosting)
        run_s = RUN_S if result is None else result["seconds"]
        return Row(moment_s, moment.services, position, restart_s, run_s, verdict, reason)

    def _position(self) -> str:
        found = self._processes.position(self._client.model_id)
        if found is None:
            return "the client has no model"
        return f"{found.finished} of {found.submitted} done, {found.covered} durable"


def _moments(rng: random.Random, count: int) -> Iterator[Moment]:
    names = itertools.cycle((("gateway",), ("engine",)))
    others = itertools.cycle(_OTHERS)
    yield from (Moment(next(names), rng.random()) for _ in range(count))
    yield from (Moment(next(others), rng.random()) for _ in range(count // 5))


def main() -> None:
    """Print the table; exit with status 1 after a failure, and keep the logs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--moments", type=int, default=20)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    seed = secrets.randbelow(1 << 31) if options.seed is None else options.seed
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.print(f"seed {seed}")
    folder, began_s = Path(tempfile.mkdtemp(prefix="turnstream-kills-")), time.monotonic()
    try:
        with ExitStack() as stack:
            store = stack.enter_context(EmbeddedServer(folder / "store"))
            processes = stack.enter_context(HostedProcesses(folder, store_url=store.url))
            processes.start_all()
            campaign = Campaign(processes, rng=random.Random(seed), report=console.print)
            rows = campaign.run(options.moments)
    except BaseException:  # also of an interrupted one
        console.print(f"logs of all processes: {folder}")
        raise
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    counts = Counter(each.verdict for each in rows)
    console.print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    times = f"{time.monotonic() - began_s:.0f} s, CPU {usage.ru_utime + usage.ru_stime:.0f} s"
    console.print(times)
    if counts["FAILURE"]:
        console.print(f"logs of all processes: {folder}")
        sys.exit(1)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
