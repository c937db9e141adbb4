"""The code and the commands of every page run as printed, with `turnstream up` on its ports."""

from __future__ import annotations

import ast
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel

import turnstream
from testkit import wait_until
from testkit.services.stores import client_of
from turnstream.records.turns import decode_turn
from turnstream.store.client import keys
from turnstream.store.client.addresses import DEFAULT_URL
from turnstream.store.client.connection import connect
from turnstream.store.run.evals import eval_results
from turnstream.store.run.tasks import read_prompt_counts
from turnstream.types import RecoveryToken, TrajectoryKey, TrajectoryState
from turnstream_server.batcher.planner.releaser import LONGEST_PAUSE_S
from turnstream_server.ledger.core.frontier import read_frontier
from turnstream_server.ledger.queries.ledger import read_ledger
from turnstream_server.models.policy import load_policy
from turnstream_server.models.spec import SmallModelSpec

if TYPE_CHECKING:
    from tests.integration.docs.conftest import Runner

pytestmark = [
    pytest.mark.redis,
    pytest.mark.grpc,
    # Waiting for other tests that need the same ports is part of the time.
    pytest.mark.timeout(400),
    pytest.mark.xdist_group("default-ports"),
]

REPOSITORY = Path(__file__).parents[3]
SHAPE = REPOSITORY / "tests/shapes/vllm-0.33.0-chat.json"
COMMITTED, SURPLUS = TrajectoryState.COMMITTED, TrajectoryState.SURPLUS


def sampler() -> Callable[[], tuple[list[int], list[int], list[float]]]:
    """Return a generator's `sample`, whose responses differ."""
    tokens = itertools.count(5)
    return lambda: ([1, 2, 3], [4, next(tokens)], [-0.5, -0.25])


def by_state(run: str) -> dict[TrajectoryState, int]:
    """Return how many trajectories of a run are in each state; no state of none."""
    with connect(DEFAULT_URL) as client:
        counts = read_ledger(client, run).by_state
    return {state: number for state, number in counts.items() if number}


def stored(run: str, trajectory_id: str) -> list[tuple[list[int], list[int]]]:
    """Return the new prompt tokens and the response of every turn of a trajectory."""
    with connect(DEFAULT_URL) as client:
        entries: Any = client.xrange(keys.trajectory_keys(run, trajectory_id).turns)
    records = [fields[b"r"] for _, fields in entries]
    turns = [decode_turn(record) for record in records if record[2:3] == b"T"]
    return [(turn.new_prompt_ids.tolist(), turn.response_ids.tolist()) for turn in turns]


def test_every_page_with_code_is_run(open_page: Callable[[Path], Any]) -> None:
    paths = sorted((REPOSITORY / "docs").rglob("*.md"))
    names = [path.stem.lower().replace("-", "_") for path in paths if open_page(path).blocks()]
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))

    assert len(names) >= 7
    assert [name for name in names if f"def test_{name}_runs_as_printed(" not in tests] == []


ENVIRONMENT = """
import itertools, sys

numbers = itertools.count(1)

def sample(prompt_ids):
    if next(numbers) == int(sys.argv[1]):
        sys.stdin.read()  # until the test kills the process
    return [len(prompt_ids)]

def answer(response_ids):
    return [4, 5]

def judge(prompt_ids):
    return len(prompt_ids)
"""


def test_crashes_runs_as_printed(runner: Runner) -> None:
    """Takes more than 5 s: it starts a generator three times."""
    brought: dict[str, Any] = {}
    exec(ENVIRONMENT.replace("sys.argv[1]", "0"), brought)
    runner.open(
        "docs/crashes.md", **{name: brought[name] for name in ("sample", "answer", "judge")}
    )
    Path("environment.py").write_text(ENVIRONMENT)
    rollouts = runner.take_block()

    def start(*, hold_at: int) -> subprocess.Popen[str]:
        program = [sys.executable, "-c", rollouts, str(hold_at)]
        return subprocess.Popen(
            program, cwd=Path.cwd(), text=True, stdin=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def kill_after(writer: subprocess.Popen[str], trajectory: str, *, num_turns: int) -> str:
        wait_until(
            lambda: writer.poll() is not None or len(stored("crashed", trajectory)) == num_turns,
            describe=f"{num_turns} turns of {trajectory}",
            timeout_s=60,
        )
        writer.kill()
        _, printed = writer.communicate()
        assert writer.returncode == -signal.SIGKILL, printed
        return printed

    # A sample has four turns; the group of two samples has eight.
    assert kill_after(start(hold_at=14), "task-1/1/0", num_turns=1) == ""
    printed = kill_after(start(hold_at=8), "task-2/0/0", num_turns=3)
    assert printed in runner.text
    runner.run_block()
    last = start(hold_at=0)
    assert last.wait(60) == 0
    last.communicate()

    with turnstream.connect().run("crashed").batches() as batches:
        for step in batches:
            for mini_batch in step:
                assert mini_batch.to_torch("cpu").loss_mask_BR.sum(1).tolist() == [4] * 8
            step.done()
            step.commit()
    assert by_state("crashed") == {COMMITTED: 8, TrajectoryState.ABANDONED: 1}
    assert "1 x left half-written" in runner.run_commands()


def test_responses_runs_as_printed(runner: Runner) -> None:
    sent: list[dict[str, Any]] = []

    def create(**request: Any) -> Any:
        sent.append(request)
        return json.loads(SHAPE.read_text(), object_hook=lambda fields: SimpleNamespace(**fields))

    outputs = [
        SimpleNamespace(
            index=index,
            text="42",
            token_ids=[token],
            logprobs=[{token: SimpleNamespace(logprob=-1.0)}],
            finish_reason="stop",
        )
        for index, token in enumerate((5, 6))
    ]
    output = SimpleNamespace(prompt_token_ids=[1, 2], outputs=outputs)
    runner.open(
        "docs/responses.md",
        client=SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create))),
        messages=[{"role": "user", "content": "What is 6 times 7?"}],
        llm=SimpleNamespace(generate=lambda prompt, parameters: [output]),
        prompt="What is 6 times 7?",
        SamplingParams=SimpleNamespace,
        score=lambda text: float(text == "42"),
    )

    runner.run_all()

    assert [request["extra_body"] for request in sent] == [{"return_token_ids": True}]
    assert stored("served", "visit-1/0/0") == [([151644, 872, 30, 151645], [19, 17, 151645])]
    assert stored("served", "visit-2/0/0") == [([1, 2], [5])]
    assert stored("served", "visit-2/1/0") == [([1, 2], [6])]


def test_tasks_runs_as_printed(runner: Runner) -> None:
    seen: list[bytes] = []

    def play(payload: bytes) -> tuple[list[int], list[int], float]:
        seen.append(payload)
        return [1], [2], float(len(seen))

    runner.open("docs/tasks.md", play=play)

    runner.run_all()

    assert seen == [b"What is 6 times 7?"] * 2 + [b"What is 6 times 8?"] * 2
    assert by_state("quiz") == {TrajectoryState.PLANNED: 4}
    with connect(DEFAULT_URL) as client:
        assert read_prompt_counts(client, "quiz").num_added == 2


def test_waits_runs_as_printed(runner: Runner, capsys: pytest.CaptureFixture[str]) -> None:
    run = turnstream.connect().create_run("full", batch_groups=1)
    with (
        run.publisher(admission_timeout_s=1) as publisher,
        publisher.group("g5", num_samples=1),
        publisher.group("g6", num_samples=8),
    ):
        runner.open("docs/waits.md", publisher=publisher)
        runner.run_all()

    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("no_admission group g7 has waited 1 s for admission: 2 groups are")


def test_late_rewards_runs_as_printed(runner: Runner, capsys: pytest.CaptureFixture[str]) -> None:
    trained: list[Any] = []
    runner.open(
        "docs/late-rewards.md",
        sample=sampler(),
        judge=lambda key: float(key.sample),
        train=lambda batch, denominators: trained.append(batch),
    )

    runner.run_all()
    printed = capsys.readouterr().out
    late = runner.names["run"].post_reward(TrajectoryKey("task-7", 2), 1.0)
    commands = runner.run_commands()

    assert (printed, late) == ("OK\nOK\n", "LATE")
    assert [batch.input_ids_BT[:, -1].tolist() for batch in trained] == [[5, 6]]
    assert trained[0].advantages_BR[0, 0] < 0 < trained[0].advantages_BR[1, 0]
    assert by_state("judged") == {COMMITTED: 2, SURPLUS: 1}
    assert "1 rewards came after their groups were decided" in commands


def test_branches_runs_as_printed(runner: Runner, capsys: pytest.CaptureFixture[str]) -> None:
    runner.open("docs/branches.md")

    runner.run_all()

    assert f"\n```\n{capsys.readouterr().out}```\n" in runner.text


def test_evaluations_runs_as_printed(runner: Runner) -> None:
    trained: list[Any] = []
    rewards = iter((1.0, 0.0, 0.25, 0.75))
    runner.open(
        "docs/evaluations.md",
        sample=sampler(),
        judge=lambda response_ids: next(rewards),
        train=lambda batch, denominators: trained.append(batch),
    )

    runner.run_all()
    wait_until(
        lambda: by_state("graded") == {COMMITTED: 2, TrajectoryState.EVALUATED: 2},
        describe="the evaluation",
    )
    printed = runner.run_commands()

    assert [batch.input_ids_BT[:, -1].tolist() for batch in trained] == [[7, 8]]
    with connect(DEFAULT_URL) as client:
        [result] = eval_results(client, "graded")
    assert (result.version, result.num_groups, result.reward.mean, result.best.mean) == (
        3,
        1,
        0.5,
        1,
    )
    assert "\n".join(line.rstrip() for line in printed.splitlines()) in runner.text


def test_http_runs_as_printed(runner: Runner) -> None:
    turnstream.connect().create_run("demo", batch_groups=1)
    runner.open("docs/http.md")

    runner.run_all()
    runner.names["service"].close()

    assert sum(by_state("demo").values()) == 2


def test_requests_of_the_http_page_may_be_repeated(runner: Runner) -> None:
    runner.open("docs/http.md")
    commands = runner.text.partition("```sh\n")[2].partition("```")[0]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])

    for _ in range(2):
        output = subprocess.run(
            ["sh", "-ec", commands],
            env={**os.environ, "PATH": path},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout
        assert '"status":201' in output

    with turnstream.connect() as service:
        wait_until(lambda: read_frontier(client_of(service), "lab").planned == 1)
        assert read_ledger(client_of(service), "lab").accepted == 1


def test_weights_runs_as_printed(runner: Runner) -> None:
    rewards = itertools.count(1.0)
    loaded: list[str] = []
    trained: list[Any] = []
    runner.open(
        "docs/weights.md",
        sample=sampler(),
        judge=lambda response_ids: next(rewards),
        load=loaded.append,
        train=lambda batch, denominators: trained.append(batch),
        publish_weights=lambda version: f"file:///weights/{version}",
    )

    runner.run_all()
    printed = runner.run_commands()

    assert len(trained) == 4
    # The fourth group is admitted after step 2, and version 1 was announced before.
    assert loaded[0] == "file:///weights/0"
    assert 2 <= len(loaded) <= 4
    assert runner.names["run"].wait_for_version().weights_uri == "file:///weights/4"
    assert "policy version   4" in printed


def test_sampling_runs_as_printed(runner: Runner, capsys: pytest.CaptureFixture[str]) -> None:
    vocab = {chr(32 + token): token for token in range(64)}
    tokenizer = Tokenizer(WordLevel(vocab, unk_token=" "))
    tokenizer.decoder = Fuse()
    runner.open(
        "docs/sampling.md",
        model=load_policy(SmallModelSpec(vocab_size=64, hidden_size=32)),
        folder=Path("base"),
        tokenizer=tokenizer,
        prompts=[[1, 2, 3], [4, 5]],
        judge=lambda text: float(len(text)),
    )

    runner.run_block()
    assert capsys.readouterr().out.count("length ") == 2
    runner.run_block()
    assert sum(by_state("sampled").values()) == 8
    assert [len(response) for _, response in stored("sampled", "task-1/3/0")] == [64]
    runner.run_block()
    versions = ast.literal_eval(capsys.readouterr().out)
    assert versions[-1][0] == 1
    assert sum(count for _, count in versions) == 64
    runner.run_block()
    assert capsys.readouterr().out == "((3, 64),) ((0, 64),)\n"


def test_advantages_runs_as_printed(runner: Runner) -> None:
    temperatures: list[float] = []

    def sample(temperature: float) -> tuple[list[int], list[int], float]:
        temperatures.append(temperature)
        return [1, 2], [3], float(len(temperatures) % 2)

    runner.open("docs/advantages.md", sample=sample)

    runner.run_all()

    assert temperatures == [0.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert by_state("maths") == {}
    assert by_state("greedy") == {TrajectoryState.SEALED: 4}
    assert by_state("weighed") == {TrajectoryState.SEALED: 2}


def test_retention_runs_as_printed(runner: Runner) -> None:
    """Takes more than 5 s: it waits for the time after which steps would be deleted."""
    rewards = itertools.count(1.0)
    saved: list[Any] = []
    seen: list[int] = []
    runner.open(
        "docs/retention.md",
        sample=sampler(),
        judge=lambda response_ids: next(rewards),
        train=lambda batch, denominators: None,
        save=saved.append,
        look_at=lambda mini_batch: seen.append(mini_batch.info.step),
    )
    ids = [f"task-{number}/0/0" for number in range(4)]

    runner.run_block()
    runner.run_block()
    time.sleep(LONGEST_PAUSE_S + 0.5)  # by then every step would be deleted
    held = [bool(stored("kept", name)) for name in ids]
    runner.run_block()
    wait_until(lambda: not any(stored("kept", name) for name in ids), describe="the deletion")
    runner.run_commands()

    assert [RecoveryToken.parse(each["turnstream"]).step for each in saved] == [1, 2, 3, 4]
    assert (held, seen) == ([True] * 4, [1, 2, 3, 4])
    assert "kept" not in turnstream.connect().runs()
