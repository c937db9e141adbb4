"""Training on datums and on a run, saved states and exports, as the real SDK sees them."""

from __future__ import annotations

import filecmp
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import turnstream
from testkit.requests.datums import as_sent, random_data
from testkit.requests.sdks import BASE, RELEASES, Hosting, Sdk
from testkit.training.operation_reference import stored_weights
from turnstream.store.client.connection import connect
from turnstream_server.ledger.core.frontier import read_frontier


@pytest.mark.parametrize("release", RELEASES)
def test_loaded_state_trains_bit_equal_to_the_saved_model(
    release: str, hosting: Hosting, sdk: Callable[..., Sdk]
) -> None:
    """Takes more than 5 s: the services that host models start, and the SDK."""
    arguments = {"data": as_sent(random_data(5, (6, 3, 11))), "name": f"saved-{release}"}

    result = sdk(release).run(BASE, "saved_and_loaded", **arguments)

    assert result["rank"] == 4
    found, wanted = (stored_weights(hosting.saved(each)) for each in result["paths"])
    assert found.keys() == wanted.keys()
    for name, weight in wanted.items():
        assert torch.equal(found[name], weight), name


def test_exports_are_downloaded_by_the_sdk_and_its_command_line(
    hosting: Hosting, sdk: Callable[..., Sdk], tmp_path: Path
) -> None:
    """Takes more than 5 s: the services that host models start, and the SDK twice."""
    data = as_sent(random_data(20, (6, 3)))

    result = sdk().run(BASE, "exported", data=data, folder=str(tmp_path))

    names = ["adapter_config.json", "adapter_model.safetensors"]
    assert result["files"] == names
    assert result["kinds"] == ["external", "training"]
    (by_command,) = (each.parent for each in (tmp_path / "of-state").rglob("*.safetensors"))
    for name in names:
        assert filecmp.cmp(tmp_path / name, by_command / name, shallow=False)
    found, saved = (
        load_file(each / "adapter_model.safetensors")
        for each in (tmp_path, hosting.saved(result["saved"]))
    )
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[name], saved[name]) for name in saved)
    assert any(value.any() for name, value in found.items() if "lora_B" in name)


def test_fleet_of_a_run_trains_a_hosted_model(hosting: Hosting, sdk: Callable[..., Sdk]) -> None:
    """Takes more than 5 s: the services that host models start, and the SDK."""
    with turnstream.connect(hosting.store_url) as service:
        run = service.create_run("fleet", batch_groups=2, max_staleness=9)
        with run.publisher() as publisher:
            for number in range(6):
                with publisher.group(f"g{number}", num_samples=2) as group:
                    for sample, trajectory in enumerate(group):
                        response = [40 + number, 50 + sample, 60]
                        trajectory.append([10, 11], response, logprobs=[-5.0, -5.5, -6.0])
                        trajectory.seal(reward=float(sample))

    found = sdk().run(BASE, "trained_on_a_run", run="fleet", steps=3, name="of-fleet")

    metrics = [each["metrics"] for each in found["outputs"]]
    assert [each["logprobs"] for each in found["outputs"]] == [[[0.0]]] * 3
    assert [each["step:max"] for each in metrics] == [1, 2, 3]
    assert [each["trajectories:sum"] for each in metrics] == [4, 4, 4]
    assert {each["reward:mean"] for each in metrics} == {0.5}
    unknown, other_loss = (text for _, text in found["errors"])
    assert "no run named 'no-run'" in unknown
    assert "loss_fn 'cispo' is not supported on a run" in other_loss
    weights = stored_weights(hosting.saved(found["path"]))
    assert any(torch.any(value) for name, value in weights.items() if "lora_B" in name)
    with connect(hosting.store_url) as client:
        assert read_frontier(client, "fleet").stepped == 3
