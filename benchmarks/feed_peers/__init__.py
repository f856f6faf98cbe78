"""Ways to bring batches from one process to another, each in a file of its own, for `benchmarks/feed.py`.

A file has `NEEDS` (the modules it imports) and `WAYS`: name -> `run(case, take)`. `run` starts a sender, calls
`take(inputs, targets)` with two torch tensors for every batch that arrived, until that returns False, and ends the
sender. Nothing of the file's library is imported before `run`.
"""
