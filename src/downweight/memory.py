"""How much memory there is, and how much a user allows."""

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from downweight.errors import InvalidInput, MemoryLimit

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_UNITS = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def gibibytes(count: float) -> str:
    """`count` bytes in words, with a unit that a person reads at a glance."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{int(count)} B"


def parse_bytes(limit: int | str | None) -> int | None:
    """Bytes from 8_000_000_000, "8GB" or "7.5 GiB"; None stays None."""
    if limit is None:
        return None
    if isinstance(limit, str):
        match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([kmgt]?)(i?)b?\s*", limit.lower())
        if match is None:
            raise InvalidInput(f"memory_limit is {limit!r}; expected bytes as an integer or a text like '8GiB'.")
        number, unit, binary = match.groups()
        limit = int(float(number) * (_BINARY_UNITS if binary else _UNITS)[unit])
    if not isinstance(limit, int) or isinstance(limit, bool) or limit <= 0:
        raise InvalidInput(f"memory_limit is {limit!r}; expected a positive number of bytes.")
    return limit


def free_bytes(device: torch.device) -> int:
    """Bytes that a new allocation on this device can have without swapping."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + cached
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def output_sizes() -> Iterator[list[int]]:
    """Bytes of every tensor that a module returns while it is active, in order."""
    sizes: list[int] = []

    def seen(module: Any, arguments: Any, result: Any) -> None:
        sizes.extend(leaf.nbytes for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))

    # A dispatch mode would see every operation, and costs a second and a half: it imports torch's compiler.
    hook = nn.modules.module.register_module_forward_hook(seen)
    try:
        yield sizes
    finally:
        hook.remove()


@dataclass(frozen=True)
class Budget:
    """What one computation may use on a device: the free memory, or less where a limit is set."""

    device: torch.device
    limit: int | None = None

    def available(self) -> int:
        # A tenth stays free for what cannot be foreseen (allocator rounding, the user's own work).
        free = int(0.9 * free_bytes(self.device))
        return free if self.limit is None else min(free, self.limit)

    def require(self, needed: int, what: str, advice: str) -> None:
        """Raise MemoryLimit, with what would fit, when `needed` bytes are not to be had."""
        available = self.available()
        if needed > available:
            source = "memory_limit" if self.limit is not None else "free memory"
            raise MemoryLimit(
                f"{what} needs {gibibytes(needed)}, and the {source} on {self.device} allows "
                f"{gibibytes(available)}. {advice}"
            )
