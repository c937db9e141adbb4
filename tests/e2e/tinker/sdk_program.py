"""A program that drives a release of the real tinker SDK, and prints what it has received.

It runs in a process of its own, with the SDK of a release on its path. Its standard input is a
list of scenarios, `[[name, arguments], ...]`. A line of standard output is the result of one:
`{"name": ..., "result": ...}`, or `"error"` with the type and the text of an exception.
"""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tinker

Scenario = Callable[..., Any]
Json = dict[str, Any]


def datum_of(sent: Json) -> tinker.Datum:
    """Return a datum; `sent` has `tokens` and the loss inputs as `[shape, dtype, flat values]`."""
    inputs = {
        name: tinker.TensorData(data=values, dtype=dtype, shape=shape)
        for name, (shape, dtype, values) in sent["inputs"].items()
    }
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens=sent["tokens"]), loss_fn_inputs=inputs
    )


def output_of(result: Any) -> Json:
    """Return the result of a training call."""
    outputs = [each["logprobs"] for each in result.loss_fn_outputs]
    return {
        "logprobs": [_flat(each) for each in outputs],
        "shapes": [list(each.shape or ()) for each in outputs],
        "metrics": dict(result.metrics),
    }


def _flat(tensor: Any) -> list[float]:
    data = tensor.data
    return [float(each) for each in (data.tolist() if hasattr(data, "tolist") else data)]


def created(client: Any) -> Any:
    """Return the client of a call that creates one; since 0.38 the call returns a future."""
    return client.result() if hasattr(client, "result") else client


class Client:
    """One client of the gateway, with a model of rank 4 on demand."""

    def __init__(self, base_model: str) -> None:
        self.base_model = base_model
        self.service = tinker.ServiceClient()

    def model(self, **options: Any) -> Any:
        """Return a new training client."""
        settings = {"base_model": self.base_model, "rank": 4, "seed": 1, **options}
        return created(self.service.create_lora_training_client(**settings))


def capabilities(client: Client) -> Any:
    found = client.service.get_server_capabilities().supported_models
    info = client.model().get_info()
    return {
        "models": sorted(str(each.model_name) for each in found),
        "model_id": info.model_id,
        "model_name": info.model_data.model_name,
        "lora_rank": info.lora_rank,
    }


def loss_and_step(
    client: Client,
    *,
    state: str,
    data: list[Json],
    loss: str,
    settings: Json,
    adam: Json,
    name: str,
) -> Any:
    """Train one step from a saved state, with zero moments; save the weights after it."""
    model = client.model()
    model.load_state(state).result()
    kind: Any = loss
    result = model.forward_backward([datum_of(each) for each in data], kind, settings or None)
    step = model.optim_step(tinker.AdamParams(**adam))
    output = output_of(result.result())
    metrics = step.result().metrics
    return {**output, "path": model.save_state(name).result().path, "step": metrics}


def first_state(client: Client, *, data: list[Json], name: str) -> Any:
    """Return the path of a state in which all factors of the adapter differ from zero."""
    model = client.model()
    for _ in range(2):
        model.forward_backward([datum_of(each) for each in data], "cross_entropy").result()
        model.optim_step(tinker.AdamParams(learning_rate=0.05)).result()
    return model.save_state(name).result().path


def ragged_chunks(client: Client, *, state: str, data: list[Json]) -> Any:
    """Return the outputs of a call that the SDK cuts into several chunks."""
    model = client.model()
    model.load_state(state).result()
    call: Any = model.forward_backward([datum_of(each) for each in data], "cross_entropy")
    output = output_of(call.result())
    return {**output, "requests": _number_of_chunks(data)}


def _number_of_chunks(data: list[Json]) -> int:
    return -(-len(data) // 1024)


def saved_and_loaded(client: Client, *, data: list[Json], name: str) -> Any:
    """Save with moments, train on, and train the same from the saved state; return both paths."""
    first = client.model()
    for _ in range(2):
        first.forward_backward([datum_of(each) for each in data], "cross_entropy").result()
        first.optim_step(_adam()).result()
    path = first.save_state(f"{name}-before").result().path
    second = created(client.service.create_training_client_from_state_with_optimizer(path))
    paths = []
    for place, model in enumerate((first, second)):
        model.forward_backward([datum_of(each) for each in data], "cross_entropy").result()
        model.optim_step(_adam()).result()
        paths.append(model.save_state(f"{name}-{place}").result().path)
    return {"paths": paths, "rank": second.get_info().lora_rank}


def custom_loss(client: Client, *, state: str, data: list[Json], name: str) -> Any:
    """Take one step on a loss that the client computes: the sum of squared log-probabilities."""

    def squares(_: Any, logprobs: list[Any]) -> Any:
        total = sum((each.flatten() ** 2).sum() for each in logprobs)
        return total, {"squares": float(total)}

    model = client.model()
    model.load_state(state).result()
    result = model.forward_backward_custom([datum_of(each) for each in data], squares).result()
    model.optim_step(_small_adam()).result()
    return {"metrics": dict(result.metrics), "path": model.save_state(name).result().path}


def sampled(client: Client, *, state: str, prompt: list[int]) -> Any:
    """Return samples of a trained model and of the base model, in all forms."""
    model = client.model()
    model.load_state(state).result()
    trained = created(model.save_weights_and_get_sampling_client("sampled"))
    named = model.save_weights_for_sampler("named").result().path
    base = created(client.service.create_sampling_client(base_model=client.base_model))
    by_path = created(client.service.create_sampling_client(model_path=named))
    text = tinker.ModelInput.from_ints(tokens=prompt)

    def sample(sampler: Any, count: int = 1, **options: Any) -> Any:
        params = tinker.SamplingParams(**{"max_tokens": 8, "seed": 3, **options})
        result = sampler.sample(prompt=text, num_samples=count, sampling_params=params).result()
        return [
            [list(each.tokens), list(each.logprobs), each.stop_reason] for each in result.sequences
        ]

    with_prompt = trained.sample(
        prompt=text,
        num_samples=1,
        sampling_params=tinker.SamplingParams(max_tokens=1),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=3,
    ).result()
    greedy = sample(trained, temperature=0.0)
    third = greedy[0][0][2]
    topk: Any = with_prompt.topk_prompt_logprobs
    return {
        "trained": sample(trained, count=2, temperature=0.5),
        "again": sample(trained, count=2, temperature=0.5),
        "by_path": sample(by_path, count=2, temperature=0.5),
        "base": sample(base),
        "greedy": greedy,
        "stopped": sample(trained, max_tokens=200, stop=[third], temperature=0.0),
        "string": sample(trained, max_tokens=400, stop=["A", "E", "Q"], seed=5),
        "prompt_logprobs": list(with_prompt.prompt_logprobs),
        "topk": [None if each is None else list(map(list, each)) for each in topk],
        "compute": list(trained.compute_logprobs(text).result()),
        "errors": [
            error_of(lambda: sample(trained, max_tokens=10_000)),
            error_of(lambda: sample(trained, stop=[100_000])),
            error_of(lambda: sample(trained, temperature=-1.0)),
        ],
    }


def trained_on_a_run(client: Client, *, run: str, steps: int, name: str) -> Any:
    """Train on the batches of a run, and return what the client receives."""
    import turnstream

    model = client.model()
    outputs = []
    for _ in range(steps):
        call = turnstream.forward_backward_run(model, run=run, clip_high_threshold=1.3)
        model.optim_step(_adam())
        outputs.append(output_of(call.result()))
    unknown = error_of(lambda: turnstream.forward_backward_run(model, run="no-run").result())
    other = error_of(
        lambda: turnstream.forward_backward_run(model, run=run, loss_fn="cispo").result()
    )
    return {
        "outputs": outputs,
        "errors": [unknown, other],
        "path": model.save_state(name).result().path,
    }


def listed(client: Client) -> Any:
    """Return what the calls for runs and checkpoints answer."""
    model = client.model(user_metadata={"renderer_name": "role_colon"})
    path = model.save_state("kept", ttl_seconds=7200).result().path
    sampler_path = model.save_weights_for_sampler("sampler").result().path
    rest = client.service.create_rest_client()
    model_id = model.get_info().model_id
    run = rest.get_training_run(model_id).result()
    before = rest.list_checkpoints(model_id).result().checkpoints
    rest.set_checkpoint_ttl_from_tinker_path(path, 10_000).result()
    rest.publish_checkpoint_from_tinker_path(path).result()
    changed = rest.list_checkpoints(model_id).result().checkpoints
    rest.delete_checkpoint_from_tinker_path(path).result()
    after = rest.list_checkpoints(model_id).result().checkpoints
    everything = rest.list_user_checkpoints(limit=100).result().checkpoints
    runs = rest.list_training_runs(limit=100).result()
    info = rest.get_weights_info_by_tinker_path(sampler_path).result()
    return {
        "run": [run.training_run_id, run.base_model, run.lora_rank, dict(run.user_metadata or {})],
        "before": sorted(each.checkpoint_id for each in before),
        "types": sorted(each.checkpoint_type for each in before),
        "public": [each.public for each in changed if each.checkpoint_id == "weights/kept"],
        "after": sorted(each.checkpoint_id for each in after),
        "listed": sampler_path in [each.tinker_path for each in everything],
        "in_runs": model_id in [each.training_run_id for each in runs.training_runs],
        "weights_info": [info.base_model, info.is_lora, info.lora_rank],
        "gone": error_of(lambda: model.load_state(path).result()),
    }


def exported(client: Client, *, data: list[Json], folder: str) -> Any:
    """Train, save and export; download the export by its links and the save by the command line."""
    model = client.model()
    model.forward_backward([datum_of(each) for each in data], "cross_entropy").result()
    model.optim_step(_adam()).result()
    saved = model.save_state("state").result().path
    path = model.save_weights_external("out", ttl_seconds=3600).result().path
    rest = client.service.create_rest_client()
    links = rest.get_external_weights_urls(path).result()
    files = []
    for name, url in links.urls.items():
        with urllib.request.urlopen(url) as response:
            Path(folder, name).write_bytes(response.read())
            files.append(name)
    command = ["checkpoint", "download", saved, "--output", f"{folder}/of-state"]
    subprocess.run([sys.executable, "-m", "tinker.cli", *command], check=True, stdout=2)
    listed = rest.list_checkpoints(model.get_info().model_id).result().checkpoints
    kinds = sorted(each.checkpoint_type for each in listed)
    return {"saved": saved, "path": path, "files": sorted(files), "kinds": kinds}


def error_of(call: Callable[[], Any]) -> list[str] | None:
    """Return the type and the text of the error of a call; None without one."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - all of them are the result
        return [type(error).__name__, str(error)]
    return None


def _adam() -> Any:
    return tinker.AdamParams(learning_rate=0.01)


def _small_adam() -> Any:
    return tinker.AdamParams(learning_rate=1.0, eps=1000.0)


SCENARIOS: dict[str, Scenario] = {
    each.__name__: each
    for each in (
        *(capabilities, first_state, loss_and_step, ragged_chunks),
        *(saved_and_loaded, custom_loss, sampled, listed, trained_on_a_run, exported),
    )
}


def main() -> None:
    """Run the scenarios of standard input with one client."""
    request = json.load(sys.stdin)
    client = Client(request["base_model"])
    for name, arguments in request["scenarios"]:
        try:
            line = {"name": name, "result": SCENARIOS[name](client, **arguments)}
        except Exception as error:  # noqa: BLE001 - reported to the test
            line = {"name": name, "error": [type(error).__name__, str(error)]}
        print(json.dumps(line), flush=True)  # noqa: T201 - the result


if __name__ == "__main__":
    main()
