"""Workers that are killed or stopped: weights and results equal those of an undisturbed run."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from testkit import wait_until
from testkit.training.hosted import (
    STEP,
    Forward,
    HostedClient,
    ModelHost,
    Undisturbed,
    assert_equal,
    datums,
    new_model_host,
    passes_of_models,
    save,
)
from turnstream.store.client.connection import connect
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.operations.contents import LoadWeights, SaveForSampler
from turnstream_server.operations.keys import model_keys
from turnstream_server.operations.log import ModelLog
from turnstream_server.operations.results import DROPPED

ANONYMOUS = SaveForSampler("", 0, "snapshot", None, {})
BAD_STEP = STEP._replace(eps=0.0)


def make_busy(model_host: ModelHost) -> HostedClient:
    """Return a model with commands of all kinds, refused ones among them."""
    model = model_host.make(datums(1, 5, 3), datums(2, 4), datums(3, 4, loss="dro"), STEP)
    model.submit(BAD_STEP, STEP)  # without effect, with a gradient and without one
    model.submit(datums(4), BAD_STEP, datums(5), STEP)
    model.submit(datums(6), STEP, save("mid"), datums(7), STEP)
    model.submit(LoadWeights(model.path("mid"), optimizer=True), datums(8), STEP)
    model.submit(datums(9), ANONYMOUS, STEP, save("end"))
    return model


@pytest.fixture(scope="module")
def undisturbed(
    server: EmbeddedServer, base: Path, tmp_path_factory: pytest.TempPathFactory
) -> Undisturbed:
    model_host = new_model_host(server.url, base, tmp_path_factory.mktemp("undisturbed"))
    model = make_busy(model_host)
    model_host.run(model)
    return Undisturbed.of(model)


@pytest.mark.parametrize(
    "failpoint",
    [
        "engine.after_pass",  # the gradient of the first of two passes
        "engine.after_run@2",  # gradients of a shared pass, without results
        "engine.after_finish@2",
        "engine.after_run@9",  # a step
        "engine.after_run@12",  # a save, with its record
        pytest.param("engine.after_finish@11", marks=pytest.mark.campaign),
        "engine.after_save",  # the first of two saves
        "engine.after_durable",  # the creation
        "engine.after_durable@2",  # a step
        "engine.before_cover@4",  # the load
        "engine.after_cover",
        pytest.param("engine.after_cover@4", marks=pytest.mark.campaign),
        pytest.param("engine.after_finish@19", marks=pytest.mark.campaign),
    ],
)
def test_killed_worker_changes_no_result_and_no_weight(
    model_host: ModelHost, undisturbed: Undisturbed, failpoint: str
) -> None:
    model = make_busy(model_host)
    process = model_host.start(failpoint)
    process.join(60)
    before = model.stored_results()

    model_host.run(model)

    assert process.exitcode == -signal.SIGKILL
    after = model.stored_results()
    assert {number: after[number] for number in before} == before
    undisturbed.require(model)


@pytest.mark.parametrize("has_gradient", [False, True])
def test_stopped_worker_keeps_the_state_and_releases_its_models(
    model_host: ModelHost, has_gradient: bool
) -> None:
    last = (datums(2),) if has_gradient else ()
    model = model_host.make(datums(1), STEP, save("a"), *last)
    process = model_host.start(checkpoint_every=100)
    wait_until(lambda: len(model.stored_results()) == model.num_operations, describe="the results")

    assert process.pid is not None
    os.kill(process.pid, signal.SIGTERM)
    process.join(30)

    assert process.exitcode == 0
    with connect(model_host.url) as client:
        state: Any = client.hgetall(model_keys(model.record.model_id).model)
        log = ModelLog.acquire(client, model.record.model_id, worker="another", lease_s=1)
        log.renew(lease_s=0)
    # A durable checkpoint has no gradient: with one, the log is run again.
    assert state[b"covered"] == (b"0" if has_gradient else b"3")
    model.submit(datums(3), STEP, save("end"))
    # The call without a gradient keeps the two last ones from sharing a pass.
    plain = model_host.make(
        datums(1), STEP, *last, Forward(datums(1)), datums(3), STEP, save("end")
    )
    model_host.run(model, plain)
    assert_equal(model.saved("end"), plain.saved("end"))


def test_dropped_results_stay_dropped_and_their_commands_count(model_host: ModelHost) -> None:
    model = model_host.make(datums(1, 5, 3), STEP, datums(2), save("a"))
    plain = model_host.make(datums(1, 5, 3), STEP, datums(2), save("a"), Forward(datums(1)), STEP)
    plain.submit(save("end"))
    model_host.run(model, checkpoint_every=100)
    results = model_keys(model.record.model_id).results
    with connect(model_host.url) as client:
        client.hset(results, mapping={str(number): DROPPED for number in range(5)})

    model.submit(Forward(datums(1)), STEP, save("end"))
    model_host.run(model, plain)  # another worker: it runs the log again

    stored = model.stored_results()
    assert [stored[number] for number in range(5)] == [DROPPED] * 5
    assert_equal(model.saved("end"), plain.saved("end"))


def test_worker_that_stops_between_two_passes_leaves_the_call_to_the_next_one(
    model_host: ModelHost, undisturbed: Undisturbed
) -> None:
    # The first calls share two passes: each loss has one.
    model = make_busy(model_host)
    with passes_of_models() as passes:
        model_host.run(model, until=lambda: passes)

    assert model.stored_results().keys() == {0}
    model_host.run(model)
    undisturbed.require(model)


def test_only_the_newest_checkpoints_stay(model_host: ModelHost) -> None:
    model = model_host.make(*[each for seed in range(6) for each in (datums(seed), STEP)])

    model_host.run(model, checkpoint_every=2)

    folders = sorted(each.name[:8] for each in model_host.root.glob("models/*/*"))
    assert folders == ["00000008", "00000012"]


def test_missing_checkpoint_fails_commands_and_no_other_model(model_host: ModelHost) -> None:
    broken, other = model_host.make(datums(1), STEP), model_host.make(datums(1), STEP)
    model_host.run(broken, other)
    (folder,) = model_host.root.glob(f"models/{broken.session}*/00000002-*")
    (folder / "adapter_model.safetensors").unlink()

    broken.submit(datums(2), STEP)
    other.submit(datums(2), STEP)
    model_host.run(broken, other)

    for number in (3, 4):
        assert broken.failure(number).category == "server"
        assert "cannot rebuild" in broken.failure(number).error
    assert other.answer(4).content["metrics"]["skipped"] == 0


def test_command_that_never_arrives_fails_those_that_wait(model_host: ModelHost) -> None:
    model = model_host.make(datums(1))
    model.num_operations += 1
    model.submit(STEP)

    model_host.run(model)
    model.submit(datums(2), STEP)
    model_host.run(model)

    assert "operation 2 of the model has never arrived" in model.failure(3).error
    assert model.answer(5).content["metrics"]["skipped"] == 0
