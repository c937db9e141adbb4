"""Requests of generators and SDKs, also the largest ones."""
