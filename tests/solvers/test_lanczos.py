"""Lanczos: extreme eigenvalues and honest error bounds."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matrices import Spy, matrix_with, signed, spread, vectors_of

from downweight.curvature.dense import Dense
from downweight.curvature.lanczos import lanczos
from downweight.errors import InvalidInput, NonFinite


@pytest.mark.parametrize("eigenvalues", [spread(60, 100.0), signed(60, 100.0), -spread(60, 100.0)])
def test_both_ends_are_found(eigenvalues):
    spectrum = lanczos(Dense(matrix_with(eigenvalues)), tolerance=1e-8)
    # The tolerance is on the error bound relative to the norm, which is 1.
    assert spectrum.smallest == pytest.approx(float(eigenvalues.min()), abs=1e-8)
    assert spectrum.largest == pytest.approx(float(eigenvalues.max()), abs=1e-8)
    assert max(spectrum.smallest_error, spectrum.largest_error) <= 1e-8


@settings(max_examples=50, deadline=None)
@given(size=st.integers(1, 25), steps=st.integers(1, 30), seed=st.integers(0, 2**16))
def test_an_eigenvalue_lies_within_the_error_and_the_values_inside_the_spectrum(size, steps, seed):
    matrix = matrix_with(vectors_of(1, size, seed)[0], seed)
    spectrum = lanczos(Dense(matrix), steps=steps, seed=seed, tolerance=1e-10)
    truth = torch.linalg.eigvalsh(matrix)
    rounding = 1e-13 * float(truth.abs().max())
    assert spectrum.steps <= min(steps, size)
    for value, error in ((spectrum.smallest, spectrum.smallest_error), (spectrum.largest, spectrum.largest_error)):
        assert float((truth - value).abs().min()) <= error + rounding
        assert truth[0] - rounding <= value <= truth[-1] + rounding


def test_the_error_is_small_only_when_it_is_right():
    """Few steps on a crowded spectrum: far off, and the bound says so."""
    spectrum = lanczos(Dense(matrix_with(spread(200, 1e6))), steps=5)
    assert spectrum.smallest - 1e-6 > 1e-3
    assert spectrum.smallest_error > 1e-3


def test_a_small_negative_eigenvalue_beside_a_large_positive_one():
    """Where shifted power iteration is off many times: λ_min = −0.01 beside λ_max = 10 and a crowd at zero."""
    eigenvalues = torch.cat([torch.tensor([-0.01, 10.0]), torch.linspace(0, 0.1, 98)]).double()
    spectrum = lanczos(Dense(matrix_with(eigenvalues)))
    assert spectrum.smallest == pytest.approx(-0.01, rel=1e-4)


def test_it_can_stop_at_the_first_clearly_negative_value():
    operator = Dense(matrix_with(torch.cat([torch.tensor([-1.0]), spread(99, 1e4)])))
    early, full = lanczos(operator, until_negative=True), lanczos(operator)
    assert early.steps < full.steps / 2
    assert full.smallest <= early.smallest < 0


def test_until_negative_does_not_stop_on_a_positive_matrix():
    operator = Dense(matrix_with(spread(50, 1e3)))
    assert lanczos(operator, until_negative=True) == lanczos(operator)


def test_the_same_seed_gives_the_same_bits():
    operator = Dense(matrix_with(spread(50, 1e4)))
    assert lanczos(operator, steps=7, seed=3) == lanczos(operator, steps=7, seed=3)
    assert lanczos(operator, steps=7, seed=3) != lanczos(operator, steps=7, seed=4)


def test_steps_bound_the_products():
    operator = Spy(matrix_with(spread(50, 1e6)))
    assert lanczos(operator, steps=23, tolerance=1e-14).steps == 23  # past the 16 that the basis starts with
    assert operator.blocks == [1] * 23


def test_float32_products_are_good_to_float32():
    matrix = matrix_with(signed(60, 100.0))
    spectrum = lanczos(Dense(matrix.float()), tolerance=1e-5)
    # float32 products of a matrix of norm 1: a few 6e-8, far inside 1e-5
    assert spectrum.smallest == pytest.approx(float(torch.linalg.eigvalsh(matrix)[0]), abs=1e-5)
    assert spectrum.largest == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("value", [0.0, 3.0, -2.0])
@pytest.mark.parametrize("size", [1, 6])
def test_multiples_of_the_identity_take_one_step(value, size):
    spectrum = lanczos(Dense(value * torch.eye(size, dtype=torch.float64)))
    assert spectrum.steps == 1
    assert spectrum.smallest == pytest.approx(value, abs=1e-14)
    assert spectrum.largest == pytest.approx(value, abs=1e-14)


def test_misuse():
    operator = Dense(torch.eye(3, dtype=torch.float64))
    with pytest.raises(InvalidInput, match="steps"):
        lanczos(operator, steps=0)
    with pytest.raises(InvalidInput, match="tolerance"):
        lanczos(operator, tolerance=0.0)
    with pytest.raises(NonFinite, match="a matrix under test"):
        lanczos(Spy(matrix_with(spread(20, 10.0)), breaks_at=3))
