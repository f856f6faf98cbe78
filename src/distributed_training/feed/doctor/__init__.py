"""Finds out whether a loader can reach a GPU side, how fast the way is, and what to do where it is not there."""
