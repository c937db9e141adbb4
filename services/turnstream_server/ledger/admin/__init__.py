"""Operations on whole runs and on dead letters: delete, fork, list, discard."""
