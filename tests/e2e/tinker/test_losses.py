"""Losses and gradients that the real SDK receives, against a reference in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import pytest
from numpy.typing import NDArray

from testkit.requests.datums import Inputs, as_sent, random_data
from testkit.requests.sdks import BASE, NEWEST, RELEASES, Hosting, Sdk
from testkit.training.operation_reference import Reference, reference, stored_weights

LENGTHS: Final = (5, 1, 17, 9)
SETTINGS: Final[dict[str, dict[str, float]]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {},
    "cispo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05},
    "dro": {"beta": 0.3},
    "gspo": {"clip_low_threshold": 0.7, "clip_high_threshold": 1.1},
}
EPS: Final = 1000.0
"""So large that the first step of Adam is nearly proportional to the gradient."""


@pytest.fixture(scope="module")
def state(sdk: Callable[..., Sdk]) -> str:
    """A saved model, none of whose factors is zero."""
    data = as_sent(random_data(0, LENGTHS))
    return sdk().run(BASE, "first_state", data=data, name="start")


@pytest.mark.slow
@pytest.mark.parametrize("release", RELEASES)
def test_every_loss_has_the_value_and_gradient_of_its_definition(
    release: str, hosting: Hosting, sdk: Callable[..., Sdk], state: str
) -> None:
    """Takes more than 5 s: the services that host models start, and train six losses."""
    # Older releases do not name gspo.
    losses = {loss: each for loss, each in SETTINGS.items() if release == NEWEST or loss != "gspo"}
    data = {loss: random_data(1, LENGTHS, loss=loss) for loss in losses}
    adam = {"learning_rate": 1.0, "eps": EPS}
    scenarios = [
        (
            "loss_and_step",
            {
                "state": state,
                "data": as_sent(data[loss]),
                "loss": loss,
                "settings": settings,
                "adam": adam,
                "name": f"{loss}-{release}",
            },
        )
        for loss, settings in losses.items()
    ]

    results = sdk(release).run_all(BASE, scenarios)

    for (loss, settings), result in zip(losses.items(), results, strict=True):
        expected = reference(hosting.saved(state), data[loss], loss=loss, settings=settings)
        _check_outputs(result, expected, data[loss])
        _check_step(hosting, state, result["path"], expected)


def test_several_targets_of_a_position_have_their_own_values(
    hosting: Hosting, sdk: Callable[..., Sdk], state: str
) -> None:
    rng = np.random.default_rng(2)
    data: list[Inputs] = [
        {
            "model_input": rng.integers(0, 256, n),
            "target_tokens": rng.integers(0, 256, (n, 3)),
            "weights": rng.random((n, 3)).astype(np.float32),
        }
        for n in (4, 7)
    ]
    arguments = {"state": state, "data": as_sent(data), "loss": "cross_entropy", "settings": {}}
    adam = {"learning_rate": 1.0, "eps": EPS}

    result = sdk().run(BASE, "loss_and_step", **arguments, adam=adam, name="targets")

    expected = reference(hosting.saved(state), data, loss="cross_entropy", settings={})
    _check_outputs(result, expected, data)
    _check_step(hosting, state, result["path"], expected)


def test_custom_loss_of_the_client_trains(
    hosting: Hosting, sdk: Callable[..., Sdk], state: str
) -> None:
    data = random_data(3, LENGTHS)
    for datum in data:
        del datum["weights"]

    result = sdk().run(BASE, "custom_loss", state=state, data=as_sent(data), name="custom")

    known = reference(hosting.saved(state), data, loss="cross_entropy", settings={})
    # The gradient of a sum of squares p^2 is that of the cross-entropy with the weights -2 p.
    weighted = [
        {**datum, "weights": (-2 * p).astype(np.float32)}
        for datum, p in zip(data, known.logprobs, strict=True)
    ]
    expected = reference(hosting.saved(state), weighted, loss="cross_entropy", settings={})
    squares = sum(float((p**2).sum()) for p in known.logprobs)
    assert result["metrics"]["squares"] == pytest.approx(squares, rel=1e-4)
    _check_step(hosting, state, result["path"], expected)


def test_ragged_datums_of_several_chunks_keep_their_order(
    hosting: Hosting, sdk: Callable[..., Sdk], state: str
) -> None:
    """Takes more than 5 s: 1,030 datums are trained."""
    lengths = (np.random.default_rng(5).permutation(1030) % 6 + 1).tolist()
    data = random_data(5, lengths)

    result = sdk().run(BASE, "ragged_chunks", state=state, data=as_sent(data))

    assert result["requests"] == 2
    assert [len(each) for each in result["logprobs"]] == lengths
    weighted = zip(data, result["logprobs"], strict=True)
    loss = -sum(float((datum["weights"] * logprobs).sum()) for datum, logprobs in weighted)
    assert result["metrics"]["loss:sum"] == pytest.approx(loss, rel=1e-4)
    chosen = [*range(0, 1024, 32), *range(1020, 1030)]  # the second chunk begins at 1024
    part = [data[place] for place in chosen]
    expected = reference(hosting.saved(state), part, loss="cross_entropy", settings={})
    for place, wanted in zip(chosen, expected.logprobs, strict=True):
        np.testing.assert_allclose(result["logprobs"][place], wanted, rtol=1e-4, atol=1e-4)


def _check_outputs(result: Mapping[str, Any], expected: Reference, data: list[Inputs]) -> None:
    assert result["metrics"]["loss:sum"] == pytest.approx(expected.loss, rel=1e-4, abs=1e-4)
    assert len(result["logprobs"]) == len(data)
    for found, wanted in zip(result["logprobs"], expected.logprobs, strict=True):
        np.testing.assert_allclose(found, wanted.ravel(), rtol=1e-4, atol=1e-4)


def _check_step(hosting: Hosting, before: str, after: str, expected: Reference) -> None:
    """Compare the change of each weight with the first step of Adam on the reference gradient."""
    old = stored_weights(hosting.saved(before))
    new = stored_weights(hosting.saved(after))
    changes: list[NDArray[np.float64]] = []
    for name, gradient in expected.gradients.items():
        found = (old[name].double() - new[name].double()).numpy()
        wanted = (gradient / (gradient.abs() + EPS)).numpy()
        np.testing.assert_allclose(found, wanted, rtol=2e-3, atol=1e-7, err_msg=name)
        changes.append(wanted)
    assert max(float(np.abs(each).max()) for each in changes) > 1e-5
