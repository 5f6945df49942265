"""CG: stopping, restarts, breakdown and the preconditioner."""

import pytest
import torch
from matrices import Drifting, Spy, basis_of, dense_solution, matrix_with, relative_error, spread, vectors_of

from downweight.curvature.dense import Dense
from downweight.curvature.operator import Damped
from downweight.errors import DownweightWarning, IndefiniteSystem, InvalidInput, NonFinite
from downweight.solve import solve
from downweight.solvers.cg import CG
from downweight.solvers.solver import Result


def test_no_product_is_spent_on_a_finished_vector():
    matrix = matrix_with(spread(40, 1e3))
    eigenvectors = torch.linalg.eigh(matrix).eigenvectors
    operator = Spy(matrix)
    # One, two and five eigenvectors: as many steps in exact arithmetic; the last one needs d or more.
    vectors = torch.stack(
        [
            eigenvectors[:, 30],
            eigenvectors[:, [35, 39]].sum(1),
            eigenvectors[:, 35:].sum(1),
            vectors_of(1, 40)[0],
        ]
    )
    solution = solve(operator, vectors, CG())
    assert solution.steps.tolist()[:3] == [1, 2, 5]
    assert int(solution.steps[3]) > 40
    # Each step's block holds the vectors that still run; one more product for the true residuals.
    steps = solution.steps.tolist()
    expected = [sum(own > step for own in steps) for step in range(max(steps))] + [4]
    assert operator.blocks == expected
    assert solution.stats["matvecs"] == sum(expected)


def test_running_on_after_convergence_gives_no_nan():
    """Exact after one step (r = 0) beside a vector that goes on: 0/0 in a naive block."""
    eigenvalues = spread(30, 1e3)
    vectors = vectors_of(2, 30)
    vectors[0] = 0
    vectors[0, 3] = 1.0
    solution = solve(torch.diag(eigenvalues), vectors, CG())
    assert bool(torch.isfinite(solution.value).all())
    assert solution.steps.tolist()[0] == 1
    assert bool(solution.converged.all())


def test_the_error_in_the_norm_of_A_falls_with_every_step():
    matrix, vectors = matrix_with(spread(30, 1e4)), vectors_of(1, 30)
    truth = dense_solution(matrix, vectors)
    errors = []
    for steps in range(1, 25):
        with pytest.warns(DownweightWarning):
            value = solve(matrix, vectors, CG(max_steps=steps)).value
        errors.append(float(((value - truth) @ matrix * (value - truth)).sum()))
    assert all(after < before for before, after in zip(errors, errors[1:], strict=False))


def test_a_tolerance_is_kept():
    matrix, vectors = matrix_with(spread(50, 1e4)), vectors_of(3, 50)
    steps = []
    for rtol in (1e-2, 1e-5, 1e-8):
        solution = solve(matrix, vectors, CG(rtol=rtol))
        assert bool((solution.residual <= rtol).all())
        # The next power of ten is not reached by accident: it stops where it was told.
        assert bool((solution.residual > rtol / 100).all())
        steps.append(int(solution.steps.max()))
    assert steps[0] < steps[1] < steps[2]


def test_a_residual_that_only_the_recurrence_believes_is_refined():
    """The first run ends on a wrong belief, 1e-6 from the truth; the true residual sends it back."""
    matrix, vectors = matrix_with(spread(20, 50.0)), vectors_of(3, 20)
    plain = Spy(matrix)
    solve(plain, vectors, CG())
    first_run = len(plain.blocks) - 1  # the last product is that of the true residual
    operator = Drifting(matrix, products=first_run)
    solution = solve(operator, vectors, CG())
    assert len(operator.blocks) > first_run + 3
    assert solution.stats["rounds"] >= 2
    assert solution.result == (Result.CONVERGED,) * 3
    assert relative_error(solution.value, dense_solution(matrix, vectors)) < 50 * 1e-10  # cond · rtol


def test_a_tolerance_below_rounding_stagnates_and_says_so():
    matrix, vectors = matrix_with(spread(30, 1e5)), vectors_of(2, 30)
    with pytest.warns(DownweightWarning, match="rounding stops further progress"):
        solution = solve(matrix, vectors, CG(rtol=1e-15, max_steps=5000))
    assert solution.result == (Result.STAGNATED,) * 2
    # The best that rounding allows is about eps · cond, not a failed last round.
    assert bool((solution.residual < 1e-10).all())


def test_float32_reaches_its_default_or_says_stagnated():
    matrix, vectors = matrix_with(spread(40, 1e5)).float(), vectors_of(3, 40, dtype=torch.float32)
    with pytest.warns(DownweightWarning):
        solution = solve(matrix, vectors, CG(max_steps=3000))
    for result, residual in zip(solution.result, solution.residual.tolist(), strict=True):
        assert result in (Result.STAGNATED, Result.STEPS)
        assert 1e-5 < residual < 1


class TestPreconditioner:
    def test_the_exact_inverse_takes_one_step(self):
        matrix, vectors = matrix_with(spread(30, 1e3)), vectors_of(4, 30)
        inverse = torch.linalg.inv(matrix)
        solution = solve(matrix, vectors, CG(preconditioner=lambda r: r @ inverse))
        assert solution.steps.tolist() == [1, 1, 1, 1]
        assert relative_error(solution.value, dense_solution(matrix, vectors)) < 1e3 * 1e-10  # cond · rtol

    def test_a_diagonal_one_helps_a_badly_scaled_matrix_and_keeps_the_answer(self):
        scales = torch.logspace(0, 3, 40, dtype=torch.float64)
        matrix = scales[:, None] * matrix_with(spread(40, 5.0)) * scales
        vectors = vectors_of(3, 40)
        diagonal = matrix.diagonal()
        plain = solve(matrix, vectors, CG(max_steps=20_000))
        helped = solve(matrix, vectors, CG(preconditioner=lambda r: r / diagonal))
        assert bool(helped.converged.all())
        assert int(helped.steps.max()) < int(plain.steps.min()) / 5
        # Residuals of 1e-10 and a diagonal that spans 1e6: errors of up to cond · rtol, cond < 5e6.
        assert relative_error(helped.value, dense_solution(matrix, vectors)) < 5e6 * 1e-10

    def test_it_sees_only_the_vectors_that_still_run(self):
        matrix = torch.diag(spread(20, 100.0))
        vectors = vectors_of(3, 20)
        vectors[1] = 0
        vectors[1, 4] = 1
        solution = solve(matrix, vectors, CG(preconditioner=lambda r: 2 * r))
        assert solution.steps.tolist()[1] == 1
        assert bool(solution.converged.all())

    def test_one_that_is_not_positive_is_refused(self):
        matrix, vectors = matrix_with(spread(10, 10.0)), vectors_of(2, 10)
        with pytest.raises(InvalidInput, match="preconditioner is not positive definite"):
            solve(matrix, vectors, CG(preconditioner=lambda r: -r))
        flip = torch.ones(10, dtype=torch.float64)
        flip[::2] = -1
        with pytest.raises(InvalidInput, match="preconditioner is not positive definite"):
            solve(matrix, vectors, CG(preconditioner=lambda r: r * flip))

    def test_one_with_the_wrong_shape_is_refused(self):
        matrix, vectors = matrix_with(spread(10, 10.0)), vectors_of(2, 10)
        with pytest.raises(InvalidInput, match=r"maps a block \(2, 10\)"):
            solve(matrix, vectors, CG(preconditioner=lambda r: r[:, :3]))


class TestIndefinite:
    def test_lanczos_refuses_before_the_first_step(self):
        eigenvalues = [-0.6, 0.5, 1.0, 2.0, 3.0]
        with pytest.raises(IndefiniteSystem) as caught:
            solve(matrix_with(eigenvalues), vectors_of(2, 5), CG())
        assert caught.value.smallest_eigenvalue == pytest.approx(-0.6, abs=1e-10)  # all five Lanczos steps: exact
        message = str(caught.value)
        assert "CG cannot be used" in message
        assert "MINRES()" in message
        assert "Cholesky()" in message
        assert 'indefinite="allow"' in message

    def test_a_direction_of_negative_curvature_raises_where_the_operator_lied(self):
        """`positive` is believed, so no Lanczos at first; pᵀAp < 0 then gives it away."""
        operator = Spy(matrix_with([-0.6, 0.5, 1.0, 2.0, 3.0]), positive=True)
        with pytest.raises(IndefiniteSystem, match="negative curvature") as caught:
            solve(operator, vectors_of(2, 5), CG())
        assert caught.value.smallest_eigenvalue == pytest.approx(-0.6, abs=1e-10)

    def test_the_damping_it_names_is_enough_and_not_far_too_much(self):
        operator = Damped(Dense(matrix_with([-0.6, 0.5, 1.0, 2.0, 3.0])), 0.1)
        with pytest.raises(IndefiniteSystem) as caught:
            solve(operator, vectors_of(1, 5), CG())
        assert caught.value.smallest_eigenvalue == pytest.approx(-0.5, abs=1e-10)
        named = float(str(caught.value).split("a damping of ")[1].split()[0])
        assert 0.6 < named < 0.8
        assert bool(solve(Damped(operator.operator, named), vectors_of(1, 5), CG()).converged.all())

    def test_allow_is_refused_where_the_sign_is_unknown(self):
        with pytest.raises(InvalidInput, match=r"Use MINRES\(\) or Cholesky\(\)"):
            solve(matrix_with(spread(5, 3.0)), vectors_of(1, 5), CG(), indefinite="allow")

    def test_allow_on_a_positive_operator_reports_the_smallest_eigenvalue(self):
        solution = solve(Spy(matrix_with([0.5, 1.0, 2.0])), vectors_of(1, 3), CG(), indefinite="allow")
        assert solution.stats["smallest_eigenvalue"] == pytest.approx(0.5, abs=1e-10)

    def test_rounding_around_zero_is_not_called_negative(self):
        """A singular matrix whose zero eigenvalues come out as −1e-17."""
        matrix = matrix_with([0.0, 0.0, 0.0, 1.0, 2.0, 3.0])
        inside = vectors_of(2, 6) @ matrix
        solution = solve(matrix, inside, CG())
        assert bool(solution.converged.all())


class TestSingular:
    def matrix(self):
        return matrix_with([0.0, 0.0, 0.5, 1.0, 2.0, 3.0], seed=5)

    def test_consistent_gives_the_shortest_solution(self):
        matrix = self.matrix()
        inside = vectors_of(3, 6) @ matrix
        solution = solve(matrix, inside, CG())
        # Started at zero, CG stays in the range of the matrix; cond on the range is 6.
        assert relative_error(solution.value, inside @ torch.linalg.pinv(matrix)) < 6 * 1e-10
        assert bool(solution.converged.all())

    def test_inconsistent_is_never_called_converged(self):
        with pytest.warns(DownweightWarning, match="did not converge"):
            solution = solve(self.matrix(), basis_of(6, seed=5).T[:2].contiguous(), CG())
        assert not bool(solution.converged.any())
        assert bool((solution.residual > 0.1).all())


@pytest.mark.parametrize("breaks_at", [1, 3, 8])
def test_nan_in_a_product_raises(breaks_at):
    operator = Spy(matrix_with(spread(30, 100.0)), breaks_at=breaks_at)
    with pytest.raises(NonFinite, match="a matrix under test holds NaN"):
        solve(operator, vectors_of(3, 30), CG())
    assert len(operator.blocks) == breaks_at  # at once


def test_no_graph_is_kept():
    matrix = matrix_with(spread(10, 10.0)).requires_grad_()
    assert not solve(Spy(matrix), vectors_of(2, 10).requires_grad_(), CG()).value.requires_grad
