"""`turnstream rollout`: a command as a generator, once for each sample of the tasks of a run."""
