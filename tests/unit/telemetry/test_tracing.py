from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import sys
from turnstream_server.telemetry.tracing import span, start_tracing

start_tracing("batcher")
with span("plan", run="maze", step=1) as made:
    assert made is None
print([name for name in sys.modules if name.startswith("opentelemetry")])
"""


def test_nothing_is_imported_without_a_collector() -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("OTEL_")}

    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
    )

    assert done.stdout == "[]\n"
