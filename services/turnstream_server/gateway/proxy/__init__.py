"""The capture proxy: the model calls of an agent, stored as turns of one trajectory."""
