"""Which training rows made my model do this, and can I believe the answer?"""

from typing import Any

from downweight.errors import (
    DamagedResult,
    DownweightError,
    DownweightWarning,
    ForeignResult,
    IndefiniteSystem,
    InvalidInput,
    InvalidType,
    MemoryLimit,
    MissingDependency,
    NonFinite,
    NotConverged,
    SingularSystem,
)
from downweight.version import __version__

try:
    from downweight.baselines import grad_cos, grad_dot, representer_points, tracin
    from downweight.curvature.dense import Dense
    from downweight.curvature.gauss_newton import GaussNewtonMatrix
    from downweight.curvature.hessian import HessianMatrix
    from downweight.curvature.lanczos import Spectrum, lanczos
    from downweight.curvature.operator import Damped, Operator
    from downweight.damping import relative_damping
    from downweight.decompose import Decomposition, decompose
    from downweight.evaluate import DatamodellingScore, linear_datamodelling_score
    from downweight.influence import influence, parameter_shift, self_influence
    from downweight.losses import Loss
    from downweight.measurements import Measurement
    from downweight.objectives import (
        ColdStart,
        GaussNewton,
        LinearizedProximalBregman,
        Objective,
        Proximal,
        ProximalBregman,
        TwoStage,
        WarmStart,
    )
    from downweight.recipe import Recipe
    from downweight.respond import Response, respond
    from downweight.scores import Scores
    from downweight.solve import solve
    from downweight.solvers.auto import Auto
    from downweight.solvers.cg import CG
    from downweight.solvers.cholesky import Cholesky
    from downweight.solvers.dual import Dual
    from downweight.solvers.lissa import LiSSA
    from downweight.solvers.minres import MINRES
    from downweight.solvers.solver import Result, Solution, Solver
    from downweight.task import Coverage, Task
    from downweight.train import train
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise

    # Pages of saved results are made without it: downweight.report, and `downweight report` on the command line.
    def __getattr__(name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise ModuleNotFoundError(
            f"downweight.{name} needs PyTorch (pip install torch), which is not here.", name="torch"
        )


__all__ = [
    "CG",
    "MINRES",
    "Auto",
    "Cholesky",
    "ColdStart",
    "Coverage",
    "DamagedResult",
    "Damped",
    "DatamodellingScore",
    "Decomposition",
    "Dense",
    "DownweightError",
    "DownweightWarning",
    "Dual",
    "ForeignResult",
    "GaussNewton",
    "GaussNewtonMatrix",
    "HessianMatrix",
    "IndefiniteSystem",
    "InvalidInput",
    "InvalidType",
    "LiSSA",
    "LinearizedProximalBregman",
    "Loss",
    "Measurement",
    "MemoryLimit",
    "MissingDependency",
    "NonFinite",
    "NotConverged",
    "Objective",
    "Operator",
    "Proximal",
    "ProximalBregman",
    "Recipe",
    "Response",
    "Result",
    "Scores",
    "SingularSystem",
    "Solution",
    "Solver",
    "Spectrum",
    "Task",
    "TwoStage",
    "WarmStart",
    "__version__",
    "decompose",
    "grad_cos",
    "grad_dot",
    "influence",
    "lanczos",
    "linear_datamodelling_score",
    "parameter_shift",
    "relative_damping",
    "representer_points",
    "respond",
    "self_influence",
    "solve",
    "tracin",
    "train",
]
