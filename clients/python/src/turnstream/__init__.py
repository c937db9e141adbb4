"""Turnstream: the data service between LLM rollouts and training.

    import turnstream

    service = turnstream.connect()
    run = service.create_run("demo", batch_groups=8)

A generator streams turns with `run.publisher()`; a trainer iterates over `run.batches()`.
`from_vllm`, `from_sglang`, `from_openai` and `from_tinker` return the arguments of a turn for the
response of an inference engine.
`fetch_weights` returns the local folder of announced weights.
`forward_backward_run` trains a hosted model on a run, through the tinker SDK.
Modules below `turnstream` are for advanced use: `turnstream.generator`, `.worker`, `.types`,
`.errors`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from turnstream.errors import TurnstreamError
    from turnstream.responses import from_openai, from_sglang, from_tinker, from_vllm
    from turnstream.run import Run
    from turnstream.service import Service, connect
    from turnstream.tinker import forward_backward_run
    from turnstream.weights import fetch_weights

__version__ = "0.1.0"

__all__ = [
    "Run",
    "Service",
    "TurnstreamError",
    "connect",
    "fetch_weights",
    "forward_backward_run",
    "from_openai",
    "from_sglang",
    "from_tinker",
    "from_vllm",
]

_HOMES = {
    "Run": "turnstream.run",
    "Service": "turnstream.service",
    "TurnstreamError": "turnstream.errors",
    "connect": "turnstream.service",
    "fetch_weights": "turnstream.weights",
    "forward_backward_run": "turnstream.tinker",
    "from_openai": "turnstream.responses",
    "from_sglang": "turnstream.responses",
    "from_tinker": "turnstream.responses",
    "from_vllm": "turnstream.responses",
}


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used: the import of the package alone is quick."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)
