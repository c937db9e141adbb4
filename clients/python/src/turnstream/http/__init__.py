"""The SDK over HTTP: the client of a gateway, and the calls of a service and its runs."""
