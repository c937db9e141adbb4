"""One task per run: follow it, lead it, plan its batches, release finished steps."""
