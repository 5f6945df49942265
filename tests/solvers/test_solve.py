"""solve(): names, refusals, warnings, and what an operator is."""

import pickle
import subprocess
import sys
import warnings
from dataclasses import dataclass

import pytest
import torch
from matrices import Spy, dense_solution, matrix_with, relative_error, spread, vectors_of

from downweight.curvature.dense import Dense
from downweight.curvature.operator import Damped
from downweight.errors import (
    DownweightError,
    DownweightWarning,
    IndefiniteSystem,
    InvalidInput,
    InvalidType,
    NonFinite,
    NotConverged,
)
from downweight.solve import solve
from downweight.solvers.cg import CG
from downweight.solvers.cholesky import Cholesky
from downweight.solvers.minres import MINRES
from downweight.solvers.solver import Result, Solution

MATRIX = matrix_with(spread(6, 10.0))
VECTOR = vectors_of(1, 6)[0]


@pytest.mark.parametrize("solver", ["auto", "cholesky", "cg", "minres", "lissa"])
def test_solvers_have_names(solver):
    solution = solve(MATRIX, VECTOR, solver)
    assert bool(solution.converged.all())
    # cond · rtol of LiSSA, the least accurate: 10 · 1e-2
    assert relative_error(solution.value, dense_solution(MATRIX, VECTOR[None])[0]) < 0.1


def test_a_solver_of_ones_own_needs_only_two_methods():
    @dataclass(frozen=True)
    class Guess:
        def init(self, operator, *, indefinite="raise"):
            return operator

        def compute(self, state, vectors):
            count = len(vectors)
            return Solution(
                vectors.clone(),
                torch.full((count,), 0.5, dtype=torch.float64),
                torch.zeros(count, dtype=torch.long),
                (Result.STEPS,) * count,
                {"message": "a guess"},
            )

    with pytest.warns(DownweightWarning, match=r"residual is 0\.5\. a guess\."):
        assert torch.equal(solve(MATRIX, VECTOR, Guess()).value, VECTOR)


class TestRefusals:
    @pytest.mark.parametrize(
        ("vectors", "error", "match"),
        [
            (vectors_of(2, 5), InvalidInput, r"shape \(2, 5\); expected \(6,\) or \(K, 6\)"),
            (vectors_of(2, 6)[None], InvalidInput, r"shape \(1, 2, 6\)"),
            (vectors_of(2, 6).float(), InvalidType, "float32.*float64; convert one"),
            (torch.ones(6, dtype=torch.long), InvalidType, "int64"),
            (VECTOR * torch.nan, NonFinite, r"Vector 0 holds NaN or infinity \(1 of 1 do\)"),
            (torch.stack([VECTOR, VECTOR / 0]), NonFinite, "Vector 1"),
        ],
    )
    def test_vectors(self, vectors, error, match):
        with pytest.raises(error, match=match):
            solve(MATRIX, vectors)

    @pytest.mark.parametrize(
        ("matrix", "error", "match"),
        [
            (torch.ones(2, 3), InvalidInput, "square"),
            (torch.ones(4), InvalidInput, "square"),
            (torch.ones(0, 0), InvalidInput, "square"),
            (torch.eye(3, dtype=torch.long), InvalidType, "int64"),
            (torch.eye(3, dtype=torch.float16), InvalidType, "float16"),
            (torch.eye(3) * torch.nan, NonFinite, "NaN"),
            (torch.tensor([[1.0, 0.5], [0.0, 1.0]]), InvalidInput, "not symmetric.*0.5"),
        ],
    )
    def test_matrices(self, matrix, error, match):
        with pytest.raises(error, match=match):
            Dense(matrix)

    def test_rounding_is_not_asymmetry(self):
        matrix = MATRIX.clone()
        matrix[0, 1] *= 1 + 1e-14
        assert bool(solve(matrix, VECTOR, CG()).converged.all())

    @pytest.mark.parametrize("damping", [-1e-9, float("nan"), float("inf")])
    def test_damping(self, damping):
        with pytest.raises(InvalidInput, match="damping is finite and not negative"):
            Damped(Dense(MATRIX), damping)

    def test_an_unknown_name(self):
        with pytest.raises(InvalidInput, match="no solver 'gauss'; the names are auto, cg"):
            solve(MATRIX, VECTOR, "gauss")

    @pytest.mark.parametrize("solver", [CG, MINRES])
    @pytest.mark.parametrize("settings", [{"rtol": 0.0}, {"rtol": 2.0}, {"max_steps": 0}, {"max_steps": -3}], ids=str)
    def test_settings(self, solver, settings):
        with pytest.raises(InvalidInput):
            solver(**settings)

    @pytest.mark.parametrize("settings", [{"rtol": -1.0}, {"memory_limit": 0}, {"memory_limit": "much"}], ids=str)
    def test_settings_of_cholesky(self, settings):
        with pytest.raises(InvalidInput):
            Cholesky(**settings)

    def test_nothing_is_computed_before_the_checks(self):
        operator = Spy(MATRIX)
        with pytest.raises(InvalidInput):
            solve(operator, vectors_of(1, 7))
        assert operator.blocks == []


# Without the run-time check of annotations, which would object first; as a user runs it.
IN_PRODUCTION = """
import sys, torch, warnings
import downweight
from downweight.curvature.dense import Dense
from downweight.curvature.operator import Damped
from downweight.errors import InvalidInput, InvalidType
from downweight.shapes import Bool, Float, Int, Shaped
from downweight.solve import solve
from downweight.solvers.cg import CG

assert "jaxtyping" not in sys.modules
assert Float[torch.Tensor, "K d"] is Int[torch.Tensor, " K"] is torch.Tensor
eye, ones = torch.eye(3), torch.ones(3)
for error, call in [
    (InvalidType, lambda: solve([[1.0]], ones)),
    (InvalidType, lambda: solve(eye, [1.0, 1.0, 1.0])),
    (InvalidType, lambda: solve(eye, ones, CG)),
    (InvalidType, lambda: solve(eye, ones, 3)),
    (InvalidInput, lambda: solve(eye, ones, indefinite="maybe")),
    (InvalidInput, lambda: CG(max_steps=2.5)),
    (InvalidInput, lambda: CG(max_steps=True)),
    (InvalidType, lambda: Damped(Dense(eye), "0.1")),
    (InvalidType, lambda: Damped(Dense(eye), True)),
    (InvalidType, lambda: Dense(None)),
]:
    try:
        call()
    except error:
        continue
    raise SystemExit(f"no {error.__name__}")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    solve(torch.diag(torch.tensor([1.0, 2.0, 3.0])), ones, CG(max_steps=1))
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Dropout())
    task = downweight.Task(model, "cross_entropy", (eye, torch.tensor([0, 1, 1])))
    downweight.influence(task, (eye, torch.tensor([0, 1, 1])), solver=CG(max_steps=1))
assert [warning.filename for warning in caught] == ["<string>"] * 3, "warnings point at the caller"
print(solve(eye, ones, "cg").value.tolist())
"""


def test_as_a_user_runs_it_without_jaxtyping():
    run = subprocess.run([sys.executable, "-c", IN_PRODUCTION], capture_output=True, text=True, check=False)
    assert run.stdout == "[1.0, 1.0, 1.0]\n", run.stderr


class TestNotConverging:
    def test_throw_raises_and_does_not_warn(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(NotConverged, match="1 of 1 systems did not converge"):
                solve(MATRIX, VECTOR, CG(max_steps=1), throw=True)

    def test_a_converged_solve_is_quiet(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            solve(MATRIX, VECTOR, CG(), throw=True)

    def test_the_warning_counts(self):
        vectors = torch.stack([torch.linalg.eigh(MATRIX).eigenvectors[:, 0], VECTOR])
        with pytest.warns(DownweightWarning, match="1 of 2 systems"):
            solve(MATRIX, vectors, CG(max_steps=2))


class TestOperators:
    def test_damped_adds_exactly_the_damping(self):
        vectors = vectors_of(3, 6)
        assert torch.equal(Damped(Dense(MATRIX), 0.25).product(vectors), vectors @ MATRIX + 0.25 * vectors)
        assert torch.equal(Damped(Dense(MATRIX), 0).product(vectors), vectors @ MATRIX)

    def test_damped_leaves_its_operand_alone(self):
        vectors = vectors_of(3, 6)
        before = vectors.clone()
        Damped(Dense(MATRIX), 0.25).product(vectors)
        assert torch.equal(vectors, before)

    def test_matmul_takes_a_vector_or_a_block(self):
        operator = Dense(MATRIX)
        assert torch.allclose(operator @ VECTOR, MATRIX @ VECTOR, rtol=1e-14)
        assert (operator @ vectors_of(3, 6)).shape == (3, 6)
        with pytest.raises(InvalidInput, match=r"got \(5,\)"):
            _ = operator @ torch.ones(5, dtype=torch.float64)

    def test_damped_keeps_what_is_known(self):
        spy = Spy(MATRIX, positive=True)
        damped = Damped(spy, 0.5)
        assert (damped.size, damped.dtype, damped.positive, damped.rows) == (6, torch.float64, True, None)
        assert not Damped(Dense(MATRIX), 1.0).positive
        assert damped.sample(torch.arange(2)).damping == 0.5
        assert damped.describe() == "a matrix under test + 0.5 I"


def test_errors_survive_pickling():
    error = pickle.loads(pickle.dumps(IndefiniteSystem("it is", -0.5)))
    assert str(error) == "it is"
    assert error.smallest_eigenvalue == -0.5
    assert isinstance(error, ValueError)
    assert isinstance(error, DownweightError)
