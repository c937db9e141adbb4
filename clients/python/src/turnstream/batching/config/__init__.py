"""The configuration of a run: its settings, and the rules that they have to keep."""

from turnstream.batching.config.batching_config import BatchingConfig
from turnstream.batching.config.group_filter import GroupFilter

__all__ = ["BatchingConfig", "GroupFilter"]
