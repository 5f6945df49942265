"""solve(operator, vectors, solver): x with A x = v, and how far to believe it."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from downweight.curvature.dense import Dense
from downweight.curvature.operator import Operator
from downweight.errors import InvalidInput, InvalidType, NonFinite, NotConverged, warn
from downweight.shapes import Float, Shaped
from downweight.solvers.auto import Auto
from downweight.solvers.cg import CG
from downweight.solvers.cholesky import Cholesky
from downweight.solvers.dual import Dual
from downweight.solvers.lissa import LiSSA
from downweight.solvers.minres import MINRES
from downweight.solvers.solver import Indefinite, Solution, Solver, check_indefinite

SOLVERS: dict[str, Callable[[], Solver]] = {
    "auto": Auto,
    "cholesky": Cholesky,
    "dual": Dual,
    "cg": CG,
    "minres": MINRES,
    "lissa": LiSSA,
}


@torch.inference_mode(False)
def solve(
    operator: Operator | Tensor,
    vectors: Shaped[Tensor, "*K d"],
    solver: Solver | str = "auto",
    *,
    indefinite: Indefinite = "raise",
    throw: bool = False,
) -> Solution:
    """Solutions of A x = v for one vector (d,) or a block (K, d); the value has the same shape.

    A tensor as operator is taken as a dense symmetric matrix. Wrong shapes, dtypes and devices, NaN,
    a singular and (unless `indefinite="allow"`) an indefinite system raise. Not converging is a
    result: it is returned with its residual and reason, with one warning for the whole call, or
    raises NotConverged with `throw=True`.
    """
    solver = as_solver(solver)
    check_indefinite(indefinite)
    if isinstance(operator, Tensor):
        operator = Dense(operator)
    block = _checked(operator, vectors)
    solution = solver.compute(solver.init(operator, indefinite=indefinite), block)
    unfinished = describe_unfinished(solution)
    if unfinished and throw:
        raise NotConverged(unfinished)
    if unfinished:
        warn(unfinished)
    return replace(solution, value=solution.value.reshape(vectors.shape))


def as_solver(solver: Solver | str) -> Solver:
    """The solver of this name with its default settings, or the solver itself."""
    if isinstance(solver, str):
        if solver not in SOLVERS:
            raise InvalidInput(f"There is no solver {solver!r}; the names are {', '.join(sorted(SOLVERS))}.")
        return SOLVERS[solver]()
    if isinstance(solver, type) or not isinstance(solver, Solver):
        raise InvalidType(
            f"solver is a name ({', '.join(sorted(SOLVERS))}) or an object such as CG(rtol=1e-8), got {solver!r}."
        )
    return solver


def describe_unfinished(solution: Solution) -> str | None:
    """One sentence about the vectors that are not solved; None when all are."""
    left = [k for k, result in enumerate(solution.result) if not result.ok]
    if not left:
        return None
    reasons = sorted({solution.result[k].value for k in left})
    sentence = (
        f"{len(left)} of {len(solution.result)} systems did not converge ({', '.join(reasons)}); the largest "
        f"relative residual is {float(solution.residual[left].max()):.2g}."
    )
    if solution.stats.get("message"):
        sentence += f" {solution.stats['message']}."
    return sentence


def _checked(operator: Operator, vectors: Shaped[Tensor, "*K d"]) -> Float[Tensor, "K d"]:
    if not isinstance(operator, Operator):
        raise InvalidType(f"operator is an Operator or a tensor, got {type(operator).__name__}.")
    if not isinstance(vectors, Tensor):
        raise InvalidType(f"vectors is a torch.Tensor, got {type(vectors).__name__}.")
    if vectors.ndim not in (1, 2) or vectors.shape[-1] != operator.size:
        raise InvalidInput(
            f"vectors has shape {tuple(vectors.shape)}; expected ({operator.size},) or (K, {operator.size}) "
            f"for {operator.describe()}."
        )
    if vectors.dtype != operator.dtype:
        raise InvalidType(f"vectors is {vectors.dtype} and {operator.describe()} is {operator.dtype}; convert one.")
    if vectors.device != operator.device:
        raise InvalidInput(f"vectors is on {vectors.device} and {operator.describe()} on {operator.device}.")
    block = vectors.detach().reshape(-1, operator.size)
    finite = torch.isfinite(block).all(dim=1).tolist()
    if not all(finite):
        raise NonFinite(
            f"Vector {finite.index(False)} holds NaN or infinity ({finite.count(False)} of {len(finite)} do)."
        )
    return block
