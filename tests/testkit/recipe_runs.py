"""Runs of `hosted_recipe.py` in one process, and the comparison of a run with another."""

from __future__ import annotations

import json
import queue
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Final, Self

from testkit.sdks import BASE, NEWEST, Hosting, Sdk
from turnstream_server.launch.up import API_KEY

RUN_S: Final = 480.0
"""Limit of a run. The SDK repeats a submit for 5 minutes, and then raises."""

_PROGRAM: Final = Path(__file__).with_name("hosted_recipe.py")

Result = dict[str, Any]


class RecipeClient:
    """A process with the tinker SDK that makes runs of the recipe; a context manager."""

    def __init__(self, hosting: Hosting) -> None:
        sdk = Sdk(NEWEST, address=hosting.address, api_key=API_KEY, folder=hosting.folder)
        self._process = sdk.start([sys.executable, "-P", str(_PROGRAM)])
        self._lines: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        log = hosting.folder / "logs/recipe.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        self._readers = [
            threading.Thread(target=self._read),
            threading.Thread(target=_drain, args=(self._process, log)),
        ]
        for reader in self._readers:
            reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process; safe to repeat."""
        self._process.kill()
        for reader in self._readers:
            reader.join()
        with self._process:  # closes its pipes
            pass

    def start(self, name: str, *, num_rounds: int) -> None:
        """Start a run, and return as soon as it has started."""
        assert self._process.stdin is not None
        request = {"base_model": BASE, "name": name, "num_rounds": num_rounds}
        self._process.stdin.write(f"{json.dumps(request)}\n")
        self._process.stdin.flush()
        assert self._lines.get(timeout=RUN_S)["started"] == name

    def wait(self, timeout_s: float) -> Result | None:
        """Return the last line of the run; None if the run lasts longer."""
        try:
            return self._lines.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def run(self, name: str, *, num_rounds: int) -> Result:
        """Return the last line of a run, which must end in time."""
        self.start(name, num_rounds=num_rounds)
        result = self.wait(RUN_S)
        assert result is not None, f"{name} has not ended after {RUN_S:.0f} s"
        return result

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                self._lines.put(json.loads(line))


def difference(hosting: Hosting, result: Result, reference: Result) -> str:
    """Return the first difference of two runs; "" if results and saved weights are equal."""
    found = first_difference(result["received"], reference["received"])
    if not found and weights(hosting, result) != weights(hosting, reference):
        return "the saved weights differ, and all that the client has received is equal"
    return found


def first_difference(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> str:
    """Return a sentence on the first call with another result; "" if all are equal."""
    for place, (one, other) in enumerate(zip(found, wanted, strict=False)):
        if one != other:
            return f"call {place} returned {one}, expected {other}"
    if len(found) != len(wanted):
        return f"the client received {len(found)} results, expected {len(wanted)}"
    return ""


def weights(hosting: Hosting, result: Result) -> bytes:
    """Return the bytes of the saved weights of a run."""
    return (hosting.saved(result["path"]) / "adapter_model.safetensors").read_bytes()


def _drain(process: subprocess.Popen[str], log: Path) -> None:
    assert process.stderr is not None
    with log.open("a", encoding="utf-8") as file:
        shutil.copyfileobj(process.stderr, file)
