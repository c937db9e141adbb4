"""API keys: their roles, their runs, and how requests are checked against them."""
