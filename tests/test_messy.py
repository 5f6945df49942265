"""What users do wrong: each gives a right answer or an error that says what to do, and the model stays as it was."""

import contextlib
import copy
import math
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cases import CASES, Case, classification, mlp, oracle_of
from unchecked import downweight as dw
from unchecked import use  # noqa: F401
from untouched import untouched

pytestmark = pytest.mark.usefixtures("use")


@pytest.fixture
def made() -> Case:
    """A fresh copy of the smooth network, with gradients on its parameters that must not be touched."""
    original = CASES["mlp_smooth"]()
    model = copy.deepcopy(original.model)
    for p in model.parameters():
        p.grad = torch.full_like(p, 7.0)
    return Case(model, original.loss, original.train, original.queries, original.candidates, original.settings)


@contextlib.contextmanager
def refused(*kinds: type[BaseException], match: str | None = None) -> Iterator[pytest.ExceptionInfo]:
    """The package's own error, and one of Python's kinds too; never a bare message from the depths of torch."""
    with pytest.raises(dw.DownweightError, match=match) as caught:
        yield caught
    assert not kinds or isinstance(caught.value, kinds), type(caught.value).__mro__
    assert len(str(caught.value)) > 20


# data


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["train", "queries", "candidates"])
def test_nan_in_the_inputs(made, where, bad):
    parts = {"train": made.train, "queries": made.queries, "candidates": made.candidates}
    inputs, targets = parts[where]
    inputs = inputs.clone()
    inputs[1, 2] = bad
    parts[where] = (inputs, targets)
    with untouched(made.model), refused(ValueError, match=r"(?i)nan|infinite|finite"):
        task = dw.Task(made.model, made.loss, parts["train"])
        dw.influence(task, queries=parts["queries"], candidates=parts["candidates"], damping=0.1)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_in_the_targets(bad):
    made = CASES["regression_three_outputs"]()
    targets = made.train[1].clone()
    targets[4, 1] = bad
    with untouched(made.model), refused(ValueError, match="(?i)nan|infinite|finite"):
        dw.Task(made.model, made.loss, (made.train[0], targets))


def test_nan_in_the_parameters(made):
    with torch.no_grad():
        made.model[0].weight[0, 0] = math.nan
    with untouched(made.model), refused(ValueError, match="(?i)nan|infinite|finite"):
        dw.influence(made.task(), queries=made.queries, damping=0.1)


def test_nan_in_one_row_of_a_dataset(made):
    """Found when it is read, and named; not averaged into every score."""

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 10

        def __getitem__(self, index):
            inputs = made.train[0][index].clone()
            if index == 6:
                inputs[0] = math.nan
            return inputs, made.train[1][index]

    with untouched(made.model), refused(ValueError, match="6"):
        dw.influence(dw.Task(made.model, made.loss, Rows()), queries=made.queries, damping=0.1)


def test_nan_from_the_model():
    """Finite data and parameters, and a network that divides by zero for one row."""

    class Divides(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x / x[:, :1])

    model = Divides().double()
    inputs = torch.arange(-4.0, 8.0).double().reshape(6, 2)  # row 2 is (0, 1)
    with untouched(model), refused(ValueError, match="(?i)nan|infinite|finite"):
        task = dw.Task(model, "cross_entropy", (inputs, torch.zeros(6, dtype=torch.long)))
        dw.influence(task, queries=(inputs[3:], torch.ones(3, dtype=torch.long)), damping=0.1)


@pytest.mark.parametrize(
    "targets",
    [
        torch.zeros(10),  # float labels for classes
        torch.zeros(10, 3),  # one-hot
        torch.zeros(9, dtype=torch.long),  # one too few
        torch.zeros(10, 2, dtype=torch.long),
        torch.full((10,), 3),  # three classes: 0, 1, 2
        torch.full((10,), -1),
        torch.zeros(10, dtype=torch.complex64),
    ],
    ids=["float", "one-hot", "short", "matrix", "class 3", "class -1", "complex"],
)
@pytest.mark.parametrize("where", ["train", "queries"])
def test_targets_that_are_not_class_numbers(made, targets, where):
    with untouched(made.model), refused(ValueError, TypeError):
        if where == "train":
            dw.Task(made.model, "cross_entropy", (made.train[0], targets))
        else:
            dw.influence(made.task(), queries=(made.train[0], targets), damping=0.1)


@pytest.mark.parametrize(
    "targets",
    [torch.zeros(10, 2).double(), torch.zeros(10).double(), torch.zeros(10, 3, 1).double()],
    ids=["narrow", "flat", "deep"],
)
@pytest.mark.parametrize("loss", ["squared_error", "binary_cross_entropy"])
def test_targets_of_another_shape_are_never_broadcast(made, targets, loss):
    with untouched(made.model), refused(ValueError):
        dw.Task(made.model, loss, (made.train[0], targets))


@pytest.mark.parametrize("value", [-1.0, 2.0])
def test_binary_targets_outside_zero_to_one(value):
    made = CASES["binary_three_outputs"]()
    targets = made.train[1].clone()
    targets[2, 1] = value
    with untouched(made.model), refused(ValueError, match="0.*1"):
        dw.Task(made.model, made.loss, (made.train[0], targets))


@pytest.mark.parametrize("inputs", [torch.zeros(4, 7).double(), torch.zeros(4).double(), torch.zeros(4, 4, 4).double()])
def test_queries_of_another_shape(made, inputs):
    """The model cannot eat them; the error is ours, or names the shapes."""
    with untouched(made.model), pytest.raises((dw.DownweightError, RuntimeError)) as caught:
        dw.influence(made.task(), queries=(inputs, torch.zeros(4, dtype=torch.long)), damping=0.1)
    assert "shape" in str(caught.value)


def test_an_empty_query_set(made):
    """A right answer, (0, N), or a clear error."""
    queries = (made.queries[0][:0], made.queries[1][:0])
    with untouched(made.model):
        try:
            scores = dw.influence(made.task(), queries=queries, damping=0.1)
        except dw.DownweightError as error:
            assert "empty" in str(error) or "no " in str(error) or "0 " in str(error)  # noqa: PT017
        else:
            assert scores.values.shape == (0, 10)


def test_an_empty_training_set(made):
    with untouched(made.model), refused(ValueError):
        dw.Task(made.model, made.loss, (made.train[0][:0], made.train[1][:0]))


def test_one_training_row(made):
    """N = 1 is a task like any other."""
    train = (made.train[0][:1], made.train[1][:1])
    one = Case(made.model, made.loss, train, made.queries, made.candidates, made.settings)
    with untouched(made.model):
        scores = dw.influence(one.task(), queries=made.queries, damping=0.1)
    truth = one.oracle().scores(made.queries, "gauss_newton", 0.1)
    torch.testing.assert_close(scores.values, truth, rtol=1e-8, atol=1e-14)


def test_a_float_model_with_double_data(made):
    """The data is brought to the model's precision, or the mismatch is named; no error from inside a layer."""
    model = copy.deepcopy(made.model).float()
    with untouched(model):
        try:
            scores = dw.influence(dw.Task(model, made.loss, made.train, l2=0.02), queries=made.queries, damping=0.05)
        except dw.DownweightError as error:
            assert "dtype" in str(error) or "float" in str(error)  # noqa: PT017
        else:
            truth = oracle_of("mlp_smooth").scores(made.queries, "gauss_newton", 0.05)
            assert (scores.values.double() - truth).abs().max() <= 3e-4 * truth.abs().max()


# models


class Noisy(nn.Module):
    """Dropout and batch statistics, some submodules in train mode and some not."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.dropout = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.dropout(torch.tanh(self.norm(self.first(x)))))


@pytest.fixture
def noisy() -> Case:
    with torch.random.fork_rng():
        torch.manual_seed(12)
        made = classification(Noisy().double(), (4,), 3)
        made.model.norm.running_mean.normal_()
        made.model.norm.running_var.uniform_(0.5, 2)
    return made


def test_train_mode_with_dropout(noisy):
    """Evaluated in eval mode, said so in the notes, and put back as it was: some modules in train mode, some not."""
    noisy.model.train()
    noisy.model.last.eval()
    noisy.model.norm.eval()
    with untouched(noisy.model), warnings.catch_warnings():
        warnings.simplefilter("ignore", dw.DownweightWarning)  # it may say so by a warning too
        task = noisy.task()
        scores = dw.influence(task, queries=noisy.queries, damping=0.05)
        dw.self_influence(task, damping=0.05)
        dw.parameter_shift(task, remove=[[1]], damping=0.05)
        dw.grad_dot(task, noisy.queries)
    assert any("eval" in note for note in scores.notes)
    truth = noisy.oracle().scores(noisy.queries, "gauss_newton", 0.05)
    torch.testing.assert_close(scores.values, truth, rtol=1e-8, atol=1e-14)


def test_a_lambda_in_the_task():
    """A forward and a loss that cannot be pickled: nothing here needs to."""
    made = CASES["mlp_smooth"]()
    task = dw.Task(
        made.model,
        lambda outputs, targets: nn.functional.cross_entropy(outputs, targets, reduction="none"),
        made.train,
        l2=0.02,
        forward=lambda model, inputs: model(inputs),
    )
    scores = dw.influence(task, queries=made.queries, damping=0.05)
    truth = oracle_of("mlp_smooth").scores(made.queries, "gauss_newton", 0.05)
    torch.testing.assert_close(scores.values, truth, rtol=1e-8, atol=1e-14)


def test_a_lambda_survives_saving(tmp_path):
    made = CASES["mlp_smooth"]()
    task = dw.Task(made.model, made.loss, made.train, forward=lambda model, inputs: model(inputs))
    scores = dw.influence(task, queries=made.queries, damping=0.05, measurement=lambda outputs, targets: outputs[:, 0])
    scores.save(tmp_path / "answer")
    assert torch.equal(dw.Scores.load(tmp_path / "answer", expect=task).values, scores.values)


def test_a_loss_that_is_not_convex(made):
    """Gauss-Newton is refused with the reason; the Hessian, with enough damping, is not."""

    def saturating(outputs: Tensor, targets: Tensor) -> Tensor:
        one_hot = nn.functional.one_hot(targets, 3)
        return (1 - torch.exp(-(outputs - 1.5 * one_hot).square())).sum(-1)

    task = dw.Task(made.model, saturating, made.train)
    with untouched(made.model), refused(ValueError, match="(?i)convex"):
        dw.influence(task, queries=made.queries, damping=0.1)
    concave = Case(made.model, saturating, made.train, made.queries, made.candidates, {}, saturating)
    truth = concave.oracle().scores(made.queries, "hessian", 50.0)
    scores = dw.influence(task, queries=made.queries, damping=50.0, curvature="hessian")
    torch.testing.assert_close(scores.values, truth, rtol=1e-8, atol=1e-14)


@pytest.mark.parametrize(
    "loss",
    [
        lambda outputs, targets: nn.functional.cross_entropy(outputs, targets),  # a mean, not a value a row
        lambda outputs, targets: nn.functional.cross_entropy(outputs, targets, reduction="none")[:, None],
        lambda outputs, targets: nn.functional.cross_entropy(outputs.detach(), targets, reduction="none"),
        lambda outputs, targets: 3.0,
        "crossentropy",
        3,
        None,
    ],
    ids=["mean", "column", "detached", "number", "misspelt", "integer", "none"],
)
def test_a_loss_that_is_none(made, loss):
    with untouched(made.model), refused(ValueError, TypeError):
        dw.influence(dw.Task(made.model, loss, made.train), queries=made.queries, damping=0.1)


def test_a_model_without_trainable_parameters(made):
    made.model.requires_grad_(False)
    with untouched(made.model), refused(ValueError):
        dw.Task(made.model, made.loss, made.train)


@pytest.mark.parametrize("names", [["nowhere.weight"], [], ["0.weight", "0.weight"], "0.weight"])
def test_parameters_that_are_not_there(made, names):
    """Unknown, none, twice, or a text where a list is meant: refused, or read as the one name that it is."""
    with untouched(made.model):
        try:
            task = made.task(parameters=names)
        except dw.DownweightError:
            return
        scores = dw.influence(task, queries=made.queries, damping=0.1)
        assert names in ("0.weight", ["0.weight", "0.weight"])
        assert scores.coverage.covered == made.model[0].weight.numel()


def test_rows_that_see_each_other():
    """Batch normalisation without running statistics: a row's influence is not defined, and that is said."""
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, track_running_stats=False), nn.Tanh(), nn.Linear(5, 3))
    made = classification(model.double(), (4,), 3)
    with untouched(model), refused(ValueError, match="(?i)batch"):
        dw.influence(made.task(), queries=made.queries, damping=0.1)


def test_outputs_that_are_no_tensor():
    """A model that returns a dict, as those of large libraries do: the error points at `forward`."""

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"logits": self.layer(x)}

    made = classification(Wrapped().double(), (4,), 3)
    with untouched(made.model), refused(TypeError, ValueError, match="forward"):
        made.task()


# settings


@pytest.mark.parametrize("damping", [-1e-3, math.nan, math.inf, -math.inf, "0.1", None])
@pytest.mark.parametrize("call", ["influence", "self_influence", "parameter_shift"])
def test_damping_that_is_none(made, damping, call):
    task = made.task()
    with untouched(made.model), refused(ValueError, TypeError, match="(?i)damping"):
        if call == "influence":
            dw.influence(task, queries=made.queries, damping=damping)
        elif call == "self_influence":
            dw.self_influence(task, damping=damping)
        else:
            dw.parameter_shift(task, remove=[[1]], damping=damping)


@pytest.mark.parametrize("solver", ["auto", "cholesky", "dual", "cg"])
def test_damping_zero_on_a_singular_curvature(solver):
    """Without l2 and damping the Gauss-Newton matrix of 10 rows has no inverse: refused, or (CG) not called solved."""
    made = CASES["mlp_relu"]()
    with untouched(made.model):
        if solver == "cg":
            with pytest.warns(dw.DownweightWarning):
                scores = dw.influence(made.task(), queries=made.queries, damping=0.0, solver=solver)
            assert not torch.as_tensor(scores.converged).all()
        else:
            with refused(ValueError, match="(?i)damping|singular"):
                dw.influence(made.task(), queries=made.queries, damping=0.0, solver=solver)


@pytest.mark.parametrize("setting", ["l2", "loss_scale"])
@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf, "1"])
def test_settings_of_the_task_that_are_none(made, setting, value):
    with untouched(made.model), refused(ValueError, TypeError, match=setting):
        made.task(**{setting: value})


@pytest.mark.parametrize(
    "weights",
    [torch.ones(9), torch.ones(10, 1), -torch.ones(10), torch.full((10,), math.nan)],
    ids=["short", "column", "negative", "nan"],
)
def test_weights_that_are_none(made, weights):
    with untouched(made.model), refused(ValueError, match="(?i)weight"):
        made.task(weights=weights.double())


@pytest.mark.parametrize(
    "arguments",
    [
        {"curvature": "fisher"},
        {"solver": "lu"},
        {"measurement": "accuracy"},
        {"indefinite": "maybe"},
        {"rows": [0], "candidates": "some"},
        {"queries": None},
        {"queries": "x"},
    ],
    ids=lambda arguments: "-".join(arguments),
)
def test_words_that_are_not_offered(made, arguments):
    if arguments.get("candidates"):
        arguments = {**arguments, "candidates": made.candidates}
    with untouched(made.model), refused(ValueError, TypeError):
        dw.influence(made.task(), **{"queries": made.queries, "damping": 0.1, **arguments})


def test_dual_with_a_hessian(made):
    with untouched(made.model), refused(ValueError, match="(?i)gauss"):
        dw.influence(made.task(), queries=made.queries, damping=5.0, curvature="hessian", solver="dual")


def test_margin_of_a_regression():
    made = CASES["regression_three_outputs"]()
    with untouched(made.model), refused(ValueError, TypeError, match="(?i)margin"):
        dw.influence(made.task(), queries=made.queries, damping=0.1, measurement="margin")


@pytest.mark.parametrize(
    "measurement",
    [
        lambda outputs, targets: outputs,
        lambda outputs, targets: outputs.sum(),
        lambda outputs, targets: outputs[:, 0].detach(),
        lambda outputs, targets: outputs[:, 0] * math.nan,
        lambda outputs, targets: 1.0,
    ],
    ids=["matrix", "scalar", "detached", "nan", "number"],
)
def test_a_measurement_that_is_none(made, measurement):
    with untouched(made.model), refused(ValueError, TypeError):
        dw.influence(made.task(), queries=made.queries, damping=0.1, measurement=measurement)


REMOVALS = {
    "out of range": [[10]],
    "negative": [[-1]],
    "twice": [[3, 3]],
    "empty group": [[3], []],
    "nothing": [],
    "everything": [list(range(10))],
    "no list": 3,
    "float": [[1.5]],
    "bool": [[True, False]],
}


@pytest.mark.parametrize("remove", REMOVALS.values(), ids=REMOVALS.keys())
@pytest.mark.parametrize("call", ["parameter_shift", "influence"])
def test_removals_are_checked_first(made, remove, call):
    """Before any computation, so the model is not even called."""
    task = made.task()

    def explode(module, arguments):
        raise AssertionError("the model was called before the removals were checked")

    handle = made.model.register_forward_pre_hook(explode)
    try:
        with untouched(made.model), refused(ValueError, TypeError):
            if call == "parameter_shift":
                dw.parameter_shift(task, remove=remove, damping=0.1)
            else:
                dw.influence(task, queries=made.queries, damping=0.1, rows=remove)
    finally:
        handle.remove()


@pytest.mark.parametrize("rows", [[3, 3], [10], [-1], [], [0.5]], ids=str)
def test_rows_are_checked_like_removals(made, rows):
    with untouched(made.model), refused(ValueError, TypeError):
        dw.influence(made.task(), queries=made.queries, damping=0.1, rows=rows)


@pytest.mark.parametrize("epsilon", [math.nan, math.inf, "1/N"])
def test_epsilon_that_is_none(made, epsilon):
    with untouched(made.model), refused(ValueError, TypeError, match="(?i)epsilon"):
        dw.parameter_shift(made.task(), remove=[[1]], damping=0.1, epsilon=epsilon)


@pytest.mark.parametrize("arguments", [{"sign": "good"}, {"k": 1.5}, {"k": "all"}, {"query": "first"}], ids=str)
def test_top_of_what_it_cannot_mean(made, arguments):
    scores = dw.influence(made.task(), queries=made.queries, damping=0.1)
    with refused(ValueError, TypeError):
        scores.top(**{"query": 0, "k": 3, "sign": "helpful", **arguments})


@pytest.mark.parametrize("limit", [1.5, True, [100]])
def test_a_memory_limit_that_is_none(made, limit):
    with refused(ValueError, TypeError, match="memory_limit"):
        dw.influence(made.task(), queries=made.queries, damping=0.1, memory_limit=limit)


# too little memory


@pytest.mark.parametrize("limit", [2_000, 12_000])
def test_dual_too_large_for_its_memory(made, limit):
    """The kernel of N*C = 30 needs 7 KB and some working space; less is refused, with a way out."""
    task = made.task()
    with untouched(made.model), refused(MemoryError, match="(?i)memory") as caught:
        dw.influence(task, queries=made.queries, damping=0.1, solver="dual", memory_limit=limit)
    assert any(word in str(caught.value).lower() for word in ("cg", "solver", "raise", "smaller", "larger"))


# interruptions


class Interrupting(nn.Module):
    """A model that is interrupted on its n-th call, as by Ctrl-C."""

    def __init__(self, error: type[BaseException]):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.3), nn.Tanh(), nn.Linear(5, 3))
        self.calls = [0, 10**9]
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        self.calls[0] += 1
        if self.calls[0] >= self.calls[1]:
            raise self.error("stop")
        return self.layers(x)


@pytest.mark.slow
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("solver", ["auto", "dual", "cholesky", "cg", "minres", "lissa"])
@pytest.mark.parametrize("curvature", ["gauss_newton", "hessian"])
@pytest.mark.filterwarnings("ignore::UserWarning")  # that it was in train mode
def test_an_interruption_leaves_the_model_as_it_was(solver, curvature, error):
    """At the first, a middle and the last call of the model: the error comes through, and all else stays."""
    if solver == "dual" and curvature == "hessian":
        pytest.skip("the dual solver is for Gauss-Newton")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = classification(Interrupting(error).double(), (4,), 3, rows=6)
    made.model.train()
    made.model.layers[2].eval()
    task = made.task()
    calls = made.model.calls
    settings = {"queries": made.queries, "damping": 5.0, "curvature": curvature}
    settings["solver"] = dw.LiSSA(depth=40, batch_size=3) if solver == "lissa" else solver
    whole = dw.influence(task, **settings).values
    calls[0] = 0  # counted on the second run: what a task remembers of its first is not worked out again
    dw.influence(task, **settings)
    total = calls[0]
    assert total >= 1
    for stop in sorted({1, total // 2, total} - {0}):
        calls[:] = [0, stop]
        with untouched(made.model), pytest.raises((error, dw.DownweightError)) as caught:
            dw.influence(task, **settings)
        if error is KeyboardInterrupt:
            assert caught.type is KeyboardInterrupt
    calls[:] = [0, 10**9]
    assert torch.equal(dw.influence(task, **settings).values, whole)


def test_no_graph_is_left_on_the_answer(made):
    """Scores, shifts and self-influence are plain tensors; parameters' own gradients are neither used nor changed."""
    task = made.task()
    with untouched(made.model):
        answers = [
            dw.influence(task, queries=made.queries, damping=0.1).values,
            dw.self_influence(task, damping=0.1),
            dw.parameter_shift(task, remove=[[1]], damping=0.1),
            dw.grad_dot(task, made.queries).values,
        ]
    assert not any(answer.requires_grad or answer.grad_fn is not None for answer in answers)


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_called_without_gradients(made, guard):
    """Inside no_grad or inference_mode, as in an evaluation script: the same answer."""
    expected = dw.influence(made.task(), queries=made.queries, damping=0.1).values
    with guard():
        inside = dw.influence(made.task(), queries=made.queries, damping=0.1).values
    torch.testing.assert_close(inside, expected, rtol=1e-12, atol=0)


def test_data_is_not_changed(made):
    """Neither inputs nor targets, also when the first operation of the model is in place."""
    model = nn.Sequential(nn.ReLU(inplace=True), *copy.deepcopy(list(made.model)))
    inputs, targets = (part.clone() for part in made.train)
    query_inputs, query_targets = (part.clone() for part in made.queries)
    task = dw.Task(model, made.loss, (inputs, targets))
    first = dw.influence(task, queries=(query_inputs, query_targets), damping=0.1).values
    assert torch.equal(inputs, made.train[0])
    assert torch.equal(query_inputs, made.queries[0])
    assert torch.equal(dw.influence(task, queries=(query_inputs, query_targets), damping=0.1).values, first)


def test_huge_logits():
    """A confident network and a huge logit: finite scores, no warning, no NaN."""
    made = classification(mlp(4, 5, 3).double(), (4,), 3)
    with torch.no_grad():
        made.model[2].weight.mul_(1e4)
    scores = dw.influence(made.task(), queries=made.queries, damping=1e-3)
    assert scores.values.isfinite().all()


def test_rows_and_groups_in_one_list(made):
    """One group among single rows makes each of them a group; no member is lost."""
    scores = dw.influence(made.task(), queries=made.queries, damping=0.1, rows=[3, [5, 9]])
    groups = dw.influence(made.task(), queries=made.queries, damping=0.1, rows=[[3], [5, 9]])
    assert scores.removals == ((3,), (5, 9))
    assert torch.equal(scores.values, groups.values)


def test_rows_from_a_generator(made):
    """Looked through once to see what they are, and once to use them."""
    scores = dw.influence(made.task(), queries=made.queries, damping=0.1, rows=(row for row in (3, 5)))
    assert scores.removals == (3, 5)


def halves(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * ((outputs - targets) ** 2).sum(-1)


MIXING = {
    "sum of a broadcast": halves,  # (20, 1) - (20,) is (20, 20)
    "mean of a broadcast": lambda outputs, targets: ((outputs - targets) ** 2).mean(-1),
    "centred": lambda outputs, targets: (outputs - outputs.mean(0)).squeeze(-1).square(),
}


@pytest.mark.parametrize("function", MIXING.values(), ids=MIXING)
@pytest.mark.parametrize("where", ["loss", "measurement", "loss of queries"])
def test_functions_in_which_rows_see_each_other(function, where):
    """Outputs (20, 1) and targets (20,) broadcast to every pair: never a score, whatever shape comes out."""
    inputs, targets = torch.randn(20, 4, generator=torch.Generator().manual_seed(0)).double(), torch.arange(20.0) ** 2
    model = nn.Linear(4, 1).double()
    own = function if where != "measurement" else "squared_error"
    train = (inputs, targets[:, None] if where == "loss of queries" else targets)
    measurement = function if where == "measurement" else "loss"
    with untouched(model), refused(ValueError, match="one number a row|enter each other"):
        task = dw.Task(model, own, train)
        dw.influence(task, queries=(inputs, targets), damping=0.1, measurement=measurement)


def test_a_loss_for_a_model_with_one_number_a_row():
    """The model returns (B,), the loss gets (B, 1): the natural loss is told so, and how to write it."""

    class Flat(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).squeeze(-1)

    model, inputs = Flat(4, 1).double(), torch.eye(4).double()
    targets = torch.tensor([0.5, 1.0, -1.0, 2.0]).double()
    with refused(ValueError, match=r"\(B, 1\) where the model returns \(B,\).*squeeze\(-1\)"):
        dw.Task(model, lambda outputs, targets: 0.5 * (outputs - targets) ** 2, (inputs, targets))
    task = dw.Task(model, lambda outputs, targets: 0.5 * (outputs.squeeze(-1) - targets) ** 2, (inputs, targets))
    named = dw.Task(model, "squared_error", (inputs, targets))
    torch.testing.assert_close(dw.self_influence(task, damping=0.1), dw.self_influence(named, damping=0.1))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_every_class_in_every_integer_type(dtype):
    """In uint8 the number of ignored positions, -100, is class 156: it counts like any other."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        made = classification(nn.Linear(3, 160), (3,), 160, rows=4)
    labels = torch.tensor([156, 3, 100, 7]) if dtype != torch.int8 else torch.tensor([-100, 3, 100, 7])
    scores = {}
    for kind in (torch.long, dtype):
        task = dw.Task(made.model.double(), "cross_entropy", (made.train[0], labels.to(kind)))
        scores[kind] = dw.influence(task, queries=(made.train[0], labels.to(kind)), damping=0.1).values
        scores[kind, "losses"] = task.row_losses()
    assert torch.equal(scores[dtype], scores[torch.long])
    assert torch.equal(scores[dtype, "losses"], scores[torch.long, "losses"])


@pytest.mark.parametrize("curvature", ["gauss_newton", "hessian"])
@pytest.mark.parametrize(
    ("loss", "what"),
    [
        (lambda outputs, targets: -outputs.log().sum(1), "loss"),  # NaN below 0, and the derivative is finite
        (lambda outputs, targets: outputs.abs().sqrt().sum(1), "derivative"),
        (lambda outputs, targets: outputs.abs().pow(1.5).sum(1), "second derivative"),
    ],
    ids=["value", "gradient", "Hessian"],
)
def test_a_loss_that_is_not_finite_on_one_row(loss, what, curvature):
    """Named with its row, before it is averaged into every score."""

    class Shifts(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return input + 0 * super().forward(input)

    inputs = torch.linspace(1, 2, 14).double().reshape(7, 2)
    inputs[5, 1] = -1.0 if what == "loss" else 0.0
    model = Shifts(2, 2).double()
    task = dw.Task(model, loss, (inputs, torch.zeros(7)))
    with untouched(model), refused(ValueError, match=rf"(?i){what}.* NaN or infinite for row 5"):
        dw.influence(task, queries=(inputs[:2], torch.zeros(2)), damping=0.1, curvature=curvature)


# the model


class Counting(nn.Module):
    """Writes to what it reads: a buffer that counts calls and a running mean, an embedding that caps its norms."""

    def __init__(self):
        super().__init__()
        self.embedding, self.last = nn.Embedding(6, 4, max_norm=0.5), nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.ones(4))
        self.calls: Tensor
        self.mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        found = self.embedding(x)
        self.mean.mul_(0.9)
        return self.last(torch.tanh(found))


@pytest.mark.parametrize("solver", ["dual", "cholesky", "cg"])
def test_a_forward_that_writes_to_buffers_and_weights(solver):
    """They are the user's: as before afterwards, and the scores are those of the model as torch evaluates it."""
    with torch.random.fork_rng():
        torch.manual_seed(4)
        model = Counting().double()
    inputs, targets = torch.arange(6).repeat(2), torch.arange(12) % 3
    with untouched(model):
        task = dw.Task(model, "cross_entropy", (inputs, targets))
        scores = dw.influence(task, queries=(inputs, targets), damping=0.1, solver=solver)
        task.outputs(inputs)
    capped = copy.deepcopy(model)
    capped(inputs)  # once: from here on nothing exceeds the norm
    capped.embedding.max_norm = None
    truth = Case(capped, "cross_entropy", (inputs, targets), (inputs, targets), (inputs, targets)).oracle()
    torch.testing.assert_close(
        scores.values, truth.scores((inputs, targets), "gauss_newton", 0.1), rtol=1e-8, atol=1e-12
    )


def test_a_weight_that_forward_overwrites():
    """A clamp inside forward, through .data: also done to a copy."""

    class Clamps(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            self.weight.data.clamp_(-0.1, 0.1)
            return super().forward(input)

    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = classification(Clamps(4, 3).double(), (4,), 3)
    with untouched(made.model):
        dw.influence(made.task(), queries=made.queries, damping=0.1)


def embedded(**settings) -> nn.Sequential:
    return nn.Sequential(nn.Embedding(6, 4, **settings), nn.Flatten(), nn.Linear(4, 3)).double()


def test_sparse_gradients_are_refused_by_name():
    model = embedded(sparse=True)
    with untouched(model), refused(ValueError, match="Layer 0 has sparse"):
        dw.Task(model, "cross_entropy", (torch.arange(6), torch.arange(6) % 3))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_activation_checkpoints_are_refused(reentrant, first):
    """They recompute parts of the network during backward, or detach them with a warning: refused, with the way out."""
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = mlp(4, 5, 5, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = x if first else self.layers[:2](x)
            x = checkpoint(self.layers[:2] if first else self.layers[2:4], x, use_reentrant=reentrant)
            return self.layers[2 if first else 4 :](x)  # pyright: ignore[reportArgumentType]

    made = classification(Checkpointed().double(), (4,), 3)
    with untouched(made.model), refused(ValueError, match="checkpointing off"):
        made.task()


def test_a_part_that_is_compiled_is_run_as_written(recwarn):
    """No compilation, and none for every new batch size: what torch.compile wraps is called itself."""
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = classification(mlp(4, 5, 3).double(), (4,), 3)
    expected = dw.influence(made.task(), queries=made.queries, damping=0.1).values
    first: Any = torch.compile(made.model[0], backend=backend)
    model = nn.Sequential(first, *made.model[1:])
    scores = dw.influence(dw.Task(model, "cross_entropy", made.train), queries=made.queries, damping=0.1)
    torch.testing.assert_close(scores.values, expected, rtol=1e-10, atol=0)
    assert not compiled


def test_a_model_converted_after_the_task(made):
    task = made.task()
    made.model.float()
    with untouched(made.model), refused(TypeError, match="float32.*was torch.float64.*Make the Task after"):
        dw.influence(task, queries=made.queries, damping=0.1)


def test_a_model_that_squeezes_a_single_row(made):
    model = made.model
    for forward in (lambda model, x: model(x).squeeze(), lambda model, x: model(x)[:, 0].squeeze()):
        with untouched(model), refused(ValueError, match=r"squeeze\(-1\)"):
            made.task(forward=forward)


def as_dict(x: Tensor) -> dict[str, Tensor]:
    return {"input": x}


UNFIT = {
    "wide": lambda x: torch.cat([x, x], 1),
    "integers": lambda x: x.long(),
    "dict": as_dict,
    "tuple": lambda x: (x, x),
}


@pytest.mark.parametrize("change", UNFIT.values(), ids=UNFIT)
@pytest.mark.parametrize("where", ["train", "queries", "candidates"])
def test_inputs_that_do_not_fit_the_model(made, change, where):
    parts = {"train": made.train, "queries": made.queries, "candidates": made.candidates}
    parts[where] = (change(parts[where][0]), parts[where][1])
    if where == "train" and change is as_dict:
        parts[where] = ({"nothing": made.train[0]}, made.train[1])
    with untouched(made.model), refused(ValueError, match=where):
        task = dw.Task(made.model, made.loss, parts["train"])
        dw.influence(task, queries=parts["queries"], candidates=parts["candidates"], damping=0.1)


def test_queries_with_other_names():
    """A dict with other keys: refused by its names, not by what the model makes of them."""
    made = CASES["dict_inputs"]()
    inputs = {f"{name}_": value for name, value in made.queries[0].items()}
    with untouched(made.model), refused(ValueError, match="queries.*_'.*training row"):
        dw.influence(made.task(), queries=(inputs, made.queries[1]), damping=0.1)


def test_a_ragged_dataset(made):
    rows = [(torch.zeros(3 + index).double(), 0) for index in range(4)]

    class Ragged(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int):
            return rows[index]

    with refused(ValueError, match="train.*one shape"):
        dw.Task(made.model, made.loss, Ragged())


# settings of other kinds


class OwnLoss:
    def value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets[:, None]).square().sum(1)


WRONG = {
    "loss class": lambda made, task: dw.Task(made.model, OwnLoss, made.train),
    "l2 of two": lambda made, task: made.task(l2=torch.ones(2)),
    "weights in a word": lambda made, task: made.task(weights="balanced"),
    "row_ids in a number": lambda made, task: made.task(row_ids=5),
    "row_ids in a word": lambda made, task: made.task(row_ids="0123456789"),
    "row_ids NaN": lambda made, task: made.task(row_ids=[math.nan, *range(9)]),
    "row_ids objects": lambda made, task: made.task(row_ids=[object(), *range(9)]),
    "damping of two": lambda made, task: dw.influence(task, made.queries, damping=torch.ones(2)),
    "curvature in a list": lambda made, task: dw.influence(task, made.queries, curvature=["hessian"]),
    "memory_limit": lambda made, task: dw.influence(task, made.queries, memory_limit="1.2.3"),
    "memory_limit point": lambda made, task: dw.influence(task, made.queries, memory_limit=".GB"),
    "parameters in a word": lambda made, task: task.with_parameters("x"),
    "expect a model": lambda made, task: dw.Scores.load(made.saved, expect=made.model),
    "CG rtol": lambda made, task: dw.CG(rtol="x"),
    "MINRES rtol": lambda made, task: dw.MINRES(rtol=[1e-3]),
    "LiSSA scale": lambda made, task: dw.LiSSA(scale="a"),
    "LiSSA seed": lambda made, task: dw.LiSSA(seed="x"),
    "rate in a word": lambda made, task: dw.tracin(task, made.queries, checkpoints=[task.flat], learning_rates="a"),
    "rate None": lambda made, task: dw.tracin(task, made.queries, checkpoints=[task.flat], learning_rates=None),
    "one checkpoint bare": lambda made, task: dw.tracin(task, made.queries, checkpoints=task.flat, learning_rates=0.1),
    "checkpoints a state": lambda made, task: dw.tracin(
        task, made.queries, checkpoints=task.state_dict(), learning_rates=0.1
    ),
}


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG)
def test_settings_of_the_wrong_kind(made, call, tmp_path):
    """Each is refused by a sentence that names it."""
    task = made.task()
    dw.influence(task, made.queries, damping=0.1).save(tmp_path / "saved")
    object.__setattr__(made, "saved", tmp_path / "saved")
    with untouched(made.model), refused(ValueError, TypeError):
        call(made, task)


def test_numbers_of_other_libraries(made):
    """numpy's and torch's numbers are numbers."""
    plain = dw.influence(made.task(l2=0.5), made.queries, damping=0.25, solver=dw.CG(rtol=0.125, max_steps=3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other = dw.influence(
            made.task(l2=np.float32(0.5)),
            made.queries,
            damping=torch.tensor(0.25),
            solver=dw.CG(rtol=np.float32(0.125)),
        )
    assert torch.equal(plain.values, other.values)
    assert plain.top(k=np.int64(2)) == plain.top(k=2)
    task = made.task()
    one, two = task.flat, task.flat + 0.1
    expected = dw.tracin(task, made.queries, checkpoints=[one, two], learning_rates=[0.5, 0.5]).values
    for checkpoints, rates in (
        (torch.stack([one, two]), 0.5),
        ([one, two], np.float32(0.5)),
        ((one, two), torch.full((2,), 0.5)),
        ([one, two], np.array([0.5, 0.5])),
        ([one, two], torch.tensor(0.5)),
    ):
        found = dw.tracin(task, made.queries, checkpoints=checkpoints, learning_rates=rates).values
        assert torch.equal(found, expected)


def test_a_checkpoint_that_diverged(made):
    state = {name: value.clone() for name, value in made.model.state_dict().items()}
    state["2.weight"][0, 0] = math.nan
    with untouched(made.model), refused(ValueError, match=r"2\.weight of the state dict has NaN"):
        dw.tracin(made.task(), made.queries, checkpoints=[state], learning_rates=0.1)


@pytest.mark.parametrize(
    "ids",
    [
        np.arange(10) + 2**40,
        np.array([f"r{i}" for i in range(10)]),
        torch.arange(10),
        [np.float64(0.5), np.int64(2), "a", *range(7)],
        [(0, "a"), (1, ("b", np.int64(3))), *range(8)],
    ],
    ids=["numpy", "numpy texts", "torch", "mixed", "nested"],
)
def test_names_of_rows_survive_the_disk(made, ids, tmp_path):
    task = made.task(row_ids=ids)
    for name, rows in (("all", None), ("groups", [[1], [0, 2]])):
        scores = dw.influence(task, made.queries, damping=0.1, rows=rows)
        scores.save(tmp_path / name)
        loaded = dw.Scores.load(tmp_path / name, expect=task)
        assert loaded.removals == scores.removals
        assert repr(loaded.removals) == repr(scores.removals)


@pytest.mark.parametrize("scale", [1.0, 20.0])
def test_a_convex_loss_in_float32_code(made, scale):
    """Its rounding makes eigenvalues of -1e-8; that is not a loss that bends down. Confident outputs included."""

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(scale * outputs.float(), targets, reduction="none")

    def exact(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(scale * outputs, targets, reduction="none")

    own = dw.influence(dw.Task(made.model, loss, made.train), made.queries, damping=0.1)
    named = dw.influence(dw.Task(made.model, exact, made.train), made.queries, damping=0.1)
    torch.testing.assert_close(own.values, named.values, rtol=1e-3, atol=1e-5 * named.values.abs().max().item())
