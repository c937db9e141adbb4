"""One task that sends an outbox to the store, in the loop of its caller or of a thread."""
