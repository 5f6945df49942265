"""Every solver against torch.linalg on matrices small enough to factor."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matrices import dense_solution, matrix_with, relative_error, signed, spread, vectors_of

from downweight.curvature.dense import Dense
from downweight.curvature.operator import Damped
from downweight.errors import DownweightWarning
from downweight.solve import solve
from downweight.solvers.cg import CG
from downweight.solvers.cholesky import Cholesky
from downweight.solvers.lissa import LiSSA
from downweight.solvers.minres import MINRES
from downweight.solvers.solver import Result

EXACT = [CG(), MINRES(), Cholesky()]
ALL = [*EXACT, LiSSA(batch_size=None, depth=100_000, rtol=1e-10)]


def name(solver) -> str:
    return type(solver).__name__


@pytest.mark.parametrize("condition", [1.0, 10.0, 1e3, 1e5])
@pytest.mark.parametrize("solver", EXACT, ids=name)
def test_definite(solver, condition):
    matrix, vectors = matrix_with(spread(40, condition)), vectors_of(6, 40)
    solution = solve(matrix, vectors, solver)
    assert bool(solution.converged.all())
    # ‖x − x*‖ / ‖x*‖ ≤ cond · residual, and rtol is 1e-10 (Cholesky: about eps).
    assert relative_error(solution.value, dense_solution(matrix, vectors)) <= condition * 1e-10


@pytest.mark.parametrize("condition", [2.0, 30.0])
def test_lissa_with_all_rows(condition):
    matrix, vectors = matrix_with(spread(20, condition)), vectors_of(4, 20)
    solution = solve(matrix, vectors, ALL[-1])
    assert solution.result == (Result.CONVERGED,) * 4
    assert relative_error(solution.value, dense_solution(matrix, vectors)) <= condition * 1e-10  # cond · rtol


@pytest.mark.parametrize("condition", [1.0, 10.0, 300.0])
@pytest.mark.parametrize("solver", [MINRES(), Cholesky()], ids=name)
def test_indefinite(solver, condition):
    matrix, vectors = matrix_with(signed(30, condition)), vectors_of(5, 30)
    solution = solve(matrix, vectors, solver, indefinite="allow")
    assert bool(solution.converged.all())
    assert relative_error(solution.value, dense_solution(matrix, vectors)) <= condition * 1e-10  # cond · rtol


@pytest.mark.parametrize("solver", ALL, ids=name)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_the_residual_is_the_true_one(solver, dtype):
    """Recomputed here in float64; not the one that a recurrence carries, and not just below rtol."""
    matrix, vectors = matrix_with(spread(30, 50.0)).to(dtype), vectors_of(4, 30, dtype=dtype)
    solution = solve(matrix, vectors, LiSSA(batch_size=None) if isinstance(solver, LiSSA) else solver)
    exact, value = vectors.double(), solution.value.double()
    residual = (value @ matrix.double() - exact).norm(dim=1) / exact.norm(dim=1)
    # The product of the reported one is in the dtype itself: rounding of a few eps ‖A‖ ‖x‖ / ‖v‖, ‖A‖ = 1.
    rounding = 10 * torch.finfo(dtype).eps * value.norm(dim=1) / exact.norm(dim=1)
    assert bool(((solution.residual - residual).abs() <= rounding).all())
    assert solution.residual.dtype == torch.float64


@pytest.mark.parametrize("solver", EXACT, ids=name)
def test_float32(solver):
    matrix, vectors = matrix_with(spread(30, 100.0)).float(), vectors_of(4, 30, dtype=torch.float32)
    solution = solve(matrix, vectors, solver)
    assert bool(solution.converged.all())
    assert solution.value.dtype == torch.float32
    # cond · rtol with the float32 default of 1e-5
    assert relative_error(solution.value, dense_solution(matrix, vectors)) <= 100 * 1e-5


def test_cholesky_of_a_float32_operator_keeps_float32_digits():
    """The factor is float64, so at cond = 1e4 the answer is right to float32 (plain float32 loses four digits).

    A step of refinement with float32 products lost these digits before it had to halve the residual.
    """
    matrix, vectors = matrix_with(spread(30, 1e4)).float(), vectors_of(4, 30, dtype=torch.float32)
    # The rounding of x to float32 (half a unit, 6e-8) is all that is left: the matrix itself is exact here.
    assert relative_error(solve(matrix, vectors, Cholesky(rtol=0.5)).value, dense_solution(matrix, vectors)) < 1e-7


@pytest.mark.parametrize("solver", ALL, ids=name)
def test_zero_vectors_are_answered_with_zero(solver):
    matrix, vectors = matrix_with(spread(12, 10.0)), vectors_of(4, 12)
    vectors[[0, 2]] = 0
    solution = solve(matrix, vectors, solver)
    assert [result is Result.ZERO for result in solution.result] == [True, False, True, False]
    assert bool((solution.value[[0, 2]] == 0).all())
    assert solution.residual[[0, 2]].tolist() == [0.0, 0.0]
    assert bool(solution.converged.all())
    assert relative_error(solution.value[[1, 3]], dense_solution(matrix, vectors[[1, 3]])) < 1e-8  # 10 · rtol, wide


@pytest.mark.parametrize("solver", ALL, ids=name)
@pytest.mark.parametrize(("dtype", "power"), [(torch.float64, -700), (torch.float64, 700), (torch.float32, -100)])
def test_the_size_of_a_vector_does_not_matter(solver, dtype, power):
    """Gradients of confident rows are tiny and their squares underflow; a power of two changes no digit."""
    matrix, vectors = matrix_with(spread(12, 5.0)).to(dtype), vectors_of(3, 12, dtype=dtype)
    if isinstance(solver, LiSSA):
        solver = LiSSA(batch_size=None)
    plain = solve(matrix, vectors, solver)
    small = solve(matrix, vectors * 2.0**power, solver)
    assert torch.equal(small.value, plain.value * 2.0**power)
    assert torch.equal(small.residual, plain.residual)
    assert small.result == plain.result


@pytest.mark.parametrize("solver", ALL, ids=name)
def test_vectors_of_a_block_do_not_disturb_each_other(solver):
    """Very different convergence: an eigenvector (one step), random vectors, zero, and one 1e12 times larger."""
    matrix = matrix_with(spread(25, 20.0), seed=3)
    vectors = vectors_of(5, 25)
    vectors[0] = torch.linalg.eigh(matrix).eigenvectors[:, 7]
    vectors[2] = 0
    vectors[4] *= 1e12
    block = solve(matrix, vectors, solver)
    for k in range(5):
        alone = solve(matrix, vectors[k], solver)
        assert block.result[k] is alone.result[0]
        # A block and a single product round differently, which moves the last steps a little.
        assert abs(int(block.steps[k]) - int(alone.steps[0])) <= 1
        assert torch.allclose(block.value[k], alone.value, rtol=0, atol=1e-8 * float(vectors[k].norm()))


@pytest.mark.parametrize("solver", ALL, ids=name)
def test_one_vector_and_a_block_of_one_agree(solver):
    matrix, vector = matrix_with(spread(10, 4.0)), vectors_of(1, 10)[0]
    single, block = solve(matrix, vector, solver), solve(matrix, vector[None], solver)
    assert single.value.shape == (10,)
    assert block.value.shape == (1, 10)
    assert torch.equal(single.value, block.value[0])
    assert single.residual.shape == (1,)


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 12),
    count=st.integers(0, 5),
    seed=st.integers(0, 2**16),
    indefinite=st.booleans(),
    solver=st.sampled_from(EXACT),
)
def test_any_shape(size, count, seed, indefinite, solver):
    matrix, vectors = matrix_with(spread(size, 20.0), seed), vectors_of(count, size, seed + 1)
    how = "raise"
    if indefinite and not isinstance(solver, CG):
        matrix, how = matrix_with(signed(size, 20.0), seed), "allow"
    solution = solve(matrix, vectors, solver, indefinite=how)
    assert solution.value.shape == (count, size)
    assert len(solution.result) == count == len(solution.residual) == len(solution.steps)
    assert bool(solution.converged.all())
    if count:
        assert relative_error(solution.value, dense_solution(matrix, vectors)) <= 20 * 1e-10  # cond · rtol


@pytest.mark.parametrize("solver", EXACT, ids=name)
def test_damping_is_added_once(solver):
    eigenvalues = spread(15, 1e3)
    vectors = vectors_of(3, 15)
    solution = solve(Damped(Dense(matrix_with(eigenvalues)), 0.1), vectors, solver)
    truth = dense_solution(matrix_with(eigenvalues + 0.1), vectors)
    assert relative_error(solution.value, truth) <= 11 * 1e-10  # cond = 1.1 / 0.101


@pytest.mark.parametrize("solver", [CG(max_steps=3), MINRES(max_steps=3), LiSSA(depth=3)], ids=name)
def test_too_few_steps_are_a_result_with_one_warning(solver):
    matrix, vectors = matrix_with(spread(30, 1e3)), vectors_of(3, 30)
    with pytest.warns(DownweightWarning, match="3 of 3 systems did not converge") as caught:
        solution = solve(matrix, vectors, solver)
    assert len(caught) == 1
    assert solution.result == (Result.STEPS,) * 3
    assert solution.steps.tolist() == [3, 3, 3]
    assert not bool(solution.converged.any())
    exact = (solution.value @ matrix - vectors).norm(dim=1) / vectors.norm(dim=1)
    assert torch.allclose(solution.residual, exact, rtol=1e-10)  # residuals of order one, rounded at 1e-16
