"""Lines of the log, as JSON and as text."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest

from turnstream_server.logs import bound, configure_logging

logger = logging.getLogger("some.module")


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


@pytest.fixture
def stream() -> io.StringIO:
    """Receives the lines of the root logger, as JSON."""
    stream = io.StringIO()
    configure_logging("INFO", service="batcher", stream=stream, form="json")
    return stream


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_is_one_object_with_its_facts(stream: io.StringIO) -> None:
    facts = {"run": "maze", "step": 12, "level": 3, "ratio": float("nan"), "at": (1, 2)}
    logger.info("planned\n%s", "x", extra=facts)
    logger.error("failed", exc_info=ValueError("not a number"))

    line, failed = lines(stream)

    assert datetime.fromisoformat(line.pop("time")).tzinfo is not None
    assert line == {
        "level": "INFO",
        "service": "batcher",
        "logger": "some.module",
        "message": "planned\nx",
        "run": "maze",
        "step": 12,
        "fact_level": 3,
        "ratio": "nan",
        "at": [1, 2],
    }
    assert failed["exception"] == "ValueError: not a number"


def test_bound_facts_are_on_the_lines_of_the_block(stream: io.StringIO) -> None:
    with bound(request_id="a", run="maze"):
        logger.info("one", extra={"run": "own"})
        with bound(step=2):
            logger.info("two")
    logger.info("three")

    one, two, three = lines(stream)
    assert (one["request_id"], one["run"]) == ("a", "own")
    assert (two["request_id"], two["run"], two["step"]) == ("a", "maze", 2)
    assert not {"request_id", "run", "step"} & three.keys()


def test_text_of_a_caller_makes_no_line_of_its_own(stream: io.StringIO) -> None:
    configure_logging("INFO", service="batcher", stream=stream, form="text")
    forged = "x\n2026-01-01 00:00:00,000 ERROR   batcher a: b\r\x1b[2K\x85\u2028"

    logger.warning("%s failed", forged, extra={"run": forged})
    logger.error("failed", exc_info=ValueError(forged))

    first, second, *traceback = stream.getvalue().split("\n")[:-1]
    assert r"ERROR   batcher a: b\r\x1b[2K\x85\u2028 failed run=x\n2026" in first
    assert first.isprintable()
    assert second.endswith("some.module: failed")
    assert traceback[-1].startswith("    2026")
    assert all(line.startswith("    ") for line in traceback)


def test_text_line_names_service_logger_and_facts_above_its_level() -> None:
    first, second = io.StringIO(), io.StringIO()
    configure_logging("DEBUG", service="batcher", stream=first)
    configure_logging("INFO", service="batcher", stream=second)  # it replaces the other one

    logger.info("planned %s", "run", extra={"step": 3, "groups": 8})
    logger.debug("dropped")

    assert first.getvalue() == ""
    assert "INFO    batcher some.module: planned run step=3 groups=8\n" in second.getvalue()
    assert "dropped" not in second.getvalue()


@pytest.mark.parametrize(("level", "is_written"), [("INFO", False), ("DEBUG", True)])
def test_requests_of_http_clients_are_logged_at_debug_alone(level: str, is_written: bool) -> None:
    stream = io.StringIO()
    configure_logging(level, service="trainer", stream=stream)

    logging.getLogger("httpx2").info("HTTP Request: POST /pause")
    logging.getLogger("uvicorn.error").info("Finished server process")

    assert stream.getvalue().count("\n") == 2 * is_written
