"""The gRPC service: requests, answers, health, and the runs of this replica."""
