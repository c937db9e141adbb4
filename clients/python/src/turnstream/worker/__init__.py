"""Pull mini-batches into a training loop, and the losses to train with.

Importing this package needs grpcio and pyarrow. Torch is loaded by `to_torch()`, and by importing
`turnstream.worker.tensors`, `.losses` or `.corrections`.
"""

from turnstream.optional import from_extra

with from_extra("worker", needed_by="turnstream.worker"):
    from turnstream.worker._prefetch import StreamStatistics
    from turnstream.worker.observer import ObserverStream
    from turnstream.worker.steps import PulledMiniBatch
    from turnstream.worker.stream import BatchStream

__all__ = ["BatchStream", "ObserverStream", "PulledMiniBatch", "StreamStatistics"]
