from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from turnstream_server.logs import configure_logging


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def test_a_line_names_service_logger_and_facts() -> None:
    stream = io.StringIO()
    configure_logging("INFO", service="batcher", stream=stream)

    logging.getLogger("some.module").info("planned %s", "run", extra={"step": 3, "groups": 8})

    assert "INFO    batcher some.module: planned run step=3 groups=8\n" in stream.getvalue()


def test_another_configuration_replaces_stream_and_level() -> None:
    first, second = io.StringIO(), io.StringIO()
    configure_logging("DEBUG", service="batcher", stream=first)
    configure_logging("INFO", service="batcher", stream=second)

    logging.getLogger("some.module").info("planned")
    logging.getLogger("some.module").debug("dropped")

    assert first.getvalue() == ""
    assert second.getvalue().count("planned") == 1
    assert "dropped" not in second.getvalue()


def test_an_exception_is_shown_with_its_traceback() -> None:
    stream = io.StringIO()
    configure_logging("INFO", service="batcher", stream=stream)

    try:
        int("x")
    except ValueError:
        logging.getLogger("some.module").exception("failed")

    assert "failed\n    Traceback" in stream.getvalue()
    assert stream.getvalue().endswith("invalid literal for int() with base 10: 'x'\n")


@pytest.mark.parametrize(("level", "is_written"), [("INFO", False), ("DEBUG", True)])
def test_requests_of_http_clients_are_logged_at_debug_alone(level: str, is_written: bool) -> None:
    stream = io.StringIO()
    configure_logging(level, service="trainer", stream=stream)

    logging.getLogger("httpx2").info("HTTP Request: POST /pause")
    logging.getLogger("uvicorn.error").info("Finished server process")

    assert stream.getvalue().count("\n") == 2 * is_written
