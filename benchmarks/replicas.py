"""How much faster is one training step of many replicas than as many steps of single models?

    python benchmarks/replicas.py [--large]

MLPs against plain eager PyTorch steps; on a GPU also 32 x 32 convolutional networks against the same networks captured
in CUDA graphs one after the other. Every side takes the same SGD steps on batches of 128 in this process, in turns.
"""

import argparse
import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import downweight as dw
from common import alternating, mlp, report
from downweight.stack import Stack, stack
from downweight.train import Gradient, Problem, Steps

BATCH = 128


def block(inside: int, outside: int, stride: int = 1) -> nn.Module:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
            self.two = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
            self.norms = nn.ModuleList([nn.BatchNorm2d(outside), nn.BatchNorm2d(outside)])
            same = stride == 1 and inside == outside
            self.short = nn.Identity() if same else nn.Conv2d(inside, outside, 1, stride, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norms[0](self.one(x)).relu()
            return (self.norms[1](self.two(y)) + self.short(x)).relu()

    return Residual()


def resnet20() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    inside = 16
    for outside in (16, 32, 64):
        for place in range(3):
            layers.append(block(inside, outside, 2 if outside > 16 and place == 0 else 1))
            inside = outside
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def vgg13() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    inside = 3
    for outside in (64, 64, 0, 128, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0):
        if outside:
            layers += [nn.Conv2d(inside, outside, 3, 1, 1), nn.BatchNorm2d(outside), nn.ReLU()]
            inside = outside
        else:
            layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 10))


def ours(task: dw.Task, count: int) -> Callable[[], None]:
    """One step of `count` replicas, each with another row removed, in one shared order."""
    problem = Problem(task, "cost", 0.0, [[row] for row in range(count)], 1 / len(task))
    passes = Stack.of(task)
    leaves = {name: value.requires_grad_() for name, value in stack(task, count).items()}
    steps = Steps(Gradient(problem, passes), dw.Recipe(lr=1e-3, epochs=1, batch_size=BATCH), leaves, {})
    index = torch.arange(BATCH, device=task.device)

    def step() -> None:
        with task.evaluating():
            steps(index)

    return step


def singles(model: nn.Module, data: tuple[Tensor, Tensor], count: int, captured: bool) -> Callable[[], None]:
    """A step of `count` models, one after the other: plain eager PyTorch, or each captured in a CUDA graph."""
    x, t = (part[:BATCH] for part in data)
    models = [copy.deepcopy(model) for _ in range(count)]
    steps: list[Callable[[], object]] = []
    for each in models:
        optimizer = torch.optim.SGD(each.parameters(), lr=1e-3)

        def step(each: nn.Module = each, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.zero_grad()
            nn.functional.cross_entropy(each(x), t).backward()
            optimizer.step()

        if not captured:
            steps.append(step)
            continue
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        steps.append(graph.replay)

    def all_of_them() -> None:
        for step in steps:
            step()

    return all_of_them


def compare(name: str, model: nn.Module, shape: Sequence[int], counts: Sequence[int], out: str | None) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator().manual_seed(0)
    data = (
        torch.randn(600, *shape, generator=generator).to(device),
        torch.randint(0, 10, (600,), generator=generator).to(device),
    )
    model = model.to(device).eval()
    task = dw.Task(model, "cross_entropy", data)
    captured = name != "MLP" and device.type == "cuda"
    record: dict[str, object] = {"network": name, "parameters": task.size, "together": Stack.of(task).batched}
    for count in counts:
        mine, theirs = alternating(ours(task, count), singles(model, data, count, captured))
        record[f"{count} replicas: ours (ms)"] = 1e3 * mine
        record[f"{count} replicas: {'graphs in turn' if captured else 'eager steps'} (ms)"] = 1e3 * theirs
        record[f"{count} replicas: times faster"] = theirs / mine
    report(__doc__.splitlines()[0], record, out)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--out")
    settings = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    widths, counts = ((784, 1024, 1024, 10), (20, 100)) if settings.large else ((8, 128, 128, 10), (20,))
    compare("MLP", mlp(*widths), widths[:1], counts, settings.out)
    if settings.large and torch.cuda.is_available():
        compare("ResNet-20", resnet20(), (3, 32, 32), (20,), settings.out)
        compare("VGG-13", vgg13(), (3, 32, 32), (20,), settings.out)


if __name__ == "__main__":
    main()
