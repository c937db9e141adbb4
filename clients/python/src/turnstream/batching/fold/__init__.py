"""The events of a run folded into groups that are ready, and the decisions on the others."""
