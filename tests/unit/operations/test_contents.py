"""Contents of commands, request ids and checkpoint paths: their texts, read back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from turnstream.errors import BatchingError, RecordError
from turnstream_server.keys.records import owner_of
from turnstream_server.operations.checkpoints import (
    CheckpointPath,
    checkpoint_name,
    folder_of,
    session_folder,
)
from turnstream_server.operations.contents import (
    CONTENT_TYPES,
    Content,
    CreateModel,
    ForwardBackwardRun,
    LoadWeights,
    OptimStep,
    SaveExternal,
    SaveForSampler,
    SaveWeights,
    decode_content,
    encode_content,
    fingerprint,
)
from turnstream_server.operations.keys import RequestId, parse_request_id

MODEL = "S:train:0"
floats = st.floats(allow_nan=False, allow_infinity=False)
words = st.text(st.characters(codec="utf-8"), min_size=1, max_size=6)
names = st.from_regex(r"[a-zA-Z0-9é~%. _-]{1,20}", fullmatch=True).filter(
    lambda name: name not in (".", "..")
)
paths = st.builds(
    CheckpointPath, st.just(MODEL), st.sampled_from(["weights", "sampler_weights"]), names
)
metadata = st.dictionaries(words, words, max_size=3)
seconds = st.none() | st.integers(1, 2**40)
contents: st.SearchStrategy[Content] = st.one_of(
    st.builds(CreateModel, st.none() | paths, st.booleans()),
    st.builds(OptimStep, *[floats] * 6),
    st.builds(ForwardBackwardRun, words, words, st.dictionaries(words, floats, max_size=2)),
    st.builds(SaveWeights, names, seconds, st.booleans(), metadata),
    st.builds(
        *(SaveForSampler, names, st.none() | st.integers(0, 2**31)),
        *(st.sampled_from(["snapshot", "inflight"]), seconds, metadata),
    ),
    st.builds(SaveExternal, names, seconds, st.lists(words, max_size=2)),
    st.builds(LoadWeights, paths, st.booleans()),
)


@given(contents)
def test_content_is_read_back(content: Content) -> None:

    data = encode_content(content)
    (kind,) = [kind for kind, each in CONTENT_TYPES.items() if each is type(content)]

    assert decode_content(kind, data) == content
    assert encode_content(decode_content(kind, data)) == data


def test_fingerprints_differ_in_content_and_not_in_order_of_metadata() -> None:
    saves = [
        SaveWeights("a", None, overwrite=False, user_metadata=each)
        for each in ({"a": "1", "b": "2"}, {"b": "2", "a": "1"}, {"a": "1", "b": "3"})
    ]

    first, second, third = (fingerprint(encode_content(each)) for each in saves)

    assert first == second
    assert first != third


@pytest.mark.parametrize(
    "text",
    [
        "",
        "weights/a",
        "tinker:///weights/a",
        "tinker://../weights/a",
        "tinker://m/weights",
        "tinker://m/weights/a/b",
        "tinker://m/other/a",
        "tinker://m/weights/",
        "tinker://m/weights/..",
        "tinker://m/weights/a\n",
        "http://m/weights/a",
        f"tinker://m/weights/{'a' * 201}",
        f"tinker://m/weights/{'é' * 34}",
    ],
)
def test_text_that_is_no_path_is_refused_with_its_value(text: str) -> None:
    with pytest.raises(BatchingError, match=r"expected|is not allowed"):
        CheckpointPath.parse(text)


@given(names)
def test_path_of_a_name_is_read_again(name: str) -> None:
    path = CheckpointPath(MODEL, "sampler_weights", checkpoint_name(name))

    assert CheckpointPath.parse(str(path)) == path


@given(paths, paths)
def test_checkpoints_have_folders_of_their_own(one: CheckpointPath, other: CheckpointPath) -> None:
    assume(one != other)

    folders = [folder_of(one), folder_of(other), session_folder(MODEL, 0)]

    assert len(set(folders)) == 3
    assert {each.parts[:2] for each in folders} == {("saved", "S%3Atrain%3A0")}
    assert {len(each.parts) for each in folders} == {4}
    assert all(len(each.name.encode()) <= 200 for each in folders)


@given(st.sampled_from(["train", "sample"]), st.integers(0, 2**31), st.integers(0, 2**63 - 1))
def test_request_id_is_read_back(kind: str, target: int, number: int) -> None:
    request_id = RequestId(f"S:{kind}:{target}", number)

    assert parse_request_id(str(request_id)) == request_id
    assert request_id.is_sample == (kind == "sample")


@pytest.mark.parametrize(
    "text", ["", "S", "S:train:0", "S:train:0:", "S:train:0:-1", "S:other:0:1", "a{b}:train:0:1"]
)
def test_text_that_is_no_request_id_is_refused_with_its_value(text: str) -> None:
    with pytest.raises(RecordError, match="expected <session>:train"):
        parse_request_id(text)


def test_owner_differs_by_key_and_does_not_show_it() -> None:
    keys: Any = ["tml-secret", "tml-other"]

    owners = [owner_of(key) for key in keys]

    assert len({*owners}) == 2
    assert owner_of("tml-secret") == owners[0]
    assert "secret" not in owners[0]
