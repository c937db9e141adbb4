"""Turnstream: the data service between LLM rollouts and training.

Generators use `turnstream.generator`, training loops use `turnstream.worker`; both speak in the
values of `turnstream.types` and raise the errors of `turnstream.errors`.
"""

__version__ = "0.1.0"
