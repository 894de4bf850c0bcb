"""Ways to alter an archive: bytes, files put in place of others, values of the manifest, and whole tables."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.faults.mend import read_json, write_json
from ragkv.archive.manifest import MANIFEST_FILE
from ragkv.archive.parquet import plain_bytes
from ragkv.archive.rows import ROWS_FILE

_SUMS = "ragkv.row_groups.sha256"
_BOMB, _SMALLER_BOMB = 30_000_000, 300_000
_NUMBERS = (0, 1, -1, 7, 255, 1 << 16, (1 << 31) - 1, 1 << 31, 1 << 32, 1 << 62, 1 << 63, 1 << 64, 10**400)
_FLOATS = (0.0, -0.5, 1.5, 1e308, float("nan"), float("inf"), -float("inf"))
_OTHERS: tuple[Any, ...] = (
    None,
    True,
    False,
    "",
    "x",
    "\ud800",
    "../../etc",
    [],
    {},
    [[]],
    [0] * 5000,
    {"a": {"b": []}},
    "9" * 5000,
)
_INTS = (0, 1, -1, 2, 3, 127, 1 << 16, (1 << 31) - 1, -(1 << 31))


def flip_bits(random: Random, path: Path) -> None:
    raw = bytearray(path.read_bytes())
    for _ in range(random.choice((1, 1, 2, 8, 64))):
        raw[random.randrange(len(raw))] ^= 1 << random.randrange(8)
    path.write_bytes(raw)


def flip_end(random: Random, path: Path) -> None:
    """Flip bits where the footer of a table is."""
    raw = bytearray(path.read_bytes())
    for _ in range(random.choice((1, 2, 4))):
        raw[-1 - random.randrange(min(len(raw), 2000))] ^= 1 << random.randrange(8)
    path.write_bytes(raw)


def flip_start(random: Random, path: Path) -> None:
    """Flip bits where the head of a shard, or the first page of a table, is."""
    raw = bytearray(path.read_bytes())
    raw[random.randrange(min(len(raw), 120))] ^= 1 << random.randrange(8)
    path.write_bytes(raw)


def write_huge(random: Random, path: Path) -> None:
    """Write a huge number of four or eight bytes somewhere, most often near one of the ends."""
    raw, size = bytearray(path.read_bytes()), random.choice((4, 8))
    number = random.choice(((1 << 31) - 1, 1 << 31, (1 << 8 * size) - 1, 1 << (8 * size - 2)))
    span = random.choice((min(len(raw), 128), len(raw)))
    at = random.randrange(max(1, span - size))
    at = random.choice((at, max(0, len(raw) - size - at)))
    raw[at : at + size] = (number % (1 << 8 * size)).to_bytes(size, "little")
    path.write_bytes(raw)


def cut(random: Random, path: Path) -> None:
    raw = path.read_bytes()
    path.write_bytes(raw[: random.choice((0, 1, len(raw) // 8, len(raw) // 2, len(raw) - 8, len(raw) - 1))])


def lengthen(random: Random, path: Path) -> None:
    path.write_bytes(path.read_bytes() + random.randbytes(random.choice((1, 8, 4096))))


def scribble(random: Random, path: Path) -> None:
    n = random.choice((0, 1, 100, path.stat().st_size))
    path.write_bytes(random.choice((bytes(n), random.randbytes(n), b"\xff" * n, b"hello\n")))


def swap(random: Random, path: Path) -> None:
    other = random.choice([found for found in sorted(path.parent.iterdir()) if found != path] or [path])
    ours, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(ours)


def put_another_kind(random: Random, path: Path) -> None:
    """A pipe, a device, a folder, a link that leads nowhere or to itself, or nothing in place of a file."""
    path.unlink()
    kind = random.choice(("pipe", "zero", "folder", "nowhere", "itself", "null", "socket", "nothing"))
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            folder = os.open(path.parent, os.O_RDONLY)
            made.bind(f"/proc/self/fd/{folder}/{path.name}")
            os.close(folder)
    elif kind != "nothing":
        target = {"zero": "/dev/zero", "null": "/dev/null", "nowhere": "nowhere", "itself": path.name}[kind]
        path.symlink_to(target)


def edit_json(random: Random, path: Path) -> None:
    """Change, remove or add values anywhere in a sealed file."""
    body = read_json(path)
    if body is None:
        return
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        place, key = random.choice(_places(body))
        how = random.random()
        if how < 0.1:
            del place[key]
        elif how < 0.15 and isinstance(place, dict):
            place[f"{key}x"] = place[key]
        elif how < 0.2:
            place[key] = _nested(random.choice((100, 500, 5000)))
        elif how < 0.35 and isinstance(place[key], int):
            place[key] += random.choice((-1, 1, 100))
        else:
            place[key] = random.choice((random.choice(_NUMBERS), random.choice(_FLOATS), random.choice(_OTHERS)))
        if not _places(body):
            break
    write_json(path, body)


def _nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every value of a JSON body, as what holds it and under which key."""
    found, left = [], [value]
    while left:
        holder = left.pop()
        items = holder.items() if isinstance(holder, dict) else enumerate(holder) if isinstance(holder, list) else ()
        for key, each in items:
            found.append((holder, key))
            if len(found) < 10_000:
                left.append(each)
    return [(holder, key) for holder, key in found if not (holder is value and key == "sha256")]


def edit_table(random: Random, path: Path) -> None:
    """Change values of one column of a table, and write it as the format says."""
    table = _read(path)
    place = random.randrange(table.num_columns)
    name, values = table.column_names[place], table.column(place).to_pylist()
    for _ in range(random.choice((1, 1, 3, len(values)))):
        row = random.randrange(len(values))
        values[row] = _other_value(random, values[row])
    _write(path, table.set_column(place, table.schema.field(name), _array(values, table.schema.field(name).type)))


def _other_value(random: Random, value: Any) -> Any:
    if isinstance(value, int):
        return random.choice((*_INTS, max(-(1 << 31), min((1 << 31) - 1, value + random.choice((-1, 1))))))
    if isinstance(value, bytes):
        nans = np.full(max(1, len(value) // 4), np.nan, np.float32).tobytes()[: len(value)].ljust(len(value), b"\xff")
        flipped = bytearray(value or b"\0")
        flipped[random.randrange(len(flipped))] ^= 1 << random.randrange(8)
        return random.choice(
            (bytes(flipped), nans, b"\xff" * len(value), bytes(len(value)), value[:-1], value * 2, b"")
        )
    if isinstance(value, list):
        other = list(value)
        if other:
            other[random.randrange(len(other))] = random.choice(_INTS)
        return random.choice((other, other[:-1], other * 2, [], sorted(value, reverse=True)))
    return value


def _array(values: list[Any], kind: pa.DataType) -> pa.Array:
    if pa.types.is_fixed_size_binary(kind):
        values = [value[: kind.byte_width].ljust(kind.byte_width, b"\0") for value in values]
    return pa.array(values, kind)


def change_rows(random: Random, path: Path) -> None:
    """Drop, double or reverse rows of a table."""
    table, n = _read(path), _read(path).num_rows
    at = random.randrange(n)
    parts = random.choice(
        (
            [table.slice(0, at), table.slice(at + 1)],
            [table, table.slice(at, 1)],
            [table.slice(at), table.slice(0, at)],
            [table.slice(0, 0)],
            [table] * 3,
        )
    )
    _write(path, pa.concat_tables(parts).combine_chunks())


def change_schema(random: Random, path: Path) -> None:
    """A table of other columns, types or names, with nulls, or of no columns."""
    table = _read(path)
    place = random.randrange(table.num_columns)
    name, n = table.column_names[place], table.num_rows
    others = (
        table.drop_columns([name]),
        table.append_column("more", pa.array(range(n), pa.int32())),
        table.rename_columns([f"{each}x" if each == name else each for each in table.column_names]),
        table.set_column(place, pa.field(name, pa.int64(), nullable=False), pa.array(range(n), pa.int64())),
        table.set_column(place, pa.field(name, pa.float32()), pa.array([float("nan")] * n, pa.float32())),
        table.set_column(place, pa.field(name, pa.string()), pa.array(["x"] * n)),
        table.set_column(
            place, pa.field(name, table.schema.field(name).type), pa.nulls(n, table.schema.field(name).type)
        ),
        table.set_column(place, pa.field(name, pa.list_(pa.list_(pa.int32()))), pa.array([[[1]]] * n)),
        table.select(table.column_names[::-1]),
    )
    _write(path, random.choice(others), plain=random.random() < 0.5)


def compress(random: Random, path: Path) -> None:
    """The same table, or a huge one of one value, in few bytes: compressed, as a dictionary, or as run lengths."""
    table = _read(path)
    options: list[dict[str, Any]] = [
        {"compression": "zstd", "use_dictionary": False},
        {"compression": "gzip", "use_dictionary": False},
        {"compression": "none", "use_dictionary": True},
        {"compression": "none", "use_dictionary": False, "column_encoding": _packed(table.schema)},
    ]
    if random.random() < 0.5:
        n = _BOMB if all(pa.types.is_integer(field.type) for field in table.schema) else _SMALLER_BOMB
        columns = [pa.repeat(table.column(name)[0], n) for name in table.column_names]
        table = pa.table(columns, schema=table.schema)
    pq.write_table(table, path, **random.choice(options))


def _packed(schema: pa.Schema) -> dict[str, str]:
    return {
        field.name: "DELTA_BINARY_PACKED" if pa.types.is_integer(field.type) else "PLAIN"
        for field in schema
        if not pa.types.is_list(field.type)
    }


def _read(path: Path) -> pa.Table:
    return pq.read_table(pa.BufferReader(path.read_bytes()), use_threads=False).combine_chunks()


def _write(path: Path, table: pa.Table, *, plain: bool = True) -> None:
    """Write a table: rows in one group with a place for its checksum, small tables as the format says."""
    if path.name == ROWS_FILE:
        table = table.replace_schema_metadata({_SUMS: "0" * 64})
        encodings = {
            name: "PLAIN" for name in table.column_names if not pa.types.is_list(table.schema.field(name).type)
        }
        options = {"compression": "none", "use_dictionary": False, "write_statistics": False}
        pq.write_table(table, path, row_group_size=max(1, len(table)), column_encoding=encodings, **options)
    elif plain:
        columns = [table.column(name).combine_chunks() for name in table.column_names]
        columns = [each.chunk(0) if isinstance(each, pa.ChunkedArray) else each for each in columns]
        path.write_bytes(plain_bytes(table.schema, columns))
    else:
        pq.write_table(table, path)


_ANY = (flip_bits, flip_end, flip_start, write_huge, cut, lengthen, scribble, swap, put_another_kind)
_TABLE = (edit_table, edit_table, edit_table, change_rows, change_schema, compress)
_JSON = (edit_json, edit_json, edit_json, edit_json, put_another_kind, flip_bits, cut, scribble)

Edit = Callable[[Random, Path], None]


def alter(random: Random, folder: Path) -> str:
    """Alter one file of the archive in `folder`; returns which and how."""
    files = sorted(found for found in folder.iterdir() if found.is_file())
    weights = [3 if found.name in (MANIFEST_FILE, ROWS_FILE) else 2 for found in files]
    path = random.choices(files, weights)[0]
    return f"{path.name}: {alter_file(random, path)}"


def alter_file(random: Random, path: Path) -> str:
    """Alter one file in a way that suits it; returns how."""
    ways: tuple[Edit, ...] = _JSON if path.suffix == ".json" else _ANY
    if path.suffix == ".parquet":
        ways = _ANY + _TABLE
    way = random.choice(ways)
    kept = path.read_bytes()
    try:
        way(random, path)
    except (pa.ArrowException, OSError, TypeError, ValueError, OverflowError, IndexError, KeyError):
        path.write_bytes(kept)  # a table that cannot even be written is no case
        flip_bits(random, path)
    return way.__name__


def copy(base: Path, target: Path) -> None:
    """A fresh copy of what was prepared, whatever stands at `target`."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(base, target)
