"""The root of all errors of this package, and the one that settings raise.

They live here because `config` imports nothing else of ours; `runtime.errors` holds the rest of the hierarchy.
"""

from __future__ import annotations


class DistributedTrainingError(Exception):
    """Base of every error this package raises on purpose: what happened, where, and what to do next."""

    exit_code = 1


class ConfigError(DistributedTrainingError):
    """A setting is unknown, of the wrong type, impossible, or its file is missing."""

    exit_code = 2
