"""What this machine has for the work, and what would be slow here and why."""

import os
import platform
import re
import sys
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

from downweight.memory import free_bytes, gibibytes
from downweight.version import __version__

_PACKAGES = ("torch", "numpy", "pandas", "pyarrow", "safetensors", "altair")
_SMALL_MEMORY = 8 * 2**30  # a guess: below it the dual kernel ends at N·C of about 20,000
_SLOW_DOUBLE = 4  # float64 products on CPUs and data-centre GPUs take about twice as long as float32 ones


@dataclass(frozen=True)
class Examination:
    """`facts` by section, as (name, value) pairs in words, and one sentence for everything that would be slow."""

    facts: dict[str, list[tuple[str, str]]]
    slow: list[str]


@dataclass(frozen=True)
class Device:
    """A device, its free memory in bytes and its measured products in 10⁹ operations a second."""

    device: torch.device
    name: str
    free: int
    single: float
    double: float

    def largest_kernel(self) -> int:
        """Rows of the largest dual kernel that is factored within the free memory, in float64.

        The kernel and its factor are the same memory; half as much again is left to its making.
        """
        return int((self.free / (8 * 1.5)) ** 0.5)

    def seconds_to_factor(self, rows: int) -> float:
        """Cholesky takes rows³/3 products and as many sums, at best at the rate of a matrix product."""
        return 2 * rows**3 / 3 / (self.double * 1e9)


def examine() -> Examination:
    """Look at versions, devices, memory, threads and the data folder; measures for about a second."""
    devices = [_measured(device, name) for device, name in _devices()]
    facts = {
        "Versions": _versions(),
        "Devices": [
            (
                str(device.device),
                f"{device.name}, {gibibytes(device.free)} free, matrix products at {device.single:,.0f} GFLOP/s in "
                f"float32 and {device.double:,.0f} in float64",
            )
            for device in devices
        ],
        "Threads": [
            ("torch", f"{torch.get_num_threads()} of {_cores()} cores"),
            ("linear algebra", _linear_algebra()),
            *((name, os.environ[name]) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if name in os.environ),
        ],
        "Data": _data_folder(),
    }
    return Examination(facts, slow_here(devices, torch.get_num_threads(), _cores()))


def slow_here(devices: list[Device], threads: int, cores: int) -> list[str]:
    """One sentence for everything that would take long or not fit, with the reason and what helps."""
    fastest = max(devices, key=lambda device: device.double)
    rows = fastest.largest_kernel()
    found = [
        f"Exact scores through Dual() on {fastest.device}: a kernel up to N·C = {round(rows, -3):,} fits its free "
        "memory; "
        f"factoring that takes at least {_duration(fastest.seconds_to_factor(rows))} (20,000: "
        f"{_duration(fastest.seconds_to_factor(20_000))}). Beyond it the work is iterative."
    ]
    if all(device.device.type == "cpu" for device in devices):
        found.append("No GPU is visible to torch: products with the curvature and retraining run on the CPU.")
    for device in devices:
        if device.device.type == "cuda" and device.single > _SLOW_DOUBLE * device.double:
            found.append(
                f"{device.device} ({device.name}) computes {device.single / device.double:.0f} times slower in float64 "
                "than in float32. Keep the model in float32 there and look at scores.residuals, or use the CPU in "
                "float64."
            )
        if device.free < _SMALL_MEMORY:
            found.append(
                f"Only {gibibytes(device.free)} of memory are free on {device.device}. Rows and kernels go through it "
                "in small chunks; close other programs or set memory_limit to plan for it."
            )
    if threads < cores:
        found.append(
            f"torch uses {threads} of {cores} cores; unset OMP_NUM_THREADS or call torch.set_num_threads({cores})."
        )
    elif cores <= 4:
        found.append(f"There are only {cores} cores, so CPU work is slow whatever its settings.")
    if not torch.backends.mkl.is_available() and platform.machine() in ("x86_64", "AMD64"):
        found.append("This build of torch is without MKL; factorisations on the CPU may be several times slower.")
    return found


def _versions() -> list[tuple[str, str]]:
    found = [("downweight", __version__), ("Python", f"{platform.python_version()} ({sys.platform})")]
    for name in _PACKAGES:
        try:
            found.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            found.append((name, "not installed"))
    return found


def _devices() -> list[tuple[torch.device, str]]:
    found = [(torch.device("cpu"), _processor())]
    for index in range(torch.cuda.device_count()):
        found.append((torch.device("cuda", index), torch.cuda.get_device_name(index)))
    return found


def _measured(device: torch.device, name: str) -> Device:
    rates = [_gflops(device, dtype) for dtype in (torch.float32, torch.float64)]
    return Device(device, name, free_bytes(device), *rates)


def _gflops(device: torch.device, dtype: torch.dtype) -> float:
    """10⁹ operations a second of the best of four matrix products."""
    size = 4096 if device.type == "cuda" else 768
    generator = torch.Generator(device).manual_seed(0)
    matrix = torch.rand(size, size, generator=generator, dtype=dtype, device=device)

    def seconds() -> float:
        started = time.perf_counter()
        product = matrix @ matrix
        product[0, 0].item()  # waits for a GPU
        return time.perf_counter() - started

    return 2 * size**3 / min(seconds() for _ in range(4)) / 1e9


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _linear_algebra() -> str:
    settings = torch.__config__.show()
    found = re.search(r"LAPACK_INFO=(\w+)", settings) or re.search(r"BLAS_INFO=(\w+)", settings)
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{found.group(1) if found else 'unknown'}, vector instructions {capability}"


def _data_folder() -> list[tuple[str, str]]:
    place = os.environ.get("DOWNWEIGHT_DATA")
    if not place:
        return [("DOWNWEIGHT_DATA", "not set; only the UCI tables inside the package are at hand")]
    folder = Path(place)
    if not folder.is_dir():
        return [("DOWNWEIGHT_DATA", f"{folder} is not a folder")]
    found = [("DOWNWEIGHT_DATA", str(folder.resolve()))]
    for child in sorted(child for child in folder.iterdir() if child.is_dir()):
        files = [file for file in child.rglob("*") if file.is_file()]
        size = sum(file.stat().st_size for file in files)
        found.append((child.name, f"{len(files)} file{'' if len(files) == 1 else 's'}, {gibibytes(size)}"))
    return found if len(found) > 1 else [*found, ("", "it has no folders")]


def _duration(seconds: float) -> str:
    if seconds < 1:
        return "under a second"
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
