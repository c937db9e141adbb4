"""The calls of generators that use the SDK over HTTP."""
