"""Ways to bring batches from one process to another: plain sockets and our feed. `benchmarks/feed_peers` has more.

A file has `NEEDS` (the modules it imports) and `WAYS`: name -> `run(case, take)`. `run` starts a sender, calls
`take(inputs, targets)` with two torch tensors for every batch that arrived, until that returns False, and ends the
sender. Nothing but numpy and torch is imported before `run`: other libraries are measured where we are not installed.
"""
