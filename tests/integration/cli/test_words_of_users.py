"""Names, reasons, tags and exceptions are anybody's: every command shows them as they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from testkit import group, ids, trajectory, wait_until
from testkit.runs.scripts import script
from turnstream.generator import Prompt, Publisher, add_prompts
from turnstream.store.client import keys
from turnstream.store.client.connection import connect
from turnstream.store.client.scripts import run_command
from turnstream.store.run.evals import eval_results
from turnstream.store.run.runs import pause_run
from turnstream_server.ledger.admin.dead_letters import read_dead_letters

pytestmark = [pytest.mark.redis, pytest.mark.grpc]

RUN = "a[b]/c [/d]"
PAUSE = "waiting for a [gpu] node [/x]"
REASONS = ["parse error near [/INST] token", "tool [bash] failed", "said :ok: in [red]"]
LABELS: dict[str, Any] = {"tags": {"e[nv]": "[/b]"}, "metrics": {"acc[val]": 1.0}}


@pytest.fixture(scope="module")
def typed(place: Any) -> Iterator[Any]:
    """Types commands about a run in which every name, label and reason looks like markup."""
    place.create_run(RUN, batch_groups=2, mini_batch_groups=2, retain_checkpoints=9)
    place.publish(RUN, group("g[/g]", *_members(2)), group("h[i]", *_members(2)))
    (token,) = place.train(RUN)
    place.publish(RUN, group("d[/d]", *_members(3)))
    place.damage(RUN, "d%5B%2Fd%5D/1/0")
    place.publish(RUN, group("f[f]", *_members(2)))
    place.train(RUN, after=token)
    with connect(place.url) as client:
        assert len(read_dead_letters(client, RUN).trajectories) == 1
        note = (keys.run_keys(RUN).conflicts,)
        run_command(client, script("note_conflict")(note, "k/0/0", "has [/another] content"))
        add_prompts(client, RUN, [Prompt(prompt_uid="p[/p]", payload=b"", num_samples=1)], first=1)
    with Publisher(place.url, RUN, writer="gen [/w]") as publisher:
        with publisher.group("e[/e]", 1, purpose="eval") as evaluated:
            evaluated.trajectory(0).append(ids("ab"), ids("c"), policy_version=1)
            evaluated.trajectory(0).seal(1.0, **LABELS)
        with publisher.group("x[/x]", len(REASONS)) as given_up:
            for sample, reason in enumerate(REASONS):
                given_up.trajectory(sample).abandon(reason).result(10)
        with publisher.next_task(wait_s=10), connect(place.url) as client:
            wait_until(lambda: eval_results(client, RUN), describe="the end of the evaluation")
            pause_run(client, RUN, PAUSE)
            yield place.type


def _members(number: int) -> list[Any]:
    return [trajectory(sample=n, reward=float(n), **LABELS) for n in range(number)]


SHOWN = {
    ("run", "list"): [RUN],
    ("run", "show", RUN): [RUN, PAUSE],
    ("ledger", RUN): [f"ledger of {RUN}", *REASONS, "has [/another] content"],
    ("ledger", RUN, "x[/x]/0/0"): [f"{RUN}: x[/x]/0/0", f"abandoned: {REASONS[0]}"],
    ("ledger", RUN, "x[/x]/1/0"): [REASONS[1]],
    ("ledger", RUN, "x[/x]/2/0"): [REASONS[2]],
    ("why", RUN): [f"the run is paused: {PAUSE}", "group p[/p]#1", "generator gen [/w]"],
    ("ledger", RUN, "p[/p]#1/0/0"): [f"{RUN}: p[/p]#1/0/0", "open"],
    ("batch", RUN, "1", "--all"): [f"step 1 of {RUN}", "g[/g]/1/0", "e[nv]", "[/b]", "acc[val]"],
    ("batch", RUN, "2"): [f"step 2 of {RUN}", "d[/d]/0/0"],
    ("dead", "list", RUN): [f"dead letters of {RUN}", "d[/d]/1/0"],
    ("dead", "show", RUN, "d[/d]/1/0"): [f"{RUN}: d[/d]/1/0"],
    ("evals", RUN): [f"evaluations of {RUN}", "e[nv]", "[/b]", "acc[val]"],
    ("batch", RUN, "1", "--out", "out.arrow"): ["out.arrow"],
    ("archive", RUN, "--to", "[/b]"): ["[/b]/"],
}


@pytest.mark.parametrize("words", SHOWN, ids=lambda words: " ".join((words[0], *words[2:])))
def test_words_that_look_like_markup_are_shown_as_they_are(
    typed: Any, words: tuple[str, ...]
) -> None:
    told = typed(*words)

    assert [each for each in SHOWN[words] if each not in told] == []


def test_a_terminal_obeys_nothing_that_a_reason_says(place: Any) -> None:
    run = place.create_run("obey")
    with Publisher(place.url, run) as publisher, publisher.group("g", 1) as opened:
        opened.trajectory(0).abandon("cleared \x1b[2J\x07\x9b1m").result(10)

    told = place.type("ledger", run)

    assert "cleared \N{SYMBOL FOR ESCAPE}[2J\N{SYMBOL FOR BELL}\ufffd1m" in told
