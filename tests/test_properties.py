"""What must hold for every task: algebra of the operators, and indifference to batches and to the order of rows.

Tasks are drawn by Hypothesis (derandomised, so every run sees the same ones). Tolerances: 1e-12 of the largest entry
for sums in another order (a few hundred float64 additions), 1e-9 where a system of condition below 1e4 is solved.
"""

import copy
from dataclasses import dataclass

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import downweight as dw
from cases import CASES, task_of

LOSSES = ["cross_entropy", "squared_error", "binary_cross_entropy"]
quick = settings(max_examples=12, deadline=None, derandomize=True)
few = settings(quick, max_examples=6)  # where whole scores are computed


@dataclass
class Small:
    """A drawn task, with what is needed to build variants of it."""

    model: nn.Module
    loss: str
    inputs: Tensor
    targets: Tensor
    queries: tuple[Tensor, Tensor]
    l2: float
    weights: Tensor | None
    generator: torch.Generator

    def task(self, rows: Tensor | None = None, **changes) -> dw.Task:
        """The task on a choice of the rows, all by default."""
        rows = torch.arange(len(self.inputs)) if rows is None else rows
        train = (self.inputs[rows], self.targets[rows])
        weights = None if self.weights is None else self.weights[rows]
        return dw.Task(self.model, self.loss, train, **{"l2": self.l2, "weights": weights, **changes})

    def vectors(self, count: int) -> Tensor:
        size = sum(p.numel() for p in self.model.parameters())
        return torch.randn(count, size, dtype=torch.float64, generator=self.generator)


@st.composite
def small_tasks(draw) -> Small:
    """N from 1 to 7, one or two hidden layers, any of the losses, with or without l2 and weights."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    rows, classes, hidden = draw(st.integers(1, 7)), draw(st.integers(2, 4)), draw(st.integers(1, 5))
    loss, weighted = draw(st.sampled_from(LOSSES)), draw(st.booleans())
    activation = draw(st.sampled_from([nn.Tanh, nn.ReLU, nn.SiLU]))
    model = nn.Sequential(nn.Linear(3, hidden), activation(), nn.Linear(hidden, classes)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, dtype=torch.float64, generator=generator) / 2)

    def some(n: int):
        inputs = torch.randn(n, 3, dtype=torch.float64, generator=generator)
        if loss == "cross_entropy":
            return inputs, torch.randint(classes, (n,), generator=generator)
        return inputs, torch.rand(n, classes, dtype=torch.float64, generator=generator)

    weights = torch.rand(rows, dtype=torch.float64, generator=generator) + 0.1 if weighted else None
    return Small(model, loss, *some(rows), some(2), draw(st.sampled_from([0.0, 0.05])), weights, generator)


def assert_near(actual: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    scale = expected.abs().max().clamp_min(1e-12)
    assert ((actual - expected).abs().max() / scale).item() <= tolerance


OPERATORS = {"gauss_newton": dw.GaussNewtonMatrix, "hessian": dw.HessianMatrix}


@pytest.mark.parametrize("curvature", OPERATORS)
@quick
@given(small=small_tasks())
def test_products_are_symmetric(curvature, small):
    """u . A v = v . A u."""
    operator, (u, v) = OPERATORS[curvature](small.task()), small.vectors(2)
    left, right = u @ (operator @ v), v @ (operator @ u)
    assert abs(left - right) <= 1e-12 * (u.norm() * (operator @ v).norm())


@quick
@given(small=small_tasks())
def test_gauss_newton_is_positive(small):
    """v . G v >= 0, and at least l2 |v|^2."""
    vectors = small.vectors(4)
    forms = (vectors * (dw.GaussNewtonMatrix(small.task()) @ vectors)).sum(1)
    squares = vectors.square().sum(1)
    assert (forms - small.l2 * squares >= -1e-13 * squares).all()


@pytest.mark.parametrize("curvature", OPERATORS)
@quick
@given(small=small_tasks(), factor=st.floats(-3, 3))
def test_products_are_linear(curvature, small, factor):
    """A (u + c v) = A u + c A v, and a block of vectors is its vectors one by one."""
    operator, (u, v) = OPERATORS[curvature](small.task()), small.vectors(2)
    assert_near(operator @ (u + factor * v), operator @ u + factor * (operator @ v))
    assert_near(operator @ torch.stack([u, v]), torch.stack([operator @ u, operator @ v]))


@pytest.mark.parametrize("curvature", OPERATORS)
@quick
@given(small=small_tasks(), damping=st.floats(0, 100))
def test_damping_adds_exactly_itself(curvature, small, damping):
    """(A + c I) v - A v = c v to the last bits of the sum."""
    operator, vectors = OPERATORS[curvature](small.task()), small.vectors(3)
    torch.testing.assert_close(
        dw.Damped(operator, damping) @ vectors, operator @ vectors + damping * vectors, rtol=1e-15, atol=1e-14
    )


@pytest.mark.parametrize("curvature", OPERATORS)
@quick
@given(small=small_tasks(), data=st.data())
def test_a_split_into_parts_averages_back(curvature, small, data):
    """The mean over all rows is the mean of the parts weighted by their sizes, however ragged the split."""
    rows = len(small.inputs)
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, rows - 1)), max_size=rows - 1))) if rows > 1 else []
    edges = [0, *cuts, rows]
    whole, vectors = OPERATORS[curvature](small.task()), small.vectors(2)
    parts = [
        (stop - start) / rows * (whole.sample(torch.arange(start, stop)) @ vectors)
        for start, stop in zip(edges, edges[1:], strict=False)
    ]
    assert_near(torch.stack(parts).sum(0), whole @ vectors)


@pytest.mark.slow
@pytest.mark.parametrize("curvature", OPERATORS)
@few
@given(small=small_tasks(), data=st.data())
def test_the_order_of_rows_does_not_matter(curvature, small, data):
    """A permuted training set has the same curvature, and its scores are permuted with it."""
    order = torch.tensor(data.draw(st.permutations(range(len(small.inputs)))))
    straight, permuted = small.task(), small.task(order)
    vectors = small.vectors(2)
    assert_near(OPERATORS[curvature](permuted) @ vectors, OPERATORS[curvature](straight) @ vectors)
    damping = 5.0 if curvature == "hessian" else 0.05
    one = dw.influence(straight, queries=small.queries, damping=damping, curvature=curvature).values
    two = dw.influence(permuted, queries=small.queries, damping=damping, curvature=curvature).values
    assert_near(two, one[:, order], 1e-9)


@pytest.mark.parametrize("curvature", OPERATORS)
@few
@given(small=small_tasks())
def test_every_row_twice_is_the_same_cost(curvature, small):
    """Doubling the training set leaves the mean cost alone, so curvature stays and every score halves."""
    twice = torch.arange(len(small.inputs)).repeat(2)
    vectors = small.vectors(2)
    assert_near(OPERATORS[curvature](small.task(twice)) @ vectors, OPERATORS[curvature](small.task()) @ vectors)
    damping = 5.0 if curvature == "hessian" else 0.05
    one = dw.influence(small.task(), queries=small.queries, damping=damping, curvature=curvature).values
    two = dw.influence(small.task(twice), queries=small.queries, damping=damping, curvature=curvature).values
    assert_near(two, one.repeat(1, 2) / 2, 1e-9)


@quick
@given(small=small_tasks())
def test_a_weight_of_two_is_two_rows(small):
    """One row with weight 2 among N rows acts like the sum of two copies, at the same normaliser 1/N."""
    rows = len(small.inputs)
    base = torch.ones(rows, dtype=torch.float64) if small.weights is None else small.weights
    doubled = base.clone()
    doubled[0] *= 2
    once, twice = small.task(weights=base), small.task(weights=doubled)
    vectors = small.vectors(2)
    first = small.task(torch.tensor([0]), weights=base[:1], l2=0.0)
    added = dw.GaussNewtonMatrix(first) @ vectors / rows
    assert_near(dw.GaussNewtonMatrix(twice) @ vectors, dw.GaussNewtonMatrix(once) @ vectors + added)


@few
@given(small=small_tasks())
def test_epsilon_zero_moves_nothing(small):
    """No downweighting, no shift: exactly zero."""
    assume(len(small.inputs) > 1)  # nothing can be removed from one row
    shift = dw.parameter_shift(small.task(), remove=[[0]], damping=0.1, epsilon=0.0)
    assert (shift == 0).all()


@pytest.mark.slow
@few
@given(small=small_tasks())
def test_queries_do_not_see_each_other(small):
    """A query's line is the same alone and in company; a repeated query repeats its line."""
    task = small.task()
    both = dw.influence(task, queries=small.queries, damping=0.05).values
    inputs, targets = small.queries
    for index in range(2):
        alone = dw.influence(task, queries=(inputs[index : index + 1], targets[index : index + 1]), damping=0.05)
        assert_near(alone.values[0], both[index], 1e-9)


@few
@given(small=small_tasks())
def test_solvers_agree(small):
    """Three exact paths to one answer: d x d, N C x N C, and iterations."""
    task = small.task()
    answers = [
        dw.influence(task, queries=small.queries, damping=0.05, solver=solver).values
        for solver in ("cholesky", "dual", dw.CG(rtol=1e-12, max_steps=1_000))
    ]
    assert_near(answers[1], answers[0], 1e-9)
    assert_near(answers[2], answers[0], 1e-9)


@pytest.mark.filterwarnings("ignore::downweight.DownweightWarning")  # batches of LiSSA need not meet its tolerance
@pytest.mark.parametrize("solver", ["auto", "dual", "cholesky", "cg", "lissa"])
def test_the_same_call_gives_the_same_bits(solver):
    made = CASES["mlp_smooth"]()
    solver = dw.LiSSA(depth=200, repeats=2, batch_size=4) if solver == "lissa" else solver
    calls = [
        dw.influence(copy.copy(task_of("mlp_smooth")), queries=made.queries, damping=0.5, solver=solver).values
        for _ in range(2)
    ]
    assert torch.equal(*calls)


@pytest.mark.parametrize("name", ["mlp_relu", "batch_norm", "language_model", "regression_with_positions"])
def test_group_of_everything_is_the_sum(name):
    """A group is a sum of rows: all rows but one, against the single scores."""
    made = CASES[name]()
    group = list(range(made.rows - 1))
    single = dw.influence(task_of(name), queries=made.queries, damping=0.05).values
    grouped = dw.influence(task_of(name), queries=made.queries, damping=0.05, rows=[group]).values
    assert_near(grouped[:, 0], single[:, :-1].sum(1), 1e-9)


@pytest.mark.parametrize("name", ["mlp_relu", "cnn", "language_model"])
@pytest.mark.parametrize("curvature", OPERATORS)
def test_lanczos_finds_both_ends(name, curvature):
    """The extreme eigenvalues of the operator against those of its dense matrix."""
    from cases import oracle_of

    values = torch.linalg.eigvalsh(oracle_of(name).curvature(curvature))
    spectrum = dw.lanczos(OPERATORS[curvature](task_of(name)))
    scale = values.abs().max()
    assert abs(spectrum.smallest - values[0]) <= 1e-3 * scale
    assert abs(spectrum.largest - values[-1]) <= 1e-3 * scale
    # The error that it reports bounds the error that it has.
    assert abs(spectrum.smallest - values[0]) <= spectrum.smallest_error + 1e-10 * scale
    assert abs(spectrum.largest - values[-1]) <= spectrum.largest_error + 1e-10 * scale
