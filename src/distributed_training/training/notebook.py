"""What a person sees in a notebook: one piece of HTML below the cell, which changes as the work goes on.

It needs nothing but IPython, which is what runs the cell, and stays in the notebook when that is saved.
"""

from __future__ import annotations

import sys
import time
from html import escape
from typing import Any

_REFRESH = 0.5
_FIGURES = "font-family:monospace;white-space:pre"


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook: Jupyter, Colab, VS Code. Not so in IPython on a terminal."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return getattr(shell, "kernel", None) is not None


class Area:
    """A piece of HTML below the cell that runs, which can be exchanged. For the main thread."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._next = 0.0

    @property
    def due(self) -> bool:
        """Whether the last change is long enough ago: each one is a message to the browser."""
        return time.monotonic() >= self._next

    def show(self, html: str) -> None:
        """Show this in place of what was there."""
        from IPython.display import HTML, display

        if self._handle is None:
            self._handle = display(HTML(html), display_id=True)
        else:
            self._handle.update(HTML(html))
            self._next = time.monotonic() + _REFRESH  # not before the first change, which shows that it has begun


def line(text: str) -> str:
    """A line of figures."""
    return f'<div style="{_FIGURES}">{escape(text)}</div>'


def bar(done: int, total: int | None, text: str) -> str:
    """A progress bar with text after it."""
    of = f' value="{done}" max="{total}"' if total else ""
    return f'<div><progress{of} style="width:16em"></progress> <span style="{_FIGURES}">{escape(text)}</span></div>'
