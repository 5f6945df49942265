"""The command line: parse, call one function of the library, print, set the exit code.

Exit codes: 0 done, 2 something asked for is not to be had (one line on stderr says what), 130 stopped by Ctrl-C.
"""

import contextlib
import importlib
import inspect
import os
import secrets
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

import downweight as dw
from downweight.errors import DownweightError, DownweightWarning
from downweight.version import __version__

if TYPE_CHECKING:
    import pandas

app = typer.Typer(
    name="downweight",
    help="Which training rows made a PyTorch model do this, and how far the answer can be believed.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"max_content_width": 110},
)


def _show_version(asked: bool) -> bool:
    if asked:
        typer.echo(f"downweight {__version__}")
        raise typer.Exit
    return asked


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and stop.")
    ] = False,
) -> None:
    pass


@app.command()
def influence(
    task: Annotated[str, typer.Argument(metavar="MODULE:FUNCTION", help="The function that returns the Task.")],
    queries: Annotated[
        str,
        typer.Option(
            metavar="MODULE:FUNCTION", help="The function that returns the queries, (inputs, targets) or a dataset."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Where the scores go: NAME.parquet, NAME.csv, or a folder that Scores.load reads."),
    ] = None,
    damping: Annotated[float, typer.Option(help="λ in A = C + λI; absolute.")] = 1e-3,
    curvature: Annotated[Literal["gauss_newton", "hessian"], typer.Option(help="C.")] = "gauss_newton",
    solver: Annotated[
        Literal["auto", "cholesky", "dual", "cg", "minres", "lissa"], typer.Option(help="How A x = v is solved.")
    ] = "auto",
    measurement: Annotated[
        Literal["loss", "margin"], typer.Option(help="What of a query is predicted to change.")
    ] = "loss",
    indefinite: Annotated[
        Literal["raise", "allow"], typer.Option(help="Whether an indefinite Hessian is an error.")
    ] = "raise",
    query: Annotated[int, typer.Option(min=0, help="The query whose strongest rows are printed.")] = 0,
    top: Annotated[int, typer.Option(min=0, help="How many rows are printed on each side.")] = 10,
    memory_limit: Annotated[str | None, typer.Option(help="The most memory to use, such as 8GiB.")] = None,
    progress: Annotated[bool, typer.Option("--progress/--no-progress", help="Bars on a terminal.")] = True,
) -> None:
    """Predict how removing each training row changes each query.

    Both functions are named as package.module:function; the current directory is searched first.
    """
    with _told_plainly():
        write = None if out is None else _writer(out)
        problem = _call(task)
        if not isinstance(problem, dw.Task):
            _fail(f"{task} returned {type(problem).__name__}; expected a downweight.Task.")
        asked = _call(queries)
        count = len(problem.read_rows(asked, queries))
        if query >= count:
            _fail(f"--query {query}: there are {count} queries, counted from 0.")
        scores = dw.influence(
            problem,
            queries=asked,
            damping=damping,
            curvature=curvature,
            solver=solver,
            measurement=measurement,
            indefinite=indefinite,
            memory_limit=memory_limit,
            progress=None if progress else False,
        )
        if write is not None:
            write(scores)
        _print_scores(scores, query, top)
        if out is not None:
            typer.echo(f"Written to {out}")


@app.command()
def decompose(
    task: Annotated[str, typer.Argument(metavar="MODULE:FUNCTION", help="The function that returns the Task.")],
    queries: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FUNCTION", help="The function that returns the queries, (inputs, targets)."),
    ] = None,
    remove: Annotated[int, typer.Option(min=1, help="How many removals to draw.")] = 20,
    size: Annotated[float, typer.Option(help="Rows in each removal; below 1 a part of the training rows.")] = 1.0,
    choose: Annotated[
        Literal["random", "stratified"], typer.Option(help="How rows are drawn: evenly, or by rank of self-influence.")
    ] = "random",
    damping: Annotated[float, typer.Option(help="λ in A = C + λI, and of the proximity; absolute.")] = 1e-3,
    batch_order: Annotated[
        Literal["independent", "shared"], typer.Option(help="Whether each removal retrains in an order of its own.")
    ] = "independent",
    seed: Annotated[int, typer.Option(help="Draws the removals.")] = 0,
    report: Annotated[Path | None, typer.Option(help="The page to write, such as page.html.")] = None,
    out: Annotated[Path | None, typer.Option(help="The folder for the result, which Decomposition.load reads.")] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="A folder that a stopped run goes on from, with the same result.")
    ] = None,
    progress: Annotated[bool, typer.Option("--progress/--no-progress", help="Bars on a terminal.")] = True,
) -> None:
    """Split the way from retraining to influence into its five gaps, and say which question influence answers.

    Retraining needs a task that knows its recipe: one that dw.train returned, or task.with_recipe.
    """
    with _told_plainly():
        if out is not None and out.exists():
            _fail(f"--out {out} exists; it is left alone. Choose another name, or delete it first.")
        problem = _call(task)
        if not isinstance(problem, dw.Task):
            _fail(f"{task} returned {type(problem).__name__}; expected a downweight.Task.")
        result = dw.decompose(
            problem,
            remove,
            queries=None if queries is None else _call(queries),
            size=size if size < 1 else int(size),
            choose=choose,
            damping=damping,
            batch_order=batch_order,
            seed=seed,
            checkpoint=checkpoint,
            progress=None if progress else False,
        )
        if out is not None:
            result.save(out)
        from downweight.decompose import as_text  # here, because a page is made again where torch is not installed

        typer.echo(as_text(result))
        if report is not None:
            typer.echo(f"Open {result.report(report)}")
        if out is not None:
            typer.echo(f"Written to {out}")


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="The folder of a decomposition: what --out or save wrote.")],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("page.html"),
) -> None:
    """Write the page of a saved decomposition again, with nothing computed anew; it needs no PyTorch."""
    with _told_plainly():
        from downweight.report import page

        typer.echo(f"Open {page.of_saved(folder, out)}")


@app.command()
def doctor() -> None:
    """Show what this machine has, and what would be slow and why."""
    from rich.console import Console
    from rich.table import Table

    from downweight.doctor import examine

    with _told_plainly():
        found = examine()
    console = Console()
    for section, facts in found.facts.items():
        table = Table.grid(padding=(0, 2))
        for name, value in facts:
            table.add_row(f"  {name}", value)
        console.print(section, style="bold")
        console.print(table, markup=False)
    console.print("What would be slow here, and why", style="bold")
    for sentence in found.slow:
        console.print(f"  - {sentence}", markup=False, highlight=False)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="The folder that the page is written to.")] = Path("downweight-demo"),
) -> None:
    """Take the paper's network on an embedded table apart, from retraining to influence, as a page with pictures."""
    with _told_plainly():
        from downweight.demo import run

        typer.echo(f"Open {run(out)}")


@contextlib.contextmanager
def _told_plainly() -> Iterator[None]:
    """Errors and warnings of the library as one line on stderr, with the exit codes of this module's first line."""
    show = warnings.showwarning

    def plain(message: Any, category: type[Warning], *place: Any, **more: Any) -> None:
        if issubclass(category, DownweightWarning):
            typer.echo(f"downweight: note: {message}", err=True)
        else:
            show(message, category, *place, **more)

    warnings.showwarning = plain
    try:
        yield
    except DownweightError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        typer.echo("downweight: stopped", err=True)
        raise typer.Exit(130) from None
    finally:
        warnings.showwarning = show


def _fail(message: str) -> NoReturn:
    typer.echo(f"downweight: {' '.join(message.split())}", err=True)
    raise typer.Exit(2)


def _call(name: str) -> Any:
    """What the function called `name`, as package.module:function, returns."""
    module_name, colon, attribute = name.partition(":")
    if not (colon and module_name and attribute):
        _fail(f"{name!r} names no function; expected package.module:function.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, and one that it imports is missing: its own traceback says where
        _fail(f"There is no module {error.name!r} in {os.getcwd()} or among the installed packages.")
    function = getattr(module, attribute, None)
    if function is None:
        _fail(f"Module {module_name!r} ({module.__file__}) has no {attribute!r}.")
    if not callable(function):
        _fail(f"{name} is of type {type(function).__name__}; expected a function.")
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        _fail(f"{name} must be callable without arguments: {error}.")
    return function()


def _writer(out: Path) -> "Callable[[dw.Scores], None]":
    """The function that writes scores to `out`, chosen and checked before anything is computed."""
    if out.suffix not in ("", ".parquet", ".csv"):
        _fail(f"--out {out} ends in {out.suffix!r}; expected .parquet, .csv, or a folder without a suffix.")
    if out.exists():
        _fail(f"--out {out} exists; it is left alone. Choose another name, or delete it first.")
    if not out.absolute().parent.is_dir():
        _fail(f"--out {out}: there is no folder {out.absolute().parent}.")
    if out.suffix == "":
        return lambda scores: scores.save(out)

    def write(scores: dw.Scores) -> None:
        frame = scores.to_pandas()
        partial = out.with_name(f"{out.name}.partial-{secrets.token_hex(4)}")
        try:
            if out.suffix == ".parquet":
                _with_one_type(frame).to_parquet(partial)
            else:
                frame.to_csv(partial, index=False)
            os.replace(partial, out)
        finally:
            partial.unlink(missing_ok=True)

    return write


def _with_one_type(frame: "pandas.DataFrame") -> "pandas.DataFrame":
    """A parquet column has one type: names of rows that are neither all numbers nor all texts go in as texts."""
    name = frame.columns[1]
    mixed = frame[name].dtype == object and not all(isinstance(label, str) for label in frame[name])
    return frame.assign(**{name: frame[name].map(str)}) if mixed else frame


def _print_scores(scores: "dw.Scores", query: int, top: int) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    table = Table(title=f"Query {query}", title_justify="left")
    for column in ("", "helpful row", "score", "harmful row", "score"):
        table.add_column(column, justify="right")
    sides = [scores.top(query=query, k=top, sign=sign) for sign in ("helpful", "harmful")]
    for place in range(max(map(len, sides))):
        cells = [side[place] if place < len(side) else ("", None) for side in sides]
        table.add_row(str(place + 1), *(text for row, score in cells for text in (Text(str(row)), _number(score))))
    if any(sides):
        console.print(table)
    console.print(scores.meaning(), markup=False)


def _number(score: float | None) -> str:
    return "" if score is None else f"{score:+.4g}"
