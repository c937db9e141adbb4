"""Commands that start services as processes: `up`, `demo`, `replay`."""
