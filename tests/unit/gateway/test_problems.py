"""Errors travel from the gateway to the SDK, as problem documents, and keep their class."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from turnstream import errors
from turnstream.errors import TurnstreamError, WaitReason
from turnstream.http.problems import ERRORS, WIRE_PROBLEM, error_of, problem_name
from turnstream_server.gateway.proxy.errors import openai_error_of
from turnstream_server.gateway.rest.problems import KINDS, problem_of, response

OF_ONE_PROCESS = {errors.MissingExtraError, errors.RowTooLongError}
"""Errors that no answer of a gateway has."""

BASES = {
    TurnstreamError: None,
    errors.UnsupportedEstimatorError: errors.BatchingError,
    errors.UnavailableError: errors.StoreUnavailableError,
}
"""Errors that travel as another class, which is raised in their place."""

WITHOUT_AN_ERROR = {WIRE_PROBLEM, "internal", "invalid-request", "store-restarted"}
"""Types of documents that no class of `errors` has."""


def _classes(base: type[Any] = TurnstreamError) -> Iterator[type[Any]]:
    yield base
    for each in base.__subclasses__():
        if each.__module__ == errors.__name__:
            yield from _classes(each)


def _made(kind: type[Any]) -> TurnstreamError:
    """Return an error with a value for each argument."""
    if issubclass(kind, errors.InvalidTurnError | errors.InvalidConfigError):
        return kind("logprobs", "3 values for 4 tokens")
    if issubclass(kind, errors.UnknownFormatError):
        return kind("the run", 9, 3, "the setting 'x'")
    if issubclass(kind, errors.UnavailableError):
        reason = WaitReason("no_task", "none", {"waited_s": 1.5, "left": 2, "why": None})
        return kind("not now", [reason], 2.5)
    if issubclass(kind, errors.RejectedError):
        return kind("refused", 1.5)
    return kind("a message")


def _travelled(error: TurnstreamError) -> TurnstreamError:
    document: dict[str, Any] = json.loads(bytes(response(problem_of(error)).body))
    return error_of(document)


def test_every_error_of_a_gateway_arrives_as_the_same_error() -> None:
    kinds = {*_classes()} - OF_ONE_PROCESS - {*BASES}
    for kind in kinds:
        error = _made(kind)
        found = _travelled(error)
        assert (type(found), found.args, str(found)) == (type(error), error.args, str(error))
    for kind, instead in BASES.items():
        assert instead is None or type(_travelled(_made(kind))) is instead


def test_every_type_of_a_document_has_an_error_of_the_sdk() -> None:
    known = {kind.name for _, kind in KINDS}
    assert {*ERRORS} == known | WITHOUT_AN_ERROR
    classes = [kind for error_type, kind in KINDS if error_type.__module__ == errors.__name__]
    assert len({kind.name for kind in classes}) == len(classes)


def test_documents_of_other_servers_are_errors_too() -> None:
    for document, kind in (
        ({"status": 401, "detail": "no key"}, errors.UnknownKeyError),
        ({"type": "about:blank", "status": 403}, errors.AccessDeniedError),
        ({"type": "about:blank", "status": 413, "reasons": "x"}, errors.RejectedError),
        ({"status": 502, "reasons": [3, {"kind": "x"}]}, errors.StoreUnavailableError),
        ({"type": "https://turnstream.dev/problems/unknown-format"}, errors.RejectedError),
        ({"type": "https://turnstream.dev/problems/invalid-turn"}, errors.InvalidTurnError),
        ({}, errors.RejectedError),
    ):
        assert type(error_of(document)) is kind, document
    assert problem_name({"type": "https://other.example/turn-gap"}) == ""


def test_error_of_the_proxy_names_its_problem_and_when_to_retry() -> None:
    table = [
        (errors.RejectedError("too fast", 2.1), 429, "rate_limit_error", "rejected", "3", None),
        (
            errors.ConflictError("it is sealed"),
            409,
            "invalid_request_error",
            "conflict",
            None,
            "false",
        ),
        (
            errors.InvalidTurnError("n", "0"),
            422,
            "invalid_request_error",
            "invalid-turn",
            None,
            None,
        ),
        (errors.StoreUnavailableError("away"), 503, "server_error", "unavailable", None, None),
        (KeyError("secret"), 500, "server_error", "internal", None, None),
    ]
    for error, status, kind, code, retry_after, should_retry in table:
        answer = openai_error_of(error)
        found = json.loads(bytes(answer.body))["error"]
        assert (answer.status_code, found["type"], found["code"]) == (status, kind, code)
        assert found["param"] == getattr(error, "field", None)
        assert answer.headers.get("retry-after") == retry_after
        assert answer.headers.get("x-should-retry") == should_retry
        assert "secret" not in found["message"]
