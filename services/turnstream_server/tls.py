"""Certificate and private key of a service, for gRPC and HTTP."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import NamedTuple

from turnstream.errors import InvalidConfigError


class Tls(NamedTuple):
    """Files of a service with TLS.

    Attributes:
        cert: chain of certificates, PEM.
        key: private key without a password, PEM.
    """

    cert: Path
    key: Path


def read_tls(cert: Path | None, key: Path | None) -> Tls | None:
    """Return the files of a service with TLS; None without TLS.

    InvalidConfigError if one of the two is missing or cannot be read, or they do not fit.
    """
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        missing = "TURNSTREAM_TLS_CERT" if cert is None else "TURNSTREAM_TLS_KEY"
        raise InvalidConfigError(missing, "it is not set, and TLS needs certificate and key")
    for name, path in (("TURNSTREAM_TLS_CERT", cert), ("TURNSTREAM_TLS_KEY", key)):
        try:
            path.read_bytes()
        except OSError as error:
            raise InvalidConfigError(name, f"{path} cannot be read: {error}") from error
    try:
        # An empty password: OpenSSL asks on the terminal for one otherwise.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password="")
    except ssl.SSLError as error:
        reason = f"{cert} and {key} are no certificate and its private key: {error}"
        raise InvalidConfigError("TURNSTREAM_TLS_CERT", reason) from error
    return Tls(cert, key)
