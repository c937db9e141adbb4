"""Turnstream's services: batcher, trainer, generators, and the jobs that start them together."""
