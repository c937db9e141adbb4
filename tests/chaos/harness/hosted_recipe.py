"""A program that trains a hosted model with the real tinker SDK: base model, number of rounds.

It creates a model, saves its state at the end, and prints a line of JSON: `received`, what the
client has received, and `path`, that of the saved state.

All data are drawn from the number of the round, or are samples of the model with a seed. So two
undisturbed runs receive the same values, bit for bit.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import tinker

VOCABULARY: Final = 256
WINDOW: Final = 6
"""Calls that may be unanswered before the program waits for the oldest one."""

_CHUNKED_DATA: Final = 2_050
"""The SDK cuts a call of so many datums into three chunks."""

_SAMPLE_EVERY: Final = 4


class Recipe:
    """One run of the recipe, with the results of the client in the order of the calls."""

    def __init__(self, model: Any, *, num_rounds: int) -> None:
        self.received: list[dict[str, Any]] = []
        self._model = model
        self._num_rounds = num_rounds
        self._pending: deque[tuple[str, Any]] = deque()

    def run(self) -> str:
        """Train all rounds, and return the path of the state after the last one."""
        for number in range(self._num_rounds):
            self._train(number)
            if number == self._num_rounds // 3:
                self._middle = self._model.save_state("middle").result().path
            if number == self._num_rounds // 2:
                self._send("load_state", self._model.load_state(self._middle))
            self._await(most=WINDOW)
        path = self._model.save_state("end").result().path
        self._await(most=0)
        return path

    def _train(self, number: int) -> None:
        """Submit the calls of a round, without waiting for their results."""
        rng = random.Random(number)
        if number == self._num_rounds // 4:
            data = [_supervised(rng, 3) for _ in range(_CHUNKED_DATA)]
            self._send("chunks", self._model.forward_backward(data, "cross_entropy"))
        elif number % 2 == 0:
            data = [_supervised(rng, length) for length in (6, 3, 11)]
            self._send("cross_entropy", self._model.forward_backward(data, "cross_entropy"))
        else:
            is_sampled = number % _SAMPLE_EVERY == 1
            data = self._sampled(rng, seed=number) if is_sampled else _drawn(rng)
            result = self._model.forward_backward(data, "importance_sampling")
            self._send("importance_sampling", result)
        step = self._model.optim_step(tinker.AdamParams(learning_rate=0.02, grad_clip_norm=50.0))
        self._send("optim_step", step)

    def _sampled(self, rng: random.Random, *, seed: int) -> list[tinker.Datum]:
        """Return samples of the model as it is, with an advantage each."""
        sampler = self._model.save_weights_and_get_sampling_client(f"round-{seed}").result()
        prompt = _tokens(rng, 5)
        result = sampler.sample(
            prompt=tinker.ModelInput.from_ints(tokens=prompt),
            num_samples=2,
            sampling_params=tinker.SamplingParams(max_tokens=8, seed=seed),
        ).result()
        samples = [(list(each.tokens), list(each.logprobs)) for each in result.sequences]
        self.received.append({"call": "sample", "samples": samples})
        return [
            _reinforced(prompt, tokens, logprobs, advantage=1.0 - 2.0 * place)
            for place, (tokens, logprobs) in enumerate(samples)
        ]

    def _send(self, call: str, future: Any) -> None:
        self._pending.append((call, future))

    def _await(self, *, most: int) -> None:
        """Receive the oldest results until no more than `most` are missing."""
        while len(self._pending) > most:
            call, future = self._pending.popleft()
            self.received.append({"call": call, **_facts(future.result())})


def _facts(result: Any) -> dict[str, Any]:
    """Return all metrics of a result, and a digest of its log-probabilities."""
    facts: dict[str, Any] = {"metrics": dict(getattr(result, "metrics", None) or {})}
    if outputs := getattr(result, "loss_fn_outputs", None):
        digest = hashlib.sha256()
        for each in outputs:
            digest.update(np.asarray(each["logprobs"].data, np.float32).tobytes())
        facts["digest"] = digest.hexdigest()
    return facts


def _supervised(rng: random.Random, length: int) -> tinker.Datum:
    weights = [rng.uniform(-1, 2) for _ in range(length)]
    inputs = {"target_tokens": _ints(_tokens(rng, length)), "weights": _floats(weights)}
    return _datum(_tokens(rng, length), inputs)


def _drawn(rng: random.Random) -> list[tinker.Datum]:
    return [
        _reinforced(
            _tokens(rng, 4),
            _tokens(rng, length),
            [rng.uniform(-6.0, -5.0) for _ in range(length)],
            advantage=rng.uniform(-1, 1),
        )
        for length in (5, 9, 2)
    ]


def _reinforced(
    prompt: Sequence[int], tokens: Sequence[int], logprobs: Sequence[float], *, advantage: float
) -> tinker.Datum:
    whole, unused = [*prompt, *tokens], [0.0] * (len(prompt) - 1)
    inputs = {
        "target_tokens": _ints(whole[1:]),
        "logprobs": _floats([*unused, *logprobs]),
        "advantages": _floats([*unused, *[advantage] * len(tokens)]),
    }
    return _datum(whole[:-1], inputs)


def _datum(tokens: list[int], inputs: dict[str, tinker.TensorData]) -> tinker.Datum:
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens=tokens), loss_fn_inputs=inputs
    )


def _tokens(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(length)]


def _ints(values: Sequence[int]) -> tinker.TensorData:
    return tinker.TensorData(data=list(values), dtype="int64", shape=[len(values)])


def _floats(values: Sequence[float]) -> tinker.TensorData:
    return tinker.TensorData(data=list(values), dtype="float32", shape=[len(values)])


def main() -> None:
    base_model, num_rounds = sys.argv[1:]
    service: Any = tinker.ServiceClient()
    model = service.create_lora_training_client(base_model=base_model, rank=4, seed=1).result()
    recipe = Recipe(model, num_rounds=int(num_rounds))
    path = recipe.run()
    print(json.dumps({"received": recipe.received, "path": path}))  # noqa: T201 - the result


if __name__ == "__main__":
    main()
