"""Samplers: processes that sample for the sampling sessions of the Tinker API."""
