"""Parallelism applied to a chain from outside: plans of tensor shards, pipeline stages, and the view of shards."""
