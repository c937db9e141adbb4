"""Checks of dependencies that several services have."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

from turnstream.calls import connect_calls
from turnstream.errors import TurnstreamError
from turnstream.store.client.addresses import is_http
from turnstream.store.client.connection import connect
from turnstream.store.client.replies import translating
from turnstream.store.client.server_checks import SYNCS_OF
from turnstream_server.telemetry.readiness import Check

_ANSWER_S: Final = 2.0


def store_check(url: str, *, durability: str) -> Check:
    """Return a check that a store, or a gateway, answers and has this durability."""
    syncs = SYNCS_OF[durability]

    def check() -> str:
        # A connection for each check: an idle one would cost more between two of them.
        try:
            if is_http(url):  # the gateway checks its store itself
                with contextlib.closing(connect_calls(url)) as calls:
                    calls.ping()
                return ""
            with (
                connect(url, num_retries=0, silent_s=_ANSWER_S, syncs=syncs) as client,
                translating(),
            ):
                client.ping()
        except TurnstreamError as error:
            return str(error)
        return ""

    return check


def folder_check(folder: Path, *, is_written: bool) -> Check:
    """Return a check that a folder is there, and can be written if `is_written`."""

    def check() -> str:
        if not folder.is_dir():
            return f"there is no folder {folder}"
        if not os.access(folder, os.W_OK if is_written else os.R_OK | os.X_OK):
            return f"{folder} cannot be {'written' if is_written else 'read'}"
        return ""

    return check
