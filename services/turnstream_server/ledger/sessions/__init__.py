"""Trainer sessions, policy versions and observers."""
