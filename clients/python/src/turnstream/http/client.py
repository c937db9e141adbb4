"""A client of a gateway for short calls: JSON in both directions, from any thread."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from typing import Any, Final

import httpx2

from turnstream.errors import StoreUnavailableError
from turnstream.http.answers import (
    JSON,
    certificates_for,
    content_of,
    headers_of,
    is_outage,
    lost,
    pause_s,
    unlogged,
)
from turnstream.store.client.addresses import HttpAddress, parse_http
from turnstream.store.client.backoff import pause_after
from turnstream.store.client.connection import NUM_RETRIES
from turnstream.store.client.deadlines import CONNECT_TIMEOUT_S, SOCKET_TIMEOUT_S

PREFIX: Final = "/v1"

_IDLE_S: Final = 60.0
"""A gateway keeps an idle connection for 75 s."""


class GatewayClient:
    """A client of the gateway at `url`; it connects at its first call, and again after `close`.

    A process that was forked has connections of its own.

    Args:
        url: address of the gateway, with its key; see `turnstream.store.client.addresses`.
        num_retries: repeats of a request after a lost connection. A silent gateway is not asked
            again.
        silent_s: seconds without an answer after which the gateway counts as away. A key that
            sends too fast is waited for within the same time.
    """

    def __init__(
        self, url: str, *, num_retries: int = NUM_RETRIES, silent_s: float = SOCKET_TIMEOUT_S
    ) -> None:
        self.gateway: HttpAddress = parse_http(url)
        self._tls = certificates_for(self.gateway)
        self._num_retries = num_retries
        self._silent_s = silent_s
        self._pid = os.getpid()
        self._http: httpx2.Client | None = None

    def get(self, path: str, **query: str | float) -> Any:
        """Return the content of a path below `/v1`; see `call`."""
        return self.call("GET", path, query=query)

    def post(self, path: str, content: Mapping[str, Any] | None = None) -> Any:
        """Send a JSON object to a path below `/v1` and return the answer; see `call`."""
        return self.call("POST", path, content=content)

    def call(
        self,
        method: str,
        path: str,
        *,
        content: Mapping[str, Any] | None = None,
        query: Mapping[str, str | float] | None = None,
        limit_s: float | None = None,
    ) -> Any:
        """Send a request that is safe to repeat; return the JSON of its answer.

        The path is below `/v1`, percent-encoded. `limit_s` replaces the time limit `silent_s`.

        Raises:
            StoreUnavailableError: the gateway or its store is away, or does not answer in time.
            TurnstreamError: the error of the answer.
        """
        silent_s = self._silent_s if limit_s is None else limit_s
        connect_s = min(CONNECT_TIMEOUT_S, silent_s)
        options: dict[str, Any] = {"timeout": httpx2.Timeout(silent_s, connect=connect_s)}
        if content is not None:
            options["content"] = json.dumps(content, separators=(",", ":")).encode()
            options["headers"] = {"Content-Type": JSON}
        if query:
            options["params"] = dict(query)
        answer = self._answered(method, PREFIX + path, options, time.monotonic() + silent_s)
        return content_of(answer, self.gateway)

    def close(self) -> None:
        """Disconnect. Safe to repeat; a later call connects again."""
        http, self._http = self._http, None
        if http is not None and self._pid == os.getpid():
            http.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the interpreter may be ending
            self.close()

    def _answered(
        self, method: str, path: str, options: Mapping[str, Any], ends_s: float
    ) -> httpx2.Response:
        """Return the answer after the repeats that a lost connection or a limited key needs."""
        num_lost = 0
        while True:
            answer, error = self._tried(method, path, options)
            if answer is not None and not is_outage(answer):
                pause = pause_s(answer, left_s=ends_s - time.monotonic())
                if pause is None:
                    return answer
                time.sleep(pause)
                continue
            num_lost += 1
            if num_lost > self._num_retries or time.monotonic() >= ends_s:
                if answer is not None:
                    return answer
                assert error is not None
                raise error
            time.sleep(pause_after(num_lost))

    def _tried(
        self, method: str, path: str, options: Mapping[str, Any]
    ) -> tuple[httpx2.Response | None, StoreUnavailableError | None]:
        """Return the answer of one request, or the error of a lost connection."""
        try:
            with unlogged():
                url = self.gateway.base_url + path
                return self._connected().request(method, url, **options), None
        except httpx2.TimeoutException as error:
            raise lost(error, self.gateway) from TimeoutError(str(error))
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
            return None, lost(error, self.gateway)

    def _connected(self) -> httpx2.Client:
        if self._http is None or self._pid != os.getpid():
            self._pid = os.getpid()
            self._http = httpx2.Client(
                headers=headers_of(self.gateway),
                limits=httpx2.Limits(keepalive_expiry=_IDLE_S),
                verify=self._tls,
            )
        return self._http
