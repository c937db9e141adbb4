"""The batcher: plans batches, assembles them from stored turns and serves them over gRPC.

Any replica assembles and serves any batch; for each run one of them, by lease, plans.
"""
