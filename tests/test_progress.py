"""Progress is seen where somebody watches, and costs and writes nothing elsewhere."""

import io
import os
import pty
import subprocess
import sys
import time

import pytest

from downweight import progress
from downweight.progress import reporting, track


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def watch(monkeypatch):
    """Called in the test (between fixtures and test pytest puts its own stderr back): a terminal behind stderr."""

    def start() -> Terminal:
        screen = Terminal()
        monkeypatch.setattr(sys, "stderr", screen)
        return screen

    return start


@pytest.fixture
def impatient(monkeypatch):
    """No half second of silence first."""
    monkeypatch.setattr(progress, "_PATIENCE", 0.0)


def test_without_a_terminal_nothing_is_written(impatient, capsys):
    assert list(track(range(3), "rows")) == [0, 1, 2]
    with reporting(None):
        assert list(track(range(3), "rows")) == [0, 1, 2]
    assert capsys.readouterr() == ("", "")


def test_on_a_terminal_a_bar_is_drawn_and_taken_away(watch, impatient):
    terminal = watch()
    with reporting(None):
        for _ in track([1, 2, 3], "solving"):
            pass
    text = terminal.getvalue()
    assert "solving" in text
    assert "/3" in text
    assert progress._terminal.bars is None


def test_false_is_silent_on_a_terminal(watch, impatient):
    terminal = watch()
    with reporting(False):
        list(track(range(3), "rows"))
    assert terminal.getvalue() == ""


def test_true_writes_plain_lines_into_a_log(impatient, capsys):
    with reporting(True):
        list(track(range(2_500), "rows"))
    written = capsys.readouterr()
    assert written.out == ""
    first, last = written.err.splitlines()
    assert first.startswith("rows: 0/2,500")
    assert last == "rows: 2,500/2,500 in 0:00:00"


def test_silence_asked_for_outside_holds_inside(impatient, capsys):
    with reporting(False), reporting(True):
        list(track(range(3), "rows"))
    with reporting(True), reporting(False):
        list(track(range(3), "rows"))
    assert capsys.readouterr().err == ""
    with reporting(True), reporting(None):
        list(track(range(3), "rows"))
    assert capsys.readouterr().err != ""


def test_a_short_loop_shows_nothing(watch):
    terminal = watch()
    list(track(range(3), "rows"))
    assert terminal.getvalue() == ""


def test_nested_loops_share_one_display(watch, impatient):
    watch()
    shown = []
    for _ in track(range(2), "outer"):
        for _ in track((i for i in range(2)), "inner"):  # no length
            shown.append([task.description for task in progress._terminal.bars.tasks])
    assert shown[0] == ["outer", "inner"]
    assert progress._terminal.bars is None


def test_a_loop_that_fails_or_is_left_takes_its_bar_away(watch, impatient):
    watch()

    def fails():
        for _ in track(range(3), "rows"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fails()
    assert progress._terminal.bars is None
    for _ in track(range(3), "rows"):
        break
    assert progress._terminal.bars is None


def test_rate_and_remaining_time_are_shown(monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    loop = progress._Loop("rows", total=400, started=now)
    assert loop.pace() == "the first is under way"
    now, loop.done = 110.0, 100
    assert loop.pace() == "10/s, 0:00:30 left"
    loop.done = 2
    assert loop.pace() == "0.2/s, 0:33:10 left"
    loop.total = None
    assert loop.pace() == "0.2/s"


def test_off_is_the_iterable_itself():
    """Not even a generator stands between: a million items cost what they cost."""
    rows = iter(range(3))
    assert track(rows, "rows") is rows


def test_a_real_terminal_sees_a_bar_on_stderr_and_nothing_on_stdout():
    """Through a pseudo-terminal, in a process of its own; rich is imported only once a bar is drawn."""
    code = (
        "import sys, time\n"
        "from downweight.progress import track\n"
        "assert 'rich' not in sys.modules\n"
        "for i in track(range(12), 'waiting'): time.sleep(0.08)\n"
        "assert 'rich' in sys.modules\n"
    )
    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        stderr=theirs,
        stdout=subprocess.PIPE,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "100"},
    )
    os.close(theirs)
    seen = b""
    with os.fdopen(ours, "rb", buffering=0) as screen:
        while True:
            try:
                part = screen.read(4096)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            seen += part
    out, _ = child.communicate()
    assert child.returncode == 0, seen.decode()
    assert out == b""
    assert b"waiting" in seen
    assert b"left" in seen
