"""Pages, or parts of them, that are made: the command line, the benchmarks, the pitfalls that tests check.

A line `<!-- made: NAME -->` in a page is replaced by what the function NAME of this file returns.
"""

import ast
import json
import re
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).parent.parent


def on_page_markdown(markdown: str, **_: object) -> str:
    """Called by mkdocs for every page."""
    return re.sub(r"^<!-- made: (\w+) -->$", lambda found: PARTS[found[1]](), markdown, flags=re.MULTILINE)


def command_line() -> str:
    """What `--help` prints, of the whole and of every command."""
    from typer.testing import CliRunner

    from downweight.cli import app

    def says(*arguments: str) -> str:
        answer = CliRunner(env={"COLUMNS": "110", "TERMINAL_WIDTH": "110"}).invoke(app, [*arguments, "--help"])
        assert answer.exit_code == 0, answer.output
        text = "\n".join(line.rstrip() for line in answer.output.strip().splitlines())
        return f"```text\n{text.replace('Usage: root', 'Usage: downweight')}\n```\n"

    names = [command.name or command.callback.__name__ for command in app.registered_commands if command.callback]
    return "\n".join([says(), *(f"## downweight {name}\n\n{says(name)}" for name in names)])


def pitfalls() -> str:
    """The tests under tests/referee/: their files' first lines as headings, one line a test, ordered by item."""
    sections = []
    for file in sorted((ROOT / "tests" / "referee").glob("test_*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        lines = []
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                item, name = re.fullmatch(r"test_(?:(\d+)_)?(\w+)", node.name).groups()  # type: ignore[union-attr]
                said = f" Seen elsewhere: {first_line(node)}" if first_line(node) else ""
                lines.append(
                    (int(item or 0), f"- **{name.replace('_', ' ')}**{f' ({int(item)})' if item else ''}.{said}")
                )
        lines.sort(key=lambda line: line[0])
        title = first_line(tree).rstrip(".") or file.stem
        sections.append(
            (min(lines)[0] if lines else 0, "\n".join([f"## {title}", "", *(text for _, text in lines), ""]))
        )
    return "\n".join(text for _, text in sorted(sections))


def benchmarks() -> str:
    """The records that the files of benchmarks/ wrote: a section a question, a table a machine."""
    records = [json.loads(line) for line in (ROOT / "benchmarks" / "records.jsonl").read_text().splitlines()]
    made: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for record in records:
        machine = "{device}, {threads} threads, torch {torch}, Python {python}, commit {commit}".format(**record)
        measured = {name: value for name, value in record.items() if name not in _MACHINE}
        made.setdefault(record["question"], {}).setdefault(machine, []).append(measured)
    lines = []
    for question, machines in made.items():
        lines += [f"## {question}", ""]
        for machine, runs in machines.items():
            names = dict.fromkeys(name for run in runs for name in run)
            lines += [machine, "", f"| measured |{' |' * len(runs)}", f"| --- |{' --- |' * len(runs)}"]
            lines += [f"| {name} | {' | '.join(as_text(run.get(name, '')) for run in runs)} |" for name in names]
            lines.append("")
    return "\n".join(lines)


_MACHINE = ("question", "device", "threads", "torch", "python", "commit")


def as_text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def first_line(node: ast.Module | ast.FunctionDef) -> str:
    """The first paragraph of a docstring, on one line."""
    return " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())


class Arguments(griffe.Extension):
    """Lines such as `damping: the absolute λ` in a docstring become a list on the reference page."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = "\n\n".join(map(as_list, obj.docstring.value.split("\n\n")))


def as_list(paragraph: str) -> str:
    """A paragraph of `name: text` lines as a list; any other paragraph as it is."""
    named = r"^(\w+(?:, \w+)*): "
    if not re.match(named, paragraph):
        return paragraph
    return re.sub(named, r"- `\1`: ", paragraph, flags=re.MULTILINE)


PARTS = {"benchmarks": benchmarks, "command_line": command_line, "pitfalls": pitfalls}
