"""Stores, gateways, batchers and other processes of the tests."""
