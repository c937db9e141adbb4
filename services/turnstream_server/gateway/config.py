"""Settings of the gateway."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from turnstream_server.commands.sessions import DEFAULT_SILENCE_S


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions:
    """Settings of one gateway process.

    Attributes:
        redis_url: address of the store.
        listen: "host:port"; port 0 takes a free one.
        folder: shared folder of the workers, for downloads of exported weights; None offers none.
        address_file: receives the bound "host:port" once the server answers; None for none.
        api_keys: the accepted keys; empty accepts every key that begins with `tml-`.
        poll_s: longest time for which a poll of a pending result is held. Clients wait 45 s.
        session_silence_s: seconds without a heartbeat after which a session is closed.
        max_body_bytes: largest body of a request.
        max_store_connections: most connections to the store at the same time.
        shutdown_grace_s: time for requests in progress after a request to stop.
    """

    redis_url: str
    listen: str = "127.0.0.1:0"
    folder: Path | None = None
    address_file: Path | None = None
    api_keys: frozenset[str] = frozenset()
    poll_s: float = 30.0
    session_silence_s: float = DEFAULT_SILENCE_S
    max_body_bytes: int = 256 << 20
    max_store_connections: int = 32
    shutdown_grace_s: float = 5.0
