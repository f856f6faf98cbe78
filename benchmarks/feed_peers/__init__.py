"""Other libraries' ways to bring batches from one process to another, a file for each, for `benchmarks/feed.py`.

A file is as those of `distributed_training.bench.transport`, which holds plain sockets and our own feed.
"""
