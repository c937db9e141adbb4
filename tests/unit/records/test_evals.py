"""Results of evaluations as records."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testkit.strategies.figures import figures
from testkit.strategies.values import names, optional_versions, rewards_of_trajectories
from turnstream.errors import CorruptRecordError
from turnstream.records.evals import decode_evaluation, encode_evaluation
from turnstream.records.framing import EVALUATION, write_frame
from turnstream.types import EvalGroup, EvalResult, Spread

counts = st.integers(0, 2**40)
spreads = st.builds(Spread, num=counts, mean=rewards_of_trajectories, squares=st.floats(0, 1e9))
groups = st.builds(
    EvalGroup,
    group_id=names,
    prompt_uid=names,
    version=optional_versions,
    num_trajectories=counts,
    num_lost=counts,
    reward=spreads,
    best=st.none() | rewards_of_trajectories,
)
results = st.builds(
    EvalResult,
    version=optional_versions,
    num_groups=counts,
    num_trajectories=counts,
    num_lost=counts,
    reward=spreads,
    best=spreads,
    figures=figures,
    groups=st.just(()),
)


@given(group=groups)
def test_decoded_group_is_the_encoded_one(group: EvalGroup) -> None:
    assert decode_evaluation(EvalGroup, encode_evaluation(group)) == group


@given(result=results)
def test_decoded_result_is_the_encoded_one(result: EvalResult) -> None:
    assert decode_evaluation(EvalResult, encode_evaluation(result)) == result


@pytest.mark.parametrize("kind", [EvalGroup, EvalResult])
@pytest.mark.parametrize("header", [b"", b"[]", b"{}", b'{"version": 1, "reward": 3}'])
def test_record_that_is_no_result_is_refused(kind: Any, header: bytes) -> None:
    with pytest.raises(CorruptRecordError):
        decode_evaluation(kind, write_frame(EVALUATION, header))
