"""Proof that it is the same training: one strategy beside another, and a run beside its plan."""
