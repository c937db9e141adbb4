"""Training on the batches of a run, as the real SDK sees it."""

from __future__ import annotations

from collections.abc import Callable

import torch

import turnstream
from testkit.operation_reference import stored_weights
from testkit.sdks import BASE, Hosting, Sdk
from turnstream.store.client.connection import connect
from turnstream_server.ledger.core.frontier import read_frontier


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
