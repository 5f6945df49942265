"""Pages, or parts of them, that are made from the code: the command line, and the pitfalls that tests check.

A line `<!-- made: NAME -->` in a page is replaced by what the function NAME of this file returns.
"""

import ast
import re
from pathlib import Path

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
    """What the tests under tests/referee/ check: their files' first lines as headings, one line a test."""
    parts = []
    for file in sorted((ROOT / "tests" / "referee").glob("test_*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        title = first_line(tree) or file.stem.removeprefix("test_").replace("_", " ")
        parts += [f"## {title.rstrip('.')}", ""]
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                name = node.name.removeprefix("test_").replace("_", " ")
                said = first_line(node)
                parts.append(f"- **{name}**" + (f": {said}" if said else ""))
        parts.append("")
    return "\n".join(parts)


def first_line(node: ast.Module | ast.FunctionDef) -> str:
    """The first paragraph of a docstring, on one line."""
    return " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())


PARTS = {"command_line": command_line, "pitfalls": pitfalls}
