"""Settings that a process reads from its environment once, and passes on as arguments."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

from pydantic import Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from turnstream.errors import InvalidConfigError
from turnstream.store.client.addresses import (
    checked_url,
    http_host_and_port,
    is_http,
    without_key,
)
from turnstream.store.client.passwords import with_password_of
from turnstream.types.names import quoted

_OF_AGENTS: Final = (
    *("RUN", "GROUP", "SAMPLE", "TASK_FILE", "OUTPUT_FILE", "EXIT_STATUS", "OUTCOME"),
)
_OF_CLIENTS: Final = frozenset(f"TURNSTREAM_{name}" for name in ("GATEWAY_URL", *_OF_AGENTS))
_OF_OTHERS: Final = re.compile(r"^TURNSTREAM_TEST_|_SERVICE_(HOST|PORT)|_PORT(_\d+_|$)")


class Settings(BaseSettings):
    """The settings of every service; each is read from `TURNSTREAM_<NAME>`.

    Attributes:
        redis_url: an external Redis or Valkey; without it the embedded server is started.
        redis_password_file: file with the password for `redis_url`, if the URL has none.
        data_dir: kept folder of the embedded server; without it the data is temporary.
        durability: "everysec", or "fsync": an acknowledged write survives a power cut too.
        store_max_bytes: memory of the embedded server, above which it refuses writes; 0: no limit.
        store_port: port of the store of `turnstream up`; 0 takes a free one.
        batcher_host: address on which the batcher listens.
        batcher_port: its port; 0 takes a free one.
        batcher_advertise: "host:port" or "host" at which workers reach the batcher; empty for the
            address on which it listens.
        http_host: address on which the gateway of the Tinker API listens.
        http_port: its port; 0 takes a free one.
        http_names: host names under which the gateway is reached, with commas between them. An
            address and `localhost` are always accepted. Without a name, a gateway that needs keys
            accepts every name.
        http_url: address at which agents reach the gateway, if a proxy changes the `Host` of
            requests; empty takes that of the request for a session.
        api_key: API key with which this process calls batchers and gateways.
        key_file: file with that key; batcher and gateway create it at their first start.
        insecure: batcher and gateway need no key, on every address.
        tls_cert: chain of certificates of a service, PEM; with it gRPC, HTTP and metrics have TLS.
        tls_key: private key of the certificate, PEM.
        tls_ca: certificates that this process trusts, PEM; without it those of the system.
        start_wait_s: seconds for which a service waits at its start for store, run and batcher.
        lease_s: seconds after which a silent planner loses its leadership.
        get_wait_max_s: longest time the batcher holds a call that waits for a batch.
        assembly_cache_bytes: encoded mini-batches that a batcher keeps to answer again.
        archive_dir: folder in which the batcher writes each trained step as Parquet, before the
            step is released; without it no step is written.
        log_level: least level in the log: DEBUG, INFO, WARNING or ERROR.
        log_format: "text", or "json": one object per line.
        metrics_listen: "host:port" or "port" for /metrics, /healthz and /readyz of each service;
            empty for none.
        push_api_key: bearer token for the inference servers to which a trainer pushes weights.
        engine_api_key: bearer token for the inference servers to which a gateway passes calls.
        failpoint: place at which the process is to die, for tests; see failpoints.py.
    """

    model_config = SettingsConfigDict(
        env_prefix="TURNSTREAM_", frozen=True, env_ignore_empty=True, allow_inf_nan=False
    )

    redis_url: SecretStr | None = None
    redis_password_file: Path | None = None
    data_dir: Path | None = None
    durability: Literal["everysec", "fsync"] = "everysec"
    store_max_bytes: int = Field(default=0, ge=0)
    store_port: int = Field(default=7379, ge=0, le=65_535)
    batcher_host: str = "127.0.0.1"
    batcher_port: int = Field(default=7600, ge=0, le=65_535)
    batcher_advertise: str = ""
    http_host: str = "127.0.0.1"
    http_port: int = Field(default=7601, ge=0, le=65_535)
    http_names: str = ""
    http_url: str = ""
    api_key: SecretStr | None = None
    key_file: Path | None = None
    insecure: bool = False
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_ca: Path | None = None
    start_wait_s: float = Field(default=60.0, ge=0.0)
    lease_s: float = Field(default=5.0, gt=0.0)
    get_wait_max_s: float = Field(default=30.0, gt=0.0)
    assembly_cache_bytes: int = Field(default=512 * 1024 * 1024, ge=0)
    archive_dir: Path | None = None
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    log_format: Literal["text", "json"] = "text"
    metrics_listen: str = ""
    push_api_key: SecretStr | None = None
    engine_api_key: SecretStr | None = None
    failpoint: str = ""

    def with_password(self, url: str) -> str:
        """Return the URL of a store with the password of the file, unless the URL has one.

        Raises:
            StoreUnavailableError: the file cannot be read, or is empty.
        """
        if self.redis_password_file is None:
            return url
        return with_password_of(self.redis_password_file, url=url)

    def printable(self) -> dict[str, str]:
        """Return every setting by the name of its variable, passwords masked."""
        printable = {
            f"TURNSTREAM_{name.upper()}": "" if value is None else str(value)
            for name, value in self
        }
        if self.redis_url is not None:
            printable["TURNSTREAM_REDIS_URL"] = mask_password(self.redis_url.get_secret_value())
        return printable


def read_settings() -> Settings:
    """Return the settings of the environment.

    Raises:
        InvalidConfigError: a value is wrong, or a name `TURNSTREAM_...` is no setting.
    """
    if unknown := unknown_name(os.environ):
        raise unknown
    try:
        return Settings()
    except ValidationError as error:
        first = error.errors()[0]
        name = "_".join(str(part) for part in first["loc"]).upper()
        raise InvalidConfigError(f"TURNSTREAM_{name}", first["msg"]) from error


def unknown_name(environment: Mapping[str, str]) -> InvalidConfigError | None:
    """Return the error of the first variable that looks like a setting and is none.

    Names of tests are ignored, and those that Kubernetes makes for a service of that name.

    >>> str(unknown_name({"TURNSTREAM_LEASE": "5"}))
    'TURNSTREAM_LEASE: it is no setting; did you mean TURNSTREAM_LEASE_S?'
    >>> unknown_name({"TURNSTREAM_REDIS_PORT_6379_TCP": "tcp://10.0.0.7:6379", "PATH": ""})
    """
    known = {name.upper() for name in Settings.model_fields}
    for name in sorted(environment):
        prefix, _, rest = name.partition("_")
        is_ours = prefix == "TURNSTREAM" and rest not in known and name not in _OF_CLIENTS
        if is_ours and not _OF_OTHERS.search(name):
            close = difflib.get_close_matches(rest, known, n=1)
            hint = f"did you mean {prefix}_{close[0]}?" if close else "see `turnstream config`"
            return InvalidConfigError(name, f"it is no setting; {hint}")
    return None


def checked_store_url(url: str, *, field: str) -> str:
    """Return the address of a store itself, and not of a gateway.

    Raises:
        InvalidConfigError: it is another address; `field` names the setting that has it.
    """
    url = checked_url(url, field=field)
    if is_http(url):
        raise InvalidConfigError(
            field,
            f"{without_key(url)} is a gateway, and the server needs the store itself: write "
            "redis://HOST:PORT, rediss://HOST:PORT or unix:///PATH",
        )
    return url


def checked_gateway_url(url: str, *, field: str) -> str:
    """Return the address of a gateway without a slash at its end; "" for none.

    Raises:
        InvalidConfigError: it is another address; `field` names the setting that has it.
    """
    try:
        is_right = is_http(url) and without_key(url) == url and bool(http_host_and_port(url))
    except ValueError:
        is_right = False
    if url and not is_right:
        text = f"{quoted(without_key(url))} is no address of a gateway without its key"
        raise InvalidConfigError(field, f"{text}: write http://HOST:PORT or https://HOST")
    return url.rstrip("/")


def mask_password(url: str) -> str:
    """Return a URL with its password replaced.

    >>> mask_password("redis://default:secret@10.0.0.7:6379/0")
    'redis://default:***@10.0.0.7:6379/0'
    >>> mask_password("redis://10.0.0.7:6379?password=secret&db=0")
    'redis://10.0.0.7:6379?password=***&db=0'
    """
    masked = re.sub(r"(://[^:/@?]*):.*@", r"\1:***@", url)
    return re.sub(r"([?&]password=)[^&]*", r"\1***", masked)
