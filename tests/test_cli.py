"""The command line, as a user meets it: what it prints, what it writes and how it says no."""

import os
import re
import signal
import subprocess
import sys
import time

import pandas
import pytest
import torch
from typer.testing import CliRunner

import downweight as dw
from downweight import cli, doctor
from downweight.version import __version__

MODULE = """
import torch
import downweight as dw
from torch import nn

X = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(8, 3) ** 2
T = torch.tensor([0, 1, 0, 1, 1, 0, 1, 0])

def task():
    torch.manual_seed(0)
    return dw.Task(nn.Linear(3, 2).double(), loss="cross_entropy", train=(X, T), l2=0.01)

def queries():
    return X[:3] + 0.1, T[:3]

def hard_queries():
    return X[:3], torch.tensor([0, 1, 7])

def as_list():
    return list(queries())

def as_dataset():
    return torch.utils.data.TensorDataset(*queries())

def no_targets():
    return X, None

def marked():
    made = task()
    ids = ["img[a]0", "x[/tmp/1]", "[bold]2", 3, ("four", 4), 5, 6, 7]
    return dw.Task(made.model, loss="cross_entropy", train=(X, T), l2=0.01, row_ids=ids)

def number():
    return 7

def needs(argument):
    return argument

constant = 7
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The user's folder, with `study.py` in it, as current directory."""
    (tmp_path / "study.py").write_text(MODULE)
    (tmp_path / "broken.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in ("study", "broken"):
        sys.modules.pop(name, None)


def run(*arguments: str, code: int = 0):
    result = CliRunner(env={"COLUMNS": "120"}).invoke(cli.app, list(arguments))
    assert result.exit_code == code, result.output
    return result


def influence(*arguments: str, code: int = 0, task: str = "study:task", queries: str = "study:queries"):
    return run("influence", task, "--queries", queries, "--no-progress", *arguments, code=code)


def expected() -> torch.Tensor:
    import study  # pyright: ignore[reportMissingImports]  # written by the fixture

    return dw.influence(study.task(), queries=study.queries()).values


@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_scores_are_written_as_a_table(folder, suffix):
    result = influence("--out", f"scores.{suffix}")
    assert f"Written to scores.{suffix}" in result.stdout
    frame = getattr(pandas, f"read_{suffix}")(folder / f"scores.{suffix}")
    scores = dw.influence(*_study())
    ours = scores.to_pandas()
    assert list(frame.columns) == list(ours.columns)
    # csv keeps 17 digits, which is every bit
    pandas.testing.assert_frame_equal(frame, ours, check_dtype=False, check_exact=True)
    assert [path.name for path in folder.iterdir() if "partial" in path.name] == []


def _study():
    import study  # pyright: ignore[reportMissingImports]  # written by the fixture

    return study.task(), study.queries()


def test_scores_are_written_as_a_folder(folder):
    influence("--out", "scores")
    assert torch.equal(dw.Scores.load(folder / "scores").values, expected())


def test_settings_reach_the_library(folder, monkeypatch):
    seen = {}
    original = dw.influence

    def stand_in(task, **settings):
        seen.update(settings)
        return original(task, **settings)

    monkeypatch.setattr(dw, "influence", stand_in)
    influence(
        *("--damping", "0.5", "--curvature", "hessian", "--solver", "minres", "--measurement", "margin"),
        *("--indefinite", "allow", "--memory-limit", "1GiB"),
    )
    queries = seen.pop("queries")
    assert torch.equal(queries[0], _study()[1][0])
    assert seen == {
        "damping": 0.5,
        "curvature": "hessian",
        "solver": "minres",
        "measurement": "margin",
        "indefinite": "allow",
        "memory_limit": "1GiB",
        "progress": False,
    }


def test_the_strongest_rows_are_printed(folder):
    result = influence("--query", "1", "--top", "2")
    scores = dw.influence(*_study())
    assert "Query 1" in result.stdout
    for sign in ("helpful", "harmful"):
        for row, score in scores.top(query=1, k=2, sign=sign):
            assert re.search(rf"\b{row}\b.*{re.escape(f'{score:+.4g}')}", result.stdout)
    # the meaning is printed whole, wrapped to the terminal
    assert " ".join(scores.meaning().split()) in " ".join(result.stdout.split())


@pytest.mark.parametrize("queries", ["study:as_list", "study:as_dataset"])
def test_queries_are_what_the_library_takes(folder, queries):
    influence("--out", "scores", queries=queries)
    assert torch.equal(dw.Scores.load(folder / "scores").values, expected())


def test_names_of_rows_are_not_read_as_markup(folder):
    """Brackets in a name are part of it, as in a path; and a name of another kind is no reason to fail at the end."""
    result = influence("--top", "8", "--out", "scores.parquet", task="study:marked")
    for name in ("img[a]0", "x[/tmp/1]", "[bold]2", "('four', 4)"):
        assert name in result.stdout
    frame = pandas.read_parquet(folder / "scores.parquet")
    assert frame["row"][:5].tolist() == ["img[a]0", "x[/tmp/1]", "[bold]2", "3", "('four', 4)"]


def test_every_note_is_printed_once(folder):
    result = influence()
    said = " ".join(result.stdout.split())
    for note in dw.influence(*_study()).notes:
        if not note.startswith("The peak"):
            assert said.count(" ".join(note.split())) == 1


def test_nothing_is_written_without_out(folder):
    before = sorted(folder.iterdir())
    influence()
    assert [path for path in sorted(folder.iterdir()) if path.name != "__pycache__"] == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"task": "study"}, "names no function; expected package.module:function"),
        ({"task": "nowhere:task"}, "There is no module 'nowhere'"),
        ({"task": "study.deeper:task"}, "There is no module 'study.deeper'"),
        ({"task": "study:missing"}, "has no 'missing'"),
        ({"task": "study:constant"}, "of type int; expected a function"),
        ({"task": "study:needs"}, "must be callable without arguments"),
        ({"task": "study:number"}, "study:number returned int; expected a downweight.Task"),
        (
            {"queries": "study:number"},
            "study:number is a int; expected a pair (inputs, targets) or a map-style dataset",
        ),
        ({"queries": "study:no_targets"}, "expected tensors, got a NoneType"),
        ({"queries": "study:hard_queries"}, "class 7"),
        ({"out": "scores.xlsx"}, "expected .parquet, .csv, or a folder"),
        ({"out": "taken"}, "exists; it is left alone"),
        ({"out": "taken.csv"}, "exists; it is left alone"),
        ({"out": "no/such/scores.csv"}, "there is no folder"),
        ({"query": "3"}, "there are 3 queries, counted from 0"),
        ({"damping": "-1"}, "damping"),
        ({"memory-limit": "plenty"}, "memory_limit"),
        ({"memory-limit": "1.2.3"}, "memory_limit"),
    ],
)
def test_each_mistake_is_one_line_and_code_2(folder, arguments, words):
    (folder / "taken").mkdir()
    (folder / "taken.csv").write_text("mine")
    options = [text for name, value in arguments.items() if name in OPTIONS for text in (f"--{name}", value)]
    functions = {name: value for name, value in arguments.items() if name not in OPTIONS}
    result = influence(*options, code=2, **functions)
    assert result.stdout == ""
    assert result.stderr.startswith("downweight: ")
    assert result.stderr.count("\n") == 1
    assert words in result.stderr
    assert (folder / "taken.csv").read_text() == "mine"


OPTIONS = ("out", "query", "damping", "memory-limit")


def test_a_mistake_inside_the_users_module_keeps_its_traceback(folder):
    result = CliRunner().invoke(cli.app, ["influence", "broken:task", "--queries", "study:queries"])
    assert isinstance(result.exception, ModuleNotFoundError)
    assert result.exception.name == "a_package_that_is_not_there"


def test_a_warning_of_the_library_is_one_line(folder, monkeypatch):
    import warnings

    original = dw.influence

    def stand_in(task, **settings):
        warnings.warn("2 of 3 did not converge.", dw.DownweightWarning, stacklevel=2)
        return original(task, **settings)

    monkeypatch.setattr(dw, "influence", stand_in)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        result = influence()
    assert result.stderr == "downweight: note: 2 of 3 did not converge.\n"


def test_ctrl_c_stops_with_130_and_leaves_no_file(folder, monkeypatch):
    def stand_in(task, **settings):
        raise KeyboardInterrupt

    monkeypatch.setattr(dw, "influence", stand_in)
    result = influence("--out", "scores.csv", code=130)
    assert result.stderr == "downweight: stopped\n"
    assert not (folder / "scores.csv").exists()


@pytest.mark.slow
def test_a_real_ctrl_c(folder):
    """The installed command, interrupted while the user's function is still working."""
    (folder / "slow_study.py").write_text(
        MODULE + "\nimport pathlib, time\ndef slow():\n    pathlib.Path('started').touch()\n    time.sleep(60)\n"
    )
    # A shell that runs these tests in the background ignores Ctrl-C for all its children.
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    command = [sys.executable, "-c", f"{heard}; from downweight.cli import app; app()"]
    arguments = ["influence", "slow_study:slow", "--queries", "slow_study:queries", "--out", "scores.csv"]
    child = subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (folder / "started").exists():
        assert child.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=30)
    assert (child.returncode, out, err) == (130, "", "downweight: stopped\n")


@pytest.mark.slow
def test_the_installed_command_runs(folder):
    """In a process of its own, from the user's folder: the console script, the module search and the exit code."""
    script = os.path.join(os.path.dirname(sys.executable), "downweight")
    arguments = ["influence", "study:task", "--queries", "study:queries", "--out", "scores.parquet"]
    done = subprocess.run([script, *arguments], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")  # stderr is no terminal: no bar
    assert (folder / "scores.parquet").exists()
    done = subprocess.run([script, *arguments], capture_output=True, text=True)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_version():
    assert run("--version").stdout == f"downweight {__version__}\n"


def test_help_names_every_command():
    text = run("--help").stdout
    for command in cli.app.registered_commands:
        assert command.callback is not None
        assert command.callback.__name__ in text


def test_demo_prints_where_its_page_is(tmp_path, monkeypatch):
    import downweight.demo

    monkeypatch.setattr(downweight.demo, "run", lambda out: out / "page.html")
    assert run("demo", "--out", str(tmp_path)).stdout.strip() == f"Open {tmp_path / 'page.html'}"


# doctor


def test_doctor_names_versions_devices_and_data(tmp_path, monkeypatch):
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "train").write_bytes(bytes(2048))
    monkeypatch.setenv("DOWNWEIGHT_DATA", str(tmp_path))
    text = run("doctor").stdout
    for word in (__version__, torch.__version__.split("+")[0], "cpu", "free", "float64", "threads", "1 file, 2 KiB"):
        assert word.lower() in text.lower()


def test_doctor_says_when_there_is_no_data(tmp_path, monkeypatch):
    monkeypatch.delenv("DOWNWEIGHT_DATA", raising=False)
    assert "not set" in dict(doctor.examine().facts["Data"])["DOWNWEIGHT_DATA"]
    monkeypatch.setenv("DOWNWEIGHT_DATA", str(tmp_path / "gone"))
    assert "is not a folder" in dict(doctor.examine().facts["Data"])["DOWNWEIGHT_DATA"]


CPU = doctor.Device(torch.device("cpu"), "a processor", 20 * 2**30, single=200, double=100)
GAMING = doctor.Device(torch.device("cuda", 0), "a card for games", 6 * 2**30, single=40_000, double=700)
CENTRE = doctor.Device(torch.device("cuda", 0), "a card for work", 130 * 2**30, single=50_000, double=50_000)


@pytest.mark.parametrize(
    ("devices", "threads", "cores", "words", "absent"),
    [
        ([CPU], 8, 8, ["No GPU", "N·C = 42,000"], ["of 8 cores", "Only"]),
        ([CPU], 1, 8, ["1 of 8 cores"], []),
        ([CPU], 2, 2, ["only 2 cores"], []),
        ([CPU, GAMING], 8, 8, ["57 times slower in float64", "Only 6 GiB"], ["No GPU"]),
        ([CPU, CENTRE], 8, 8, ["on cuda:0"], ["No GPU", "slower in float64", "Only"]),
    ],
)
def test_doctor_says_what_would_be_slow_and_why(devices, threads, cores, words, absent):
    text = "\n".join(doctor.slow_here(devices, threads, cores))
    for word in words:
        assert word in text
    for word in absent:
        assert word not in text
