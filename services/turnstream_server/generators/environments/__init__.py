"""Built-in environments: pure functions from tokens to tokens and a reward."""
