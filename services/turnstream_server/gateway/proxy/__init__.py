"""The capture proxy: model calls of agents, passed on to inference servers and stored as turns."""
