"""Certificates of a service on this machine, each its own authority."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from turnstream_server.tls import Tls


class Certificates(NamedTuple):
    """Files of a service, and the certificate that its clients trust."""

    tls: Tls
    ca: Path


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    cert, key = make_certificate(tmp_path_factory.mktemp("certificates"))
    return Certificates(Tls(cert, key), cert)


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Write a certificate of this machine that is its own authority; return it and its key."""
    cert, key = folder / "store.crt", folder / "store.key"
    words = ["openssl", "req", "-x509", "-nodes", "-days", "2", "-subj", "/CN=test"]
    words += ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    words += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([*words, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return cert, key
