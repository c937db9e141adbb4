"""Commands of the Python SDK to the store: each is checked before it is sent."""
