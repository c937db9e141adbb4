"""The routes of the Tinker API, by group."""
