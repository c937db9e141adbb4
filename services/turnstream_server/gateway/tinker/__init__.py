"""The protocol of the tinker SDK, releases 0.16 to 0.38."""
