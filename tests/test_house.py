"""The house: imports point one way, importing is light, and versions, pins, pages and changelog agree."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import downweight as dw

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "downweight"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

# From upstream to downstream: a room imports from rooms above it, and a folder from within itself.
ROOMS = [
    "errors",
    "version",
    "settings",
    "identity",
    "shapes",
    "memory",
    "progress",
    "losses",
    "linearization",
    "rows",
    "task",
    "features",
    "gradients",
    "kernel",
    "measurements",
    "curvature",
    "solvers",
    "solve",
    "damping",
    "meta",
    "store",
    "scores",
    "influence",
    "baselines",
    "objectives",
    "recipe",
    "stack",
    "train",
    "proximal",
    "respond",
    "report",
    "decompose",
    "evaluate",
    "datasets",
    "paper",
    "doctor",
    "demo",
    "cli",
]


def modules() -> dict[str, ast.Module]:
    """Every module of the package by its dotted name, parsed."""
    found = {}
    for file in sorted(SOURCE.rglob("*.py")):
        parts = ("downweight", *file.relative_to(SOURCE).with_suffix("").parts)
        found[".".join(part for part in parts if part != "__init__")] = ast.parse(file.read_text())
    return found


def imports(tree: ast.AST) -> set[str]:
    """The modules of the package that a module imports, anywhere in it."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names} & MODULES.keys()
    return {name for name in found if name.split(".")[0] == "downweight"}


MODULES = modules()


def room(module: str) -> str:
    return module.split(".")[1]


def test_every_module_has_a_room():
    unplaced = {room(name) for name in MODULES if name != "downweight"} - set(ROOMS)
    assert not unplaced, f"add {unplaced} to ROOMS, where the data flows through it"


@pytest.mark.parametrize("module", [name for name in MODULES if name != "downweight"])
def test_imports_point_upstream(module):
    place = ROOMS.index(room(module))
    for imported in imports(MODULES[module]):
        if imported == "downweight":  # the whole package: only at its end
            assert room(module) in ("demo", "cli"), f"{module} imports the package as a whole"
        elif room(imported) != room(module):
            assert ROOMS.index(room(imported)) < place, f"{module} imports {imported}, which is downstream of it"


def test_no_cycles_within_a_folder():
    """A member of a folder may import another one, never back."""
    edges = {name: imports(tree) & MODULES.keys() - {name} for name, tree in MODULES.items() if name.count(".") > 1}

    def reach(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"cycle: {' → '.join((*path, name))}"
        for other in edges.get(name, ()):
            reach(other, (*path, name))

    for name in edges:
        reach(name, ())


@pytest.mark.parametrize("module", MODULES)
def test_no_import_inside_a_function_to_dodge_a_cycle(module):
    """Heavy packages may be imported late, and so may the report, which brings them; others of our own only by the
    command line, for its start."""
    if room(module + ".") == "cli":
        return
    functions = [node for node in ast.walk(MODULES[module]) if isinstance(node, ast.FunctionDef)]
    late = {name for function in functions for name in imports(function)}
    assert {name for name in late if room(name + ".") != "report"} == set()


def test_no_room_without_a_name():
    assert not {"utils", "helpers", "core", "common", "misc"} & {part for name in MODULES for part in name.split(".")}


def test_every_module_says_what_it_holds():
    for name, tree in MODULES.items():
        empty = not tree.body
        assert empty or ast.get_docstring(tree), f"{name} has no first line"


def printed(code: str) -> str:
    """What a process of its own prints."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_importing_brings_torch_numpy_and_the_standard_library_only():
    code = (
        "import sys, torch, numpy\n"
        "before = set(sys.modules)\n"
        "import downweight\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before} - {'downweight'}\n"
        "print(sorted(new - set(sys.stdlib_module_names)))\n"
        "heavy = {'pandas', 'rich', 'typer', 'safetensors', 'altair', 'torchvision', 'jaxtyping', 'scipy', 'sklearn'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    assert printed(code) == "[]\n[]\n"


def test_scores_do_not_wait_for_the_compiler_of_torch():
    """A dispatch mode imports it, which takes a second and a half of a first call that needs a tenth."""
    code = (
        "import sys, torch\n"
        "import downweight as dw\n"
        "rows = (torch.randn(8, 3), torch.zeros(8).long())\n"
        "task = dw.Task(torch.nn.Linear(3, 2), 'cross_entropy', rows)\n"
        "for solver in ('cholesky', 'dual', 'cg'):\n"
        "    dw.influence(task, rows, damping=1.0, solver=solver)\n"
        "print('torch._dynamo' in sys.modules)\n"
    )
    assert printed(code) == "False\n"


def test_public_names_are_there_once():
    """Sorted they are by ruff (RUF022)."""
    assert len(set(dw.__all__)) == len(dw.__all__)
    for name in dw.__all__:
        assert hasattr(dw, name)


def test_every_public_name_is_documented():
    pages = "\n".join(file.read_text() for file in (ROOT / "docs").rglob("*.md"))
    documented = set(re.findall(r"^::: downweight(?:\.\w+)*\.(\w+)$", pages, re.MULTILINE))
    missing = [name for name in dw.__all__ if name not in documented and name != "__version__"]
    assert missing == [], "add them to docs/reference.md"


def test_the_version_is_that_of_the_changelog():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(r"^## \[Unreleased\]$", changelog, re.MULTILINE)
    coming = re.search(r"^Next version: (\S+)$", changelog, re.MULTILINE)
    released = re.search(r"^## \[(\d[^\]]*)\] - \d{4}-\d\d-\d\d$", changelog, re.MULTILINE)
    stated = coming or released
    assert stated is not None
    assert stated.group(1) == dw.__version__
    assert PROJECT["tool"]["hatch"]["version"]["path"] == "src/downweight/version.py"


def pins() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    pairs = [line.split("==") for line in lines]
    return {_plain(name): version for name, version in pairs}


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_requirement_is_pinned_for_our_own_set_up():
    project = PROJECT["project"]
    wanted = [
        *project["dependencies"],
        *(line for extra in project["optional-dependencies"].values() for line in extra),
    ]
    names = {_plain(re.split(r"[\[<>=!~ ]", line)[0]) for line in wanted}
    assert names - pins().keys() == set()
    assert pins()["torch"] == "2.13.0"


def test_requirements_have_a_lower_bound_and_no_upper_one():
    project = PROJECT["project"]
    for line in [*project["dependencies"], *(e for extra in project["optional-dependencies"].values() for e in extra)]:
        assert re.fullmatch(r"[\w-]+(\[\w+\])?>=[\d.]+", line), line


def test_the_readme_states_the_supported_versions():
    readme = (ROOT / "README.md").read_text()
    python = PROJECT["project"]["requires-python"].removeprefix(">=")
    [torch] = [line.removeprefix("torch>=") for line in PROJECT["project"]["dependencies"] if line.startswith("torch>")]
    assert f"Python ≥ {python}" in readme
    assert f"PyTorch ≥ {torch}" in readme
    assert f"PyTorch {pins()['torch']}" in readme


def test_tool_settings_stand_in_one_file():
    """A second file could switch the first one off unnoticed."""
    others = ["pytest.ini", "tox.ini", "setup.cfg", "setup.py", "ruff.toml", ".ruff.toml", "pyrightconfig.json"]
    assert [name for name in others if (ROOT / name).exists()] == []
