"""Errors as gRPC and HTTP statuses, held against the whole error tree by reflection."""

from __future__ import annotations

import inspect
import json
import pickle
from collections.abc import Iterator

import grpc
import pytest

from turnstream import errors
from turnstream.errors import NotReadyError, TurnstreamError, WaitReason
from turnstream.records.statuses import MAX_DETAILS, MAX_TEXT, error_to_status, status_to_error

REASON = WaitReason(
    "of_another_release", "für 你", {"group": "g", "sample": 3, "lease_left_s": 1.5}
)
EXAMPLES = {
    "str": "für 你",
    "int": 7,
    "float | None": 1.5,
    "Iterable[Sequence[Any]]": [REASON, REASON._replace(facts={"writer": None})],
}


def tree(root: type[TurnstreamError]) -> Iterator[type[TurnstreamError]]:
    yield root
    for kind in root.__subclasses__():
        if kind.__module__ == errors.__name__:
            yield from tree(kind)


def example(kind: type[TurnstreamError]) -> TurnstreamError:
    """An error of that class, its arguments made up by their annotations."""
    parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return kind("für 你")
    return kind(*(EXAMPLES[parameter.annotation] for parameter in parameters))


every_error = pytest.mark.parametrize("kind", list(tree(TurnstreamError)))


def assert_equal_errors(actual: BaseException, expected: TurnstreamError) -> None:
    assert type(actual) is type(expected)
    assert actual.args == expected.args
    assert str(actual) == str(expected)
    assert vars(actual) == vars(expected)


@every_error
def test_every_error_survives_pickling_and_a_grpc_status(kind: type[TurnstreamError]):
    error = example(kind)

    code, details = error_to_status(error)

    assert code in {*grpc.StatusCode.__members__} - {"OK"}
    assert_equal_errors(status_to_error(code, details), error)
    assert_equal_errors(pickle.loads(pickle.dumps(error)), error)


@every_error
def test_error_without_details_keeps_its_branch_of_the_tree(kind: type[TurnstreamError]):
    """A proxy may drop the details; the remedy of the caller must stay the same."""
    if kind is errors.MissingExtraError:
        return  # no process reports it to another: it has the status of any defect
    branches = [b for b in TurnstreamError.__subclasses__() if issubclass(kind, b)]

    code, _ = error_to_status(example(kind))

    if kind is not errors.UnknownFormatError:
        for branch in branches:
            assert isinstance(status_to_error(code, ""), branch)


def test_every_grpc_code_has_an_error_with_its_text():
    for code in grpc.StatusCode.__members__:
        error = status_to_error(code, "connection refused")
        assert isinstance(error, TurnstreamError)
        assert str(error) == f"{code}: connection refused"


@pytest.mark.parametrize(
    "details",
    [
        "text",
        "7",
        "[]",
        '{"error": "NewerError", "args": []}',
        '{"error": ["x"], "args": []}',
        '{"error": "RowTooLongError", "args": []}',
        '{"error": "RowTooLongError"}',
    ],
)
def test_unreadable_details_keep_the_meaning_of_the_code(details: str):
    error = status_to_error("NOT_FOUND", details)

    assert type(error) is errors.RunNotFoundError
    assert details in str(error)


def test_unknown_error_class_is_sent_as_its_nearest_base():
    class TooEarlyError(errors.RejectedError):
        pass

    code, details = error_to_status(TooEarlyError("wait", 2.0))

    assert_equal_errors(status_to_error(code, details), errors.RejectedError("wait", 2.0))


def test_long_messages_are_shortened_to_what_fits_into_a_header():
    error = errors.CorruptRecordError("你" * 100_000)

    _, details = error_to_status(error)

    assert len(details) < 8_000
    assert len(json.loads(details)["args"][0]) == MAX_TEXT


def test_reasons_beyond_the_header_limit_are_dropped():
    long = WaitReason("member_open", "你" * 300, {f"fact {i}": "你" * 50 for i in range(8)})
    error = NotReadyError("step 3 is not there", [REASON, *[long] * 7])

    code, details = error_to_status(error)
    restored = status_to_error(code, details)

    assert len(details) <= MAX_DETAILS
    assert isinstance(restored, NotReadyError)
    assert restored.message == error.message
    assert restored.reasons == (REASON, long)
