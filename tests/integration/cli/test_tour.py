"""Somebody looks around in a small run that trains, through every command that looks."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from testkit import group, ids, trajectory, turn
from turnstream.batching.config import BatchingConfig
from turnstream.errors import InvalidConfigError, NotReadyError, ObserverExpiredError
from turnstream.generator import Publisher
from turnstream.worker.observer import ObserverStream
from turnstream_server.console.runs import REFRESH_S, watch_status
from turnstream_server.screen import Screen

pytestmark = [pytest.mark.redis, pytest.mark.grpc]

RUN = "maze"


@pytest.fixture(scope="module")
def typed(place: Any) -> Iterator[Any]:
    """Types commands about a run of three steps, a rollback, an observer and an open trajectory."""
    place.create_run(RUN, max_staleness=3, retain_checkpoints=9)
    place.publish(RUN, *(group(f"g{step}", *_members(2)) for step in (1, 2, 3)))
    tokens = place.train(RUN, steps=3)
    place.train(RUN, after=tokens[1])
    with (
        ObserverStream(place.target, RUN, "the critic", first_step=1, expiry_s=600) as critic,
        Publisher(place.url, RUN, writer="gen-2") as publisher,
        publisher.group("late", 2) as opened,
    ):
        next(iter(critic))
        critic.seen()
        opened.trajectory(0).abandon("the tool hung").result(10)
        opened.trajectory(1).append(ids("abc"), ids("d")).result(10)
        yield place.type


def _members(number: int) -> list[Any]:
    return [trajectory(turn("ab", "CD"), sample=n, reward=float(n)) for n in range(number)]


def lines_of(table: str) -> dict[str, str]:
    """First cell -> the others of its row."""
    rows = [line.strip()[1:-1].split("│") for line in table.splitlines() if line.startswith("│")]
    return {first.strip(): " ".join(" ".join(rest).split()) for first, *rest in rows}


def test_observer_is_removed_by_name(typed: Any, place: Any) -> None:
    with ObserverStream(place.target, RUN, "spare", first_step=1) as spare:
        next(spare)
        removed = typed("run", "remove-observer", RUN, "spare")
        with pytest.raises(ObserverExpiredError, match="was removed"):
            spare.seen()
    with pytest.raises(InvalidConfigError, match="run maze has no 'spare'; it has 'the critic'"):
        typed("run", "remove-observer", RUN, "spare")

    assert "observer 'spare' of run maze is removed: no step is kept for it" in removed


def test_show_fits_one_screen_and_all_prints_every_setting(typed: Any) -> None:
    shown = typed("run", "show", RUN)
    everything = typed("run", "show", RUN, "--all")
    as_json = json.loads(typed("run", "show", RUN, "--json"))

    assert re.search(r"steps +3 planned, 3 stepped, 3 committed", shown)
    assert re.search(r"lineage +main-1 ", shown)
    assert "main-1 continues from step 2; the steps up to 3 are trained again" in shown
    assert re.search(r"the critic +1 +\d+ s +(9 min \d+ s|10 min 0 s)", shown)
    assert len(shown.splitlines()) <= 24
    assert "merge_ratio" not in shown
    assert "estimator" not in shown
    for field in dataclasses.fields(BatchingConfig):
        assert re.search(rf"[* ] {field.name} ", everything), field.name
    for text in (shown, everything):
        assert re.search(r"\* max_staleness +3", text)
    assert re.search(r"  estimator +grpo", everything)
    assert as_json["steps"] == {"planned": 3, "stepped": 3, "committed": 3}
    assert as_json["settings"]["max_staleness"] == 3
    assert "max_staleness" in as_json["changed_settings"]


def test_show_and_batch_print_the_same_numbers_of_a_batch(typed: Any) -> None:
    # Two trajectories of one turn: 2 prompt tokens and 2 sampled ones each, equally long.
    names = ("padding share", "merge ratio", "tokens", "policy versions", "mean reward")
    wanted = ("0.0%", "1.00", "8 in 2 rows", "unknown", "0.500")

    for shown in (typed("run", "show", RUN), typed("batch", RUN, "3")):
        found = {name: re.search(rf"^{name} +(.*?) *$", shown, re.MULTILINE) for name in names}
        assert [each and each[1] for each in found.values()] == [*wanted]
    for content in (
        json.loads(typed("run", "show", RUN, "--json"))["newest_batch"],
        json.loads(typed("batch", RUN, "3", "--json"))["numbers"],
    ):
        assert (content["padding_share"], content["merge_ratio"]) == (0.0, 1.0)
        assert (content["num_tokens"], content["num_trained_tokens"]) == (8, 4)
        assert content["newest_version"] is None

    shown = typed("batch", RUN, "2")
    assert shown.startswith(f"step 2 of {RUN}: committed, ")
    assert re.search(r"0 +0 +-0\.7\d* +1 +g2/0/0", shown)
    assert re.search(r"0 +1 +0\.7\d* +1 +g2/1/0", shown)
    assert "num_tokens 4" in shown
    with pytest.raises(NotReadyError, match="step 9 is not planned; 3 are"):
        typed("batch", RUN, "9")


def test_status_prints_progress_once_or_until_ctrl_c(typed: Any, place: Any) -> None:
    shown = typed("status", RUN)
    every = typed("status")
    as_json = json.loads(typed("status", RUN, "--json"))

    assert re.search(r"run +maze: open", shown)
    assert re.search(r"steps +3 planned, 3 stepped, 3 committed", shown)
    assert re.search(r"ledger +8 accepted: 1 open, 6 committed, 1 abandoned", shown)
    assert "mean reward 0.500" in shown
    assert re.search(r"waits +too_few_ready: ", shown)
    assert re.search(r"run +maze: open", every)
    assert (as_json["ledger"]["committed"], as_json["accepted"]) == (6, 8)
    assert as_json["reason"]["kind"] in shown
    assert json.loads(typed("status", "--json"))[0]["run"] == RUN

    output, paused = io.StringIO(), list[float]()

    def pause(seconds: float) -> None:
        paused.append(seconds)
        if len(paused) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        watch_status(place.url, RUN, Screen(output, width=100), pause=pause)
    assert paused == [REFRESH_S] * 3
    assert re.search(r"steps +3 planned, 3 stepped, 3 committed", output.getvalue())


def test_ledger_shows_states_reasons_and_the_history_of_a_trajectory(typed: Any) -> None:
    shown = typed("ledger", RUN)
    as_json = json.loads(typed("ledger", RUN, "--json"))

    assert re.search(r"committed +│ 6 ", shown)
    assert re.search(r"open +│ 1 ", shown)
    assert re.search(r"abandoned +│ 1 +│ [\d, ]*│ 1 x the tool hung", shown)
    assert re.search(r"accepted +│ 8 ", shown)
    assert as_json["rollbacks"] == [{"lineage": "main-1", "step": 2, "stepped": 3}]
    history = lines_of(typed("ledger", RUN, "g2/1/0"))

    assert list(history) == [
        *("group opened", "sealed", "planned", "stepped", "committed"),
        *("reward", "batch", "advantage", "state"),
    ]
    when = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\+00:00, [\w ]+ ago"
    assert re.fullmatch(f"{when} completed, reward 1", history["sealed"])
    assert re.fullmatch(f"{when} in step 2", history["planned"])
    assert (history["reward"], history["batch"]) == ("1", "step 2")
    assert float(history["advantage"]) > 0
    assert history["state"] == "committed"


def test_batch_and_archive_write_the_bytes_of_steps(typed: Any, tmp_path: Path) -> None:
    path = tmp_path / "step.arrow"

    shown = typed("batch", RUN, "2", "--out", str(path))
    archived = typed("archive", RUN, "--to", str(tmp_path))

    table = pa.ipc.open_stream(path.read_bytes()).read_all()
    assert shown == f"{path}\n"
    assert table["trajectory_id"].to_pylist() == ["g2/0/0", "g2/1/0"]
    paths = [tmp_path / RUN / f"step-{step:08}.parquet" for step in (1, 2, 3)]
    assert archived.splitlines() == [str(path) for path in paths]
    groups = [pq.read_table(path)["group_id"].to_pylist() for path in paths]
    assert groups == [["g1"] * 2, ["g2"] * 2, ["g3"] * 2]
