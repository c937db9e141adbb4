"""A number-guessing game: find the secret with "higher" and "lower" answers.

Vocabulary (`GuessingGame.vocab_size` tokens)::

    0 PAD      never seen by the model
    1 START    the whole first prompt: a game begins
    2 HIGHER   the secret is higher than the guess
    3 LOWER    the secret is lower than the guess
    4 INVALID  the response was not one number
    4 + n      the number n, for n = 1 .. num_numbers

One turn of the model is one token. A game with secret 6 reads ``START 8 LOWER 4 HIGHER 6``: tokens
of the model are trained, tokens of the game are observed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from turnstream.errors import InvalidConfigError

PAD, START, HIGHER, LOWER, INVALID = range(5)
_NUMBERS = INVALID  # the token of the number n is _NUMBERS + n


class Episode(NamedTuple):
    """The whole state of a game between turns."""

    secret: int
    num_guesses: int = 0


class Answer(NamedTuple):
    """Answer of the game to a guess.

    Attributes:
        episode: state after the guess.
        observation_ids: int32, follow the response in the next prompt; empty when `is_done`.
        reward: 1.0 when the secret was found, else 0.0.
        is_done: whether the game has ended.
    """

    episode: Episode
    observation_ids: NDArray[np.int32]
    reward: float
    is_done: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GuessingGame:
    """Find a number from 1 to `num_numbers` in `max_guesses`; reward 1.0 if found, else 0.0."""

    num_numbers: int = 15
    max_guesses: int = 4

    def __post_init__(self) -> None:
        for name in ("num_numbers", "max_guesses"):
            if getattr(self, name) < 1:
                raise InvalidConfigError(name, f"{getattr(self, name)} is not at least 1")

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return _NUMBERS + self.num_numbers + 1

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest game."""
        return 2 * self.max_guesses

    @property
    def best_mean_reward(self) -> float:
        """The mean reward of the best policy: halving finds 2^k - 1 numbers in k guesses.

        >>> GuessingGame(num_numbers=15, max_guesses=4).best_mean_reward
        1.0
        >>> GuessingGame(num_numbers=10, max_guesses=2).best_mean_reward
        0.3
        """
        return min(1.0, (2**self.max_guesses - 1) / self.num_numbers)

    def reset(self, *, seed: int) -> tuple[Episode, NDArray[np.int32]]:
        """Return a new game and its first prompt; equal seeds have equal secrets, spread evenly."""
        secret = int(np.random.default_rng(seed).integers(1, self.num_numbers + 1))
        return Episode(secret), np.array([START], np.int32)

    def step(self, episode: Episode, response_ids: NDArray[np.int32]) -> Answer:
        """Return the answer to one response. Anything but exactly one number costs a guess."""
        guess = int(response_ids[0]) - _NUMBERS if len(response_ids) == 1 else 0
        now = episode._replace(num_guesses=episode.num_guesses + 1)
        is_found = guess == episode.secret
        if is_found or now.num_guesses >= self.max_guesses:
            return Answer(now, np.empty(0, np.int32), float(is_found), is_done=True)
        hint = HIGHER if episode.secret > guess else LOWER
        observation = INVALID if guess < 1 else hint
        return Answer(now, np.array([observation], np.int32), 0.0, is_done=False)
