"""Payload and plan become the rows of every rank."""
