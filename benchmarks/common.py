"""What every benchmark shares: the data, the network, honest timing, and a record of where it ran."""

import gzip
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


def mnist(train: int, test: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The first rows of MNIST, standardised by its published mean and deviation, as float32."""
    folder = Path(os.environ.get("DOWNWEIGHT_DATA", "data-local")) / "mnist"

    def read(name: str, header: int) -> np.ndarray:
        return np.frombuffer(gzip.decompress((folder / name).read_bytes()), np.uint8, offset=header)

    def pair(prefix: str, count: int) -> tuple[Tensor, Tensor]:
        images = read(f"{prefix}-images-idx3-ubyte.gz", 16).reshape(-1, 784)[:count]
        labels = read(f"{prefix}-labels-idx1-ubyte.gz", 8)[:count]
        pixels = torch.from_numpy(images.astype(np.float32) / 255)
        return (pixels - 0.1307) / 0.3081, torch.from_numpy(labels.astype(np.int64))

    return pair("train", train), pair("t10k", test)


def mlp(*widths: int, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for size, following in zip(widths, widths[1:], strict=False):
        layers += [nn.Linear(size, following), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def trained(model: nn.Module, inputs: Tensor, targets: Tensor, epochs: int) -> nn.Module:
    """Adam at 1e-3, batches of 128: a network that fits its rows without being at a minimum."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        for batch in torch.randperm(len(targets), generator=generator).to(inputs.device).split(128):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs[batch]), targets[batch]).backward()
            optimizer.step()
    return model.eval()


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(function: Callable[[], Any]) -> tuple[float, Any]:
    """Wall time of one call, and its result."""
    synchronize()
    start = time.perf_counter()
    result = function()
    synchronize()
    return time.perf_counter() - start, result


def median(function: Callable[[], Any], repeats: int = 9) -> float:
    """Median wall time after two warm-up calls."""
    function(), function()
    return statistics.median(seconds(function)[0] for _ in range(repeats))


def alternating(*functions: Callable[[], Any], repeats: int = 15) -> list[float]:
    """Median wall times of several functions that take turns, so that a slow spell hits them all."""
    for function in functions:
        function(), function()
    times = [[seconds(function)[0] for function in functions] for _ in range(repeats)]
    return [statistics.median(column) for column in zip(*times, strict=True)]


def environment() -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    ).stdout.strip()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
    return {
        "device": device or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": os.environ.get("DOWNWEIGHT_COMMIT") or commit or "unknown",
    }


def report(question: str, record: dict[str, Any], out: str | None) -> None:
    """Print the answer, and append it as one line of JSON to `out`."""
    print(question)
    for name, value in {**environment(), **record}.items():
        print(f"  {name}: {value:.4g}" if isinstance(value, float) else f"  {name}: {value}")
    if out:
        with Path(out).open("a") as file:
            file.write(json.dumps({"question": question, **environment(), **record}) + "\n")


def correlations(mine: Tensor, exact: Tensor) -> dict[str, float]:
    """Pearson and Spearman over the rows, averaged over the queries."""

    def standard(values: Tensor) -> Tensor:
        values = values.double() - values.double().mean(1, keepdim=True)
        return values / values.norm(dim=1, keepdim=True).clamp_min(1e-300)

    def ranks(values: Tensor) -> Tensor:
        return values.argsort(1).argsort(1)

    exact = exact.to(mine.device)
    return {
        "pearson": float((standard(mine) * standard(exact)).sum(1).mean()),
        "spearman": float((standard(ranks(mine)) * standard(ranks(exact))).sum(1).mean()),
    }
