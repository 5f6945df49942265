"""Every python example in the README and in docs/ runs, and prints what the page says it prints."""

import contextlib
import io
import json
import re
from pathlib import Path

import pytest

import hooks  # docs/hooks.py, the part of the site that is made from code
from downweight.solve import SOLVERS
from test_house import PROJECT, ROOMS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?")


def blocks(page: Path) -> list[tuple[str, str, int]]:
    """(language, content, line) of every fenced block."""
    text = page.read_text(encoding="utf-8")
    return [(found[1], found[2], text.count("\n", 0, found.start()) + 2) for found in FENCE.finditer(text)]


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if "```python" in page.read_text()], ids=lambda p: p.name)
def test_examples_run_and_print_what_the_page_says(page, tmp_path, monkeypatch):
    """The blocks of a page run in order, in one namespace; a text block after a python block is its output."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": page.stem}
    printed = None
    for language, content, line in blocks(page):
        if language == "python":
            out = io.StringIO()
            code = compile("\n" * (line - 1) + content, str(page), "exec")
            with contextlib.redirect_stdout(out):
                exec(code, namespace)
            printed = out.getvalue()
        elif language == "text" and printed is not None:
            assert_same_text(printed, content)
            printed = None


def assert_same_text(printed: str, stated: str) -> None:
    """Equal but for white space, and for numbers in their third digit: platforms round differently."""
    assert NUMBER.sub("#", printed).split() == NUMBER.sub("#", stated).split()
    for ours, theirs in zip(NUMBER.findall(printed), NUMBER.findall(stated), strict=True):
        a, b = float(ours.replace(",", "")), float(theirs.replace(",", ""))
        assert abs(a - b) <= 0.005 * abs(b), f"the page says {theirs}, the example prints {ours}"


def test_the_comparison_of_outputs_sees_a_wrong_one():
    assert_same_text("a 1.001\n", "a  1.0\n")
    for wrong in ("a 1.01", "b 1.0", "a 1.0 2"):
        with pytest.raises(AssertionError):
            assert_same_text(wrong, "a 1.0")


def test_every_page_is_in_the_navigation():
    navigation = re.findall(r"^  - .*: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(navigation) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))


def test_the_command_line_page_has_every_option():
    text = hooks.on_page_markdown("<!-- made: command_line -->")
    for option in ("--queries", "--out", "--damping", "--curvature", "--solver", "--measurement", "--top", "--version"):
        assert option in text
    assert "## downweight doctor" in text
    assert PROJECT["project"]["scripts"] == {"downweight": "downweight.cli:app"}


def test_the_pitfalls_page_has_every_referee_test():
    text = hooks.pitfalls()
    for file in (ROOT / "tests" / "referee").glob("test_*.py"):
        for name in re.findall(r"^def test_(?:\d+_)?(\w+)", file.read_text(), re.MULTILINE):
            assert name.replace("_", " ") in text


def test_the_benchmarks_page_has_every_record():
    text = hooks.benchmarks()
    records = [json.loads(line) for line in (ROOT / "benchmarks" / "records.jsonl").read_text().splitlines()]
    assert text.count("## ") == len({record["question"] for record in records})
    for record in records:
        for name, value in record.items():
            assert name in text or name in hooks._MACHINE
            assert hooks.as_text(value) in text


@pytest.mark.parametrize("name", SOLVERS)
def test_every_solver_is_on_the_page_of_solvers(name):
    assert f'"{name}"' in (ROOT / "docs" / "solvers.md").read_text()


def test_the_tree_in_the_readme_is_that_of_the_package():
    """One line a file or folder, in the order of the rooms."""
    readme = (ROOT / "README.md").read_text()
    tree = readme[readme.index("src/downweight/") :]
    stated = re.findall(r"^  ([\w.]+?)(?:\.py|/) ", tree[: tree.index("```")], re.MULTILINE)
    package = ROOT / "src" / "downweight"
    there = {path.stem for path in package.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert set(stated) == there - {"__init__"}
    assert stated == [room for room in ROOMS if room in stated]
