"""Settings of the gateway."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Protocol, cast
from urllib.parse import urlsplit

from turnstream.errors import InvalidConfigError
from turnstream_server.operations.sessions import DEFAULT_SILENCE_S
from turnstream_server.telemetry.readiness import Readiness
from turnstream_server.tls import Tls

if TYPE_CHECKING:
    from turnstream.records.batches import EncodedMiniBatch


EngineKind = Literal["vllm", "sglang", "hosted"]

ENGINE_TIMEOUT_S: Final = 600.0


class EngineAddress(NamedTuple):
    """An inference server to which the capture proxy passes calls.

    Attributes:
        kind: its API.
        url: address without a slash at its end; for "hosted" the name of a base model, or
            `MODEL_ID/sampler path`.
    """

    kind: EngineKind
    url: str

    @classmethod
    def parse(cls, text: str) -> EngineAddress:
        """Return the address in `KIND=URL`; InvalidConfigError for another text.

        >>> EngineAddress.parse("vllm=http://10.0.0.7:8000/v1")
        EngineAddress(kind='vllm', url='http://10.0.0.7:8000')
        >>> EngineAddress.parse("hosted=tiny").url
        'tiny'
        """
        kind, _, url = text.partition("=")
        if kind == "hosted" and url:
            return cls(kind, url)
        with suppress(ValueError):  # the port is no number
            parts = urlsplit(url)
            is_address = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
            if kind in ("vllm", "sglang") and is_address and not parts.query + parts.fragment:
                return cls(cast(EngineKind, kind), url.rstrip("/").removesuffix("/v1"))
        message = f"{text!r} is not vllm=URL, sglang=URL or hosted=MODEL"
        raise InvalidConfigError("--engine", f"{message}, such as vllm=http://10.0.0.7:8000")

    def __str__(self) -> str:
        return f"{self.kind}={self.url}"


class ReadShare(Protocol):
    """Returns one rank's share of a mini-batch. It is passed in: services import no other one."""

    def __call__(
        self, run: str, step: int, *, mini_batch: int, dp_rank: int, dp_world_size: int
    ) -> EncodedMiniBatch:
        """Return the share; errors as of `turnstream batch --out`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions:
    """Settings of one gateway process.

    Attributes:
        redis_url: address of the store.
        listen: "host:port"; port 0 takes a free one.
        read_share: assembles mini-batches; None offers none.
        folder: shared folder of the workers, for downloads of exported weights; None offers none.
        address_file: receives the bound address once the server answers; None for none.
        public_url: its address for agents, behind a proxy; "" takes the Host of each request.
        names: host names under which it is reached, in lower case; see admission.py.
        requires_key: requests need a stored key; see `KeyChecks`.
        tls: certificate and key of the server; None serves without TLS.
        poll_s: longest time for which a poll of a pending result is held. Clients wait 45 s.
        session_silence_s: seconds without a heartbeat after which a session is closed.
        max_body_bytes: largest body of a request, as it is sent and unpacked.
        max_store_connections: most connections to the store at the same time.
        shutdown_grace_s: time for requests in progress after a request to stop.
        readiness: receives the checks of the dependencies.
        durability: "everysec" or "fsync", which the store must have.
        engines: inference servers of the capture proxy; none of them is given by a request.
        engine_timeout_s: longest silence of an engine during a call.
        engine_api_key: bearer token for the engines; empty: none.
    """

    redis_url: str
    listen: str = "127.0.0.1:0"
    read_share: ReadShare | None = None
    folder: Path | None = None
    address_file: Path | None = None
    public_url: str = ""
    names: frozenset[str] = frozenset()
    requires_key: bool = False
    tls: Tls | None = None
    poll_s: float = 30.0
    session_silence_s: float = DEFAULT_SILENCE_S
    max_body_bytes: int = 32 << 20
    max_store_connections: int = 32
    shutdown_grace_s: float = 5.0
    readiness: Readiness = field(default_factory=lambda: Readiness("gateway"))
    durability: str = "everysec"
    engines: tuple[EngineAddress, ...] = ()
    engine_timeout_s: float = ENGINE_TIMEOUT_S
    engine_api_key: str = field(default="", repr=False)
