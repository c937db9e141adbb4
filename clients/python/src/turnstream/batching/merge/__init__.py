"""Turns that continue each other become rows, with their tokens and extra columns."""
