"""Session keys: each is a signed capability for one trajectory, good at every gateway of a store.

A session key names its trajectory and its limits, and is stored nowhere. It can be given to a
sandbox: it opens nothing but its trajectory, and ends with it, or with the API key that made it.

    tms-<base64url of a MAC of 32 bytes and the content>

The MAC is HMAC-SHA256 under a secret in the store. The content is a JSON list: the number of its
format, and the fields of `Session`.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import json
import secrets
import time
from typing import Any, Final, NamedTuple, cast

import redis.asyncio

from turnstream.errors import StoreUnavailableError, UnavailableError, UnknownKeyError
from turnstream.store.client.replies import translating
from turnstream.types import TrajectoryKey
from turnstream.types.names import RunId
from turnstream_server.keys.records import LOCAL_KEY, ApiKey, KeyChecks

SESSION_PREFIX: Final = "tms-"

SESSION: Final = "turnstream.session"
"""Entry of the scope of an HTTP request with a session key: its `Session`."""

SESSIONS: Final = "tk:sessions"
"""String in the store: the secret that signs session keys."""

DEFAULT_MAX_CALLS: Final = 1_000
DEFAULT_MAX_TOKENS: Final = 10_000_000
DEFAULT_EXPIRES_S: Final = 3_600
LONGEST_S: Final = 7 * 86_400

_FORMAT: Final = 1
_MAX_LENGTH: Final = 8_192
_FRESH_S: Final = 10.0
"""Time for which the secret is used without another read."""

_ANSWER_S: Final = 3.0
"""Longest wait for the store where an older secret is known."""


class Session(NamedTuple):
    """The content of a session key.

    Attributes:
        run: id of the run.
        key: the trajectory.
        num_samples: samples of its group.
        prompt_uid: the dataset's name of the prompt.
        policy: name of the model whose calls are stored; "" stores every call.
        max_calls: stored calls, at most.
        max_tokens: prompt and sampled tokens of all stored calls, at most.
        expires_ms: server ms from which on the key is refused.
        may_seal: whether the key may seal or abandon the trajectory.
        key_id: id of the stored API key that made it; "" where none was needed.
        owner: owner of that key.
        writer: name under which the trajectory is written.
    """

    run: RunId
    key: TrajectoryKey
    num_samples: int
    prompt_uid: str = ""
    policy: str = ""
    max_calls: int = DEFAULT_MAX_CALLS
    max_tokens: int = DEFAULT_MAX_TOKENS
    expires_ms: int = 0
    may_seal: bool = True
    key_id: str = ""
    owner: str = "local"
    writer: str = ""


def signed(session: Session, secret: bytes) -> str:
    """Return the session key with this content.

    >>> session = Session(RunId("demo"), TrajectoryKey("task-7", 0), 8, expires_ms=1_000)
    >>> verified(signed(session, b"secret"), b"secret", now_ms=999) == session
    True
    """
    content = json.dumps([_FORMAT, *session], ensure_ascii=False, separators=(",", ":"))
    return _text_of(content.encode(), secret)


def verified(text: str, secret: bytes, *, now_ms: int) -> Session:
    """Return the content of a session key; UnknownKeyError with the reason if it is refused."""
    content = _content_of(text)
    if not hmac.compare_digest(_text_of(content, secret).encode(), text.encode(errors="replace")):
        raise UnknownKeyError(
            "the session key is not as it was made: it was changed or cut off, or it is of another "
            "store"
        )
    format_, *fields = cast("list[Any]", json.loads(content))
    if format_ != _FORMAT:
        raise UnknownKeyError(f"the session key has the format {format_}, expected {_FORMAT}")
    run, key, *rest = fields
    session = Session(RunId(run), TrajectoryKey(*key), *rest)
    if now_ms >= session.expires_ms:
        ago_s = (now_ms - session.expires_ms) / 1000
        raise UnknownKeyError(f"the session key expired {ago_s:.0f} s ago (expires_in_s)")
    return session


def _text_of(content: bytes, secret: bytes) -> str:
    mac = hmac.digest(secret, content, hashlib.sha256)
    return SESSION_PREFIX + base64.urlsafe_b64encode(mac + content).decode().rstrip("=")


def _content_of(text: str) -> bytes:
    """Return the content of a session key before its check; b"" for a text that is none."""
    if len(text) > _MAX_LENGTH or not text.startswith(SESSION_PREFIX):
        return b""
    encoded = text.removeprefix(SESSION_PREFIX)
    try:
        blob = base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4))
    except (binascii.Error, ValueError):
        return b""
    return blob[hashlib.sha256().digest_size :]


class _Signing(NamedTuple):
    """The secret, and the server ms at the start of the monotonic clock."""

    secret: bytes
    start_ms: float
    asked_s: float


class SessionKeys:
    """Makes and checks session keys in one process.

    Args:
        client: the store.
        keys: checks of the API keys that make session keys.
    """

    def __init__(self, client: redis.asyncio.Redis, keys: KeyChecks) -> None:
        self._client = client
        self._keys = keys
        self._signing: _Signing | None = None

    async def now_ms(self) -> int:
        """Return the server ms; UnavailableError if the store does not answer."""
        return _now_ms(await self._current())

    async def sign(self, session: Session) -> str:
        """Return the session key with this content; UnavailableError as of `now_ms`."""
        return signed(session, (await self._current()).secret)

    async def identify(self, text: str) -> Session:
        """Return the content of a session key whose API key is still accepted.

        UnknownKeyError with the reason if it is refused, AccessDeniedError if its API key may no
        longer write the run, UnavailableError if the store does not answer.
        """
        current = await self._current()
        session = verified(text, current.secret, now_ms=_now_ms(current))
        await self.rights_of(session)
        return session

    async def rights_of(self, session: Session) -> ApiKey:
        """Return the rights of a session key: no role, its run, and the limits of its API key.

        Errors as of `identify`.
        """
        run = RunId(session.run).name
        if not session.key_id:
            if self._keys.requires_key:
                raise UnknownKeyError(
                    "the session key was made without an API key, which this gateway needs"
                )
            return LOCAL_KEY._replace(roles=frozenset(), runs=(run,), owner=session.owner)
        maker = await self._keys.stored(session.key_id)
        if maker is None:
            raise UnknownKeyError("the API key that made the session key is revoked")
        maker.require("produce", run=session.run)
        return maker._replace(roles=frozenset(), runs=(run,))

    async def _current(self) -> _Signing:
        """Return the secret of the store, some seconds old at most; older while it is away."""
        known, now_s = self._signing, time.monotonic()
        if known is not None and now_s - known.asked_s < _FRESH_S:
            return known
        try:
            found = await self._read(known)
        except UnavailableError:
            if known is None:
                raise
            found = known._replace(asked_s=now_s)
        self._signing = found
        return found

    async def _read(self, known: _Signing | None) -> _Signing:
        """Return the secret of the store. If it has none, it receives the known or a new one."""
        within_s = None if known is None else _ANSWER_S
        try:
            async with asyncio.timeout(within_s):
                with translating():
                    secret = await self._client.get(SESSIONS)
                    if secret is None:
                        new = secrets.token_bytes(32) if known is None else known.secret
                        await self._client.set(SESSIONS, new, nx=True)
                        secret = await self._client.get(SESSIONS)
                    seconds, microseconds = await self._client.time()
        except TimeoutError as error:
            raise StoreUnavailableError(f"no answer within {within_s} s") from error
        if not secret:
            raise StoreUnavailableError(
                f"the store has lost {SESSIONS}, the secret of session keys"
            )
        now_s, store_ms = time.monotonic(), seconds * 1000 + microseconds / 1000
        return _Signing(cast("bytes", secret), store_ms - now_s * 1000, now_s)


def _now_ms(signing: _Signing) -> int:
    return round(signing.start_ms + time.monotonic() * 1000)
