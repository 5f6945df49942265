"""LiSSA: the series, its scale, its batches, and the moment it diverges."""

import pytest
import torch
from matrices import Rows, Spy, matrix_with, relative_error, spread, vectors_of

from downweight.curvature.operator import Damped
from downweight.errors import DownweightWarning, IndefiniteSystem, InvalidInput, NonFinite
from downweight.solve import solve
from downweight.solvers.cg import CG
from downweight.solvers.lissa import LiSSA
from downweight.solvers.solver import Result


def rows_operator(rows: int = 40, size: int = 8, damping: float = 0.05, seed: int = 0) -> Rows:
    return Rows(vectors_of(rows, size, seed) * spread(size, 10.0).sqrt(), damping)


@pytest.mark.parametrize("depth", [1, 2, 7])
def test_it_is_the_series_from_zero_to_depth(depth):
    """σ⁻¹ Σₜ₌₀^T (I − A/σ)ᵗ v, summed here term by term; the damping is inside A."""
    operator, vectors, scale = rows_operator(), vectors_of(3, 8), 3.0
    with pytest.warns(DownweightWarning):
        solution = solve(operator, vectors, LiSSA(scale=scale, depth=depth, batch_size=None))
    shrink = torch.eye(8, dtype=torch.float64) - operator.matrix() / scale
    series = sum(torch.linalg.matrix_power(shrink, t) for t in range(depth + 1)) / scale
    assert torch.allclose(solution.value, vectors @ series, rtol=1e-13, atol=1e-14)  # sums of a few terms


@pytest.mark.parametrize("batch_size", [10, 7])
def test_repeats_are_averaged_and_batches_are_an_epochs_rows_once_each(batch_size):
    """Replayed here from the batches that it drew; 7 leaves a ragged end of 5 rows, which is not used."""
    operator, vectors = rows_operator(rows=40), vectors_of(3, 8)
    scale, depth, repeats = 4.0, 9, 3
    settings = LiSSA(scale=scale, depth=depth, repeats=repeats, batch_size=batch_size, rtol=1e-6)
    with pytest.warns(DownweightWarning):
        solution = solve(operator, vectors, settings)
    assert [len(rows) for rows in operator.log] == [batch_size] * (depth * repeats)

    answers = []
    for repeat in range(repeats):
        drawn = operator.log[repeat * depth : (repeat + 1) * depth]
        in_an_epoch = 40 // batch_size
        for start in range(0, depth, in_an_epoch):
            together = torch.cat(drawn[start : start + in_an_epoch])
            assert len(together.unique()) == len(together)
        x = vectors.clone()
        for rows in drawn:
            x = vectors + x - x @ Rows(operator.jacobian[rows], operator.damping).matrix() / scale
        answers.append(x / scale)
    assert torch.allclose(solution.value, torch.stack(answers).mean(0), rtol=1e-12)  # rounding of nine steps
    assert not torch.allclose(answers[0], answers[1], rtol=1e-3)  # the repeats do differ
    assert solution.steps.tolist() == [depth * repeats] * 3


def test_two_scales_have_the_same_limit_and_it_is_that_of_cg():
    operator, vectors = rows_operator(), vectors_of(3, 8)
    truth = solve(operator, vectors, CG(rtol=1e-13)).value
    largest = float(torch.linalg.eigvalsh(operator.matrix())[-1])
    for scale in (0.6 * largest, 1.1 * largest, 5 * largest, None):
        solution = solve(operator, vectors, LiSSA(scale=scale, batch_size=None, depth=20_000, rtol=1e-11))
        assert solution.result == (Result.CONVERGED,) * 3
        # cond · rtol, cond < 40
        assert relative_error(solution.value, truth) < 40 * 1e-11


def test_mini_batches_approach_the_answer_as_repeats_grow():
    """Unbiased up to the dependence within an epoch: the error of the mean falls, as 1/√repeats at first."""
    operator, vectors = rows_operator(rows=400, damping=0.2), vectors_of(2, 8)
    truth = solve(operator, vectors, CG(rtol=1e-13)).value
    errors = []
    for repeats in (1, 64):
        settings = LiSSA(scale=8.0, depth=400, repeats=repeats, batch_size=40, rtol=0.99)
        errors.append(relative_error(solve(operator, vectors, settings).value, truth))
    # √64 = 8 in expectation; one draw of the first error scatters by a factor of about two.
    assert errors[1] < errors[0] / 2.5
    assert errors[1] < 0.02


def test_a_truncated_series_is_never_silent():
    operator, vectors = rows_operator(damping=1e-4), vectors_of(2, 8)
    with pytest.warns(DownweightWarning, match="the series stopped at depth 20"):
        solution = solve(operator, vectors, LiSSA(depth=20, repeats=2, batch_size=10))
    assert solution.result == (Result.STEPS,) * 2
    truth = (solution.value @ operator.matrix() - vectors).norm(dim=1) / vectors.norm(dim=1)
    assert torch.allclose(solution.residual, truth, rtol=1e-12)  # a residual over all rows, of order one


def test_the_scale_is_found_and_recorded():
    operator = rows_operator()
    largest = float(torch.linalg.eigvalsh(operator.matrix())[-1])
    solution = solve(operator, vectors_of(1, 8), LiSSA(batch_size=None))
    # 1.1 times the eigenvalue, which Lanczos knows to one per cent
    assert solution.stats["scale"] == pytest.approx(1.1 * largest, rel=0.02)
    batched = LiSSA(batch_size=5, repeats=1, depth=50, rtol=0.99)
    assert solve(operator, vectors_of(1, 8), batched).stats["scale"] > 1.1 * largest


class TestDivergence:
    def test_too_small_a_scale_is_noticed_at_once(self):
        operator, vectors = rows_operator(), vectors_of(3, 8)
        vectors[1] = 0
        largest = float(torch.linalg.eigvalsh(operator.matrix())[-1])
        with pytest.warns(DownweightWarning, match="diverge"):
            solution = solve(operator, vectors, LiSSA(scale=largest / 20, batch_size=None))
        assert solution.result == (Result.DIVERGED, Result.ZERO, Result.DIVERGED)
        assert bool(solution.value[[0, 2]].isnan().all())
        assert bool((solution.value[1] == 0).all())
        assert solution.residual.tolist() == [torch.inf, 0.0, torch.inf]
        assert int(solution.steps.max()) <= 3

    @pytest.mark.parametrize("batch_size", [None, 5])
    def test_the_scale_it_names_works(self, batch_size):
        operator, vectors = rows_operator(), vectors_of(2, 8)
        with pytest.warns(DownweightWarning, match="a scale of .* would work"):
            broken = solve(operator, vectors, LiSSA(scale=0.02, batch_size=batch_size))
        scale = broken.stats["suggested_scale"]
        assert f"a scale of {scale:.3g} would work" in broken.stats["message"]
        cured = solve(operator, vectors, LiSSA(scale=scale, batch_size=batch_size, rtol=0.99))
        assert cured.result == (Result.CONVERGED,) * 2

    def test_just_past_the_limit_is_noticed_before_the_depth(self):
        """(1 − λ/σ) = −1.02: growth of two per cent a step."""
        operator, vectors = rows_operator(), vectors_of(2, 8)
        largest = float(torch.linalg.eigvalsh(operator.matrix())[-1])
        with pytest.warns(DownweightWarning, match="diverge"):
            solution = solve(operator, vectors, LiSSA(scale=largest / 2.02, batch_size=None, depth=5000, rtol=1e-9))
        assert solution.result == (Result.DIVERGED,) * 2
        assert int(solution.steps.max()) < 500

    def test_just_inside_the_limit_is_not_called_divergence(self):
        operator, vectors = rows_operator(), vectors_of(2, 8)
        largest = float(torch.linalg.eigvalsh(operator.matrix())[-1])
        solution = solve(operator, vectors, LiSSA(scale=largest / 1.98, batch_size=None, depth=5000))
        assert solution.result == (Result.CONVERGED,) * 2

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
    @pytest.mark.parametrize("batch_size", [None, 2])
    def test_a_flat_direction_is_slow_and_not_divergence(self, batch_size, dtype):
        """x grows by v at every step, as far as the bound allows."""
        operator = Damped(Rows(torch.tensor([[1.0, 0.0]] * 4, dtype=dtype)), 1e-6)
        with pytest.warns(DownweightWarning, match="flat directions need about"):
            solution = solve(
                operator, torch.eye(2, dtype=dtype)[1], LiSSA(depth=3000, repeats=1, batch_size=batch_size)
            )
        assert solution.result == (Result.STEPS,)
        assert 0.99 < float(solution.residual) < 1

    def test_one_vector_may_diverge_alone(self):
        """An eigenvector of a small eigenvalue never meets the large one."""
        matrix = torch.diag(torch.tensor([100.0, 1.0, 0.5], dtype=torch.float64))
        vectors = torch.eye(3, dtype=torch.float64)
        with pytest.warns(DownweightWarning, match="1 of 3"):
            solution = solve(matrix, vectors, LiSSA(scale=2.0))
        assert solution.result == (Result.DIVERGED, Result.CONVERGED, Result.CONVERGED)
        # rtol = 1e-2 on a diagonal matrix
        assert torch.allclose(solution.value[1:], torch.diag(1 / matrix.diagonal())[1:], atol=2e-2)

    def test_a_negative_eigenvalue_has_no_scale(self):
        operator, vectors = Spy(matrix_with([-0.5, 1.0, 2.0]), positive=True), vectors_of(1, 3)
        with pytest.warns(DownweightWarning, match="no scale works"):
            solution = solve(operator, vectors, LiSSA())
        assert solution.result == (Result.DIVERGED,)
        assert solution.stats["smallest_eigenvalue"] == pytest.approx(-0.5, abs=1e-10)
        assert "suggested_scale" not in solution.stats


def test_indefinite_is_refused():
    matrix, vectors = matrix_with([-0.5, 1.0, 2.0]), vectors_of(1, 3)
    with pytest.raises(IndefiniteSystem):
        solve(matrix, vectors, LiSSA())
    with pytest.raises(InvalidInput, match="diverges at every scale"):
        solve(matrix, vectors, LiSSA(), indefinite="allow")


def test_the_same_seed_gives_the_same_bits_in_every_call():
    operator, vectors = rows_operator(), vectors_of(2, 8)
    solver = LiSSA(batch_size=5, depth=30, repeats=2, rtol=0.99)
    state = solver.init(operator)
    first, second = solver.compute(state, vectors), solver.compute(state, vectors)
    assert torch.equal(first.value, second.value)
    other = LiSSA(batch_size=5, depth=30, repeats=2, rtol=0.99, seed=1)
    assert not torch.equal(first.value, other.compute(other.init(operator), vectors).value)


def test_the_global_random_state_is_left_alone():
    state = torch.random.get_rng_state()
    solve(rows_operator(), vectors_of(1, 8), LiSSA(batch_size=5, depth=10, repeats=1, rtol=0.99))
    assert torch.equal(torch.random.get_rng_state(), state)


def test_no_graph_is_kept():
    class Watching(Spy):
        seen: list[bool] = []

        def product(self, vectors):
            self.seen.append(vectors.requires_grad)
            return super().product(vectors)

    operator = Watching(matrix_with(spread(6, 5.0)).requires_grad_())
    solution = solve(operator, vectors_of(2, 6).requires_grad_(), LiSSA())
    assert not solution.value.requires_grad
    assert len(operator.seen) > 20
    assert not any(operator.seen)


def test_float32_does_not_look_like_divergence_over_thousands_of_steps():
    operator = rows_operator(damping=0.01)
    operator = Rows(operator.jacobian.float(), 0.01)
    vectors = vectors_of(2, 8, dtype=torch.float32)
    solution = solve(operator, vectors, LiSSA(batch_size=None, depth=5000, rtol=1e-4))
    assert solution.result == (Result.CONVERGED,) * 2


@pytest.mark.parametrize("scale", [None, 3.0])
def test_nan_in_a_product_raises(scale):
    operator = Spy(matrix_with(spread(10, 10.0)), breaks_at=4)
    with pytest.raises(NonFinite, match="NaN"):
        solve(operator, vectors_of(2, 10), LiSSA(scale=scale))


@pytest.mark.parametrize(
    "settings",
    [{"scale": 0.0}, {"scale": -1.0}, {"scale": float("nan")}, {"depth": 0}, {"repeats": 0}, {"batch_size": 0}],
    ids=str,
)
def test_settings_that_make_no_sense(settings):
    with pytest.raises(InvalidInput):
        LiSSA(**settings)
