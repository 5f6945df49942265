"""Figure 2: cold and warm response paths of a quadratic cost that loses its only minimum."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from downweight.objectives import ColdStart, Objective, WarmStart
from downweight.recipe import Recipe
from downweight.report import figures, page
from downweight.respond import respond
from downweight.shapes import Float
from downweight.task import Task
from downweight.train import train

# Kept rows fix θ along one direction only; the two removed ones, which disagree, fix the other.
INPUTS = ((1.0, 1.0), (2.0, 2.0), (1.0, -0.2), (0.3, 1.2))
TARGETS = (2.0, 4.2, 1.6, -0.5)
REMOVED = (2, 3)
START = (-0.6, 1.6)  # the black star: θ⁰


@dataclass(frozen=True, eq=False)
class ResponsePaths:
    """Where gradient descent on J − ε Σ_S L ends, from θ⁰ (cold) and from the trained θˢ (warm), for every ε.

    epsilon: from 0 to 1/N, (E,); cold, warm: (E, 2); start: θ⁰; trained: θˢ. At ε = 1/N the minima are a line.
    """

    epsilon: Float[torch.Tensor, " E"]
    cold: Float[torch.Tensor, "E 2"]
    warm: Float[torch.Tensor, "E 2"]
    start: Float[torch.Tensor, " 2"]
    trained: Float[torch.Tensor, " 2"]
    inputs: Float[torch.Tensor, "N 2"]
    targets: Float[torch.Tensor, " N"]

    def costs(self, epsilon: float, points: Float[torch.Tensor, "n 2"]) -> Float[torch.Tensor, " n"]:
        """J − ε Σ_S L at any points."""
        share = torch.full((len(self.targets),), 1 / len(self.targets), dtype=torch.float64)
        share[list(REMOVED)] -= epsilon
        return 0.5 * (points @ self.inputs.T - self.targets).square() @ share

    def picture(self) -> str:
        """The two paths over the contours of the cost at ε = 0 and ε = 1/N, as SVG."""
        ends = torch.cat([self.cold, self.warm, self.start[None]])
        low, high = ends.min(0).values - 0.4, ends.max(0).values + 0.4
        across, along = (torch.linspace(float(low[k]), float(high[k]), 60, dtype=torch.float64) for k in (0, 1))
        grid = torch.stack(torch.meshgrid(across, along, indexing="xy"), 2).flatten(0, 1)
        costs = {name: self.costs(e, grid) for name, e in (("all rows", 0.0), ("removed", 1 / len(self.targets)))}
        return figures.paths(
            across.tolist(),
            along.tolist(),
            {name: values.reshape(60, 60).tolist() for name, values in costs.items()},
            {"cold start": self.cold.tolist(), "warm start": self.warm.tolist()},
            {"θ⁰": self.start.tolist(), "θˢ": self.trained.tolist()},
        )

    def write(self, path: str | Path) -> Path:
        """The picture as an SVG file."""
        return page.write_whole(self.picture(), path)


def response_paths(steps: int = 100, points: int = 15) -> ResponsePaths:
    """Both paths by the library's own engine: full-batch gradient descent of a linear network, `steps` of it."""
    inputs, targets = torch.tensor(INPUTS, dtype=torch.float64), torch.tensor(TARGETS, dtype=torch.float64)[:, None]
    model = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([START]))
    untrained = Task(model.eval(), "squared_error", (inputs, targets))
    task = train(untrained, Recipe(lr=0.2, epochs=steps), progress=False)
    # Most of the way is made near 1/N.
    epsilon = (1 - torch.linspace(1, 0, points, dtype=torch.float64) ** 3) / len(task)

    def path(objective: Objective) -> torch.Tensor:
        group = [list(REMOVED)]
        ends = [respond(task, objective, group, epsilon=e, progress=False).parameters for e in epsilon.tolist()]
        return torch.cat(ends)

    cold, warm = path(ColdStart()), path(WarmStart())
    return ResponsePaths(epsilon, cold, warm, untrained.flat, task.flat, inputs, targets[:, 0])
