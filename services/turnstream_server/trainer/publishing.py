"""Publishing a version: a folder on disk, over HTTP, and in inference servers."""

from __future__ import annotations

from contextlib import ExitStack

from turnstream.weights import write_checksums
from turnstream_server.failpoints import failpoint
from turnstream_server.models.folders import remove_unfinished
from turnstream_server.trainer.checkpoint import publish_weights
from turnstream_server.trainer.config import TrainerConfig
from turnstream_server.trainer.engine import WriteWeights
from turnstream_server.trainer.inference_servers import inference_server
from turnstream_server.trainer.pushing import Pushes
from turnstream_server.trainer.weights_server import WeightsAccess, advertised_url, serve_weights


class WeightsPublisher:
    """Publishes the versions of one trainer, between `__enter__` and `__exit__`."""

    def __init__(self, config: TrainerConfig, access: WeightsAccess | None = None) -> None:
        """Raises InvalidConfigError for an option of `config` that is wrong.

        `access` has the callers that get the weights over HTTP: see `serve_weights`.
        """
        self._config = config
        self._access = access
        self._folder = config.folder / "weights"
        remove_unfinished(self._folder)
        self._servers = [
            inference_server(
                target,
                adapter=config.run,
                api_key=config.push_api_key,
                timeout_s=config.push_timeout_s,
            )
            for target in config.push
        ]
        self._base_url = ""
        self._pushes = Pushes([])
        self._open = ExitStack()

    def __enter__(self) -> WeightsPublisher:
        config = self._config
        self._base_url = config.weights_url and advertised_url("", config.weights_url)
        if config.weights_listen:
            listen, access = config.weights_listen, self._access
            server = serve_weights(self._folder, listen=listen, access=access)
            self._open.enter_context(server)
            self._base_url = advertised_url(server.url, config.weights_url)
        self._pushes = Pushes(self._servers)
        self._open.callback(self._pushes.close)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def publish(self, write: WriteWeights, *, version: int) -> str:
        """Make the weights of a version available and return the URI to announce.

        Inference servers load the version before it is announced, so that a generator finds it
        there. A server that fails delays the announcement by `push_timeout_s` at most, and never
        prevents it.
        """
        uri = publish_weights(self._folder, write, version=version)
        folder = self._folder.resolve() / f"v{version}"
        if self._base_url:
            write_checksums(folder)
            uri = f"{self._base_url}/v{version}"
        failpoint("publish.before_push")
        self._pushes.push(version, folder, timeout_s=self._config.push_timeout_s)
        return uri

    def statistics(self) -> dict[str, int]:
        """Return the metrics of the pushes."""
        return self._pushes.statistics()
