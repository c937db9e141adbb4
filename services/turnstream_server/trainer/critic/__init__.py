"""The critic of the trainer: its settings, its training, and the advantages of a step."""
