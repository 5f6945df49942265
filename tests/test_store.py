"""Results on disk: whole or not at all, read by row and by column, and never mistaken for another."""

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from downweight.errors import DamagedResult, ForeignResult, InvalidInput, InvalidType
from downweight.meta import checksum
from downweight.store import read_folder, write_folder
from downweight.version import __version__

META = {"kind": "scores", "damping": 1e-3, "names": ["a", "b"]}


def values(rows: int = 7, columns: int = 5, dtype=torch.float64) -> torch.Tensor:
    return torch.arange(rows * columns).reshape(rows, columns).to(dtype)


def listing(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_is_written_is_read_back(tmp_path):
    arrays = {"values": values(), "flags": torch.tensor([True, False]), "cube": torch.rand(3, 2, 4)}
    path = write_folder(tmp_path / "deep" / "scores", META, arrays)
    assert path == tmp_path / "deep" / "scores"
    meta, stored = read_folder(path, "scores")
    assert meta == {"format": "downweight", "format_version": 1, "package_version": __version__, **META}
    assert stored.keys() == arrays.keys()
    for name, array in arrays.items():
        assert stored[name].shape == array.shape
        assert stored[name].dtype == array.dtype
        assert torch.equal(stored[name].load(), array)
        assert torch.equal(stored[name].row(1), array[1])
    assert torch.equal(stored["cube"].column(1), arrays["cube"][:, 1])
    assert listing(tmp_path / "deep") == ["scores"]


@given(
    cuts=st.lists(st.integers(0, 9), max_size=4),
    shard_rows=st.integers(1, 11),
    window=st.tuples(st.integers(0, 9), st.integers(0, 9)).map(sorted),
)
def test_blocks_and_shards_change_nothing(tmp_path_factory, cuts, shard_rows, window):
    """However the rows came and were cut into files, every row and column is the same."""
    array = values(9, 3)
    edges = [0, *sorted(cuts), 9]
    blocks = (array[a:b] for a, b in zip(edges, edges[1:], strict=False))
    path = write_folder(tmp_path_factory.mktemp("s") / "r", META, {"values": blocks}, shard_bytes=shard_rows * 3 * 8)
    stored = read_folder(path, "scores")[1]["values"]
    assert len(list(path.glob("*.safetensors"))) == -(-9 // shard_rows)
    start, stop = window
    assert torch.equal(stored.rows(start, stop), array[start:stop])
    assert torch.equal(stored.column(2), array[:, 2])
    assert torch.equal(stored.load(), array)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int64, torch.uint8])
def test_every_dtype_keeps_its_bits(tmp_path, dtype):
    array = values(dtype=dtype)
    stored = read_folder(write_folder(tmp_path / "r", META, {"values": array}), "scores")[1]["values"]
    assert stored.load().dtype == dtype
    assert torch.equal(stored.load(), array)


def test_no_rows_and_views_are_kept(tmp_path):
    arrays = {
        "empty": torch.empty(0, 4),
        "later": iter([torch.empty(0, 4), torch.ones(2, 4)]),
        "never": iter([torch.empty(0, 4)]),
        "turned": values().T,
        "graph": values().requires_grad_(),
    }
    stored = read_folder(write_folder(tmp_path / "r", META, arrays), "scores")[1]
    assert stored["empty"].load().shape == stored["never"].load().shape == (0, 4)
    assert_close(stored["later"].load(), torch.ones(2, 4))
    assert torch.equal(stored["turned"].load(), values().T)
    assert torch.equal(stored["graph"].load(), values())


def test_a_producer_may_fill_the_same_buffer_again(tmp_path):
    def blocks():
        buffer = torch.empty(2, 3)
        for i in range(4):
            yield buffer.fill_(i)

    stored = read_folder(write_folder(tmp_path / "r", META, {"values": blocks()}), "scores")[1]["values"]
    assert stored.column(0).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_what_is_returned_is_a_copy(tmp_path):
    stored = read_folder(write_folder(tmp_path / "r", META, {"values": values()}), "scores")[1]["values"]
    for part in (stored.row(0), stored.rows(0, 2), stored.column(0), stored.load()):
        part.fill_(-1)
    assert torch.equal(stored.load(), values())


@pytest.mark.slow
def test_a_large_array_is_read_by_row_and_by_column_without_the_rest(tmp_path):
    """10,000 × 6,000 in float32, 240 MB in two shards or more; reading a row and a column maps it, and loads little."""
    rows, columns = 10_000, 6_000
    grid = torch.arange(rows, dtype=torch.float32)[:, None] + torch.arange(columns) / 8192  # exact in float32
    path = write_folder(tmp_path / "r", META, {"values": grid.split(999)}, shard_bytes=128 * 2**20)
    assert len(list(path.glob("*.safetensors"))) == 2
    code = (
        "import resource, sys, torch\n"
        "from downweight.store import read_folder\n"
        "stored = read_folder(sys.argv[1], 'scores')[1]['values']\n"
        "import safetensors.torch\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "for i in (0, 5591, 9999):\n"
        "    assert torch.equal(stored.row(i), i + torch.arange(6000) / 8192)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
        "for j in (0, 4097):\n"
        "    assert torch.equal(stored.column(j), torch.arange(10000, dtype=torch.float32) + j / 8192)\n"
    )
    kibibytes = subprocess.run([sys.executable, "-c", code, str(path)], check=True, capture_output=True, text=True)
    assert int(kibibytes.stdout) < 32 * 1024  # of the 240 MB; the kernel reads ahead a little
    assert torch.equal(read_folder(path, "scores")[1]["values"].load(), grid)


# Written whole or not at all


def test_a_result_is_replaced_and_its_old_shards_go(tmp_path):
    path = write_folder(tmp_path / "r", META, {"values": values(), "old": values()})
    (path / "page.html").write_text("made by someone else")
    opened = read_folder(path, "scores")[1]["values"]
    opened.row(0)
    write_folder(path, META | {"damping": 1.0}, {"values": values() + 1})
    meta, stored = read_folder(path, "scores")
    assert meta["damping"] == 1.0
    assert torch.equal(stored["values"].load(), values() + 1)
    assert len(list(path.glob("*.safetensors"))) == 1
    assert (path / "page.html").exists()
    assert torch.equal(opened.row(1), values()[1])  # an open map keeps the old rows, never a mixture
    assert listing(tmp_path) == ["r"]


def test_an_empty_folder_is_taken(tmp_path):
    (tmp_path / "r").mkdir()
    write_folder(tmp_path / "r", META, {"values": values()})
    assert torch.equal(read_folder(tmp_path / "r", "scores")[1]["values"].load(), values())


def test_other_peoples_files_are_never_replaced(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.tex").write_text("mine")
    (tmp_path / "json").mkdir()
    (tmp_path / "json" / "meta.json").write_text('{"format": "another"}')
    for name in ("file", "folder", "json"):
        with pytest.raises(ForeignResult, match="left alone"):
            write_folder(tmp_path / name, META, {"values": values()})
    assert listing(tmp_path) == ["file", "folder", "json"]
    assert (tmp_path / "file").read_text() == "mine"


def test_another_kind_of_result_is_not_replaced(tmp_path):
    path = write_folder(tmp_path / "r", META, {"values": values()})
    with pytest.raises(ForeignResult, match="holds 'scores', and 'findings'"):
        write_folder(path, META | {"kind": "findings"}, {"values": values()})


@pytest.mark.parametrize("earlier", [False, True])
def test_a_failure_on_the_way_leaves_what_was_there(tmp_path, earlier):
    def fails():
        yield values()
        raise KeyboardInterrupt

    if earlier:
        write_folder(tmp_path / "r", META, {"values": values()})
    with pytest.raises(KeyboardInterrupt):
        write_folder(tmp_path / "r", META, {"values": fails()}, shard_bytes=100)
    assert listing(tmp_path) == (["r"] if earlier else [])
    if earlier:
        assert torch.equal(read_folder(tmp_path / "r", "scores")[1]["values"].load(), values())


@pytest.mark.parametrize("earlier", [False, True])
def test_kill_nine_in_the_middle_of_a_write(tmp_path, earlier):
    """The process dies while shards are being written: the earlier result is whole, or there is none."""
    if earlier:
        write_folder(tmp_path / "r", META, {"values": values()})
    code = (
        "import sys, time, torch\n"
        "from downweight.store import write_folder\n"
        "def blocks():\n"
        "    for i in range(1000):\n"
        "        yield torch.full((100, 100), float(i))\n"
        "        time.sleep(0.01)\n"
        f"write_folder(sys.argv[1], {META!r}, {{'values': blocks()}}, shard_bytes=40_000)\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "r")])
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("r.partial-*/*.safetensors"))) < 3:
        assert writer.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    if earlier:
        assert torch.equal(read_folder(tmp_path / "r", "scores")[1]["values"].load(), values())
    else:
        with pytest.raises(DamagedResult, match="no such folder"):
            read_folder(tmp_path / "r", "scores")
    [partial] = tmp_path.glob("r.partial-*")
    with pytest.raises(DamagedResult, match=r"no meta\.json"):
        read_folder(partial, "scores")
    write_folder(tmp_path / "r", META, {"values": values() * 2})
    assert torch.equal(read_folder(tmp_path / "r", "scores")[1]["values"].load(), values() * 2)


@pytest.mark.parametrize("step", range(12))
@pytest.mark.parametrize("earlier", [False, True])
def test_stopped_at_any_rename_a_result_is_whole(tmp_path, monkeypatch, step, earlier):
    """Every rename of the final step in turn is the last thing that happens: readers see the old or the new, whole."""
    old, new = values(), values() + 1
    if earlier:
        write_folder(tmp_path / "r", META, {"values": old}, shard_bytes=100)
    calls = iter(range(100))

    class Killed(BaseException):
        pass

    def dying(function):
        def stand_in(*arguments):
            if next(calls) == step:
                raise Killed
            return function(*arguments)

        return stand_in

    monkeypatch.setattr(os, "rename", dying(os.rename))
    monkeypatch.setattr(os, "replace", dying(os.replace))
    with contextlib.suppress(Killed):
        write_folder(tmp_path / "r", META, {"values": new}, shard_bytes=100)
    monkeypatch.undo()
    if (tmp_path / "r").exists():
        read = read_folder(tmp_path / "r", "scores")[1]["values"].load()
        assert torch.equal(read, old) or torch.equal(read, new)
    else:
        assert not earlier
    write_folder(tmp_path / "r", META, {"values": new}, shard_bytes=100)
    assert torch.equal(read_folder(tmp_path / "r", "scores")[1]["values"].load(), new)


def test_a_full_disk_is_named_and_changes_nothing(tmp_path, monkeypatch):
    """The disk fills up during the second shard, and, before anything is written, is too small for a known size."""
    write_folder(tmp_path / "r", META, {"values": values()})
    written = []

    def full(descriptor):
        written.append(descriptor)
        if len(written) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="became full .* nothing was changed") as caught:
        write_folder(tmp_path / "r", META, {"values": values() + 1}, shard_bytes=100)
    assert caught.value.errno == errno.ENOSPC
    monkeypatch.undo()

    class Usage:
        free = 100

    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage)
    with pytest.raises(OSError, match="280 bytes are needed and 100 are free"):
        write_folder(tmp_path / "r", META, {"values": values() + 1})
    assert listing(tmp_path) == ["r"]
    assert torch.equal(read_folder(tmp_path / "r", "scores")[1]["values"].load(), values())


# Never mistaken for another


def test_no_folder(tmp_path):
    with pytest.raises(DamagedResult, match="no such folder"):
        read_folder(tmp_path / "r", "scores")
    (tmp_path / "file").touch()
    with pytest.raises(DamagedResult, match="is a file"):
        read_folder(tmp_path / "file", "scores")


def test_a_half_written_folder(tmp_path):
    path = write_folder(tmp_path / "r", META, {"values": values()})
    (path / "meta.json").unlink()
    with pytest.raises(DamagedResult, match=r"no meta\.json"):
        read_folder(path, "scores")


def test_another_kind(tmp_path):
    path = write_folder(tmp_path / "r", META, {"values": values()})
    with pytest.raises(ForeignResult, match="holds 'scores'; expected 'findings'"):
        read_folder(path, "findings")


def change_meta(path, **changes):
    """As a writer would have written it, with the checksum of what it then says."""
    file = path / "meta.json"
    meta = json.loads(file.read_text()) | changes
    del meta["checksum"]
    file.write_text(json.dumps(meta | {"checksum": checksum(meta)}))


def test_a_newer_format_is_refused_by_its_number(tmp_path):
    path = write_folder(tmp_path / "r", META, {"values": values()})
    change_meta(path, format_version=7, package_version="9.0")
    with pytest.raises(ForeignResult, match=r"format version 7, written by downweight 9\.0"):
        read_folder(path, "scores")
    with pytest.raises(ForeignResult, match="format version 7"):
        write_folder(path, META, {"values": values()})


def test_a_foreign_folder(tmp_path):
    (tmp_path / "meta.json").write_text('{"format": "something else"}')
    with pytest.raises(ForeignResult, match="was not written by downweight"):
        read_folder(tmp_path, "scores")


def test_a_changed_meta_file(tmp_path):
    path = write_folder(tmp_path / "r", META, {"values": values()})
    whole = json.loads((path / "meta.json").read_text())["arrays"]
    shard = whole["values"]["shards"][0]
    for wrong in (
        None,
        {"values": {}},
        {"values": whole["values"] | {"dtype": "nn"}},
        {"values": whole["values"] | {"shape": [8, 5]}},
        {"values": whole["values"] | {"shards": [shard | {"file": "../r/" + shard["file"]}]}},
    ):
        change_meta(path, arrays=wrong)
        with pytest.raises(DamagedResult):
            read_folder(path, "scores")
    for wrong in ({"shape": [7, 4]}, {"dtype": "float32"}):
        change_meta(path, arrays={"values": whole["values"] | wrong})
        with pytest.raises(DamagedResult, match=r"meta\.json beside it says"):
            read_folder(path, "scores")[1]["values"].load()
    (path / "meta.json").write_text("{")
    with pytest.raises(DamagedResult, match="not readable as JSON"):
        read_folder(path, "scores")


@pytest.mark.parametrize("name", ["damping", "names", "package_version", "format_version", "checksum"])
def test_every_entry_of_a_meta_file_is_under_its_checksum(tmp_path, name):
    """A number changed by hand would be believed, and an entry taken out be an error from the depths."""
    path = write_folder(tmp_path / "r", META, {"values": values()})
    file = path / "meta.json"
    meta = json.loads(file.read_text())
    file.write_text(json.dumps(dict(reversed(meta.items()))))  # said in another order
    assert read_folder(path, "scores")[0]["damping"] == 1e-3
    for changed in (meta | {name: 0}, {key: value for key, value in meta.items() if key != name}):
        file.write_text(json.dumps(changed))
        with pytest.raises(DamagedResult, match="changed"):
            read_folder(path, "scores")


def test_a_folder_in_the_place_of_the_meta_file(tmp_path):
    path = write_folder(tmp_path / "r", META, {"values": values()})
    (path / "meta.json").unlink()
    (path / "meta.json").mkdir()
    with pytest.raises(DamagedResult, match="is a folder"):
        read_folder(path, "scores")


def test_a_truncated_or_missing_shard(tmp_path):
    path = write_folder(tmp_path / "r", META, {"values": values()})
    stored = read_folder(path, "scores")[1]["values"]
    [shard] = path.glob("*.safetensors")
    content = shard.read_bytes()
    shard.write_bytes(content[:-8])
    with pytest.raises(DamagedResult, match="not whole"):
        read_folder(path, "scores")
    with pytest.raises(DamagedResult, match="not whole"):  # cut after it was opened, before it was mapped
        stored.row(0)
    shard.unlink()
    with pytest.raises(DamagedResult, match="missing"):
        read_folder(path, "scores")


def test_a_changed_shard(tmp_path):
    path = write_folder(tmp_path / "r", META, {"values": values()})
    [shard] = path.glob("*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(DamagedResult, match="checksum"):
        read_folder(path, "scores")[1]["values"].load()
    content[0] ^= 255  # the length of the header
    shard.write_bytes(content)
    with pytest.raises(DamagedResult, match="cannot be read"):
        read_folder(path, "scores")[1]["values"].row(0)


def test_misuse_is_refused_before_anything_is_written(tmp_path):
    cases: list[tuple[dict, dict, type[Exception], str]] = [
        ({}, {}, InvalidInput, "meta\\['kind'\\] is None"),
        (META | {"arrays": 1}, {}, InvalidInput, "which the store writes itself"),
        (META | {"bad": float("nan")}, {}, InvalidInput, "cannot be written as JSON"),
        (META | {"bad": torch.ones(1)}, {}, InvalidInput, "cannot be written as JSON"),
        (META, {"a/b": values()}, InvalidInput, "part of a file name"),
        (META, {"values": torch.tensor(1.0)}, InvalidType, "axis of rows"),
        (META, {"values": iter([[1.0]])}, InvalidType, "expected a tensor"),
        (META, {"values": iter([])}, InvalidInput, "shape is not known"),
        (META, {"values": [values(2, 3), values(2, 4)]}, InvalidInput, "A block of 'values'"),
    ]
    for meta, arrays, error, words in cases:
        with pytest.raises(error, match=words):
            write_folder(tmp_path / "r", meta, arrays)
    assert listing(tmp_path) == []


def test_indices_outside_are_refused(tmp_path):
    arrays = {"values": values(), "line": torch.arange(3)}
    stored = read_folder(write_folder(tmp_path / "r", META, arrays), "scores")[1]
    for call in (
        lambda: stored["values"].row(7),
        lambda: stored["values"].row(-1),
        lambda: stored["values"].column(5),
        lambda: stored["values"].rows(3, 8),
        lambda: stored["line"].column(0),
    ):
        with pytest.raises(InvalidInput):
            call()
