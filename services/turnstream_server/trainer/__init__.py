"""The torch worker: batches in, optimizer steps out, weights and checkpoints on disk."""
