"""Waits on a run: the facts they depend on, the reasons, the warnings, and bounded calls."""
