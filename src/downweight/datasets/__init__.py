"""Data to try things on."""

from downweight.datasets.uci import (
    TABLES,
    Split,
    Table,
    breast_cancer,
    concrete,
    energy_efficiency,
    pima_diabetes,
    split,
)

__all__ = ["TABLES", "Split", "Table", "breast_cancer", "concrete", "energy_efficiency", "pima_diabetes", "split"]
