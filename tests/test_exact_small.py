"""Every case, both curvatures, every solver: the library against explicit float64 matrices.

Exact solvers must agree to 1e-8 of the largest entry. The worst condition number in the table is about 500 (largest
eigenvalue 23 over a damping of 0.05), so 500 * 2.2e-16 = 1e-13 would be rounding; 1e-8 is what the contract promises
and leaves no room for a wrong formula. The iterative solvers stop at a relative residual of 1e-11, times 500.
"""

import pytest
import torch

import downweight as dw
import oracles
from cases import CASES, oracle_of, task_of

EXACT = 1e-8
GAUSS_NEWTON = {
    "cholesky": "cholesky",
    "dual": "dual",
    "auto": "auto",
    "cg": dw.CG(rtol=1e-11, max_steps=5_000),
    "minres": dw.MINRES(rtol=1e-11, max_steps=5_000),
}
HESSIAN = {name: solver for name, solver in GAUSS_NEWTON.items() if name != "dual"}
COMBINATIONS = [("gauss_newton", name) for name in GAUSS_NEWTON] + [("hessian", name) for name in HESSIAN]


def relative_error(values: torch.Tensor, truth: torch.Tensor) -> float:
    """Largest difference over the largest entry; shape and dtype must be right too."""
    assert values.shape == truth.shape
    assert values.dtype == torch.float64
    assert not values.requires_grad
    return ((values - truth).abs().max() / truth.abs().max()).item()


def damping_of(name: str, curvature: str) -> float:
    """0.01 for Gauss-Newton; for a Hessian enough to make it definite."""
    return 0.01 if curvature == "gauss_newton" else oracle_of(name).definite_damping("hessian")


@pytest.mark.parametrize(
    ("name", "curvature", "solver"),
    # MINRES meets CG's systems through the same products: every fourth case is enough for it.
    [
        pytest.param(n, c, s, marks=[] if s == ("dual" if c == "gauss_newton" else "cholesky") else pytest.mark.slow)
        for i, n in enumerate(CASES)
        for c, s in COMBINATIONS
        if s != "minres" or i % 4 == 0
    ],
)
def test_scores(name, curvature, solver):
    """The (Q, N) scores of the queries' losses, with the dense solve as the truth."""
    damping = damping_of(name, curvature)
    made = CASES[name]()
    scores = dw.influence(
        task_of(name), queries=made.queries, damping=damping, curvature=curvature, solver=GAUSS_NEWTON[solver]
    )
    truth = oracle_of(name).scores(made.queries, curvature, damping)
    assert relative_error(scores.values, truth) <= EXACT
    assert torch.as_tensor(scores.converged).all()
    assert torch.as_tensor(scores.residuals).max() <= 1e-9


@pytest.mark.parametrize("curvature", ["gauss_newton", "hessian"])
@pytest.mark.parametrize("name", CASES)
def test_products(name, curvature):
    """The operator on every unit vector is the dense curvature; l2 is in it once, damping not."""
    operator = {"gauss_newton": dw.GaussNewtonMatrix, "hessian": dw.HessianMatrix}[curvature](task_of(name))
    truth = oracle_of(name).curvature(curvature)
    eye = torch.eye(len(truth), dtype=torch.float64)
    assert operator.size == len(truth)
    assert relative_error(operator @ eye, truth) <= 1e-10  # products only, no solve: rounding of sums of N rows
    assert relative_error(operator @ eye[1], truth[1]) <= 1e-10
    damped = dw.Damped(operator, 0.3)
    assert relative_error(damped @ eye, truth + 0.3 * eye) <= 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("solver", ["dual", "cholesky"])
@pytest.mark.parametrize("name", CASES)
def test_self_influence(name, solver):
    values = dw.self_influence(task_of(name), damping=0.01, solver=solver)
    assert relative_error(values, oracle_of(name).self_influence("gauss_newton", 0.01)) <= EXACT


@pytest.mark.parametrize("name", CASES)
def test_self_influence_of_the_hessian(name):
    damping = damping_of(name, "hessian")
    values = dw.self_influence(task_of(name), damping=damping, curvature="hessian")
    assert relative_error(values, oracle_of(name).self_influence("hessian", damping)) <= EXACT


@pytest.mark.slow
@pytest.mark.parametrize("curvature", ["gauss_newton", "hessian"])
@pytest.mark.parametrize("name", CASES)
def test_parameter_shift(name, curvature):
    """Single rows and a group; a removal's shift is minus its addition's; the unit of epsilon is not hidden."""
    damping, truth = damping_of(name, curvature), oracle_of(name)
    remove = [[3], [0, 2, 4], [1]]
    shift = dw.parameter_shift(task_of(name), remove=remove, damping=damping, curvature=curvature)
    assert relative_error(shift, truth.shifts(remove, curvature, damping)) <= EXACT
    added = dw.parameter_shift(task_of(name), remove=remove, damping=damping, curvature=curvature, epsilon=-0.7)
    assert relative_error(added, truth.shifts(remove, curvature, damping, epsilon=-0.7)) <= EXACT


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_rows_and_groups(name):
    """A choice of rows keeps its order, a group is the sum of its rows; by either exact solver."""
    made, truth = CASES[name](), oracle_of(name)
    first, second = ("dual", "cholesky") if len(name) % 2 else ("cholesky", "dual")
    single = truth.scores(made.queries, "gauss_newton", 0.01)
    picked = dw.influence(task_of(name), queries=made.queries, damping=0.01, solver=first, rows=[3, 0, 2])
    assert relative_error(picked.values, single[:, [3, 0, 2]]) <= EXACT
    groups = [[3], [0, 2, 4], [1, 3]]
    grouped = dw.influence(task_of(name), queries=made.queries, damping=0.01, solver=second, rows=groups)
    truth_of_groups = truth.group_scores(made.queries, "gauss_newton", 0.01, groups)
    assert relative_error(grouped.values, truth_of_groups) <= EXACT


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_candidates(name):
    """Rows outside the training set, as if removed with weight 1/N, N the number of training rows."""
    made, solver = CASES[name](), "cholesky" if len(name) % 2 else "dual"
    scores = dw.influence(task_of(name), queries=made.queries, damping=0.01, solver=solver, candidates=made.candidates)
    truth = oracle_of(name).candidate_scores(made.queries, made.candidates, "gauss_newton", 0.01)
    assert relative_error(scores.values, truth) <= EXACT


def test_candidates_equal_rows_when_they_are_the_same():
    made = CASES["mlp_smooth"]()
    train = (made.train[0][2:5], made.train[1][2:5])
    outside = dw.influence(made.task(), queries=made.queries, damping=0.01, candidates=train)
    inside = dw.influence(made.task(), queries=made.queries, damping=0.01, rows=[2, 3, 4])
    torch.testing.assert_close(outside.values, inside.values, rtol=1e-10, atol=0)


WITH_MARGIN = [
    name
    for name in CASES
    if name.startswith(("mlp", "cnn", "binary_flat", "binary_one", "binary_three", "language_model", "dict_inputs"))
]


def binary_margin(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """(2t - 1) y, summed over the outputs."""
    return ((2 * targets.reshape(outputs.shape) - 1) * outputs).sum(-1)


@pytest.mark.slow
@pytest.mark.parametrize("curvature", ["gauss_newton", "hessian"])
@pytest.mark.parametrize("name", WITH_MARGIN)
def test_margin(name, curvature):
    """The predicted change of log p_t / (1 - p_t), which loss_scale does not touch."""
    made, damping = CASES[name](), damping_of(name, curvature)
    scores = dw.influence(
        task_of(name), queries=made.queries, damping=damping, curvature=curvature, measurement="margin"
    )
    measurement = oracles.margin if made.loss == "cross_entropy" else binary_margin
    truth = oracle_of(name).scores(made.queries, curvature, damping, measurement=measurement)
    assert relative_error(scores.values, truth) <= EXACT


def first_output_squared(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A measurement that looks at outputs and targets: (B,)."""
    return outputs.reshape(len(outputs), -1)[:, 0].square() + 0.1 * targets.reshape(len(targets), -1)[:, 0]


@pytest.mark.parametrize("name", ["mlp_smooth", "regression_three_outputs", "language_model", "custom_forward"])
def test_a_measurement_of_ones_own(name):
    made = CASES[name]()
    truth = oracle_of(name).scores(made.queries, "gauss_newton", 0.01, measurement=first_output_squared)
    for measurement in (first_output_squared, dw.Measurement("squared", first_output_squared, higher_is_better=True)):
        scores = dw.influence(task_of(name), queries=made.queries, damping=0.01, measurement=measurement)
        assert relative_error(scores.values, truth) <= EXACT


@pytest.mark.parametrize("name", ["mlp_relu", "language_model_of_torch_parts"])
def test_an_indefinite_hessian_is_solved_exactly_when_allowed(name):
    """Cholesky (LDL^T) and MINRES at a damping below minus the lowest eigenvalue: the stationary point."""
    made, truth = CASES[name](), oracle_of(name)
    lowest = torch.linalg.eigvalsh(truth.hessian)[0].item()
    damping = -0.47 * lowest  # between eigenvalues, so that A is indefinite and not nearly singular
    values = torch.linalg.eigvalsh(truth.system("hessian", damping))
    assert values[0] < -0.1
    condition = (values.abs().max() / values.abs().min()).item()
    for solver in ("cholesky", dw.MINRES(rtol=1e-12, max_steps=20_000)):
        scores = dw.influence(
            task_of(name),
            queries=made.queries,
            damping=damping,
            curvature="hessian",
            solver=solver,
            indefinite="allow",
        )
        tolerance = EXACT if isinstance(solver, str) else 1e-11 * condition
        assert relative_error(scores.values, truth.scores(made.queries, "hessian", damping)) <= tolerance
        assert any("stationary" in note for note in scores.notes)


@pytest.mark.parametrize("name", ["mlp_relu", "language_model_of_torch_parts"])
@pytest.mark.parametrize("solver", ["cholesky", "cg", "minres", "auto"])
def test_an_indefinite_hessian_is_refused_unless_allowed(name, solver):
    made, truth = CASES[name](), oracle_of(name)
    lowest = torch.linalg.eigvalsh(truth.hessian)[0].item()
    with pytest.raises(dw.IndefiniteSystem) as caught:
        dw.influence(task_of(name), queries=made.queries, damping=-0.47 * lowest, curvature="hessian", solver=solver)
    # of the system that was to be solved, A = H + damping I
    assert caught.value.smallest_eigenvalue == pytest.approx(0.53 * lowest, rel=0.01)


FROM_DATASETS = [
    "mlp_smooth",
    "cnn",
    "batch_norm",
    "language_model",
    "regression_flat_targets",
    "regression_with_positions",
    "binary_flat_targets",
    "dict_inputs",
    "custom_forward",
    "row_weights",
    "own_loss_of_counts",
]


@pytest.mark.slow
@pytest.mark.parametrize("name", FROM_DATASETS)
def test_a_dataset_gives_what_tensors_give(name):
    """Rows read one at a time from a map-style dataset, dict inputs and flat targets included."""
    made = CASES[name]()

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return made.rows

        def __getitem__(self, index):
            inputs, targets = made.train
            if isinstance(inputs, dict):
                return {key: value[index] for key, value in inputs.items()}, targets[index]
            return inputs[index], targets[index]

    task = dw.Task(made.model, loss=made.loss, train=Rows(), **made.settings)
    scores = dw.influence(task, queries=made.queries, damping=0.01)
    assert relative_error(scores.values, oracle_of(name).scores(made.queries, "gauss_newton", 0.01)) <= EXACT


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp_smooth", "cnn", "language_model", "batch_norm", "layer_used_twice"])
def test_other_parameters_give_the_scores_there(name):
    """`task.with_parameters(flat)` is the same task at another theta; the first task stays where it was."""
    made, truth = CASES[name](), oracle_of(name)
    task = made.task()
    generator = torch.Generator().manual_seed(3)
    moved = truth.theta + 0.1 * torch.randn(truth.theta.shape, dtype=torch.float64, generator=generator)
    before = dw.influence(task, queries=made.queries, damping=0.01).values
    there = dw.influence(task.with_parameters(moved), queries=made.queries, damping=0.01).values
    again = dw.influence(task, queries=made.queries, damping=0.01).values
    assert torch.equal(before, again)
    try:
        torch.nn.utils.vector_to_parameters(moved, truth.parameters)
        elsewhere = made.oracle()
        expected = elsewhere.scores(made.queries, "gauss_newton", 0.01)
    finally:
        torch.nn.utils.vector_to_parameters(truth.theta, truth.parameters)
    assert relative_error(there, expected) <= EXACT


@pytest.mark.parametrize(
    "name", ["mlp_smooth", "cnn", "language_model", "binary_three_outputs", "regression_with_positions"]
)
@pytest.mark.parametrize("curvature", ["gauss_newton", "hessian"])
def test_float32_agrees_with_float64(name, curvature):
    """The same model in float32: rounding of 1e-7 times a condition number of a few hundred, nothing worse."""
    import copy

    made, damping = CASES[name](), damping_of(name, curvature)

    def single(pair):
        return tuple(part.float() if part.is_floating_point() else part for part in pair)

    model = copy.deepcopy(made.model).float()
    task = dw.Task(model, loss=made.loss, train=single(made.train), **made.settings)
    scores = dw.influence(task, queries=single(made.queries), damping=damping, curvature=curvature)
    truth = oracle_of(name).scores(made.queries, curvature, damping)
    assert ((scores.values.double() - truth).abs().max() / truth.abs().max()).item() <= 3e-4
