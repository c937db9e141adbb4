"""A program that uses the real tinker SDK for one whole session, and prints what it received."""

from __future__ import annotations

import json
import sys
from typing import Any

import tinker
from tinker import types

_BASE = sys.argv[1]
_PROMPT = types.ModelInput.from_ints([5, 6, 7])
_PARAMS = types.SamplingParams(max_tokens=3, temperature=0.5)


def main() -> None:
    """Train, save, load and sample; print a JSON object."""
    service = tinker.ServiceClient()
    served = service.get_server_capabilities().supported_models
    training = service.create_lora_training_client(base_model=_BASE, rank=8)
    saved = _trained(training)
    found = {
        "release": tinker.__version__,
        "served": [each.model_name for each in served],
        **saved,
        **_sampled(training),
        **_managed(service, training, path=saved["saved"]),
    }
    sys.stdout.write(json.dumps(found) + "\n")


def _trained(training: Any) -> dict[str, Any]:
    """Submit pipelined calls, a refused one and a save; return what came back."""
    info = training.get_info()
    calls = [
        training.forward([_datum(3)], "cross_entropy"),
        training.forward_backward([_datum(1), _datum(2)], "cross_entropy"),
        training.optim_step(types.AdamParams(learning_rate=0.5)),
    ]
    forward, backward, step = (call.result() for call in calls)
    refused = training.forward_backward([_datum(100_000)], "cross_entropy")
    return {
        "info": [info.model_id, info.model_data.model_name, info.lora_rank],
        "forward": _logprobs(forward),
        "backward": _logprobs(backward),
        "loss": backward.metrics["loss:sum"],
        "step": step.metrics,
        "refused": _error(refused),
        "saved": training.save_state("s1").result().path,
    }


def _sampled(training: Any) -> dict[str, Any]:
    """Sample from the current weights; return the samples, log-probabilities and an error."""
    sampler = training.save_weights_and_get_sampling_client()
    sampled = sampler.sample(_PROMPT, num_samples=2, sampling_params=_PARAMS).result()
    long = types.SamplingParams(max_tokens=1_000)
    return {
        "sampled": [[each.stop_reason, each.tokens, each.logprobs] for each in sampled.sequences],
        "logprobs": sampler.compute_logprobs(_PROMPT).result(),
        "too_long": _error(sampler.sample(_PROMPT, num_samples=1, sampling_params=long)),
    }


def _managed(service: Any, training: Any, *, path: str) -> dict[str, Any]:
    """Use, list, publish and delete saved weights."""
    named = training.save_weights_for_sampler("n1").result().path
    sampler = service.create_sampling_client(model_path=named)
    sample = sampler.sample(_PROMPT, num_samples=1, sampling_params=_PARAMS).result()
    resumed = service.create_training_client_from_state(path)
    output = resumed.forward([_datum(4)], "cross_entropy").result()
    rest = service.create_rest_client()
    runs = rest.list_training_runs().result().training_runs
    listed = rest.list_checkpoints(training.get_info().model_id).result().checkpoints
    rest.publish_checkpoint_from_tinker_path(path).result()
    rest.delete_checkpoint_from_tinker_path(named).result()
    left = rest.list_user_checkpoints().result().checkpoints
    return {
        "by_path": list(sample.sequences[0].tokens),
        "resumed": _logprobs(output),
        "runs": [each.training_run_id for each in runs],
        "checkpoints": sorted(each.checkpoint_id for each in listed),
        "left": [[each.checkpoint_id, each.public] for each in left],
    }


def _error(call: Any) -> str:
    try:
        call.result()
    except tinker.RequestFailedError as error:
        return str(error)
    return ""


def _datum(token: int) -> types.Datum:
    targets = types.TensorData(data=[token, token + 1], dtype="int64", shape=[2])
    model_input = types.ModelInput.from_ints([token, token])
    return types.Datum(model_input=model_input, loss_fn_inputs={"target_tokens": targets})


def _logprobs(output: types.ForwardBackwardOutput) -> list[list[float]]:
    return [[float(value) for value in each["logprobs"].data] for each in output.loss_fn_outputs]


if __name__ == "__main__":
    main()
