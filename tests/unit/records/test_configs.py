"""Run configurations as JSON."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testkit import config
from testkit.strategies import configs
from turnstream.batching.config import BatchingConfig
from turnstream.errors import (
    CorruptRecordError,
    InvalidConfigError,
    TurnstreamError,
    UnknownFormatError,
)
from turnstream.records.configs import decode_config, encode_config


def edited(**changes: Any) -> str:
    return json.dumps({**json.loads(encode_config(config())), **changes})


@given(value=configs())
def test_decoded_config_is_the_encoded_one(value: BatchingConfig):
    text = encode_config(value)

    assert decode_config(text) == value
    assert decode_config(text.encode()) == value


def test_missing_settings_have_defaults_or_are_refused():
    stored = '{"format": 3, "batch_groups": 1, "mini_batch_groups": 1}'

    assert decode_config(stored) == config()
    with pytest.raises(InvalidConfigError, match="mini_batch_groups: is missing"):
        decode_config('{"format": 3, "batch_groups": 1}')


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"format": 4}, r"format 4; this one reads up to 3"),
        # A setting that is ignored trains other batches than the release that wrote it.
        ({"mood": [1, 2]}, ", with the setting 'mood'"),
        ({"extra_columns": [{"mood": 1}]}, "the field of an extra column 'mood'"),
        ({"group_filters": [{"mood": 1}]}, "the field of a group filter 'mood'"),
    ],
)
def test_config_of_a_newer_release_is_refused(changes: dict[str, Any], problem: str):
    with pytest.raises(UnknownFormatError, match=f"run 'maze' was .* newer release .*{problem}"):
        decode_config(edited(**changes), run="maze")


def test_format_of_an_older_release_is_refused_with_a_remedy():
    for older in range(3):
        with pytest.raises(UnknownFormatError) as caught:
            decode_config(edited(format=older), run="maze")

        assert str(caught.value) == (
            f"run 'maze' was written by an older release of Turnstream (format {older}; this one "
            "reads format 3): finish the run with that release, or remove it with "
            "`turnstream run delete`"
        )


@pytest.mark.parametrize("text", ["", "{", "[]", "7", "{}", '{"format": "0"}', b"\xff\xfe"])
def test_other_texts_are_refused_as_configs(text: str | bytes):
    with pytest.raises(CorruptRecordError):
        decode_config(text)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("batch_groups", "8"),
        ("merge", "yes"),
        ("estimator", ["grpo"]),
        ("component_weights", [[["format"], 1.0]]),
        ("max_staleness", None),
        ("group_filters", {"kind": "zero_variance"}),
        *[("extra_columns", declared) for declared in (7, [7], [{"name": "x"}], {"x": 1})],
    ],
)
def test_wrong_value_is_refused_by_the_name_of_its_field(field: str, value: object):
    with pytest.raises(InvalidConfigError) as caught:
        decode_config(edited(**{field: value}))

    assert caught.value.field == field


@given(
    field=st.sampled_from(list(json.loads(encode_config(config())))),
    value=st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=3)
    | st.lists(st.integers(), max_size=2)
    | st.dictionaries(st.text(max_size=2), st.none()),
)
def test_config_with_any_value_is_decoded_or_refused(field: str, value: object):
    with contextlib.suppress(TurnstreamError):
        decode_config(edited(**{field: value}))
