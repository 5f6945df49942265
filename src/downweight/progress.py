"""Progress of long loops: a bar with rate and remaining time, and nothing at all where nobody watches.

`track` goes around the iterable of a loop; `reporting` around the whole of a public call says who watches:

| `progress` | on a terminal | elsewhere (log file, pipe, notebook) |
| --- | --- | --- |
| None | a bar | nothing |
| True | a bar | a plain line every ten seconds, and one at the end |
| False | nothing | nothing |

"Terminal" is that of stderr; stdout is never written to. A loop that is over within half a second shows nothing.
"""

import contextlib
import sys
import time
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")

_BAR_EVERY = 0.1  # seconds between two drawings of a bar
_LINE_EVERY = 10.0  # seconds between two plain lines
_PATIENCE = 0.5  # seconds of silence before a loop is worth showing

_choice: ContextVar[bool | None] = ContextVar("downweight_progress", default=None)


@contextlib.contextmanager
def reporting(progress: bool | None) -> Iterator[None]:
    """Decide for every `track` inside whether it shows: as in the table above.

    Nested, False holds whoever said it, and None keeps what was said outside: a caller who asked for silence gets it
    whatever the functions it calls were told.
    """
    outer = _choice.get()
    token = _choice.set(False if False in (outer, progress) else outer or progress)
    try:
        yield
    finally:
        _choice.reset(token)


def track(iterable: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    """`iterable`, its progress shown under the name `what` while it is looped over.

    `total` is its length where `len` does not know; without either the bar has no remaining time. Off, this is the
    iterable's own iterator; on, one look at the clock an item. A loop left early closes its bar.
    """
    choice = _choice.get()
    on_terminal = sys.stderr is not None and sys.stderr.isatty()
    if choice is False or (choice is None and not on_terminal):
        return iter(iterable)
    if total is None and hasattr(iterable, "__len__"):
        total = len(iterable)  # pyright: ignore[reportArgumentType]  # asked for just above
    return _tracked(iterable, _Loop(what, total), _terminal if on_terminal else _Lines())


@dataclass(eq=False)
class _Loop:
    what: str
    total: int | None
    done: int = 0
    started: float = field(default_factory=time.monotonic)
    drawing: Any = None  # what the display keeps for this loop

    def pace(self) -> str:
        """Rate and remaining time in words."""
        if self.done == 0:
            return "the first is under way"
        elapsed = max(time.monotonic() - self.started, 1e-9)
        rate = self.done / elapsed
        words = f"{rate:,.0f}/s" if rate >= 10 else f"{rate:.2g}/s"
        if self.total is None:
            return words
        return f"{words}, {_clock((self.total - self.done) / rate)} left"

    def count(self) -> str:
        return f"{self.done:,}" if self.total is None else f"{self.done:,}/{self.total:,}"


def _tracked(iterable: Iterable[T], loop: _Loop, display: "_Terminal | _Lines") -> Iterator[T]:
    due = loop.started + _PATIENCE
    try:
        for item in iterable:
            now = time.monotonic()
            if now >= due:
                display.draw(loop)
                due = now + display.every
            yield item
            loop.done += 1
    finally:
        display.close(loop)


class _Terminal:
    """All bars of this process, innermost lowest, drawn by rich. No thread: a bar moves when its loop does."""

    every = _BAR_EVERY

    def __init__(self):
        self.bars: Any = None
        self.open = 0

    def draw(self, loop: _Loop) -> None:
        if self.bars is None:
            self.bars = _bars()
            self.bars.start()
        if loop.drawing is None:
            loop.drawing = self.bars.add_task(loop.what, total=loop.total, pace="", count="")
            self.open += 1
        self.bars.update(loop.drawing, completed=loop.done, pace=loop.pace(), count=loop.count())
        self.bars.refresh()

    def close(self, loop: _Loop) -> None:
        if loop.drawing is None:
            return
        self.bars.remove_task(loop.drawing)
        self.open -= 1
        if self.open == 0:
            self.bars.stop()
            self.bars = None


def _bars() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        TextColumn("{task.fields[count]}"),
        TextColumn("{task.fields[pace]}", style="dim"),
        console=Console(stderr=True),
        auto_refresh=False,
        transient=True,
        redirect_stdout=False,  # what the user prints stays on stdout
    )


class _Lines:
    """Plain lines, for a log."""

    every = _LINE_EVERY

    def draw(self, loop: _Loop) -> None:
        loop.drawing = True
        print(f"{loop.what}: {loop.count()}, {loop.pace()}", file=sys.stderr, flush=True)

    def close(self, loop: _Loop) -> None:
        if loop.drawing:
            seconds = time.monotonic() - loop.started
            print(f"{loop.what}: {loop.count()} in {_clock(seconds)}", file=sys.stderr, flush=True)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"


_terminal = _Terminal()
