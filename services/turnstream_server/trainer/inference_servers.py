"""Inference servers that load a version of the weights from a folder which both machines see.

The requests are those of vLLM 0.33.0 and SGLang 0.5.23. A folder with `adapter_config.json` is an
adapter (LoRA in the layout of peft), any other folder is a full model.

- A full model replaces the weights of the server. Requests in progress finish with the old
  weights, new ones wait or are refused until the new ones are loaded. So every response has one
  version. The server calls it by `weight_version`, the number as text.
- An adapter is loaded as `<run>-v<N>`. Requests name it as their model, so they name their
  version. Adapters of versions whose folder is deleted are unloaded.
"""

from __future__ import annotations

import functools
import re
import ssl
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import httpx2

from turnstream.errors import RejectedError, TurnstreamError, UnavailableError
from turnstream_server.trainer.checkpoint import NUM_VERSIONS
from turnstream_server.trainer.settings import checked_url, parse_push

NO_VERSION: Final = "unknown"
"""The `weight_version` of a vLLM server while its weights are replaced, or after that failed."""

_ADAPTER_FILE: Final = "adapter_config.json"
_TRANSIENT: Final = (408, 425, 429, 502, 503, 504)
_CONNECT_TIMEOUT_S: Final = 10.0
_SHOWN_CHARACTERS: Final = 300


class InferenceServer(ABC):
    """A server that samples with the weights which it loads: calls, and adapters by version.

    Attributes:
        url: its address, for messages.
    """

    def __init__(
        self, url: str, *, adapter: str, api_key: str = "", timeout_s: float = 300.0
    ) -> None:
        """Only `load` connects.

        Args:
            url: the server, for example http://10.0.0.7:8000; InvalidConfigError for no address.
            adapter: name of the adapters before `-v<N>`: the run.
            api_key: sent as bearer token, if it is not empty.
            timeout_s: longest time of one call; loading a model can take minutes.
        """
        self.url = checked_url(url)
        self._adapter = adapter
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = httpx2.Timeout(timeout_s, connect=min(timeout_s, _CONNECT_TIMEOUT_S))
        self._client: httpx2.Client

    def load(self, version: int, folder: Path) -> None:
        """Return once the server samples with the weights in `folder`. Calls can be repeated.

        One thread at a time may call it.

        Raises:
            UnavailableError: the server was not reached, or asks to try again.
            RejectedError: the server refused the weights; its reason is the message.
        """
        with httpx2.Client(
            base_url=self.url,
            headers=self._headers,
            timeout=self._timeout,
            verify=_tls_context(),
        ) as self._client:
            if (folder / _ADAPTER_FILE).is_file():
                self._replace_adapters(version, folder)
            else:
                self._load_model(version, folder)

    def _replace_adapters(self, version: int, folder: Path) -> None:
        """Load the adapter of a version, and unload those whose folders are deleted."""
        loaded = self._loaded_adapters()
        self._load_adapter(f"{self._adapter}-v{version}", folder, loaded)
        for older, name in loaded.items():
            if older <= version - NUM_VERSIONS:
                with suppress(RejectedError):  # another trainer has unloaded it
                    self._unload_adapter(name)

    @abstractmethod
    def _load_model(self, version: int, folder: Path) -> None: ...

    @abstractmethod
    def _load_adapter(self, name: str, folder: Path, loaded: Mapping[int, str]) -> None: ...

    @abstractmethod
    def _unload_adapter(self, name: str) -> None: ...

    def _loaded_adapters(self) -> dict[int, str]:
        """Return the names of the run's adapters, by version."""
        cards = self._json("GET", "/v1/models").get("data")
        if not isinstance(cards, list):
            raise RejectedError(f"{self.url}/v1/models lists no models")
        names = [str(card.get("id")) for card in cards if isinstance(card, dict)]
        return adapter_versions(names, adapter=self._adapter)

    def _json(self, method: str, path: str, **content: Any) -> dict[str, Any]:
        response = self._call(method, path, **content)
        with suppress(ValueError):
            if isinstance(body := response.json(), dict):
                return body
        raise RejectedError(f"{self.url}{path} answered {_shown(response.text)}, no JSON object")

    def _call(self, method: str, path: str, **content: Any) -> httpx2.Response:
        try:
            response = self._client.request(method, path, **content)
        except httpx2.HTTPError as error:
            message = f"{self.url}{path}: {type(error).__name__}: {error}"
            raise UnavailableError(message) from error
        if response.is_success:
            return response
        kind = UnavailableError if response.status_code in _TRANSIENT else RejectedError
        raise kind(
            f"{self.url}{path}: HTTP {response.status_code}: {_reason(response)}"
            f"{self._hint(path) if response.status_code == HTTPStatus.NOT_FOUND else ''}"
        )

    def _hint(self, path: str) -> str:
        """Return the setting without which a server does not have a path."""
        return ""


class VllmServer(InferenceServer):
    """vLLM 0.33.0, `vllm serve`.

    - A full model uses the paths of its development mode (`VLLM_SERVER_DEV_MODE=1`): `/pause`,
      `/collective_rpc` with `reload_weights`, `/reset_prefix_cache`, `/update_weight_version` and
      `/resume`. Its API key does not protect them, so keep the port in a private network.
    - An adapter uses `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, which exist with
      `--enable-lora` and `VLLM_ALLOW_RUNTIME_LORA_UPDATING=True`.
    """

    def _load_model(self, version: int, folder: Path) -> None:
        try:
            self._json("POST", "/pause", params={"mode": "wait"})
            self._replace_weights(version, folder)
        except TurnstreamError:
            with suppress(TurnstreamError):
                self._json("POST", "/resume")
            raise
        self._json("POST", "/resume")

    def _replace_weights(self, version: int, folder: Path) -> None:
        # A reload that fails may have replaced a part: tokens of such weights have no version.
        self._json("POST", "/update_weight_version", json={"new_version": NO_VERSION})
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        self._call("POST", "/collective_rpc", json=reload)
        if self._json("POST", "/reset_prefix_cache").get("success") is not True:
            raise UnavailableError(f"{self.url}: the cache of the old weights is still in use")
        self._json("POST", "/update_weight_version", json={"new_version": str(version)})

    def _load_adapter(self, name: str, folder: Path, loaded: Mapping[int, str]) -> None:
        # In place: a repeated call finds the adapter there.
        content = {"lora_name": name, "lora_path": str(folder), "load_inplace": True}
        self._call("POST", "/v1/load_lora_adapter", json=content)

    def _unload_adapter(self, name: str) -> None:
        self._call("POST", "/v1/unload_lora_adapter", json={"lora_name": name})

    def _hint(self, path: str) -> str:
        is_adapter = path.endswith("_lora_adapter")
        wanted = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True" if is_adapter else "VLLM_SERVER_DEV_MODE=1"
        return f"; start vLLM with {wanted}"


class SglangServer(InferenceServer):
    """SGLang 0.5.23, `python -m sglang.launch_server`.

    - A full model uses `/update_weights_from_disk`, which waits until no request is in progress.
    - An adapter uses `/load_lora_adapter` and `/unload_lora_adapter`; the server needs
      `--enable-lora`, with the largest rank and all target modules.
    """

    def _load_model(self, version: int, folder: Path) -> None:
        content = {
            "model_path": str(folder),
            # Without it a server that was started with dummy weights would load those again.
            "load_format": "safetensors",
            "weight_version": str(version),
            "abort_all_requests": False,
            "flush_cache": True,
        }
        self._checked("/update_weights_from_disk", content)

    def _load_adapter(self, name: str, folder: Path, loaded: Mapping[int, str]) -> None:
        if name in loaded.values():  # a repeated call; SGLang refuses a name that it has
            self._unload_adapter(name)
        self._checked("/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})

    def _unload_adapter(self, name: str) -> None:
        self._checked("/unload_lora_adapter", {"lora_name": name})

    def _checked(self, path: str, content: Mapping[str, Any]) -> None:
        body = self._json("POST", path, json=content)
        if body.get("success") is not True:
            raise RejectedError(f"{self.url}{path}: {_shown(str(body))}")


_KINDS: Final[Mapping[str, type[InferenceServer]]] = {"vllm": VllmServer, "sglang": SglangServer}


def inference_server(
    target: str, *, adapter: str, api_key: str = "", timeout_s: float = 300.0
) -> InferenceServer:
    """Return the server that an option `--push` names; errors as of `parse_push`.

    >>> inference_server("vllm=http://10.0.0.7:8000/", adapter="demo").url
    'http://10.0.0.7:8000'
    """
    kind, url = parse_push(target)
    return _KINDS[kind](url, adapter=adapter, api_key=api_key, timeout_s=timeout_s)


def adapter_versions(names: list[str], *, adapter: str) -> dict[int, str]:
    """Return the names of one run's adapters, by version.

    >>> adapter_versions(["base", "demo-v6", "demo-v7", "demo-2-v7", "demo-v07"], adapter="demo")
    {6: 'demo-v6', 7: 'demo-v7'}
    """
    found = [re.fullmatch(rf"{re.escape(adapter)}-v(0|[1-9][0-9]*)", name) for name in names]
    return {int(match[1]): match[0] for match in found if match}


@functools.cache
def _tls_context() -> ssl.SSLContext:
    """Return the certificates of this machine; reading them takes longer than a call."""
    return httpx2.create_ssl_context()


def _reason(response: httpx2.Response) -> str:
    """Return the server's own words on a failed call, wherever its body has them."""
    with suppress(ValueError):
        body = response.json()
        if isinstance(body, dict):
            error = body.get("error")
            inner = error.get("message") if isinstance(error, dict) else error
            known = (inner, body.get("message"), body.get("error_message"), body.get("detail"))
            return _shown(str(next((each for each in known if each), body)))
    return _shown(response.text)


def _shown(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]} ..."
