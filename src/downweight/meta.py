"""meta.json of a result on disk: read and checked, without torch."""

import json
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from downweight.errors import DamagedResult, ForeignResult
from downweight.version import __version__

FORMAT = "downweight"
FORMAT_VERSION = 1  # raised when an older reader would misunderstand the folder

_SHARD = re.compile(r"[^/\\]+-[0-9a-f]{8}-[0-9]{5,}\.safetensors")


def read_meta(path: Path) -> dict[str, Any]:
    """What the folder of a result says of itself; refused unless it is whole, ours, and as it was written."""
    file = path / "meta.json"
    try:
        meta = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if path.is_dir():
            raise DamagedResult(
                f"{path} has no meta.json, which is written last: no result, or one cut short."
            ) from None
        raise DamagedResult(f"There is no result at {path}: no such folder.") from None
    except IsADirectoryError:
        raise DamagedResult(f"{file} is a folder and should be a file; the result was changed.") from None
    except NotADirectoryError:
        raise DamagedResult(f"{path} is a file; a result is a folder with a meta.json.") from None
    except ValueError as error:
        raise DamagedResult(f"{file} is not readable as JSON ({error}); it is damaged.") from None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise ForeignResult(f"{file} was not written by downweight (its 'format' is not {FORMAT!r}).")
    version = meta.get("format_version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise ForeignResult(
            f"{path} has format version {version}, written by downweight {meta.get('package_version')}; "
            f"downweight {__version__} reads up to version {FORMAT_VERSION}. Upgrade downweight to read it."
        )
    try:
        whole = isinstance(version, int) and isinstance(meta["kind"], str)
        whole = whole and all(_SHARD.fullmatch(name) for name in files_of(meta))
    except (KeyError, TypeError, AttributeError):
        whole = False
    if not whole:
        raise DamagedResult(f"{file} lacks its format version, kind or arrays; it was changed.")
    if meta.pop("checksum", None) != checksum(meta):
        raise DamagedResult(
            f"{file} has changed since it was written (its checksum differs or is missing). Restore it, or compute "
            "the result again."
        )
    return meta


def checksum(meta: Mapping[str, Any]) -> int:
    """The CRC-32 of what a meta.json says, whatever its spacing and the order of its keys."""
    said = json.loads(json.dumps(meta))  # as JSON gives it back: keys are texts, tuples lists
    return zlib.crc32(json.dumps(said, sort_keys=True).encode())


def files_of(meta: dict[str, Any]) -> list[str]:
    return [shard["file"] for entry in meta["arrays"].values() for shard in entry["shards"]]
