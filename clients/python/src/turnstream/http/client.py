"""A client of a gateway for short calls: JSON in both directions, from any thread."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import ssl
import time
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Final, cast

import httpx2

from turnstream import errors
from turnstream.http.problems import HEADER, TYPE_PREFIX, WIRE_VERSION, error_of, problem_name
from turnstream.store.client.addresses import HttpAddress, parse_http
from turnstream.store.client.api_keys import root_certificates, trusting_context
from turnstream.store.client.backoff import pause_after
from turnstream.store.client.connection import NUM_RETRIES
from turnstream.store.client.deadlines import CONNECT_TIMEOUT_S, SOCKET_TIMEOUT_S
from turnstream.store.client.replies import RETRY_AFTER_S

PREFIX: Final = "/v1"
JSON: Final = "application/json"

_TOO_FAST: Final = 429
_SILENCE: Final = 504
_CONNECTION: Final = (408, 421, 425)
"""Statuses that, like 5xx, are about the way to the gateway and not about the request."""

_LEAST_PAUSE_S: Final = 0.05

_is_ours: ContextVar[bool] = ContextVar("_is_ours", default=False)
logging.getLogger("httpx2").addFilter(lambda _: not _is_ours.get())

_IDLE_S: Final = 60.0
"""A gateway keeps an idle connection for 75 s."""


class GatewayClient:
    """A client of the gateway at `url`; it connects at its first call, and again after `close`.

    A process that was forked has connections of its own.

    Args:
        num_retries: repeats of a request after a lost connection. A silent gateway is not asked
            again.
        prefix: first characters of all paths.
        silent_s: seconds without an answer after which the gateway counts as away. A key that
            sends too fast is waited for within the same time.
    """

    def __init__(
        self,
        url: str,
        *,
        num_retries: int = NUM_RETRIES,
        prefix: str = PREFIX,
        silent_s: float = SOCKET_TIMEOUT_S,
    ) -> None:
        self.gateway: HttpAddress = parse_http(url)
        self._tls = certificates_for(self.gateway)
        self._num_retries = num_retries
        self._prefix = prefix
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
        """
        silent_s = self._silent_s if limit_s is None else limit_s
        connect_s = min(CONNECT_TIMEOUT_S, silent_s)
        options: dict[str, Any] = {"timeout": httpx2.Timeout(silent_s, connect=connect_s)}
        if content is not None:
            options["content"] = json.dumps(content, separators=(",", ":")).encode()
            options["headers"] = {"Content-Type": JSON}
        if query:
            options["params"] = dict(query)
        answer = self._answered(method, self._prefix + path, options, time.monotonic() + silent_s)
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
    ) -> tuple[httpx2.Response | None, errors.StoreUnavailableError | None]:
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


@contextlib.contextmanager
def unlogged() -> Iterator[None]:
    """Send requests inside the block without a line for each in the log of httpx2."""
    token = _is_ours.set(True)
    try:
        yield
    finally:
        _is_ours.reset(token)


def headers_of(gateway: HttpAddress) -> dict[str, str]:
    """Return the headers of each request to a gateway."""
    headers = {HEADER: str(WIRE_VERSION), "Accept": JSON}
    return {**headers, "X-API-Key": gateway.api_key} if gateway.api_key else headers


def certificates_for(gateway: HttpAddress) -> ssl.SSLContext:
    """Return the certificates that a client of a gateway trusts."""
    if gateway.base_url.startswith("https"):
        return trusting_context(root_certificates())
    return _untrusting()


def lost(error: Exception, gateway: HttpAddress) -> errors.StoreUnavailableError:
    """Return the error of a request without an answer."""
    words = f"{gateway.base_url}: {error}".rstrip(": ") or repr(error)
    what = "cannot be reached"
    if isinstance(error, httpx2.TimeoutException):
        what = "has not answered in time"
    message = f"the gateway {what}: {words}"
    return errors.StoreUnavailableError(message, retry_after_s=RETRY_AFTER_S)


def is_outage(answer: httpx2.Response) -> bool:
    """Return whether an answer is of a proxy, or of a gateway that starts or stops.

    A gateway that answers for its store has a problem document, and has repeated the call itself.
    """
    status = answer.status_code
    if problem_name(_problem(answer)):
        return False
    return (status >= 500 and status != _SILENCE) or status in _CONNECTION


def pause_s(answer: httpx2.Response, *, left_s: float) -> float | None:
    """Return the seconds after which a request may be repeated; None if it is not to be.

    A request is repeated that came too early for its key, while its time limit is not reached. A
    full store and a wait that timed out have the same status, and are errors.
    """
    if answer.status_code != _TOO_FAST or problem_name(_problem(answer)) not in ("", "rejected"):
        return None
    text = answer.headers.get("retry-after", "")
    pause = max(_LEAST_PAUSE_S, float(text) if text.isdecimal() else 1.0)
    return pause if pause < left_s else None


def content_of(answer: httpx2.Response, gateway: HttpAddress) -> Any:
    """Return the JSON of an answer, or raise its error."""
    if answer.is_success and _media_type(answer) == JSON:
        return answer.json()
    raise refusal(answer, gateway)


def refusal(answer: httpx2.Response, gateway: HttpAddress) -> errors.TurnstreamError:
    """Return the error of an answer that is no result."""
    status, problem, base_url = answer.status_code, _problem(answer), gateway.base_url
    if problem_name(problem):
        return error_of(problem)
    detail = str(problem.get("detail") or f"HTTP {status} {answer.reason_phrase}".strip())
    if status in (401, 403):
        return error_of({"status": status, "detail": detail})
    if status == 407:
        return errors.AccessDeniedError(f"a proxy denied access: {detail}")
    if status >= 500 or status in _CONNECTION:
        text = f"the gateway cannot be reached: {base_url}: {detail}"
        return errors.StoreUnavailableError(text, retry_after_s=RETRY_AFTER_S)
    if status < 300 or status in (404, 405):
        path = answer.request.url.path
        return errors.RejectedError(
            f"{base_url} is no gateway of this release: HTTP {status} at {path}"
        )
    if status < 400:
        location = answer.headers.get("location", "")
        return errors.RejectedError(
            f"{base_url} refers to {location!r}: use the address of the gateway"
        )
    retry_s = RETRY_AFTER_S if status == _TOO_FAST else None
    return errors.RejectedError(f"{base_url}: HTTP {status}: {detail}", retry_s)


def _problem(answer: httpx2.Response) -> Mapping[str, Any]:
    """Return the problem document of an answer, or another JSON object; empty for other content."""
    if answer.is_success or "json" not in _media_type(answer):
        return {}
    try:
        found = json.loads(answer.content)
    except ValueError:
        return {}
    if not isinstance(found, dict):
        return {}
    content = cast("dict[str, Any]", found)
    if isinstance(error := content.get("error"), dict):
        return _as_problem(cast("dict[str, Any]", error), answer)
    return content


def _as_problem(error: Mapping[str, Any], answer: httpx2.Response) -> Mapping[str, Any]:
    """Return the problem document of an error in the shape of the OpenAI API."""
    pause = answer.headers.get("retry-after", "")
    return {
        "type": f"{TYPE_PREFIX}{error['code']}" if error.get("code") else "",
        "status": answer.status_code,
        "detail": error.get("message"),
        "field": error.get("param"),
        "retry_after_s": float(pause) if pause.isdecimal() else None,
    }


def _media_type(answer: httpx2.Response) -> str:
    return answer.headers.get("content-type", "").partition(";")[0].strip().lower()


@functools.lru_cache(maxsize=1)
def _untrusting() -> ssl.SSLContext:
    """Return a context without any certificate, for addresses without TLS."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
