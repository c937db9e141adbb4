"""Answers about a run: its ledger, histories, bytes, health, and reasons for waiting."""
