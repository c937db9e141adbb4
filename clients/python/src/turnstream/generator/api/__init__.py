"""Publishers, and the writers of groups, trajectories and tasks."""
