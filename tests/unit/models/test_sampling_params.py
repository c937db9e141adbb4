from typing import Any

import pytest

from turnstream.errors import InvalidConfigError
from turnstream_server.models.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("num_samples", 0),
        ("num_samples", True),
        ("temperature", -0.5),
        ("temperature", 1e-6),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", 0),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", float("nan")),
        ("seed", 2**63),
        ("stop_ids", (5, -7)),
        ("stop_strings", "User:"),
        ("stop_strings", ("a", "")),
        ("topk_prompt_logprobs", -1),
        ("topk_sample_logprobs", -1),
    ],
)
def test_invalid_parameter_is_refused_with_field_and_value(field: str, value: Any) -> None:
    with pytest.raises(InvalidConfigError) as raised:
        SamplingParams(**{field: value})

    assert raised.value.field == field
    shown = value[-1] if isinstance(value, tuple) else value
    assert repr(shown) in raised.value.message


def test_greedy_parameters_report_logprobs_of_temperature_one() -> None:
    assert SamplingParams(temperature=0).logprob_temperature == 1.0
    assert SamplingParams(temperature=0.7).logprob_temperature == 0.7
