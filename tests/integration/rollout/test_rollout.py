"""`turnstream rollout`: outcomes of samples, restarts, and its end."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import pytest
import redis

import turnstream
from testkit.services.batchers import BatcherThread
from testkit.services.engine_doubles import EngineDouble
from testkit.services.gateway_thread import GatewayThread
from testkit.services.stores import RunReader
from testkit.waiting import wait_until
from turnstream.errors import InvalidConfigError
from turnstream.store.run.runs import close_run
from turnstream.types import SealedTrajectory, Status, TrajectoryKey
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.rollout.options import RolloutOptions
from turnstream_server.rollout.service import run_rollout
from turnstream_server.settings import Settings

if TYPE_CHECKING:
    from tests.integration.rollout.conftest import RolloutProcess

GRADE = """
case "$TURNSTREAM_GROUP" in
  words*) echo well done ;; infinite*) echo inf ;; broken*) echo trouble >&2; exit 7 ;;
  *) grep -q "^sample $TURNSTREAM_SAMPLE of" "$TURNSTREAM_OUTPUT_FILE" && echo "checked
0.$TURNSTREAM_EXIT_STATUS" ;;
esac
"""

OUTCOMES: dict[str, tuple[dict[str, Any], tuple[str, float, str]]] = {
    "whole": ({"steps": ["call"]}, ("completed", 0.0, "")),
    "fails": ({"steps": ["call"], "status": 3}, ("error", 0.0, "exit status 3")),
    "late": ({"steps": ["call", "hang"]}, ("truncated", 0.143, "")),
    "deaf": ({"steps": ["call", "child", "deaf", "hang"]}, ("truncated", 0.137, "")),
    "seals": ({"steps": ["call", "seal"]}, ("completed", 0.0, "")),
    "leaves": ({"steps": ["call", "child"]}, ("completed", 0.0, "")),
    "silent": ({"steps": []}, ("error", 0.0, "no model call")),
    "idle": ({"steps": ["hang"]}, ("error", 0.0, "no model call")),
    "words": (
        {"steps": ["call"]},
        ("error", 0.0, "reward command: its last line is 'well done', expected a number"),
    ),
    "infinite": (
        {"steps": ["call"]},
        ("error", 0.0, "reward command: it has printed inf, expected a finite number"),
    ),
    "broken": ({"steps": ["call"]}, ("error", 0.0, "reward command: exit status 7")),
}


def sealed(reader: RunReader) -> list[SealedTrajectory]:
    return [event for event in reader.events() if isinstance(event, SealedTrajectory)]


@pytest.mark.slow
def test_each_outcome_of_an_agent_has_its_seal(
    rollout: RolloutProcess, reader: RunReader, client: redis.Redis, run: str
):
    rollout.write([{"id": name, **task} for name, (task, _) in OUTCOMES.items()])
    options = ["--samples", "1", "--parallel", "4", "--timeout", "10", "--reward", GRADE]
    process = rollout.start(*options)
    wait_until(lambda: process.poll() or len(sealed(reader)) == len(OUTCOMES), 120, "all seals")
    assert rollout.agents() == []
    close_run(client, run)
    status, output = rollout.output()
    assert status == 0, output

    found = {
        each.key.group_id.partition("#")[0]: (
            each.status.value,
            each.reward,
            dict(each.tags).get("reason", ""),
        )
        for each in sealed(reader)
    }
    assert found == {name: expected for name, (_, expected) in OUTCOMES.items()}
    assert output.count("reward command: ") == 1
    assert "3 x reward command" in output
    assert "errors 6" in output


@contextmanager
def training(url: str, run: str) -> Iterator[list[str]]:
    """Step through the batches of a run; the list has the trajectories that were trained."""
    trained: list[str] = []

    def consume() -> None:
        with turnstream.connect(url).run(run).batches() as batches:
            for step in batches:
                trained.extend(name for each in step for name in {*each.rows.trajectory_id})
                step.done()
                step.commit()

    with BatcherThread(url):
        thread = threading.Thread(target=consume, daemon=True)
        thread.start()
        yield trained
        turnstream.connect(url).run(run).close()
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.slow
@pytest.mark.parametrize("run", [2], indirect=True)
@pytest.mark.parametrize(("fixture", "is_killed"), [("own_rollout", False), ("rollout", True)])
def test_all_tasks_are_trained_once_also_after_a_kill(
    fixture: str, is_killed: bool, request: pytest.FixtureRequest, server: EmbeddedServer, run: str
):
    rollout: RolloutProcess = request.getfixturevalue(fixture)
    naps = [["nap", "openai"], *[["call"]] * 5]  # longer than a lease
    rollout.write([{"steps": steps} for steps in naps])
    options = ["--samples", "2", "--parallel", "4", "--reward", "echo $TURNSTREAM_SAMPLE"]
    with training(server.url, run) as trained:
        process = rollout.start(*options)
        if is_killed:
            wait_until(rollout.agents, 120, "an agent")
            process.kill()
            rollout.output()
            rollout.start(*options)
        status, output = rollout.output()

    assert status == 0, output
    assert "tasks 6 of 6 done" in output
    assert "errors 0" in output
    assert [*Counter(trained).values()] == [1] * 12
    assert Counter(name.partition("%")[0] for name in trained) == dict.fromkeys("123456", 2)


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_stops_agents_and_abandons_their_samples(
    number: int, expected: int, rollout: RolloutProcess, reader: RunReader
):
    rollout.write([{"id": "a/b", "steps": ["hang"]}])
    process = rollout.start("--samples", "3", "--parallel", "2")
    wait_until(lambda: rollout.outputs() and "hangs" in rollout.outputs()[0], 60, "an agent")

    process.send_signal(number)
    status, output = rollout.output()

    assert (status, output.splitlines()[-1]) == (expected, "interrupted")
    assert {*reader.states().values()} == {"abandoned"}
    assert rollout.agents() == []


def test_first_samples_that_all_fail_stop_the_rollout(rollout: RolloutProcess, reader: RunReader):
    rollout.write([{"id": n} for n in range(20)])
    rollout.start("--samples", "2", "--parallel", "2", agent=["sh", "-c", "echo no such; exit 127"])

    status, output = rollout.output()

    assert status == 1
    assert "error: the first 8 samples have all failed: exit status 127; see " in output
    assert "no such" in output
    assert len(sealed(reader)) <= 9
    assert {*reader.states().values()} == {"sealed", "abandoned"}


def test_rewards_may_be_posted_later(
    rollout: RolloutProcess, reader: RunReader, client: redis.Redis, run: str
):
    rollout.write([{"id": "later", "steps": ["call"]}])
    rollout.start("--samples", "1")
    wait_until(lambda: reader.states() == {"later%231/0/0": "awaiting_reward"}, 60, "the end")
    close_run(client, run)

    assert rollout.output()[0] == 0


def test_rollout_waits_for_a_gateway_that_restarts(
    rollout: RolloutProcess,
    gateway: GatewayThread,
    reader: RunReader,
    client: redis.Redis,
    run: str,
):
    rollout.write([{"id": "a", "steps": ["call", "hang"]}])
    rollout.start("--samples", "1", "--timeout", "5", "--reward", "echo 1")
    wait_until(lambda: reader.turns(TrajectoryKey("a#1", 0)), describe="the call")
    gateway.stop()
    wait_until(lambda: not rollout.agents(), describe="the end of the agent")
    gateway.start()
    wait_until(lambda: sealed(reader), describe="the seal")
    close_run(client, run)

    assert rollout.output()[0] == 0
    assert [(each.status, each.reward) for each in sealed(reader)] == [(Status.TRUNCATED, 1.0)]


def test_sample_that_ended_elsewhere_is_lost_alone(
    rollout: RolloutProcess,
    gateway: GatewayThread,
    reader: RunReader,
    client: redis.Redis,
    run: str,
):
    rollout.write([{"id": "a", "steps": ["call", "hang"]}])
    rollout.start("--samples", "2", "--timeout", "6", "--reward", "echo 1")
    keys = [TrajectoryKey("a#1", sample) for sample in range(2)]
    wait_until(lambda: all(map(reader.turns, keys)), describe="the calls")
    body = {"group_id": "a#1", "trajectories": [{"sample": 1}]}
    url = f"{gateway.base_url}/v1/runs/{run}/tasks/end"
    assert httpx2.post(url, json=body).json()["abandoned"]
    wait_until(lambda: sealed(reader), describe="the seal")
    close_run(client, run)
    status, output = rollout.output()

    assert status == 0
    assert "a#1/1/0 is lost: " in output
    assert "lost 1" in output
    assert reader.states() == {"a%231/0/0": "sealed", "a%231/1/0": "abandoned"}


@pytest.mark.parametrize(
    ("text", "changes", "message"),
    [
        (
            "",
            {"gateway": ""},
            "name one with --gateway URL or TURNSTREAM_GATEWAY_URL, or start one",
        ),
        ("", {"engines": ["vllm=http://127.0.0.1:1"]}, "use either --engine or --gateway"),
        ("", {"command": ["no-such-program"]}, "COMMAND: 'no-such-program' is no program"),
        ("", {}, "has no task"),
        ('{"id": 1}\n\n[1]\n', {}, "line 3 of .*: it is .1., expected a JSON object"),
        ('{"id": 1.5}\n', {}, "line 1 of .*: id: '?1.5'? is neither a text nor a whole number"),
        ('{"id": 1}\n{"id"\n', {}, "line 2 of .*: it is no JSON"),
        ('{"id": 2}\n', {}, "has other prompts than .*: prompt 1 is there with another content"),
    ],
)
def test_wrong_input_is_refused_before_an_agent_starts(
    text: str,
    changes: dict[str, Any],
    message: str,
    gateway: GatewayThread,
    engine: EngineDouble,
    run: str,
    server: EmbeddedServer,
    tmp_path: Path,
):
    with turnstream.connect(server.url) as service:
        prompt = turnstream.generator.Prompt(prompt_uid="1", payload=b'{"id": 1}', num_samples=2)
        service.run(run).add_prompts([prompt], first=1)
    (path := tmp_path / "tasks.jsonl").write_text(text)
    marker = tmp_path / "started"
    options: dict[str, Any] = {
        "run": run,
        "gateway": gateway.base_url,
        "tasks": path,
        "num_samples": 2,
        "logs": tmp_path / "logs",
        "command": ["sh", "-c", f"touch {marker}; sleep 60"],
        **changes,
    }

    with pytest.raises(InvalidConfigError, match=message):
        run_rollout(Settings(), RolloutOptions(**options), lambda _: None)
    assert not marker.exists()


def test_two_rollouts_do_not_share_a_folder(rollout: RolloutProcess, tmp_path: Path):
    rollout.write([{"id": 1, "steps": ["hang"]}])
    rollout.start("--samples", "1")
    wait_until(rollout.agents, 60, "an agent")
    options = RolloutOptions(
        run="other", gateway="http://127.0.0.1:1", logs=rollout.logs, command=["true"]
    )

    with pytest.raises(InvalidConfigError, match="another rollout uses"):
        run_rollout(Settings(), options, lambda _: None)
