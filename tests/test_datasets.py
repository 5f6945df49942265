"""The tables inside the package are the published ones, and their splits are fixed by a seed."""

import hashlib
from importlib import resources

import pytest
import torch
from torch.testing import assert_close

from downweight import datasets
from downweight.errors import InvalidInput

# name: sha256 of the file, rows, features
PUBLISHED = {
    "breast_cancer": ("841ebc1d5d5822e02a772a093458239ec3704685cdb3dc7f9f74c537ce0c6a33", 569, 30),
    "pima_diabetes": ("1deba7b8009f8f423097fdc997e50009b83eddf82b177f44902f4a618536005c", 768, 8),
    "concrete": ("0be478b39df1ab820d96c98919f093d19568b04160912e2ef8bcd77a37738964", 1030, 8),
    "energy_efficiency": ("7045e1eaa092883d00ec2fee6a4579bcd61919b7ae909ff801779d79a54d089a", 768, 8),
}


def test_every_table_is_listed():
    assert datasets.TABLES.keys() == PUBLISHED.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_table_is_the_published_one(name):
    sha256, rows, features = PUBLISHED[name]
    table = datasets.TABLES[name]()
    content = resources.files("downweight.datasets").joinpath("tables", f"{table.name}.csv").read_bytes()
    assert hashlib.sha256(content).hexdigest() == sha256
    assert table.features.shape == (rows, features)
    assert table.features.dtype == torch.float64
    assert len(table) == len(table.target) == rows
    assert len(table.feature_names) == features
    assert table.target_name not in table.feature_names
    assert table.features.isfinite().all()
    assert table.citation


def test_classes_are_counted_and_integer():
    cancer, diabetes = datasets.breast_cancer(), datasets.pima_diabetes()
    assert cancer.target.bincount().tolist() == [212, 357]
    assert diabetes.target.bincount().tolist() == [500, 268]
    assert cancer.target.dtype == torch.int64


def test_breast_cancer_equals_that_of_scikit_learn():
    sklearn = pytest.importorskip("sklearn.datasets")
    theirs = sklearn.load_breast_cancer()
    ours = datasets.breast_cancer()
    assert_close(ours.features, torch.from_numpy(theirs.data), rtol=0, atol=0)
    assert_close(ours.target, torch.from_numpy(theirs.target).long())
    assert ours.feature_names == tuple(name.replace(" ", "_") for name in theirs.feature_names)


def test_first_rows_and_real_targets():
    concrete = datasets.concrete()
    assert concrete.features[0].tolist() == [540.0, 0.0, 0.0, 162.0, 2.5, 1040.0, 676.0, 28.0]
    assert concrete.target.shape == (1030, 1)
    assert concrete.target[0].item() == 79.99
    heating, cooling = datasets.energy_efficiency(), datasets.energy_efficiency("cooling_load")
    assert heating.feature_names == cooling.feature_names
    assert (heating.target[0].item(), cooling.target[0].item()) == (15.55, 21.33)
    with pytest.raises(InvalidInput, match="'heating_load' and 'cooling_load'"):
        datasets.energy_efficiency("gas")


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_split_is_standardised_by_its_training_rows_and_made_by_its_seed(name):
    table = datasets.TABLES[name]()
    parts = datasets.split(table, seed=3)
    (x, t), (x_test, t_test) = parts.train, parts.test
    assert len(x_test) == len(t_test) == round(0.1 * len(table))
    assert sorted([*parts.train_rows.tolist(), *parts.test_rows.tolist()]) == list(range(len(table)))
    # means of some 500 to 1,000 numbers of size 1: rounding is some eps each
    assert_close(x.mean(0), torch.zeros_like(x[0]), rtol=0, atol=1e-12)
    assert_close(x.std(0, correction=0), torch.ones_like(x[0]), rtol=1e-12, atol=0)
    mean, scale = table.features[parts.train_rows].mean(0), table.features[parts.train_rows].std(0, correction=0)
    assert_close(x_test * scale + mean, table.features[parts.test_rows], rtol=1e-12, atol=1e-9)
    if table.target.is_floating_point():
        assert_close(t.std(0, correction=0), torch.ones(1, dtype=t.dtype), rtol=1e-12, atol=0)
    else:
        assert torch.equal(t, table.target[parts.train_rows])
    assert torch.equal(datasets.split(table, seed=3).test_rows, parts.test_rows)
    assert not torch.equal(datasets.split(table, seed=4).test_rows, parts.test_rows)


def test_a_constant_feature_becomes_zero():
    table = datasets.Table(
        "t", torch.tensor([[1.0, 5.0], [2.0, 5.0], [3.0, 5.0]]).double(), torch.arange(3), (), "", ""
    )
    assert datasets.split(table, seed=0, test_fraction=0.34).train[0][:, 1].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, 1e-9])
def test_a_split_needs_rows_on_both_sides(fraction):
    with pytest.raises(InvalidInput, match="both sides"):
        datasets.split(datasets.concrete(), seed=0, test_fraction=fraction)
