"""Certificates of a service on this machine, and of the authority that its clients trust."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from turnstream_server.tls import Tls

_SERVER = "subjectAltName=DNS:localhost,IP:127.0.0.1"


class Certificates(NamedTuple):
    """Files of a service, and the certificate that its clients trust."""

    tls: Tls
    ca: Path


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """A certificate for localhost, signed by an authority of its own."""
    folder = tmp_path_factory.mktemp("certificates")
    new = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    signer = ["-CA", "ca.pem", "-CAkey", "ca.key", "-addext", "basicConstraints=CA:FALSE"]
    for name, options in (("ca", []), ("server", [*signer, "-addext", _SERVER])):
        files = ["-keyout", f"{name}.key", "-out", f"{name}.pem", "-days", "2"]
        command = ["openssl", *new, "-subj", f"/CN=test {name}", *files, *options]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return Certificates(Tls(folder / "server.pem", folder / "server.key"), folder / "ca.pem")
