"""What became of a run: its history as series, as plots, and as one HTML page."""

from distributed_training.bench.history import History, Series, load_history
from distributed_training.bench.report import write_report

__all__ = ["History", "Series", "load_history", "write_report"]
