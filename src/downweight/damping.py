"""A damping relative to the curvature, chosen in the open: the λ is printed."""

import torch

from downweight.curvature.gauss_newton import GaussNewtonMatrix
from downweight.errors import InvalidInput
from downweight.memory import parse_bytes
from downweight.progress import reporting, track
from downweight.settings import number, whole
from downweight.solvers.solver import dot
from downweight.task import Task

# The part of the available memory for a block of probes, its product and what is at work. A guess.
_PROBE_MEMORY = 0.1


@torch.inference_mode(False)
def relative_damping(
    task: Task,
    fraction: float,
    *,
    probes: int = 64,
    seed: int = 0,
    memory_limit: int | str | None = None,
    progress: bool | None = None,
) -> float:
    r"""λ = `fraction` × the mean eigenvalue of the Gauss-Newton matrix (tr C / d, its l2 included), printed.

    Everywhere else λ is absolute, and so is what is returned. The trace is Hutchinson's estimate, the mean of zᵀCz
    over `probes` vectors z of random signs, one product each; the line that is printed has its standard error. Choose
    the fraction before you look at what the scores are then compared with.
    """
    with reporting(progress):
        if number(fraction, "fraction") <= 0:
            raise InvalidInput(f"fraction is {fraction!r}; expected a number > 0, such as 0.1.")
        probes, seed = whole(probes, "probes", 2), whole(seed, "seed", 0)
        matrix = GaussNewtonMatrix(task, memory_limit=parse_bytes(memory_limit))
        generator = torch.Generator().manual_seed(seed)
        size = max(1, int(_PROBE_MEMORY * matrix.budget.available()) // (4 * 8 * task.size))
        traces = []
        for start in track(range(0, probes, size), "Probes of the trace"):
            signs = torch.randint(2, (min(size, probes - start), task.size), generator=generator)
            vectors = signs.to(task.device, task.dtype).mul_(2).sub_(1)
            traces.append(dot(vectors, matrix.product(vectors)))
        means = torch.cat(traces) / task.size
        mean, error = means.mean().item(), means.std().item() / probes**0.5
        damping = float(fraction) * mean
        print(
            f"damping λ = {damping:.6g}: {float(fraction):g} × the mean eigenvalue {mean:.4g} ± {error:.1g} of "
            f"{matrix.describe()} ({probes} probes, seed {seed})"
        )
        return damping
