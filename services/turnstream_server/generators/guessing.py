"""A number-guessing game: find the secret with "higher" and "lower" answers.

Vocabulary (`VOCAB_SIZE` tokens)::

    0 PAD      never seen by the model
    1 START    the whole first prompt: a game begins
    2 HIGHER   the secret is higher than the guess
    3 LOWER    the secret is lower than the guess
    4 INVALID  the response was not one number
    4 + n      the number n, for n = 1 .. NUM_NUMBERS

One turn of the model is one token. A game with secret 6 reads ``START 8 LOWER 4 HIGHER 6``: tokens
of the model are trained, tokens of the game are observed.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

PAD, START, HIGHER, LOWER, INVALID = range(5)
_NUMBERS = INVALID  # the token of the number n is _NUMBERS + n


class Episode(NamedTuple):
    """The whole state of a game between turns."""

    secret: int
    num_guesses: int = 0


class Answer(NamedTuple):
    """The state after a guess; the reward is 1.0 when the secret was found, else 0.0.

    `observation_ids` follow the response in the next prompt; they are empty when `is_done`.
    """

    episode: Episode
    observation_ids: NDArray[np.int32]
    reward: float
    is_done: bool


NUM_NUMBERS: Final = 15
MAX_GUESSES: Final = 4
"""The best policy halves the rest: it always finds one of 2^4 - 1 numbers in 4 guesses."""

VOCAB_SIZE: Final = _NUMBERS + NUM_NUMBERS + 1
MAX_TOKENS: Final = 2 * MAX_GUESSES
"""Tokens of the longest game."""


def reset(*, seed: int) -> tuple[Episode, NDArray[np.int32]]:
    """Return a new game and its first prompt; equal seeds have equal secrets, spread evenly."""
    secret = int(np.random.default_rng(seed).integers(1, NUM_NUMBERS + 1))
    return Episode(secret), np.array([START], np.int32)


def step(episode: Episode, response_ids: NDArray[np.int32]) -> Answer:
    """Return the answer to one response. Anything but exactly one number costs a guess."""
    guess = int(response_ids[0]) - _NUMBERS if len(response_ids) == 1 else 0
    now = episode._replace(num_guesses=episode.num_guesses + 1)
    is_found = guess == episode.secret
    if is_found or now.num_guesses >= MAX_GUESSES:
        return Answer(now, np.empty(0, np.int32), float(is_found), is_done=True)
    hint = HIGHER if episode.secret > guess else LOWER
    observation = INVALID if guess < 1 else hint
    return Answer(now, np.array([observation], np.int32), 0.0, is_done=False)
