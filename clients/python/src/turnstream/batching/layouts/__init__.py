"""Rows become padded, packed, jagged or supervised arrays, and model outputs become rows again."""
