"""Metrics, health and traces of a service process."""
