"""MINRES: indefinite, singular and inconsistent systems."""

import pytest
import torch
from matrices import Drifting, Spy, basis_of, dense_solution, matrix_with, relative_error, signed, spread, vectors_of

from downweight.errors import DownweightWarning, IndefiniteSystem, NonFinite
from downweight.solve import solve
from downweight.solvers.minres import MINRES
from downweight.solvers.solver import Result


def test_indefinite_is_refused_unless_allowed():
    matrix, vectors = matrix_with([-2.0, -0.1, 1.0, 4.0]), vectors_of(2, 4)
    with pytest.raises(IndefiniteSystem) as caught:
        solve(matrix, vectors, MINRES())
    assert caught.value.smallest_eigenvalue == pytest.approx(-2.0, abs=1e-10)


def test_an_allowed_answer_says_what_it_is():
    matrix, vectors = matrix_with([-2.0, -0.1, 1.0, 4.0]), vectors_of(2, 4)
    solution = solve(matrix, vectors, MINRES(), indefinite="allow")
    assert solution.stats["smallest_eigenvalue"] == pytest.approx(-2.0, abs=1e-10)  # d Lanczos steps: exact
    assert "stationary point" in solution.stats["message"]
    assert "not its minimum" in solution.stats["message"]
    assert relative_error(solution.value, dense_solution(matrix, vectors)) < 40 * 1e-10  # cond · rtol


def test_a_definite_matrix_is_not_called_a_saddle():
    solution = solve(matrix_with(spread(8, 10.0)), vectors_of(2, 8), MINRES(), indefinite="allow")
    assert solution.stats["smallest_eigenvalue"] == pytest.approx(0.1, abs=1e-10)
    assert "message" not in solution.stats


def test_the_residual_never_rises():
    matrix, vectors = matrix_with(signed(30, 100.0)), vectors_of(2, 30)
    residuals = []
    for steps in range(1, 30):
        with pytest.warns(DownweightWarning):
            residuals.append(solve(matrix, vectors, MINRES(max_steps=steps), indefinite="allow").residual)
    falls = torch.stack(residuals).diff(dim=0)
    assert bool((falls <= 1e-13).all())  # rounding of residuals of order one
    assert float(residuals[-1].max()) < 0.9 * float(residuals[0].max())


def test_the_residual_is_the_smallest_in_the_krylov_space():
    """The definition, against a dense least-squares problem."""
    matrix, vector = matrix_with(signed(20, 50.0)), vectors_of(1, 20)[0]
    for steps in (1, 2, 3, 6):
        krylov = [vector]
        for _ in range(steps - 1):
            krylov.append(matrix @ krylov[-1])
        basis = torch.linalg.qr(torch.stack(krylov, 1))[0]
        best = torch.linalg.lstsq(matrix @ basis, vector[:, None], driver="gelsd").solution[:, 0]
        smallest = (matrix @ basis @ best - vector).norm() / vector.norm()
        with pytest.warns(DownweightWarning):
            solution = solve(matrix, vector, MINRES(max_steps=steps), indefinite="allow")
        # Six steps at cond 50: the powers keep more than ten digits.
        assert float(solution.residual) == pytest.approx(float(smallest), rel=1e-9)


def test_no_product_is_spent_on_a_finished_vector():
    matrix = matrix_with(signed(30, 20.0))
    eigenvectors = torch.linalg.eigh(matrix).eigenvectors
    vectors = torch.stack([eigenvectors[:, 3], eigenvectors[:, [2, 29]].sum(1), vectors_of(1, 30)[0]])
    operator = Spy(matrix, positive=True)  # unexamined, so that every product below is MINRES's own
    solution = solve(operator, vectors, MINRES())
    steps = solution.steps.tolist()
    assert steps[:2] == [1, 2]
    assert operator.blocks == [sum(own > step for own in steps) for step in range(max(steps))] + [3]


class TestSingular:
    eigenvalues = (-1.5, 0.0, 0.0, 0.5, 1.0, 2.0, 3.0)

    def test_consistent_gives_the_shortest_solution(self):
        matrix = matrix_with(self.eigenvalues, seed=2)
        inside = vectors_of(3, 7) @ matrix
        solution = solve(matrix, inside, MINRES(), indefinite="allow")
        assert solution.result == (Result.CONVERGED,) * 3
        # cond on the range is 6
        assert relative_error(solution.value, inside @ torch.linalg.pinv(matrix)) < 6 * 1e-10

    @pytest.mark.parametrize("seed", range(8))
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
    def test_inconsistent_gives_least_squares_and_is_not_converged(self, seed, dtype):
        """Without a stop, rounding along the null space grows without end (1e15 after two more steps)."""
        matrix, vectors = matrix_with(self.eigenvalues, seed).to(dtype), vectors_of(3, 7, seed + 50, dtype)
        with pytest.warns(DownweightWarning, match="least-squares"):
            solution = solve(matrix, vectors, MINRES(), indefinite="allow")
        assert Result.CONVERGED not in solution.result
        value, exact = solution.value.double(), vectors.double()
        outside = basis_of(7, seed)[:, 1:3]
        # What no x can remove is the part along the null space. The rest of the residual falls until the noise
        # stop, at 100 eps ‖A‖; its square adds to the square of a part of order one.
        least = (exact @ outside).norm(dim=1) / exact.norm(dim=1)
        assert torch.allclose(solution.residual, least, rtol=100 * torch.finfo(dtype).eps ** 0.5)
        assert float((value @ (torch.eye(7) - outside @ outside.T)).norm()) < 10 * float(exact.norm())

    def test_a_zero_matrix(self):
        with pytest.warns(DownweightWarning):
            solution = solve(torch.zeros(4, 4, dtype=torch.float64), vectors_of(2, 4), MINRES())
        assert bool((solution.value == 0).all())
        assert solution.residual.tolist() == [1.0, 1.0]
        assert not bool(solution.converged.any())


def test_a_residual_that_only_the_recurrence_believes_is_refined():
    """The first run ends on a wrong belief, 1e-6 from the truth; the true residual sends it back."""
    matrix, vectors = matrix_with(spread(20, 50.0)), vectors_of(3, 20)
    plain = Spy(matrix)
    solve(plain, vectors, MINRES())
    first_run = len(plain.blocks) - 1  # the last product is that of the true residual
    operator = Drifting(matrix, products=first_run)
    solution = solve(operator, vectors, MINRES())
    assert len(operator.blocks) > first_run + 3
    assert solution.stats["rounds"] >= 2
    assert solution.result == (Result.CONVERGED,) * 3
    assert relative_error(solution.value, dense_solution(matrix, vectors)) < 50 * 1e-10  # cond · rtol


def test_float32_indefinite():
    matrix, vectors = matrix_with(signed(30, 10.0)).float(), vectors_of(3, 30, dtype=torch.float32)
    solution = solve(matrix, vectors, MINRES(), indefinite="allow")
    assert bool(solution.converged.all())
    assert relative_error(solution.value, dense_solution(matrix, vectors)) < 10 * 1e-5  # cond · rtol


@pytest.mark.parametrize("breaks_at", [1, 4])
def test_nan_in_a_product_raises(breaks_at):
    operator = Spy(matrix_with(spread(20, 100.0)), breaks_at=breaks_at)
    with pytest.raises(NonFinite, match="NaN"):
        solve(operator, vectors_of(2, 20), MINRES())
    assert len(operator.blocks) == breaks_at  # at once
