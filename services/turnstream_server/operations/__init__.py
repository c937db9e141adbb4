"""The operation logs of hosted models in Redis, and all other state of the Tinker API."""
