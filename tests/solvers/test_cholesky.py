"""Cholesky: assembly, refinement, memory, and what it says where there is no factor."""

import pytest
import torch
from matrices import Spy, dense_solution, matrix_with, relative_error, signed, spread, vectors_of

from downweight.curvature.dense import Dense
from downweight.curvature.operator import Damped
from downweight.errors import DownweightWarning, IndefiniteSystem, InvalidInput, MemoryLimit, NonFinite, SingularSystem
from downweight.solve import solve
from downweight.solvers.cholesky import Cholesky
from downweight.solvers.solver import Result


def test_the_factor_is_paid_once():
    operator = Spy(matrix_with(spread(20, 10.0)))
    solver = Cholesky()
    state = solver.init(operator)
    assert sum(operator.blocks) == 20
    for seed in (1, 2):
        solution = solver.compute(state, vectors_of(3, 20, seed))
        assert solution.result == (Result.DIRECT,) * 3
    assert sum(operator.blocks) == 20 + 2 * 2 * 3  # refinement and residual: two products a vector


@pytest.mark.parametrize("size", [1, 7, 40])
def test_assembly_by_blocks_gives_the_same_answer(size):
    """The smallest memory that is accepted makes the blocks of the identity narrow."""
    matrix, vectors = matrix_with(spread(size, 10.0)), vectors_of(3, size)
    operator = Spy(matrix)
    solution = solve(operator, vectors, Cholesky(memory_limit=3 * 8 * size**2))
    if size > 8:
        assert max(operator.blocks[:-2]) < size
    assert relative_error(solution.value, dense_solution(matrix, vectors)) < 1e-13  # a few cond · eps


def test_too_large_is_refused_with_numbers():
    limit = 2 * 8 * 40**2 - 1
    operator = Spy(matrix_with(spread(40, 10.0)))
    with pytest.raises(MemoryLimit, match=r"25 KiB.*d ≤ 39 would fit.*CG\(\)"):
        solve(operator, vectors_of(1, 40), Cholesky(memory_limit=limit))
    assert operator.blocks == []


class TwoFaced(Spy):
    """Products with blocks of basis vectors are off by 1e-6: the stored matrix is not the operator."""

    def product(self, vectors):
        product = super().product(vectors)
        return product * (1 + 1e-6) if bool(((vectors == 0) | (vectors == 1)).all()) else product


def test_one_refinement_answers_for_the_operator_not_for_the_stored_matrix():
    matrix, vectors = matrix_with(spread(20, 10.0)), vectors_of(3, 20)
    solution = solve(TwoFaced(matrix), vectors, Cholesky())
    # 1e-6 without refinement, its square with one step.
    assert relative_error(solution.value, dense_solution(matrix, vectors)) < 1e-11
    assert float(solution.residual.max()) < 1e-11


class TestIndefinite:
    matrix = matrix_with([-0.6, 0.5, 1.0, 2.0, 3.0])

    def test_raises_with_the_eigenvalue_and_a_damping_that_works(self):
        with pytest.raises(IndefiniteSystem) as caught:
            solve(Damped(Dense(self.matrix), 0.1), vectors_of(1, 5), Cholesky())
        assert caught.value.smallest_eigenvalue == pytest.approx(-0.5, abs=1e-13)
        named = float(str(caught.value).split("a damping of ")[1].split()[0])
        assert 0.6 < named < 0.8
        assert bool(solve(Damped(Dense(self.matrix), named), vectors_of(1, 5), Cholesky()).converged.all())

    def test_allowed_says_what_the_answer_is(self):
        solution = solve(self.matrix, vectors_of(2, 5), Cholesky(), indefinite="allow")
        assert solution.stats["smallest_eigenvalue"] == pytest.approx(-0.6, abs=1e-13)
        assert solution.stats["negative_eigenvalues"] == 1
        assert "not its minimum" in solution.stats["message"]

    def test_allowed_on_a_definite_matrix(self):
        solution = solve(matrix_with([0.25, 1.0, 2.0]), vectors_of(2, 3), Cholesky(), indefinite="allow")
        assert solution.stats["smallest_eigenvalue"] == pytest.approx(0.25, abs=1e-13)
        assert solution.stats["negative_eigenvalues"] == 0
        assert "message" not in solution.stats

    def test_pivoting_is_needed_and_there(self):
        """A zero leading pivot: LDLᵀ without 2 × 2 blocks divides by it."""
        matrix = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
        solution = solve(matrix, torch.tensor([3.0, 5.0], dtype=torch.float64), Cholesky(), indefinite="allow")
        assert solution.value.tolist() == [5.0, 3.0]

    def test_large_condition(self):
        matrix, vectors = matrix_with(signed(40, 1e6)), vectors_of(3, 40)
        solution = solve(matrix, vectors, Cholesky(), indefinite="allow")
        # cond · eps = 2e-10; one refinement brings the residual, not the error, below.
        assert relative_error(solution.value, dense_solution(matrix, vectors)) < 1e-9


class TestSingular:
    @pytest.mark.parametrize("smallest", [0.0, 1e-17, -1e-17])
    @pytest.mark.parametrize("indefinite", ["raise", "allow"])
    def test_is_refused_with_the_damping(self, smallest, indefinite):
        matrix = matrix_with([smallest, 0.5, 1.0, 2.0])
        with pytest.raises(SingularSystem, match="Raise the damping"):
            solve(matrix, vectors_of(1, 4), Cholesky(), indefinite=indefinite)

    def test_a_factor_that_exists_only_by_rounding_is_refused(self):
        """Every pivot is positive, the last one 1e-16 of the first: below eps · d."""
        matrix = torch.diag(torch.tensor([1.0, 1.0, 1e-16], dtype=torch.float64))
        assert int(torch.linalg.cholesky_ex(matrix).info) == 0
        with pytest.raises(SingularSystem, match="Raise the damping"):
            solve(matrix, vectors_of(1, 3), Cholesky())

    def test_the_limit_is_the_precision_not_the_condition_number(self):
        """cond = 1e10 has an answer; it is given, with its residual and a word."""
        matrix, vectors = matrix_with(spread(20, 1e10)), vectors_of(2, 20)
        solution = solve(matrix, vectors, Cholesky(rtol=1e-4))
        # The error of a backward stable solve: a few cond · eps = 2e-6.
        assert relative_error(solution.value, dense_solution(matrix, vectors)) < 1e-5
        assert solution.result == (Result.DIRECT,) * 2

    def test_a_residual_above_rtol_is_not_called_exact(self):
        with pytest.warns(DownweightWarning, match="leave a residual above"):
            solution = solve(matrix_with(spread(20, 1e10)), vectors_of(2, 20), Cholesky(rtol=1e-12))
        assert solution.result == (Result.STAGNATED,) * 2

    def test_float32_noise_is_not_called_indefinite(self):
        """λ below the rounding of float32 products: singular, to that precision."""
        matrix = matrix_with([0.0] * 10 + [1.0] * 10).float()
        with pytest.raises(SingularSystem, match="float32.*or use float64"):
            solve(matrix, vectors_of(1, 20, dtype=torch.float32), Cholesky())


def test_an_operator_that_is_not_symmetric_is_refused():
    matrix = matrix_with(spread(10, 10.0))
    matrix[2, 7] += 0.1
    with pytest.raises(InvalidInput, match="not symmetric"):
        solve(Spy(matrix), vectors_of(1, 10), Cholesky())


@pytest.mark.parametrize("breaks_at", [1, 2, 3])
def test_nan_in_a_product_raises(breaks_at):
    """In the assembly, in the refinement and in the last residual."""
    with pytest.raises(NonFinite, match="NaN"):
        solve(Spy(matrix_with(spread(10, 10.0)), breaks_at=breaks_at), vectors_of(2, 10), Cholesky())
