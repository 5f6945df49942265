"""Living with it: items 19 to 24, memory, the user's model, randomness, files, imports and progress."""

import copy
import functools
import json
import os
import pty
import select
import shutil
import subprocess
import sys
import textwrap
import time
import warnings
import weakref
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from torch import nn

import downweight as dw
from cases import CASES, classification, mlp, task_of
from untouched import untouched

# 19: memory


@pytest.mark.parametrize("solver", ["dual", "cholesky"])
def test_19_too_little_memory_is_known_before_running(solver):
    """Hours of work, then out of memory.

    An exact solver estimates first: under a limit that its matrix cannot meet it refuses before any work (a look at a
    row or two to learn sizes apart), and says how much it needs, how much there is and what would fit.
    """
    made = classification(mlp(4, 6, 3).double(), (4,), 3, rows=400)
    task = made.task()
    sizes = []
    made.model.register_forward_pre_hook(lambda module, arguments: sizes.append(len(arguments[0])))
    limit = 8 * 1_000  # bytes: neither 1200 x 1200 nor 51 x 51 numbers with their factor and working space
    with pytest.raises(dw.MemoryLimit) as caught:
        dw.influence(task, queries=made.queries, damping=0.1, solver=solver, memory_limit=limit)
    words = str(caught.value)
    assert isinstance(caught.value, MemoryError)
    assert "needs" in words
    assert any(unit in words for unit in ("KiB", "MiB", "GiB", "bytes"))
    assert any(way in words.lower() for way in ("cg", "solver=", "limit", "smaller"))
    assert sum(sizes) <= 4


def test_19_auto_keeps_the_limit():
    """An automatic choice that ignores the memory there is.

    With room it factorises; under a limit that no factorisation meets it iterates, and the answer is the same.
    """
    made = classification(mlp(4, 6, 3).double(), (4,), 3, rows=400, l2=0.01)
    roomy = dw.influence(made.task(), queries=made.queries, damping=0.1)
    tight = dw.influence(made.task(), queries=made.queries, damping=0.1, memory_limit=40_000)
    assert any(word in str(roomy.solver).lower() for word in ("dual", "cholesky"))
    assert "cg" in str(tight.solver).lower()
    torch.testing.assert_close(tight.values, roomy.values, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("exponent", range(12, 22))
def test_19_auto_finds_what_fits(exponent):
    """An automatic choice that runs out of the memory that another choice would have kept to.

    Wherever plain CG fits, the automatic choice fits as well: from 8 KiB on for these 43 parameters and 80 scores.
    """
    made = classification(mlp(4, 5, 3).double(), (4,), 3, rows=20, l2=0.01)
    settings = {"queries": made.queries, "damping": 0.1, "memory_limit": 2**exponent}
    if exponent < 13:
        for solver in ("cg", "auto"):
            with pytest.raises(dw.MemoryLimit):
                dw.influence(made.task(), solver=solver, **settings)
        return
    plain = dw.influence(made.task(), solver=dw.CG(rtol=1e-9), **settings)
    chosen = dw.influence(made.task(), **settings)
    torch.testing.assert_close(chosen.values, plain.values, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("solver", ["cg", "lissa", "auto"])
def test_19_a_limit_that_not_even_one_system_fits_is_refused(solver):
    """A limit far below one vector of parameters was taken for a wish: the work went on beyond it."""
    made = classification(mlp(4, 6, 3).double(), (4,), 3, rows=400)
    size = made.task().size
    with pytest.raises(dw.MemoryLimit, match=f"{size:,} parameters"):
        dw.influence(made.task(), queries=made.queries, damping=0.1, solver=solver, memory_limit=8 * size)


@pytest.mark.parametrize("limit", ["200 KB", "1 MB", "10 MiB"])
def test_19_a_limit_is_kept_by_cutting_the_rows(limit):
    """Chunk sizes that are settings to be guessed.

    They follow from the limit: the smaller it is, the fewer rows a pass; in bytes or in words.
    """
    made = classification(mlp(40, 30, 3).double(), (40,), 3, rows=400, l2=0.01)
    sizes = []
    made.model.register_forward_pre_hook(lambda module, arguments: sizes.append(len(arguments[0])))
    task = made.task()
    sizes.clear()
    solver = dw.CG(rtol=1e-6)
    scores = dw.influence(task, queries=made.queries, damping=0.1, solver=solver, memory_limit=limit)
    assert scores.values.shape == (4, 400)
    if limit == "200 KB":  # the activations of all rows alone are 400 x 70 x 8 = 224 kB
        assert max(sizes) < 400


@dataclass(frozen=True)
class Watched:
    """CG that counts how many of its solutions are still in memory when the next block is solved."""

    alive: list[int]
    values: list[weakref.ref]

    def init(self, operator, *, indefinite: Literal["raise", "allow"] = "raise"):
        return dw.CG().init(operator, indefinite=indefinite)

    def compute(self, state, vectors):
        self.alive.append(sum(value() is not None for value in self.values))
        solution = dw.CG().compute(state, vectors)
        self.values.append(weakref.ref(solution.value))
        return solution


@pytest.mark.parametrize("call", ["influence", "self_influence"])
def test_19_blocks_of_systems_do_not_pile_up(call):
    """A limit that is kept block by block, and exceeded by what all the blocks leave behind.

    Solutions are used and dropped before the next block of systems is solved.
    """
    made = classification(mlp(4, 6, 3).double(), (4,), 3, rows=60, l2=0.01)
    solver = Watched([], [])
    settings: dict[str, Any] = {
        "damping": 0.1,
        "solver": solver,
        "memory_limit": "70 KB" if call == "influence" else "40 KB",
    }
    if call == "influence":
        dw.influence(made.task(), queries=made.train, **settings)
    else:
        dw.self_influence(made.task(), **settings)
    assert len(solver.alive) > 2, "the limit must cut the systems into blocks"
    assert max(solver.alive) == 0


@pytest.mark.parametrize("limit", [0, -1, "much", "-3 GB"])
def test_19_a_limit_that_is_none_is_refused(limit):
    made = CASES["mlp_smooth"]()
    with pytest.raises(dw.DownweightError, match="memory_limit"):
        dw.influence(task_of("mlp_smooth"), queries=made.queries, damping=0.1, memory_limit=limit)


# 20: the user's model


OF_MANY_KINDS = [
    "mlp_smooth",
    "cnn",
    "batch_norm",
    "layer_used_twice",
    "bare_parameters",
    "in_place_activations",
    "language_model",
    "language_model_of_torch_parts",
    "dict_inputs",
    "frozen_parameters",
    "some_parameters",
    "tied_autoencoder",
    "weight_norm",
    "own_loss",
]


@pytest.mark.parametrize("name", OF_MANY_KINDS)
def test_20_the_model_is_as_it_was(name):
    """Hooks left behind, requires_grad switched off, parameters replaced or gradients added to, in the user's model.

    Identity, bits, flags, hooks, gradients and modes of everything in the model, and torch's own switches, before and
    after each public call. (PyTorch's functional_call itself replaces the parameters of a module with two names.)
    """
    made = CASES[name]()
    with untouched(made.model):
        task = made.task()
        scores = dw.influence(task, queries=made.queries, damping=0.1)
        dw.influence(
            task, queries=made.queries, damping=60.0, curvature="hessian", measurement=lambda y, t: y.flatten(1)[:, 0]
        )
        dw.self_influence(task, damping=0.1)
        dw.parameter_shift(task, remove=[[1]], damping=0.1)
        dw.grad_dot(task, made.queries)
        scores.top(query=0, k=2, sign="helpful")


def test_20_the_model_is_as_it_was_after_an_error():
    """The same after an error in the middle of the work, when cleaning up is forgotten.

    A row on which the model fails, reached after others have been worked on.
    """

    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = mlp(4, 5, 3)

        def forward(self, x):
            if x.shape[0] and x.detach().flatten()[0] > 100:
                raise ValueError("cannot look at this")
            return self.layers(x)

    made = classification(Fails().double(), (4,), 3)
    made.model.train()
    made.queries[0][0, 0] = 200.0
    task = made.task()
    for solver in ("cholesky", "dual", "cg"):
        with untouched(made.model), pytest.raises((ValueError, dw.DownweightError)):
            dw.influence(task, queries=made.queries, damping=0.1, solver=solver)


def test_20_frozen_parameters_stay_frozen_and_are_constants():
    """A frozen parameter that comes back trainable, or that counts as one."""
    made = CASES["frozen_parameters"]()
    frozen = [name for name, p in made.model.named_parameters() if not p.requires_grad]
    dw.influence(made.task(), queries=made.queries, damping=0.1)
    assert [name for name, p in made.model.named_parameters() if not p.requires_grad] == frozen
    assert made.task().with_parameters(torch.zeros(48, dtype=torch.float64)) is not None


# 21: randomness


@pytest.mark.parametrize("solver", ["lissa", "auto"])
def test_21_the_same_seed_gives_the_same_bits(solver):
    """Randomness from a global generator: results that cannot be made twice, and a user's own run that changes.

    Same seed, same bits, whatever the global state; another seed, other batches; the global state is not touched.
    """
    made = CASES["mlp_smooth"]()

    def values(seed: int) -> torch.Tensor:
        chosen = dw.LiSSA(scale=10.0, depth=50, repeats=1, batch_size=3, seed=seed) if solver == "lissa" else "auto"
        return dw.influence(task_of("mlp_smooth"), queries=made.queries, damping=0.5, solver=chosen).values

    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore", dw.DownweightWarning)
        torch.manual_seed(1)
        before = torch.get_rng_state()
        one = values(0)
        assert torch.equal(torch.get_rng_state(), before)
        torch.manual_seed(2)
        assert torch.equal(values(0), one)
        if solver == "lissa":
            assert not torch.equal(values(1), one)


# 22: files


@pytest.fixture
def saved(tmp_path):
    """A saved answer, its task and its folder."""
    made = CASES["mlp_smooth"]()
    scores = dw.influence(task_of("mlp_smooth"), queries=made.queries, damping=0.1)
    scores.save(tmp_path / "answer")
    return made, scores, tmp_path / "answer"


def test_22_an_answer_to_another_question_is_refused(saved):
    """A cached result that is reused in silence although the model, the data or a setting has changed.

    Other parameters, other inputs, other targets, other l2, other loss scale: each is refused by name.
    """
    made, scores, folder = saved
    assert torch.equal(dw.Scores.load(folder, expect=made.task()).values, scores.values)
    inputs, targets = made.train
    moved = targets.clone()
    moved[0] = (moved[0] + 1) % 3
    settings = made.settings
    others = [
        made.task().with_parameters(made.oracle().theta + 1e-9),
        dw.Task(made.model, made.loss, (inputs + 1e-9, targets), **settings),
        dw.Task(made.model, made.loss, (inputs, moved), **settings),
        dw.Task(made.model, made.loss, (inputs.flip(0), targets.flip(0)), **settings),
        made.task(l2=0.03),
        made.task(loss_scale=0.5),
        made.task(weights=torch.full((10,), 2.0).double()),
        made.task(parameters=["0.weight"]),
    ]
    for other in others:
        with pytest.raises(dw.ForeignResult):
            dw.Scores.load(folder, expect=other)


def test_22_a_half_written_folder_is_refused(saved, tmp_path):
    """A file cut short by a full disk or a stopped job, read as if it were whole.

    Every file of the folder in turn: missing, empty, cut in half, one byte changed.
    """
    _, scores, folder = saved
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    assert len(files) >= 2

    def remove(path):
        path.unlink()

    def empty(path):
        path.write_bytes(b"")

    def halve(path):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    def shorten(path):
        path.write_bytes(path.read_bytes()[:-1])

    for file in files:
        for number, damage in enumerate((remove, empty, halve, shorten)):
            broken = tmp_path / f"{file.name}-{number}"
            shutil.copytree(folder, broken)
            damage(broken / file)
            if damage is shorten and file.name == "meta.json":
                continue  # a missing newline at the end is no damage
            with pytest.raises(dw.DamagedResult):
                dw.Scores.load(broken)
    assert torch.equal(dw.Scores.load(folder).values, scores.values)


def test_22_bits_that_have_changed_are_noticed(saved):
    """A changed number inside a file of the right length."""
    _, _, folder = saved
    for path in folder.glob("*.safetensors"):
        data = bytearray(path.read_bytes())
        data[-3] ^= 0xFF
        path.write_bytes(bytes(data))
    with pytest.raises(dw.DamagedResult):
        dw.Scores.load(folder)


def test_22_a_newer_format_is_refused_by_its_number(saved):
    """A file of a later version read with today's meaning."""
    _, _, folder = saved
    meta = json.loads((folder / "meta.json").read_text())
    keys = [key for key in meta if "version" in key and isinstance(meta[key], int)]
    assert keys, f"no format version in {list(meta)}"
    meta[keys[0]] += 998
    (folder / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(dw.DownweightError, match=str(meta[keys[0]])):
        dw.Scores.load(folder)


def test_22_nothing_is_there(tmp_path):
    """A wrong path, a folder of something else, and a file: each a clear error."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("hello")
    for path in ("nowhere", "empty", "file"):
        with pytest.raises(dw.DownweightError):
            dw.Scores.load(tmp_path / path)


def test_22_a_save_that_fails_leaves_nothing_under_the_final_name(tmp_path, monkeypatch):
    """A crash while saving leaves a folder that looks finished.

    The last step of saving fails here (renaming, which a full disk or a kill would prevent as well).
    """
    made = CASES["mlp_smooth"]()
    scores = dw.influence(task_of("mlp_smooth"), queries=made.queries, damping=0.1)
    for name in ("replace", "rename"):
        monkeypatch.setattr(os, name, _full_disk)
    with pytest.raises(OSError, match="No space left"):
        scores.save(tmp_path / "answer")
    monkeypatch.undo()
    if (tmp_path / "answer").exists():
        with pytest.raises(dw.DownweightError):
            dw.Scores.load(tmp_path / "answer")
    scores.save(tmp_path / "answer")
    assert torch.equal(dw.Scores.load(tmp_path / "answer").values, scores.values)


def _full_disk(*arguments, **keywords):
    raise OSError(28, "No space left on device")


def test_22_saving_over_an_answer_never_mixes_two(saved, tmp_path):
    """A second save over the first that leaves files of both."""
    made, _, folder = saved
    other = dw.influence(task_of("mlp_smooth"), queries=made.queries, damping=0.9, rows=[1, 2])
    try:
        other.save(folder)
    except dw.DownweightError:
        assert dw.Scores.load(folder).damping == 0.1
    else:
        loaded = dw.Scores.load(folder)
        assert loaded.damping == 0.9
        assert torch.equal(loaded.values, other.values)


# 22, continued: what tells two tasks apart


class Scaled:
    """A loss of a user's own with a setting."""

    def __init__(self, scale: float):
        self.scale = scale

    def value(self, outputs, targets):
        return self.scale * nn.functional.cross_entropy(outputs, targets, reduction="none")


class Activated(nn.Module):
    """Its activation is an attribute that no description shows."""

    def __init__(self, activation):
        super().__init__()
        self.layers, self.activation = nn.Linear(4, 3), activation

    def forward(self, x):
        return self.activation(self.layers(x))


def power(outputs, targets, exponent):
    return (outputs - nn.functional.one_hot(targets, 3)).pow(exponent).sum(-1)


def times(factor):
    return lambda model, x: factor * model(x)


def _pairs():
    """Two tasks each, which share parameters, data and every setting with a name."""
    made = classification(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)), (4,), 3)
    model = made.model.double().eval()
    relu = nn.Sequential(*model[:2], nn.ReLU(), model[3]).eval()
    moved, thawed = copy.deepcopy(model), copy.deepcopy(model)
    moved[1].running_mean += 1e-6
    thawed[0].weight.data += 1e-6
    some = {"parameters": ["3.weight", "3.bias"]}
    layers = Activated(torch.tanh), Activated(torch.relu)
    layers[1].load_state_dict(layers[0].state_dict())

    def tasks(models=(model, model), losses=("cross_entropy", "cross_entropy"), **settings):
        return tuple(
            dw.Task(one.double(), loss, made.train, **{name: value[place] for name, value in settings.items()})
            for place, (one, loss) in enumerate(zip(models, losses, strict=True))
        )

    return {
        "activation module": tasks((model, relu)),
        "activation attribute": tasks(layers),
        "running mean": tasks((model, moved)),
        "uncovered parameters": tasks((model, thawed), parameters=(some["parameters"],) * 2),
        "loss object": tasks(losses=(Scaled(1.0), Scaled(1.001))),
        "partial loss": tasks(losses=tuple(functools.partial(power, exponent=n) for n in (2, 4))),
        "closure": tasks(forward=(times(1.0), times(1.001))),
        "default": tasks(forward=(lambda model, x, by=1.0: by * model(x), lambda model, x, by=1.001: by * model(x))),
    }


@pytest.mark.parametrize("name", list(_pairs()))
def test_22_every_part_of_a_task_is_in_its_fingerprint(name, tmp_path):
    """A hash of the weights alone: another activation, running mean or setting of a loss passes for the same."""
    one, other = _pairs()[name]
    queries = classification(nn.Linear(4, 3), (4,), 3).queries
    dw.influence(one, queries=queries, damping=1.0).save(tmp_path / "answer")
    assert dw.Scores.load(tmp_path / "answer", expect=one)
    with pytest.raises(dw.ForeignResult):
        dw.Scores.load(tmp_path / "answer", expect=other)


def test_22_the_fingerprint_is_that_of_another_process():
    """Addresses in a description, or a random hash seed: a result that its own script refuses tomorrow."""
    code = """
        import functools, torch, downweight as dw
        torch.manual_seed(0)
        class Named(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer, self.by = torch.nn.Linear(3, 2), functools.partial(torch.mul, other=2.0)
            def extra_repr(self):
                return f"{self.by}, {(lambda: 0)}"
            def forward(self, x):
                return self.by(self.layer(x))
        names = {"a", "b", "c"}
        def loss(outputs, targets, scale=len(names)):
            return scale * len(names) * (outputs - targets).square().sum(-1)
        task = dw.Task(Named(), functools.partial(loss, scale=2.0), (torch.ones(4, 3), torch.ones(4, 2)),
                       forward=lambda model, x: model(x) if names else x)
        print(task.fingerprint())
    """
    one, two = run_python(code), run_python(code)
    assert one.returncode == 0, one.stderr
    assert one.stdout == two.stdout


def test_22_data_changed_in_place_is_other_data(tmp_path):
    """A fingerprint that is remembered while the data, held by reference, moves on."""
    made = copy.deepcopy(CASES["mlp_smooth"]())
    inputs, targets = made.train
    task = dw.Task(made.model, made.loss, (inputs, targets))
    dw.influence(task, queries=made.queries, damping=0.1).save(tmp_path / "answer")
    targets[5] = (targets[5] + 1) % 3
    with pytest.raises(dw.ForeignResult, match="targets"):
        dw.Scores.load(tmp_path / "answer", expect=task)
    targets[5] = (targets[5] + 2) % 3
    inputs.numpy()[2, 1] += 1  # behind torch's back
    with pytest.raises(dw.ForeignResult, match="inputs"):
        dw.Scores.load(tmp_path / "answer", expect=task)


# 23: dependencies

UNWANTED = [
    "torchvision",
    "transformers",
    "matplotlib",
    "altair",
    "plotly",
    "pandas",
    "pyarrow",
    "rich",
    "typer",
    "safetensors",
    "jinja2",
    "scipy",
    "sklearn",
    "starlette",
    "jaxtyping",
    "beartype",
    "curvlinops",
]


def run_python(code: str, **settings) -> subprocess.CompletedProcess:
    """A fresh interpreter, without the import hook of these tests."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        **settings,
    )


def test_23_importing_it_imports_little_and_quickly():
    """A package that drags in torchvision, transformers and a plotting library, and takes ten seconds to import.

    In a fresh interpreter, after `import torch`: under a second, and none of the heavy modules.
    """
    done = run_python(
        """
        import time, torch, numpy
        import sys
        already = set(sys.modules)
        start = time.perf_counter()
        import downweight
        print(time.perf_counter() - start)
        print(*sorted({name.split(".")[0] for name in set(sys.modules) - already}))
        """
    )
    assert done.returncode == 0, done.stderr
    seconds, modules = done.stdout.strip().split("\n")
    assert float(seconds) < 1.0
    assert not set(modules.split()) & set(UNWANTED)
    assert done.stderr == ""


def test_23_scores_need_none_of_the_optional_packages():
    """A plain computation that fails because a package for tables or pictures is missing."""
    done = run_python(
        f"""
        import sys
        for name in {[name for name in UNWANTED if name not in ("jaxtyping", "beartype")]!r}:
            sys.modules[name] = None
        import torch, downweight as dw
        model = torch.nn.Linear(3, 2)
        train = (torch.arange(12.).reshape(4, 3) / 10, torch.tensor([0, 1, 0, 1]))
        print(dw.influence(dw.Task(model, "cross_entropy", train), queries=train, damping=0.1).values.shape)
        """
    )
    assert done.returncode == 0, done.stderr
    assert "[4, 4]" in done.stdout


# 24: progress

SLOW = """
    import time, torch, downweight as dw
    class Slow(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(40, 30)
            self.last = torch.nn.Linear(30, 3)
        def forward(self, x):
            time.sleep(0.01)
            return self.last(torch.tanh(self.layer(x)))
    torch.manual_seed(0)
    train = (torch.randn(100, 40), torch.randint(3, (100,)))
    task = dw.Task(Slow(), "cross_entropy", train)
    dw.influence(task, queries=(train[0][:3], train[1][:3]), damping=0.1, memory_limit=110_000,
                 solver=dw.CG(rtol=1e-4, max_steps=200){progress})
    print("done")
"""


def on_a_terminal(code: str) -> str:
    """Everything that a program writes when its stderr is a terminal."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.DEVNULL,
        stderr=follower,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm", "COLUMNS": "100"},
    )
    os.close(follower)
    seen, stop = b"", time.monotonic() + 120
    while time.monotonic() < stop:
        ready, _, _ = select.select([leader], [], [], 0.2)
        if ready:
            try:
                piece = os.read(leader, 4096)
            except OSError:  # the other end is closed
                break
            if not piece:
                break
            seen += piece
        elif process.poll() is not None:
            break
    os.close(leader)
    assert process.wait(timeout=10) == 0, seen.decode(errors="replace")
    return seen.decode(errors="replace")


@pytest.mark.slow
def test_24_quiet_where_nobody_watches():
    """Progress bars in log files, thousands of lines of them.

    Output to a pipe: not a character by default, whatever the length of the work.
    """
    done = run_python(SLOW.replace("{progress}", ""))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n"
    assert done.stderr == ""


@pytest.mark.slow
def test_24_a_bar_with_rate_and_remaining_time():
    """An hour of silence, and nobody knows whether it is stuck.

    On a terminal there is a bar with a number done, a rate and a remaining time.
    """
    seen = on_a_terminal(SLOW.replace("{progress}", ""))
    assert seen.strip(), "nothing was shown"
    assert "/s" in seen
    assert any(word in seen for word in ("remaining", "left", "eta", "ETA", "0:0"))


@pytest.mark.slow
def test_24_it_can_be_turned_off():
    """A bar that cannot be turned off."""
    assert on_a_terminal(SLOW.replace("{progress}", ", progress=False")).strip() == ""
