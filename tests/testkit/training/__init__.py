"""Trainers, hosted models and slow references of what they compute."""
