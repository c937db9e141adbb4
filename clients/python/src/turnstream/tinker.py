"""Training of a hosted model on a run, through the training client of the tinker SDK.

    future = turnstream.forward_backward_run(model, run="demo")
    model.optim_step(tinker.AdamParams(learning_rate=1e-4)).result()
    loss = future.result().metrics["loss:sum"]

The rows of the run reach the model inside the service. The client sends one placeholder datum.
"""

from __future__ import annotations

from typing import Any

from turnstream.optional import from_extra

__all__ = ["forward_backward_run"]


def forward_backward_run(
    model: Any,
    *,
    run: str,
    loss_fn: str = "ppo",
    clip_low_threshold: float = 0.8,
    clip_high_threshold: float = 1.2,
) -> Any:
    """Return the future of a `forward_backward` on the next mini-batch of a run.

    The call waits in the service until the mini-batch is ready. Its loss is averaged as the run is
    configured. Its one log-probability is that of the placeholder, 0.

    Args:
        model: `TrainingClient` of the tinker SDK, release 0.38 or later.
        run: name of the run.
        loss_fn: "ppo"; the service refuses others.
        clip_low_threshold: smallest ratio that is not clipped, 0 to 1.
        clip_high_threshold: largest ratio that is not clipped, 1 or more.

    Raises:
        MissingExtraError: the package tinker is not installed.
    """
    with from_extra("tinker", needed_by="forward_backward_run()"):
        import tinker

    placeholder = tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens=[0]),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData(data=[0], dtype="int64", shape=[1]),
        },
    )
    settings = {
        "run": run,
        "clip_low_threshold": clip_low_threshold,
        "clip_high_threshold": clip_high_threshold,
    }
    return model.forward_backward([placeholder], loss_fn, settings)
