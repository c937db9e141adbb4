"""The run that a publisher writes to: known by its name at first, by its id once it was found."""

from __future__ import annotations

from typing import Any

from redis.exceptions import ResponseError

from turnstream.errors import TurnstreamError
from turnstream.store.client.keys import incarnation_key
from turnstream.store.client.replies import Refusal, error_text, parse_refusal, translate
from turnstream.store.client.run_ids import is_id, no_such_run, parse_incarnation


class TargetRun:
    """One run, for the whole life of a publisher: a later run of the name never takes its place.

    Attributes:
        run: its id; its name until it is found.
        pointer: the key that says which run has the name now; "" once the run is found.
    """

    def __init__(self, run: str) -> None:
        self.run = run
        self.pointer = "" if is_id(run) else incarnation_key(run)

    @property
    def is_found(self) -> bool:
        """Whether the id is known."""
        return not self.pointer

    def found(self, run: str) -> None:
        """Keep to this run from now on. Only the first call has an effect."""
        if not self.is_found:
            self.run, self.pointer = run, ""

    def answered(self, answer: Any) -> TurnstreamError | None:
        """Keep to the run that the pointer leads to; return the error where it was not read."""
        if isinstance(answer, ResponseError):
            return translate(answer)
        self.found(parse_incarnation(self.run, answer))
        return None

    def refusal(self, answer: ResponseError) -> Refusal:
        """Return why a call was refused; if the run is not in the store, the message names it."""
        refused = parse_refusal(error_text(answer))
        if refused.code != "NORUN":
            return refused
        return refused._replace(message=str(no_such_run(self.run)))
