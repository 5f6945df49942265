"""Four small UCI tables, inside the package: two of two classes, two of a real target.

| function | rows | features | target |
| --- | ---: | ---: | --- |
| `breast_cancer` | 569 | 30 | benign 1, malignant 0 |
| `pima_diabetes` | 768 | 8 | diabetes 1, none 0 |
| `concrete` | 1,030 | 8 | compressive strength, MPa |
| `energy_efficiency` | 768 | 8 | heating (or cooling) load, kWh/m² |

None has a canonical split: `split` makes one from a seed.
"""

from dataclasses import dataclass
from importlib import resources

import numpy as np
import torch
from torch import Tensor

from downweight.errors import InvalidInput
from downweight.shapes import Float, Int, Shaped


@dataclass(frozen=True, eq=False)
class Table:
    """A table as published, nothing scaled. Classes are int64 (N,), real targets float64 (N, 1)."""

    name: str
    features: Float[Tensor, "N p"]
    target: Shaped[Tensor, "N *one"]
    feature_names: tuple[str, ...]
    target_name: str
    citation: str

    def __len__(self) -> int:
        return len(self.features)


@dataclass(frozen=True, eq=False)
class Split:
    """Standardised training and test tensors, and the rows of the table that they are."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    train_rows: Int[Tensor, " n"]
    test_rows: Int[Tensor, " m"]


def breast_cancer() -> Table:
    """Breast Cancer Wisconsin (Diagnostic): 569 tumours, 30 measurements, benign (1, 357 rows) or malignant (0)."""
    return _table(
        "breast_cancer_wdbc",
        target="benign",
        citation="W. N. Street, W. H. Wolberg, O. L. Mangasarian: Nuclear feature extraction for breast tumor "
        "diagnosis. 1993. UCI Machine Learning Repository, CC BY 4.0.",
    )


def pima_diabetes() -> Table:
    """Pima Indians Diabetes: 768 women, 8 measurements, diabetes within five years (1, 268 rows) or none (0).

    Zeros in glucose, blood_pressure, skin_thickness, insulin and bmi stand for missing values, as in the original.
    """
    return _table(
        "pima_diabetes",
        target="diabetes",
        citation="J. W. Smith et al.: Using the ADAP learning algorithm to forecast the onset of diabetes mellitus. "
        "1988.",
    )


def concrete() -> Table:
    """Concrete Compressive Strength: 1,030 mixtures, 8 ingredients and age; the rounded version of the literature.

    25 rows repeat another one.
    """
    return _table(
        "concrete",
        target="compressive_strength_mpa",
        citation="I-C. Yeh: Modeling of strength of high-performance concrete using artificial neural networks. Cement "
        "and Concrete Research, 1998. UCI Machine Learning Repository, CC BY 4.0.",
    )


def energy_efficiency(target: str = "heating_load") -> Table:
    """Energy Efficiency: 768 simulated buildings, 8 features; `target` is "heating_load" (usual) or "cooling_load"."""
    return _table(
        "energy_efficiency",
        target=target,
        targets=("heating_load", "cooling_load"),
        citation="A. Tsanas, A. Xifara: Accurate quantitative estimation of energy performance of residential "
        "buildings using statistical machine learning tools. Energy and Buildings, 2012. UCI Machine Learning "
        "Repository, CC BY 4.0.",
    )


TABLES = {
    "breast_cancer": breast_cancer,
    "pima_diabetes": pima_diabetes,
    "concrete": concrete,
    "energy_efficiency": energy_efficiency,
}


def split(table: Table, seed: int, test_fraction: float = 0.1) -> Split:
    """A random split, standardised by the mean and standard deviation of its training rows.

    Real targets are standardised too; classes stay as they are. The split depends on the table's length, `seed` and
    `test_fraction` only. Standard deviations divide by the number of rows; a constant feature becomes zero.
    """
    count = round(len(table) * test_fraction)
    if not 0 < count < len(table):
        raise InvalidInput(
            f"test_fraction is {test_fraction}, which makes {count} of {len(table)} rows test rows; "
            "expected a fraction that leaves rows on both sides."
        )
    order = torch.randperm(len(table), generator=torch.Generator().manual_seed(seed))
    test_rows, train_rows = order[:count].sort().values, order[count:].sort().values
    features = _standardised(table.features, train_rows)
    target = _standardised(table.target, train_rows) if table.target.is_floating_point() else table.target
    return Split(
        train=(features[train_rows], target[train_rows]),
        test=(features[test_rows], target[test_rows]),
        train_rows=train_rows,
        test_rows=test_rows,
    )


def _standardised(values: Float[Tensor, "N p"], rows: Int[Tensor, " n"]) -> Float[Tensor, "N p"]:
    mean = values[rows].mean(0)
    scale = values[rows].std(0, correction=0)
    return (values - mean) / torch.where(scale > 0, scale, 1.0)


def _table(name: str, target: str, citation: str, targets: tuple[str, ...] | None = None) -> Table:
    targets = targets or (target,)
    if target not in targets:
        raise InvalidInput(f"target is {target!r}; {name} has {' and '.join(map(repr, targets))}.")
    with resources.files("downweight.datasets").joinpath("tables", f"{name}.csv").open(encoding="utf-8") as file:
        names = file.readline().strip().split(",")
        values = torch.from_numpy(np.loadtxt(file, delimiter=",", ndmin=2))
    column = values[:, names.index(target)]
    classes = bool(((column == 0) | (column == 1)).all())
    return Table(
        name=name,
        features=values[:, : len(names) - len(targets)].contiguous(),
        target=column.long() if classes else column[:, None].clone(),
        feature_names=tuple(names[: len(names) - len(targets)]),
        target_name=target,
        citation=citation,
    )
