"""Results on disk: a folder with `meta.json` and arrays as safetensors shards in blocks of rows.

    scores/
      meta.json                          written last; without it the folder is no result
      values-5f0c2d9e-00000.safetensors  rows 0 to 10921 of `values`, under the key "rows"
      values-5f0c2d9e-00001.safetensors  …

A result appears whole or not at all: it is written under a temporary name beside its place, flushed to the disk and
renamed. Over an earlier result the new shards (the middle of their names is drawn anew each time) join the old ones,
and replacing `meta.json`, one rename, is the moment at which the new result holds. A process killed on the way leaves
the earlier result as it was and a folder NAME.partial-…, which can be deleted.

`meta.json` has checksums of itself and of every shard: what was changed by hand is refused.

Arrays come back as handles on a memory map: rows and columns are read without the rest.
"""

import contextlib
import errno
import json
import math
import os
import re
import secrets
import shutil
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from downweight.errors import DamagedResult, ForeignResult, InvalidInput, InvalidType
from downweight.meta import FORMAT, FORMAT_VERSION, checksum, files_of, read_meta
from downweight.version import __version__

SHARD_BYTES = 256 * 2**20  # a guess: few files, and blocks that fit beside other things in memory

_OURS = ("format", "format_version", "package_version", "arrays", "checksum")


def write_folder(
    path: str | os.PathLike[str],
    meta: Mapping[str, Any],
    arrays: Mapping[str, Tensor | Iterable[Tensor]],
    *,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write one result to the folder `path`, whole or not at all; returns the folder.

    `meta` is anything JSON can hold, with the kind of result under "kind". An array is a tensor (N, …), or an iterable
    of its blocks of rows in order, of which at most one shard is held at a time.

    An earlier result of the same kind at `path` is replaced. A file, another kind of result, or a folder of other
    things is refused.
    """
    path = Path(os.path.realpath(path))
    kind = meta.get("kind")
    if not isinstance(kind, str):
        raise InvalidInput(f"meta['kind'] is {kind!r}; expected the kind of result in a word, such as 'scores'.")
    if clash := sorted(set(_OURS) & set(meta)):
        raise InvalidInput(f"meta has the keys {clash}, which the store writes itself.")
    meta = {"format": FORMAT, "format_version": FORMAT_VERSION, "package_version": __version__, **meta}
    try:
        json.dumps(meta, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"meta cannot be written as JSON: {error}.") from error
    _check_place(path, kind)
    for name in arrays:
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise InvalidInput(f"{name!r} cannot name an array: it becomes part of a file name.")
    known = sum(array.nbytes for array in arrays.values() if isinstance(array, Tensor))
    path.parent.mkdir(parents=True, exist_ok=True)
    if known > (free := shutil.disk_usage(path.parent).free):
        raise _disk_full(path, f"{known:,} bytes are needed and {free:,} are free")

    token = secrets.token_hex(4)
    partial = path.with_name(f"{path.name}.partial-{token}")
    partial.mkdir()
    try:
        index = {
            name: _write_array(partial, f"{name}-{token}", name, array, shard_bytes) for name, array in arrays.items()
        }
        with _synced(partial / "meta.json") as file:
            whole = {**meta, "arrays": index}
            file.write(json.dumps({**whole, "checksum": checksum(whole)}, indent=1, allow_nan=False).encode())
        _sync_folder(partial)
        _put_in_place(partial, path)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _disk_full(path, "the disk became full while it was written") from error
        raise
    finally:  # after success the folder has been moved, or emptied
        shutil.rmtree(partial, ignore_errors=True)
    return path


def read_folder(path: str | os.PathLike[str], kind: str) -> "tuple[dict[str, Any], dict[str, Stored]]":
    """The meta data of the result in the folder `path`, and its arrays by name, of which nothing is read yet.

    `DamagedResult` where there is no whole result, `ForeignResult` where it is of another kind or of a newer format.
    Sizes of all shards are checked here; their checksums by `Stored.verify` and by `Stored.load`.
    """
    path = Path(path)
    meta = read_meta(path)
    if meta["kind"] != kind:
        raise ForeignResult(f"{path} holds {meta['kind']!r}; expected {kind!r}.")
    try:
        return meta, {name: Stored(path, name, **entry) for name, entry in meta.pop("arrays").items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise DamagedResult(f"{path / 'meta.json'} does not describe its arrays ({error!r}); it was changed.") from None


class Stored:
    """One array (N, …) of a result on disk. What it returns are copies in memory, of what was asked for only."""

    shape: torch.Size
    dtype: torch.dtype

    def __init__(self, folder: Path, name: str, shape: list[int], dtype: str, shards: list[dict[str, Any]]):
        self.folder = folder
        self.name = name
        self.shape = torch.Size(shape)
        self.dtype = getattr(torch, dtype)
        if not isinstance(self.dtype, torch.dtype):
            raise TypeError(dtype)
        self._shards = shards
        self._starts = [0]  # first row of every shard, then N
        for shard in shards:
            self._starts.append(self._starts[-1] + shard["rows"])
            self._check_size(folder / shard["file"], shard["bytes"])
        if self._starts[-1] != self.shape[0]:
            raise DamagedResult(
                f"The shards of {name!r} in {folder} hold {self._starts[-1]} rows; its meta.json says {self.shape[0]}."
            )
        self._maps: list[Tensor | None] = [None] * len(shards)

    def __repr__(self) -> str:
        return f"Stored({self.name!r}, shape={tuple(self.shape)}, dtype={self.dtype}, folder={str(self.folder)!r})"

    def __len__(self) -> int:
        return self.shape[0]

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows start to stop − 1, (stop − start, …)."""
        if not 0 <= start <= stop <= len(self):
            raise InvalidInput(f"rows {start} to {stop} of {self.name!r}, which has {len(self)} rows.")
        out = torch.empty((stop - start, *self.shape[1:]), dtype=self.dtype)
        shard = bisect_right(self._starts, start) - 1
        row = start
        while row < stop:
            last = min(stop, self._starts[shard + 1])
            block = self._map(shard)[row - self._starts[shard] : last - self._starts[shard]]
            out[row - start : last - start] = block
            row, shard = last, shard + 1
        return out

    def row(self, i: int) -> Tensor:
        """Row i, (…)."""
        if not 0 <= i < len(self):
            raise InvalidInput(f"row {i} of {self.name!r}, which has {len(self)} rows.")
        return self.rows(i, i + 1)[0]

    def column(self, j: int) -> Tensor:
        """Entry j of every row, (N, …)."""
        if len(self.shape) < 2:
            raise InvalidInput(f"{self.name!r} has shape {tuple(self.shape)} and so no columns.")
        if not 0 <= j < self.shape[1]:
            raise InvalidInput(f"column {j} of {self.name!r}, which has {self.shape[1]} columns.")
        return torch.cat([self._map(shard)[:, j] for shard in range(len(self._shards))])

    def load(self) -> Tensor:
        """The whole array, its checksums verified."""
        self.verify()
        return self.rows(0, len(self))

    def verify(self) -> None:
        """Compare every shard with its checksum; `DamagedResult` where one differs."""
        for shard in self._shards:
            found = 0
            with open(self.folder / shard["file"], "rb") as file:
                while block := file.read(2**22):
                    found = zlib.crc32(block, found)
            if found != shard["crc32"]:
                raise DamagedResult(
                    f"{self.folder / shard['file']} has changed since it was written (its checksum differs). "
                    "Compute the result again, or restore the file."
                )

    def _check_size(self, file: Path, expected: int) -> None:
        try:
            found = file.stat().st_size
        except FileNotFoundError:
            raise DamagedResult(f"{file} is missing, a part of {self.name!r}; the result is not whole.") from None
        if found != expected:
            raise DamagedResult(f"{file} has {found:,} bytes and should have {expected:,}; it is not whole.")

    def _map(self, shard: int) -> Tensor:
        """The rows of one shard, as a view of the memory-mapped file."""
        mapped = self._maps[shard]
        if mapped is None:
            from safetensors import SafetensorError, safe_open

            entry = self._shards[shard]
            file = self.folder / entry["file"]
            self._check_size(file, entry["bytes"])  # a map over a file that has shrunk would end the process
            try:
                with safe_open(file, framework="pt") as tensors:
                    mapped = tensors.get_tensor("rows")
            except SafetensorError as error:
                raise DamagedResult(f"{file} cannot be read ({error}); it is damaged.") from None
            if mapped.shape != (entry["rows"], *self.shape[1:]) or mapped.dtype != self.dtype:
                raise DamagedResult(
                    f"{file} holds {tuple(mapped.shape)} of {mapped.dtype}; the meta.json beside it says "
                    f"{(entry['rows'], *self.shape[1:])} of {self.dtype}."
                )
            self._maps[shard] = mapped
        return mapped


def _check_place(path: Path, kind: str) -> None:
    """Refuse a place that holds anything but an earlier result of the same kind."""
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    try:
        found = read_meta(path)["kind"]
    except (DamagedResult, ForeignResult) as error:
        raise ForeignResult(
            f"{path} exists and is no result that may be replaced: {error} It is left alone; choose another name."
        ) from None
    if found != kind:
        raise ForeignResult(f"{path} holds {found!r}, and {kind!r} would replace it. Choose another name.")


def _write_array(
    folder: Path, stem: str, name: str, array: Tensor | Iterable[Tensor], shard_bytes: int
) -> dict[str, Any]:
    """Write the shards of one array; returns its entry for meta.json."""
    shards: list[dict[str, Any]] = []
    shape: tuple[int, ...] | None = None
    dtype = None
    for rows in _shard_rows(name, array, shard_bytes):
        shape, dtype = tuple(rows.shape[1:]), rows.dtype
        file = f"{stem}-{len(shards):05}.safetensors"
        shards.append({"file": file, "rows": len(rows), **_write_shard(folder / file, rows)})
    if shape is None:
        raise InvalidInput(f"{name!r} came as an iterable without a block; its shape is not known.")
    count = sum(shard["rows"] for shard in shards)
    return {"shape": [count, *shape], "dtype": str(dtype).removeprefix("torch."), "shards": shards}


def _shard_rows(name: str, array: Tensor | Iterable[Tensor], shard_bytes: int) -> Iterator[Tensor]:
    """The rows of an array in pieces of one shard each, however they came."""
    first: Tensor | None = None
    empty = True
    held: list[Tensor] = []
    per_shard = missing = 0  # rows of a full shard, and those still to come until it is full
    for block in (array,) if isinstance(array, Tensor) else array:
        if not isinstance(block, Tensor) or block.ndim == 0:
            raise InvalidType(f"{name!r} came as {type(block).__name__}; expected a tensor with an axis of rows.")
        if first is None:
            first = block
            per_shard = max(1, shard_bytes // max(1, math.prod(block.shape[1:]) * block.element_size()))
            missing = per_shard
        if block.shape[1:] != first.shape[1:] or block.dtype != first.dtype:
            raise InvalidInput(
                f"A block of {name!r} has rows {tuple(block.shape[1:])} of {block.dtype}; the first had "
                f"{tuple(first.shape[1:])} of {first.dtype}."
            )
        empty = empty and len(block) == 0
        while len(block) >= missing:
            yield torch.cat([*held, block[:missing]]) if held else block[:missing]
            block, held, missing = block[missing:], [], per_shard
        if len(block):
            # a copy: the producer may fill the same buffer again
            held.append(block if isinstance(array, Tensor) else block.detach().clone())
            missing -= len(block)
    if held:
        yield torch.cat(held)
    elif empty and first is not None:
        yield first  # no rows, but a shape


def _write_shard(file: Path, rows: Tensor) -> dict[str, int]:
    from safetensors.torch import save

    content = save({"rows": rows.detach().cpu().contiguous()})
    with _synced(file) as out:
        out.write(content)
    return {"bytes": len(content), "crc32": zlib.crc32(content)}


def _put_in_place(partial: Path, path: Path) -> None:
    """Make the complete folder `partial` the result at `path`. Each branch takes effect in one rename."""
    if not path.exists() or not any(path.iterdir()):
        with contextlib.suppress(FileNotFoundError):
            path.rmdir()  # an empty folder
        try:
            os.rename(partial, path)
            _sync_folder(path.parent)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise  # else another process has just put its result there: replace it
    for shard in partial.glob("*.safetensors"):
        os.rename(shard, path / shard.name)
    _sync_folder(path)
    replaced = files_of(read_meta(path))
    os.replace(partial / "meta.json", path / "meta.json")
    _sync_folder(path)
    for name in replaced:
        (path / name).unlink(missing_ok=True)


@contextlib.contextmanager
def _synced(file: Path) -> Iterator[BinaryIO]:
    with open(file, "xb") as out:
        yield out
        out.flush()
        os.fsync(out.fileno())


def _sync_folder(folder: Path) -> None:
    if os.name != "posix":
        return  # elsewhere a folder cannot be opened, and renames are flushed by themselves
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _disk_full(path: Path, why: str) -> OSError:
    return OSError(
        errno.ENOSPC,
        f"No space left for this result: {why}; nothing was changed. Free some, or write to",
        str(path),
    )
