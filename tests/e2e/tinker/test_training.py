"""Order, accumulation, saved states and refusals, as the real SDK sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch

from testkit.datums import as_sent, random_data
from testkit.operation_reference import stored_weights
from testkit.sdks import BASE, NEWEST, RELEASES, Hosting, Sdk

LENGTHS: Final = (6, 3, 11)


@pytest.fixture(scope="module", params=RELEASES)
def answers(request: pytest.FixtureRequest, sdk: Callable[..., Sdk]) -> dict[str, Any]:
    """Results of several scenarios that one client of a release runs."""
    release: str = request.param
    steps = {"data": as_sent(random_data(1, LENGTHS)), "steps": 3}
    calls = [[data, loss, settings] for data, loss, settings, _ in _bad_calls(release)]
    scenarios = [
        ("pipelined", {**steps, "name": f"pipelined-{release}"}),
        ("awaited", {**steps, "name": f"awaited-{release}"}),
        (
            "saved_and_loaded",
            {"data": as_sent(random_data(5, LENGTHS)), "name": f"saved-{release}"},
        ),
        ("refused", {"calls": calls, "good": as_sent(random_data(8, LENGTHS))}),
    ]
    results = sdk(release).run_all(BASE, scenarios)
    names = [name for name, _ in scenarios]
    return {"release": release, **dict(zip(names, results, strict=True))}


def test_pipelined_calls_equal_awaited_ones(hosting: Hosting, answers: dict[str, Any]) -> None:
    pipelined, awaited = answers["pipelined"], answers["awaited"]

    assert pipelined["losses"] == awaited["losses"]
    assert pipelined["losses"][-1] < pipelined["losses"][0]
    _require_equal(hosting, pipelined["path"], awaited["path"])


def test_loaded_state_trains_bit_equal_to_the_saved_model(
    hosting: Hosting, answers: dict[str, Any]
) -> None:
    result = answers["saved_and_loaded"]

    assert result["rank"] == 4
    _require_equal(hosting, *result["paths"])


def test_bad_calls_are_refused_and_the_client_stays_usable(answers: dict[str, Any]) -> None:
    result, cases = answers["refused"], _bad_calls(answers["release"])

    for (error, seconds), (_, loss, settings, words) in zip(result["errors"], cases, strict=True):
        assert error is not None, f"{loss} {settings} was accepted"
        assert all(word in error[1] for word in words), f"{loss} {settings}: {error}"
        assert seconds < 5.0
    assert result["loss"] > 0


def _bad_calls(
    release: str,
) -> list[tuple[list[dict[str, Any]], str, dict[str, Any], tuple[str, ...]]]:
    """Return datums, loss, settings, and words of the error.

    A loss that a release does not name is refused by its client, and the number is never sent.
    """
    good = as_sent(random_data(10, LENGTHS))

    def changed(place: int, name: str, column: list[Any]) -> list[dict[str, Any]]:
        data = as_sent(random_data(10, LENGTHS))
        data[place]["inputs"][name] = column
        return data

    beyond = as_sent(random_data(10, LENGTHS))
    beyond[2]["tokens"][4] = 70_000
    short = changed(1, "weights", [[2], "float32", [1.0, 1.0]])
    negative = changed(0, "target_tokens", [[6], "int64", [1, 2, 3, 4, 5, -7]])
    unnamed = [(good, "stable_reinforce", {}, ("stable_reinforce",))]
    return [
        *(unnamed if release == NEWEST else []),
        (good, "cross_entropy", {"clip": 0.1}, ("clip",)),
        (good, "ppo", {}, ("logprobs",)),
        (short, "cross_entropy", {}, ("datum 1", "weights")),
        (negative, "cross_entropy", {}, ("datum 0", "-7")),
        (beyond, "cross_entropy", {}, ("datum 2", "70000")),
    ]


def _require_equal(hosting: Hosting, first: str, second: str) -> None:
    found, wanted = (stored_weights(hosting.saved(each)) for each in (first, second))
    assert found.keys() == wanted.keys()
    for name, weight in wanted.items():
        assert torch.equal(found[name], weight), name
