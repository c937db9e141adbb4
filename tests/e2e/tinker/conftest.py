"""A store, a batcher, a gateway, an engine and a sampler as processes, for the tinker SDK."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from testkit.requests.sdks import BASE, NEWEST, Hosting, Sdk
from turnstream_server.embedded import EmbeddedServer
from turnstream_server.launch.stack import Stack
from turnstream_server.launch.up import API_KEY, host_models, start_gateway
from turnstream_server.models.byte_model import byte_model_spec, write_byte_model


@pytest.fixture(scope="session")
def hosting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosting]:
    folder = tmp_path_factory.mktemp("hosting")
    base = folder / "byte"
    write_byte_model(base, byte_model_spec(hidden_size=32))
    with EmbeddedServer() as store, Stack(folder, store_url=store.url) as stack:
        stack.start_batcher()
        url = start_gateway(stack, folder=folder, listen="127.0.0.1:0")
        bases = [f"{BASE}={base}"]
        host_models(stack, base_models=bases, folder=folder, store_url=store.url)
        yield Hosting(url.removeprefix("http://"), base, folder, folder / "models", store.url)


@pytest.fixture(scope="session")
def sdk(hosting: Hosting) -> Callable[..., Sdk]:
    """`sdk(release)` drives a release of the SDK; without one, the newest."""

    def make(release: str = NEWEST, *, api_key: str = API_KEY) -> Sdk:
        return Sdk(release, address=hosting.address, api_key=api_key, folder=hosting.folder)

    return make
