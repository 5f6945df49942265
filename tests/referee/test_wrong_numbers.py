"""Wrong numbers without an error: items 1 to 15 of what attribution libraries get wrong.

The first line of each docstring says the mistake in plain words; the rest what is checked here. Each mistake was seen
in a published library or in its users' reports.
"""

import copy
import inspect
import math
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import downweight as dw
import oracles
from cases import CASES, EXOTIC, Case, classification, exotic, exotic_oracle, mlp, oracle_of, task_of
from untouched import untouched


def assert_near(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Largest difference over the largest entry."""
    assert actual.shape == expected.shape
    assert ((actual - expected).abs().max() / expected.abs().max()).item() <= tolerance


def some_rows(count: int) -> Case:
    """A smooth network of 43 parameters and as many rows as asked for."""
    with torch.random.fork_rng():
        torch.manual_seed(21)
        return classification(mlp(4, 5, 3).double(), (4,), 3, rows=count, l2=0.01)


def twenty_rows() -> Case:
    """Twenty training rows, so that batches of 7 and 15 leave a ragged end."""
    return some_rows(20)


@contextmanager
def batches_of(model: nn.Module) -> Iterator[list[int]]:
    """The batch sizes with which the model is called inside."""
    sizes: list[int] = []
    handle = model.register_forward_pre_hook(lambda module, arguments: sizes.append(len(arguments[0])))
    try:
        yield sizes
    finally:
        handle.remove()


def under_all_limits(model: nn.Module, compute) -> dict[tuple[int, ...], Tensor]:
    """What `compute(memory_limit)` gives for every way of cutting the rows that some limit leads to."""
    answers = {}
    for limit in (2**12, 2**13, 2**14, 3 * 2**14, 2**16, 2**17, 2**30):
        with batches_of(model) as sizes:
            try:
                answer = compute(limit)
            except dw.MemoryLimit:
                continue
        answers[tuple(sorted(set(sizes)))] = answer
    return answers


@pytest.mark.slow
@pytest.mark.parametrize("solver", ["cholesky", "dual", "cg"])
@pytest.mark.parametrize("curvature", ["gauss_newton", "hessian"])
def test_01_scores_do_not_depend_on_batch_size(solver, curvature):
    """Inverting the curvature of each batch and adding the answers up: a sum of inverses is not the inverse of a sum.

    The scores under memory limits that cut the rows into ones, into ragged batches, and not at all.
    """
    if solver == "dual" and curvature == "hessian":
        pytest.skip("the dual solver is for Gauss-Newton")
    # Beside the matrix that Cholesky needs twenty rows always fit at once; a hundred do not.
    made = some_rows(100 if solver == "cholesky" else 20)
    damping = 0.02 if curvature == "gauss_newton" else made.oracle().definite_damping("hessian")
    solver = dw.CG(rtol=1e-12, max_steps=2_000) if solver == "cg" else solver

    def scores(limit: int) -> Tensor:
        settings = {"damping": damping, "curvature": curvature, "solver": solver, "memory_limit": limit}
        return dw.influence(made.task(), queries=made.queries, **settings).values

    answers = under_all_limits(made.model, scores)
    least = 2 if solver == "dual" else 3  # whose kernel does not fit under the smaller limits
    assert len(answers) >= least, f"the limits led to {list(answers)} only"
    truth = made.oracle().scores(made.queries, curvature, damping)
    for answer in answers.values():
        assert_near(answer, truth, 1e-8)


@pytest.mark.parametrize("curvature", ["gauss_newton", "hessian"])
def test_02_ragged_batches_are_not_means_of_means(curvature):
    """Averaging the averages of batches of 15 and of 5 rows, which counts the five three times as much: 20 % off.

    Products of the curvature under every cut of 20 rows, and the mean over any choice of rows.
    """
    made = twenty_rows()
    oracle, kind = made.oracle(), {"gauss_newton": dw.GaussNewtonMatrix, "hessian": dw.HessianMatrix}[curvature]
    vectors = torch.randn(2, len(oracle.theta), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    truth = vectors @ oracle.curvature(curvature)
    answers = under_all_limits(made.model, lambda limit: kind(made.task(), memory_limit=limit) @ vectors)
    assert len(answers) >= 3, f"the limits led to {list(answers)} only"
    for answer in answers.values():
        assert_near(answer, truth, 1e-10)
    first, second = kind(made.task()).sample(torch.arange(15)), kind(made.task()).sample(torch.arange(15, 20))
    assert_near((15 * (first @ vectors) + 5 * (second @ vectors)) / 20, truth, 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp_smooth", "cnn", "language_model", "row_weights", "scaled_loss"])
@pytest.mark.parametrize("curvature", ["gauss_newton", "hessian"])
def test_03_self_influence_is_the_diagonal_of_the_scores(name, curvature):
    """Self-influence from a shortcut of its own that disagrees with the pairwise scores.

    Against the diagonal of the scores of all rows on all rows, weighted rows included.
    """
    made, task = CASES[name](), task_of(name)
    damping = 0.02 if curvature == "gauss_newton" else oracle_of(name).definite_damping("hessian")
    pairs = dw.influence(task, queries=made.train, damping=damping, curvature=curvature).values
    assert_near(dw.self_influence(task, damping=damping, curvature=curvature), pairs.diagonal(), 1e-9)


@pytest.mark.parametrize("solver", ["dual", "cholesky"])
def test_03_self_influence_does_not_depend_on_batch_size(solver):
    """Self-influence that differs for each batch size, because rows are matched with their own batch only.

    Under limits that cut the rows into ones, into ragged batches, and not at all.
    """
    made = some_rows(100 if solver == "cholesky" else 20)
    pairs = dw.influence(made.task(), queries=made.train, damping=0.02).values
    answers = under_all_limits(
        made.model, lambda limit: dw.self_influence(made.task(), damping=0.02, solver=solver, memory_limit=limit)
    )
    assert len(answers) >= (2 if solver == "dual" else 3), f"the limits led to {list(answers)} only"
    for answer in answers.values():
        assert_near(answer, pairs.diagonal(), 1e-9)


@pytest.mark.parametrize("name", ["mlp_smooth", "mlp_relu", "cnn", "language_model", "regression_three_outputs"])
def test_04_gauss_newton_is_not_the_empirical_fisher(name):
    """Calling gradient outer products with the data's labels "Gauss-Newton": another matrix, with other units.

    Against a dense J^T H_y J to 1e-10, on cases where the empirical Fisher is far from it.
    """
    oracle = oracle_of(name)
    matrix = dw.GaussNewtonMatrix(task_of(name)) @ torch.eye(len(oracle.theta), dtype=torch.float64)
    assert_near(matrix, oracle.gauss_newton, 1e-10)
    apart = (oracle.empirical_fisher - oracle.gauss_newton).norm() / oracle.gauss_newton.norm()
    assert apart > 0.1


PROBABILITIES = {
    "uniform": [0.0, 0.0, 0.0, 0.0],
    "random": [0.3, -1.2, 2.0, 0.4],
    "peaked": [30.0, -5.0, 2.0, 0.0],
    "more than peaked": [300.0, 0.0, -20.0, 1.0],
}


@pytest.mark.parametrize("logits", PROBABILITIES.values(), ids=PROBABILITIES.keys())
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_05_softmax_curvature_has_its_cross_terms(logits, dtype):
    """A softmax Fisher without its cross terms, or one in which p - 1 of a confident output is rounding noise.

    A model whose outputs are its parameters has H_y as curvature: sum_c p_c (e_c - p)(e_c - p)^T, entry by entry and
    also where p is within 1e-13 of one.
    """

    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.logits = nn.Parameter(torch.tensor(logits, dtype=dtype))

        def forward(self, x: Tensor) -> Tensor:
            return self.logits + 0 * x

    task = dw.Task(Constant(), "cross_entropy", (torch.zeros(2, 1, dtype=dtype), torch.tensor([0, 1])))
    actual = dw.GaussNewtonMatrix(task) @ torch.eye(4, dtype=dtype)
    # The truth in terms of the other probabilities: 1 - p_c is their sum, so nothing cancels.
    p = torch.tensor(logits, dtype=torch.float64).softmax(0)
    expected = -torch.outer(p, p)
    for c in range(4):
        expected[c, c] = p[c] * sum(p[k] for k in range(4) if k != c)
    if max(logits) < 10:
        torch.testing.assert_close(expected, oracles.softmax_fisher(p), rtol=1e-12, atol=1e-15)
    # Relative to each entry: the largest one says nothing about a confident output. float32 products round to 1e-7.
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=1e-30)


LAYERS = [
    "mlp_without_bias",
    "cnn",
    "cnn_one_dimensional",
    "layer_norm",
    "group_norm",
    "batch_norm",
    "layer_used_twice",
    "bare_parameters",
    "in_place_activations",
    "language_model",
    "language_model_of_torch_parts",
    "multihead_attention",
    "fused_attention",
    "dict_inputs",
    "custom_forward",
    "frozen_parameters",
    "residual",
    "tied_autoencoder",
    "weight_norm",
    "recurrent_cell",
    "prelu_and_softmax_inside",
]


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_06_every_kind_of_parameter_is_right(name):
    """Right for plain layers only: missing biases, reused layers, tied weights, norms, embeddings, strides, in-place.

    Gradients, Gauss-Newton scores and Hessian scores of every case against autograd, one row at a time.
    """
    made, oracle = CASES[name](), oracle_of(name)
    dot = oracle.measurement_gradients(made.queries) @ oracle.gradients.T / made.rows
    assert_near(dw.grad_dot(task_of(name), made.queries).values, dot, 1e-10)
    for curvature in ("gauss_newton", "hessian"):
        damping = 0.02 if curvature == "gauss_newton" else oracle.definite_damping("hessian")
        scores = dw.influence(task_of(name), queries=made.queries, damping=damping, curvature=curvature)
        assert_near(scores.values, oracle.scores(made.queries, curvature, damping), 1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXOTIC)
@pytest.mark.parametrize("curvature", ["gauss_newton", "hessian"])
@pytest.mark.parametrize("solver", ["auto", "cg"])
def test_06_less_common_layers_are_right_or_refused_by_name(name, curvature, solver):
    """A layer that the method cannot handle is skipped in silence or given a wrong derivative.

    Recurrent layers, normalisations, `weight_norm` (whose own second derivative in PyTorch is wrong): the right answer,
    or an error that names what stands in the way. The model is as it was after either.
    """
    made, oracle = exotic(name), exotic_oracle(name)
    damping = 0.02 if curvature == "gauss_newton" else oracle.definite_damping("hessian")
    truth = oracle.scores(made.queries, curvature, damping)
    with untouched(made.model):
        try:
            settings = {"damping": damping, "curvature": curvature, "solver": solver}
            scores = dw.influence(made.task(), queries=made.queries, **settings)
        except dw.DownweightError as error:
            words = str(error).lower().replace("_", "")
            assert name.lower() in words or any(
                type(module).__name__.lower() in words for module in made.model.modules() if module is not made.model
            )
        else:
            assert_near(scores.values, truth, 1e-8 if solver == "auto" else 1e-5)


def test_07_parameters_left_out_are_counted():
    """Leaving parameters out without a word: the score is then about another, smaller model.

    Every result says how many parameters of the model it is about; frozen ones and unchosen ones are not, tied ones
    count once.
    """
    for name in ("mlp_smooth", "frozen_parameters", "some_parameters", "language_model", "layer_used_twice"):
        made = CASES[name]()
        scores = dw.influence(task_of(name), queries=made.queries, damping=0.1)
        coverage = scores.coverage
        covered = coverage["covered"] if isinstance(coverage, dict) else coverage.covered
        total = coverage["total"] if isinstance(coverage, dict) else coverage.total
        assert covered == len(oracle_of(name).theta)
        assert total == sum(p.numel() for p in made.model.parameters())
        if covered < total:
            assert any(str(covered) in note for note in scores.notes)


# 8: LiSSA


def lissa_scores(solver: dw.LiSSA, damping: float = 0.3) -> dw.Scores:
    made = twenty_rows()
    return dw.influence(made.task(), queries=made.queries, damping=damping, solver=solver)


def cg_scores(damping: float = 0.3) -> Tensor:
    made = twenty_rows()
    return dw.influence(made.task(), queries=made.queries, damping=damping, solver=dw.CG(rtol=1e-12)).values


def test_08_lissa_has_one_limit_for_every_scale():
    """LiSSA with 1/sigma forgotten, or with a damping that sigma multiplies: another limit for each scale.

    Two scales and the one that it finds, deterministic batches, deep enough: all three are CG's answer.
    """
    for scale in (None, 5.0, 20.0):
        scores = lissa_scores(dw.LiSSA(scale=scale, depth=3_000, repeats=1, batch_size=20, rtol=1e-9))
        assert_near(scores.values, cg_scores(), 1e-6)
        assert torch.as_tensor(scores.converged).all()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::downweight.DownweightWarning")  # noisy batches need not meet the tolerance
def test_08_lissa_averages_its_repeats():
    """Repeats of LiSSA added up, or averaged twice: the answer is off by their number.

    Half batches: the answer is near CG's for 1 and for 6 repeats, and nearer for 6.
    """
    truth = cg_scores(damping=1.0)
    errors = []
    for repeats in (1, 6):
        each = []
        for seed in range(3):
            solver = dw.LiSSA(scale=5.0, depth=60, repeats=repeats, batch_size=10, seed=seed)
            each.append((lissa_scores(solver, damping=1.0).values - truth).norm() / truth.norm())
        errors.append(torch.stack(each).mean().item())
    assert errors[0] < 0.2
    assert errors[1] < 0.7 * errors[0]  # independent repeats would give 1/sqrt(6) = 0.4


def test_08_lissa_says_that_it_has_not_converged():
    """LiSSA that returns whatever it holds at the end, without a word.

    Too shallow: a warning, a flag on the system and a residual that is the true one.
    """
    with pytest.warns(dw.DownweightWarning):
        scores = lissa_scores(dw.LiSSA(scale=20.0, depth=3, repeats=1, batch_size=20))
    assert not torch.as_tensor(scores.converged).any()
    assert torch.as_tensor(scores.residuals).min() > 0.05


def test_08_lissa_that_diverges_says_so():
    """LiSSA with a scale below the largest eigenvalue: numbers of 1e30, or NaN, returned as scores.

    Noticed, named, and no number from a diverged run is called converged.
    """
    made = twenty_rows()
    operator = dw.Damped(dw.GaussNewtonMatrix(made.task()), 0.3)
    vector = made.oracle().gradients[0]
    largest = torch.linalg.eigvalsh(made.oracle().gauss_newton)[-1].item()
    solver = dw.LiSSA(scale=largest / 8, depth=2_000, repeats=1, batch_size=20)
    with pytest.warns(dw.DownweightWarning, match="(?i)scale"):
        solution = dw.solve(operator, vector, solver)
    assert not solution.converged.any()
    assert "diverge" in str(solution.result[0].value).lower() or "DIVERGED" in str(solution.result[0])
    assert solution.steps.max() < 1_000


def test_08_lissa_keeps_no_graph():
    """LiSSA whose steps stay connected by autograd: memory grows with the depth until there is none.

    Outputs of the model alive at any one time, for a shallow and a deep run.
    """

    def most_alive(depth: int) -> int:
        made, alive, most = twenty_rows(), set(), [0]

        def remember(module, arguments, output):
            reference = weakref.ref(output, alive.discard)
            alive.add(reference)
            most[0] = max(most[0], len(alive))

        made.model.register_forward_hook(remember)
        solver = dw.LiSSA(scale=20.0, depth=depth, repeats=1, batch_size=5)
        dw.influence(made.task(), queries=made.queries, damping=1.0, solver=solver)
        return most[0]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dw.DownweightWarning)
        assert most_alive(300) <= most_alive(30) + 2


# 9: CG


def test_09_cg_stops_when_it_is_done():
    """CG that runs on after it has converged and divides zero by zero.

    A system solved in two steps and 500 steps allowed, a zero vector, and an exact starting residual: all finite.
    """
    matrix = torch.diag(torch.tensor([1.0, 1.0, 2.0, 2.0], dtype=torch.float64))
    vectors = torch.tensor([[1.0, 2, 3, 4], [0, 0, 0, 0], [1, 0, 0, 0]], dtype=torch.float64)
    solution = dw.solve(matrix, vectors, dw.CG(rtol=1e-12, max_steps=500))
    torch.testing.assert_close(solution.value, vectors / matrix.diagonal(), rtol=1e-12, atol=0)
    assert solution.converged.all()
    assert solution.steps.max() <= 4
    assert solution.steps[1] == 0


def test_09_cg_of_a_row_without_gradient():
    """A row without a gradient, or a query without one, makes every score of the block NaN."""
    made = CASES["a_row_without_counted_positions"]()
    task = task_of("a_row_without_counted_positions")
    for solver in ("cg", "minres", "auto", "dual", "cholesky"):
        scores = dw.influence(task, queries=made.train, damping=0.1, solver=solver, rows=[2, 0])
        assert scores.values.isfinite().all()
        assert (scores.values[:, 0] == 0).all()
        assert (scores.values[2] == 0).all()
        assert torch.as_tensor(scores.converged).all()


@pytest.mark.parametrize("solver", [dw.CG, dw.MINRES])
def test_09_a_tolerance_is_kept(solver):
    """A tolerance that is accepted and ignored.

    Looser ones take fewer steps, and every residual is the true one, recomputed here, below what was asked for.
    """
    made = twenty_rows()
    operator, vectors = dw.Damped(dw.GaussNewtonMatrix(made.task()), 1e-3), made.oracle().gradients[:5]
    matrix, steps = made.oracle().system("gauss_newton", 1e-3), []
    for rtol in (1e-2, 1e-5, 1e-9):
        solution = dw.solve(operator, vectors, solver(rtol=rtol, max_steps=500))
        true = (solution.value @ matrix - vectors).norm(dim=1) / vectors.norm(dim=1)
        assert (true <= 1.01 * rtol).all()
        torch.testing.assert_close(solution.residual, true, rtol=1e-3, atol=1e-12)
        steps.append(int(solution.steps.max()))
    assert steps[0] < steps[1] < steps[2]


@pytest.mark.parametrize("solver", [dw.CG, dw.MINRES])
def test_09_a_convergence_flag_is_not_dropped(solver):
    """The solver knows that it has not converged and the score does not.

    Two steps: one warning, `converged` false on the scores, residuals as large as they are; `throw=True` raises.
    """
    made = twenty_rows()
    with pytest.warns(dw.DownweightWarning) as caught:
        scores = dw.influence(made.task(), queries=made.queries, damping=1e-4, solver=solver(rtol=1e-10, max_steps=2))
    assert sum(issubclass(w.category, dw.DownweightWarning) for w in caught) == 1
    assert not torch.as_tensor(scores.converged).any()
    assert torch.as_tensor(scores.residuals).min() > 1e-6
    operator = dw.Damped(dw.GaussNewtonMatrix(made.task()), 1e-4)
    with pytest.raises(dw.NotConverged):
        dw.solve(operator, made.oracle().gradients[0], solver(rtol=1e-10, max_steps=2), throw=True)


def in_both_precisions(made: Case) -> tuple[tuple[dw.Task, Any], tuple[dw.Task, Any]]:
    """(task, queries) of the same numbers in float32 and in float64."""

    def single(pair: tuple[Any, Tensor]) -> tuple[Any, Tensor]:
        inputs, targets = pair
        return (inputs.float() if inputs.is_floating_point() else inputs), targets

    def double(pair: tuple[Any, Tensor]) -> tuple[Any, Tensor]:
        inputs, targets = single(pair)
        return (inputs.double() if inputs.is_floating_point() else inputs), targets

    model = copy.deepcopy(made.model).float()
    coarse = dw.Task(model, made.loss, single(made.train)), single(made.queries)
    fine = dw.Task(copy.deepcopy(model).double(), made.loss, double(made.train)), double(made.queries)
    return coarse, fine


@pytest.mark.slow
@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
@pytest.mark.parametrize("damping", [1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8])
def test_09_a_float32_residual_sees_the_rounding_of_the_network(activation, damping):
    """A residual that is computed from rounded products, and so is 1e-10 where the scores are wrong by 1e-4.

    The exact dual solver in float32 against float64: no relative error of a query's scores exceeds its residual, which
    stays below the tolerance at an ordinary damping, and says so by flag and warning where rounding decides.
    """
    made = classification(mlp(10, 16, 3, activation=activation), (10,), 3, rows=20)
    (task, queries), (fine, asked) = in_both_precisions(made)
    truth = dw.influence(fine, asked, damping=damping, solver=dw.Dual(rtol=1e-6)).values
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scores = dw.influence(task, queries, damping=damping, solver="dual")
    error = (scores.values.double() - truth).norm(dim=1) / truth.norm(dim=1)
    assert (error <= torch.as_tensor(scores.residuals)).all()
    if damping >= 1e-3:
        assert scores.converged.all()
    if damping <= 1e-6:
        assert not scores.converged.any()
    if damping == 1e-8:  # of their own rows the rounding is less
        with pytest.warns(dw.DownweightWarning, match="float64"):
            dw.self_influence(task, damping=damping, solver="dual")
    assert bool(caught) != bool(scores.converged.all())


def test_09_a_float32_residual_without_second_derivatives():
    """The same where torch cannot check: `EmbeddingBag` has no second derivative, and the dual solver needs none."""
    (task, queries), (fine, asked) = in_both_precisions(exotic("EmbeddingBag"))
    for damping, converged in ((1e-2, True), (1e-7, False)):
        truth = dw.influence(fine, asked, damping=damping, solver=dw.Dual(rtol=1e-6)).values
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", dw.DownweightWarning)
            scores = dw.influence(task, queries, damping=damping, solver="dual")
        error = (scores.values.double() - truth).norm(dim=1) / truth.norm(dim=1)
        assert (error <= torch.as_tensor(scores.residuals)).all()
        assert bool(scores.converged.all()) is converged


# 10: indefinite Hessians


@pytest.mark.parametrize("solver", ["auto", "cg", "cholesky", "minres"])
def test_10_an_indefinite_hessian_is_refused(solver):
    """CG on a Hessian with negative curvature sits at a residual of 0.6 and its numbers are returned all the same.

    Below minus the lowest eigenvalue every solver refuses, with that eigenvalue; above it every solver is right.
    """
    made, oracle = CASES["mlp_relu"](), oracle_of("mlp_relu")
    lowest = torch.linalg.eigvalsh(oracle.hessian)[0].item()
    task = task_of("mlp_relu")
    with pytest.raises(dw.IndefiniteSystem) as caught:
        dw.influence(task, queries=made.queries, damping=-0.6 * lowest, curvature="hessian", solver=solver)
    assert caught.value.smallest_eigenvalue == pytest.approx(0.4 * lowest, rel=0.01)
    enough = -1.2 * lowest
    scores = dw.influence(task, queries=made.queries, damping=enough, curvature="hessian", solver=solver)
    assert_near(scores.values, oracle.scores(made.queries, "hessian", enough), 1e-5)


def test_10_the_lowest_eigenvalue_is_the_lowest_eigenvalue():
    """Shifted power iteration for the lowest eigenvalue, seen to be wrong by a factor of 40.

    A spectrum with a small negative end far below a large positive one: found by Lanczos to three digits.
    """
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(80, 80, dtype=torch.float64, generator=generator))[0]
    values = torch.cat([torch.tensor([-0.03]), torch.linspace(0.0, 0.2, 78), torch.tensor([50.0])]).double()
    matrix = basis @ torch.diag(values) @ basis.T
    spectrum = dw.lanczos(dw.Dense((matrix + matrix.T) / 2))
    assert spectrum.smallest == pytest.approx(-0.03, rel=1e-3)
    assert spectrum.largest == pytest.approx(50.0, rel=1e-6)


# 11: weight decay


def softmax_optimum() -> Case:
    """Softmax regression trained to the optimum of its regularised cost."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        made = classification(nn.Linear(3, 3).double(), (3,), 3, rows=15, l2=0.05)
    oracle = made.oracle()
    torch.nn.utils.vector_to_parameters(oracles.newton(oracle.cost_at, oracle.theta), oracle.parameters)
    return made


@pytest.mark.parametrize("curvature", ["gauss_newton", "hessian"])
def test_11_weight_decay_is_in_the_gradient_and_in_the_curvature(curvature):
    """Weight decay left out of the curvature, or added to every row's gradient.

    At a regularised optimum the rows' gradients sum to -N l2 theta, so the scores of all rows on a query sum to
    -l2 grad m . C^-1 theta: a number that either mistake changes.
    """
    made = softmax_optimum()
    oracle = made.oracle()
    scores = dw.influence(made.task(), queries=made.queries, damping=0.0, curvature=curvature)
    solved = torch.linalg.solve(oracle.curvature(curvature), oracle.theta)
    known = -0.05 * oracle.measurement_gradients(made.queries) @ solved
    torch.testing.assert_close(scores.values.sum(1), known, rtol=1e-9, atol=1e-12)


def test_11_leave_one_out_agrees_at_a_regularised_optimum():
    """The same mistake seen from outside: predicted changes that retraining does not show.

    Each row downweighted by 1e-3/N and the cost minimised again: the change of every query's loss to 1e-3.
    """
    made = softmax_optimum()
    oracle, small = made.oracle(), 1e-3
    predicted = small * dw.influence(made.task(), queries=made.queries, damping=0.0).values
    before = oracle.losses_at(oracle.theta, *made.queries)
    for row in range(made.rows):
        moved = oracles.newton(
            lambda t, row=row: oracle.downweighted_cost_at(t, [row], small / made.rows), oracle.theta
        )
        actual = oracle.losses_at(moved, *made.queries) - before
        assert ((actual - predicted[:, row]).norm() / actual.norm()).item() < 1e-3


# 12: train mode


class Noisy(nn.Module):
    """Dropout and batch normalisation, and an error on demand."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.dropout = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)
        self.last = nn.Linear(6, 3)
        self.fails = [False]

    def forward(self, x: Tensor) -> Tensor:
        if self.fails[0]:
            raise RuntimeError("out of luck")
        return self.last(self.dropout(torch.tanh(self.norm(self.first(x)))))


def test_12_dropout_and_batch_norm_are_in_eval_mode():
    """Attribution with dropout on and batch statistics moving: other scores at every call, and a changed model.

    In train mode the scores are those of eval mode, the answer says that it switched, and afterwards, also after an
    exception in the middle, every submodule's mode and every running statistic is as it was.
    """
    made = classification(Noisy().double(), (4,), 3)
    made.model.eval()
    expected = dw.influence(made.task(), queries=made.queries, damping=0.05)
    assert not any("eval" in note for note in expected.notes)
    made.model.train()
    made.model.norm.eval()
    task = made.task()
    with untouched(made.model), warnings.catch_warnings():
        warnings.simplefilter("ignore", dw.DownweightWarning)  # it may say so by a warning too
        scores = dw.influence(task, queries=made.queries, damping=0.05)
    assert torch.equal(scores.values, expected.values)
    assert any("eval" in note for note in scores.notes)
    made.model.fails[0] = True
    with untouched(made.model), warnings.catch_warnings():
        warnings.simplefilter("ignore", dw.DownweightWarning)
        with pytest.raises((RuntimeError, dw.DownweightError)):
            dw.influence(task, queries=made.queries, damping=0.05)


# 13: the baseline of a warm start


@pytest.mark.skipif(not hasattr(dw, "TwoStage"), reason="retraining is not part of this version")
def test_13_warm_start_is_measured_against_the_same_steps():
    """Warm-start retraining compared with where it started: the drift of training on is booked as influence.

    The two-stage response is theta_s plus the difference between training on without the row and training on with it,
    in the same batch order; the plain warm start is offered under its own name, and they differ by that drift.
    """
    made = twenty_rows()
    package: Any = dw  # until it has them
    recipe = package.Recipe(optimizer="sgd", lr=0.05, batch_size=5, epochs=4, seed=0)
    task = package.train(made.task(), recipe)
    order = {"remove": [[3], [7]], "batch_order": "shared"}
    warm = package.respond(task, package.WarmStart(), **order)
    two_stage = package.respond(task, package.TwoStage(), **order)
    drift = warm.parameters - two_stage.parameters
    torch.testing.assert_close(drift[0], drift[1], rtol=1e-6, atol=1e-9)
    assert drift.norm() > 1e-6


# 14: dtypes


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8, torch.int8])
def test_14_class_numbers_of_any_integer_type(dtype):
    """Labels silently cast to float, or a crash in the depths of the loss because they are int32."""
    made = CASES["mlp_smooth"]()
    task = dw.Task(made.model, made.loss, (made.train[0], made.train[1].to(dtype)), l2=0.02)
    queries = (made.queries[0], made.queries[1].to(dtype))
    scores = dw.influence(task, queries=queries, damping=0.05)
    assert_near(scores.values, oracle_of("mlp_smooth").scores(made.queries, "gauss_newton", 0.05), 1e-8)


def test_14_labels_of_binary_cross_entropy_may_be_integers():
    """The same for 0/1 labels, which the loss needs as numbers."""
    made = CASES["binary_three_outputs"]()
    for dtype in (torch.int64, torch.bool, torch.float32):
        task = dw.Task(made.model, made.loss, (made.train[0], made.train[1].to(dtype)))
        scores = dw.influence(task, queries=(made.queries[0], made.queries[1].to(dtype)), damping=0.05)
        assert_near(scores.values, oracle_of("binary_three_outputs").scores(made.queries, "gauss_newton", 0.05), 1e-8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_14_half_precision_is_answered_in_its_precision_or_refused(dtype):
    """Half precision that runs and returns noise: 1/N and p - 1 fall below its resolution.

    Refused with the way out (`model.float()`), or right to the rounding of the inputs.
    """
    made = CASES["mlp_smooth"]()
    model = copy.deepcopy(made.model).to(dtype)
    with untouched(model):
        try:
            task = dw.Task(model, made.loss, (made.train[0].to(dtype), made.train[1]), l2=0.02)
            scores = dw.influence(task, queries=(made.queries[0].to(dtype), made.queries[1]), damping=0.05)
        except dw.DownweightError as error:
            assert "float" in str(error)  # noqa: PT017
            return
    rounded = Case(model.double(), made.loss, made.train, made.queries, made.candidates, {"l2": 0.02})
    assert_near(scores.values.double(), rounded.oracle().scores(made.queries, "gauss_newton", 0.05), 0.05)


def test_14_token_numbers_stay_integers():
    """Integer inputs cast to the model's dtype, which an embedding cannot take."""
    made = CASES["language_model"]()
    for dtype in (torch.int64, torch.int32):
        task = dw.Task(made.model, made.loss, (made.train[0].to(dtype), made.train[1]), **made.settings)
        scores = dw.influence(task, queries=(made.queries[0].to(dtype), made.queries[1]), damping=0.05)
        assert_near(scores.values, oracle_of("language_model").scores(made.queries, "gauss_newton", 0.05), 1e-8)


def test_14_confident_outputs_in_float32():
    """p - 1 of a confident float32 output is rounding noise, and so is every score that is made of it.

    A float32 network with margins up to 30 nats against float64 algebra on the same float32 outputs.
    """
    made = CASES["confident"]()
    model = copy.deepcopy(made.model).float()
    exact = Case(copy.deepcopy(model).double(), made.loss, made.train, made.queries, made.candidates, made.settings)

    def single(pair):
        return pair[0].float(), pair[1]

    task = dw.Task(model, made.loss, single(made.train), **made.settings)
    gradients = exact.oracle().gradients.norm(dim=1)
    truth = exact.oracle().self_influence("gauss_newton", 0.05)
    values = dw.self_influence(task, damping=0.05).double()
    assert gradients.min() < 1e-6 * gradients.max()  # rows that p - 1 in float32 would drown
    # Relative to each row's own value: float32 logits of size 30 are good to 2e-6, their exponentials to as much.
    torch.testing.assert_close(values, truth, rtol=1e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("loss", ["cross_entropy", "binary_cross_entropy"])
def test_14_the_gradient_of_a_confident_output_does_not_cancel(loss, dtype):
    """The same at the source: p - 1 is zero from 37 nats on in float64 and from 17 in float32, and the row is lost.

    A model whose outputs are its parameters: the gradient of its own class is minus the sum of the
    probabilities of the others, to six digits.
    """
    logits = [45.0, 0.0, -2.0, 1.0]

    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.logits = nn.Parameter(torch.tensor(logits, dtype=dtype))

        def forward(self, x: Tensor) -> Tensor:
            return self.logits + 0 * x

    others = torch.tensor(logits, dtype=torch.float64)
    if loss == "cross_entropy":
        targets = torch.tensor([0])
        expected = -(others[1:] - others.logsumexp(0)).exp().sum()
    else:
        targets = torch.tensor([[1.0, 0.0, 0.0, 0.0]], dtype=dtype)
        expected = -torch.sigmoid(-others[0])
    train = (torch.zeros(1, 1, dtype=dtype), targets)
    task = dw.Task(Constant(), loss, train)
    first_output = dw.grad_dot(task, train, measurement=lambda outputs, targets: outputs[:, 0])
    assert first_output.values.item() == pytest.approx(expected.item(), rel=1e-6, abs=0)


# 15: choosing by what is reported


def test_15_nothing_is_tuned_on_the_queries():
    """Damping or scale chosen on the very metric that is then reported.

    What a call settles by itself depends on the training rows only: other queries, the same damping and the same scale;
    and a default damping, where there is one, is a number in the signature.
    """
    made = twenty_rows()
    default = inspect.signature(dw.influence).parameters["damping"].default
    assert default is inspect.Parameter.empty or isinstance(default, float)
    one = dw.influence(made.task(), queries=made.queries, damping=0.3)
    two = dw.influence(made.task(), queries=made.candidates, damping=0.3)
    assert one.damping == two.damping == 0.3
    operator = dw.Damped(dw.GaussNewtonMatrix(made.task()), 0.3)
    solver = dw.LiSSA(depth=3_000, repeats=1, batch_size=20)
    scales = [dw.solve(operator, vector, solver).stats["scale"] for vector in made.oracle().gradients[:2]]
    assert scales[0] == scales[1]
    assert math.isfinite(scales[0])
