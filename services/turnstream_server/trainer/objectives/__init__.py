"""The objective of the trainer: its settings, its loss and its statistics."""
