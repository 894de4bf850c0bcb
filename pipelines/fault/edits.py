"""Random damage: what a broken disk, an old tool or an enemy may make of the files of an archive."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from pipelines.fault.mend import Groups, edit_manifest, read_groups, write_rows
from ragkv.archive.manifest import MANIFEST_FILE

HUGE = (2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 10**30)
_SMALL_INTEGERS = (-(2**31), -1, 0, 1, 2, 3, 5, 255, 4096, 1 << 20, 2**31 - 1)
_NUMBERS = (float("nan"), float("inf"), -float("inf"), 3e38, 1e30, 1e18, 1e-45, 0.0, -0.0)
_BOMB_ROWS = 100_000_000

BOMBS = "bombs"

Edit = Callable[[random.Random, Path, Groups], Groups]
"""Damages the archive in a folder; returns where its row groups lie now."""


def bit_flips(rng: random.Random, folder: Path, groups: Groups) -> Groups:
    """Some bits of one file."""
    path = rng.choice(_files(folder))
    raw = bytearray(path.read_bytes())
    near = rng.choice((0, max(0, len(raw) - 400), rng.randrange(len(raw)), 0))  # heads and footers are most delicate
    for _ in range(rng.choice((1, 1, 2, 8, 40))):
        at = rng.choice((rng.randrange(len(raw)), min(len(raw) - 1, near + rng.randrange(400))))
        raw[at] ^= 1 << rng.randrange(8)
    path.write_bytes(raw)
    return groups


def cut(rng: random.Random, folder: Path, groups: Groups) -> Groups:
    """A file cut short, lengthened, or emptied."""
    path = rng.choice(_files(folder))
    raw = path.read_bytes()
    kept = rng.choice((0, 1, 8, len(raw) // 8, len(raw) // 2, len(raw) - 1, len(raw)))
    path.write_bytes(raw[:kept] + rng.choice((b"", b"\0" * 7, b"PAR1", b"}\n", rng.randbytes(300))))
    return groups


def swapped(rng: random.Random, folder: Path, groups: Groups) -> Groups:
    """Two files in each other's place."""
    one, other = rng.sample(_files(folder), 2)
    raw = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(raw)
    return groups


def odd_json(rng: random.Random, folder: Path, groups: Groups) -> Groups:
    """A value of the manifest of another kind, a field too few or too many."""
    edit_manifest(folder, lambda body: odd_value(rng, body))
    return groups


def odd_value(rng: random.Random, body: dict[str, Any]) -> None:
    """Change one value anywhere in a JSON body."""
    places: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
        for key in keys:
            places.append((value, key))
            walk(value[key])

    walk(body)
    holder, key = rng.choice(places)
    if rng.random() < 0.1:
        del holder[key]
        return
    if rng.random() < 0.1 and isinstance(holder, dict):
        holder["another"] = 1
        return
    odd: list[Any] = [*HUGE, -1, 0, 1, 7, 1.5, float("nan"), float("inf"), True, None, "", "text", "\ud800", []]
    odd += [{}, [[]], [1, "a"], list(range(5000)), {str(n): n for n in range(50)}, [holder[key]] * 3]
    holder[key] = rng.choice([*odd, _nested(rng.choice((50, 300, 700)))])


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value} if depth % 2 else [value]
    return value


def lying_counts(rng: random.Random, folder: Path, groups: Groups) -> Groups:
    """Numbers of tokens and clusters that fit together and to nothing else."""
    factor = rng.choice((2, 1000, 1 << 20, 1 << 24))

    def change(body: dict[str, Any]) -> None:
        counts, kind = body["counts"], rng.randrange(4)
        if kind == 0:
            more = counts["document_tokens"] * (factor - 1)
            counts["document_tokens"] += more
            counts["archived_tokens"] += more
        elif kind == 1:
            counts["clusters_asked"] = 2**40
            for layer in body["layers"]:
                layer["clusters"] = [counts["archived_tokens"]] * len(layer["clusters"])
        elif kind == 2:
            for layer in body["layers"]:
                layer[rng.choice(("key_dim", "value_dim", "n_kv_heads"))] = rng.choice((1, 8, 1 << 16, 1 << 20))
        else:
            body["layers"] = body["layers"] * rng.choice((0, 2, 300))
            for place, layer in enumerate(body["layers"]):
                body["layers"][place] = {**layer, "index": place}

    edit_manifest(folder, change)
    return groups


def no_file(rng: random.Random, folder: Path, groups: Groups) -> Groups:
    """Something else in the place of a file."""
    path = rng.choice(_files(folder))
    path.unlink()
    kind = rng.randrange(7)
    if kind == 0:
        os.mkfifo(path)
    elif kind in (1, 2):
        path.symlink_to("/dev/zero" if kind == 1 else "/dev/tty")
    elif kind == 3:
        path.mkdir()
    elif kind == 4:
        path.symlink_to(path.name)  # a link to itself
    elif kind == 5:
        path.symlink_to("not-there")
    return groups


def other_parquet(rng: random.Random, folder: Path, groups: Groups) -> Groups:
    """A Parquet file written in another way, or of other columns."""
    path = rng.choice(_tables(folder))
    options: dict[str, Any] = {"compression": "none", "use_dictionary": False}
    kind = rng.randrange(7)
    if kind < 3:
        options = {"compression": rng.choice(("zstd", "snappy", "gzip")), "use_dictionary": kind == 1}
    tables = read_groups(path)
    if kind == 3:
        tables = [table.drop_columns([table.column_names[0]]) for table in tables]
    elif kind == 4:
        tables = [table.append_column("more", pa.array(np.arange(len(table)))) for table in tables]
    elif kind == 5:
        tables = [_nullable(table) for table in tables]
    elif kind == 6:
        tables = [_retyped(rng, table) for table in tables[:1]]
    found = write_rows(path, tables, **options)
    return found if path.name.startswith("rows") else groups


def bomb(rng: random.Random, folder: Path, groups: Groups) -> Groups:
    """A small file that unpacks to a gigabyte, of the columns of the format or of others."""
    path, kind = rng.choice(bombs_in(_bombs_of(folder)))
    target = folder / ("rows.parquet" if kind == "rows" else rng.choice(_tables(folder)).name)
    shutil.copy(path, target)
    found = json.loads(path.with_suffix(".json").read_text())
    return [(first, last) for first, last in found] if target.name == "rows.parquet" else groups


def make_bombs(place: Path, sample: Path) -> None:
    """Write Parquet files of some hundred million zeros, with those of the rows file of an archive beside them."""
    zeros = np.zeros(_BOMB_ROWS, dtype=np.int32)  # never touched, so it takes no memory
    tokens = pa.table(dict.fromkeys(("token_id", "start", "end"), zeros), schema=_three("token_id", "start", "end"))
    head = read_groups(sample / "rows.parquet")
    element = head[0].schema.field("positions").type
    ends = np.full(len(head[0]) + 1, _BOMB_ROWS, dtype=np.int32)
    ends[0] = 0
    lists = pa.ListArray.from_arrays(pa.array(ends), pa.array(zeros), type=element)
    place_of = head[0].schema.get_field_index("positions")
    rows = [head[0].set_column(place_of, head[0].schema.field("positions"), lists), *head[1:]]
    packed = {"positions.list.element": "DELTA_BINARY_PACKED"}
    for name, tables, options in (
        ("tokens-zstd", [tokens], {"compression": "zstd"}),
        ("tokens-dictionary", [tokens], {"use_dictionary": True}),
        ("rows-zstd", rows, {"compression": {"positions.list.element": "zstd"}}),
        ("rows-packed", rows, {"column_encoding": packed}),
    ):
        found = write_rows(place / f"{name}.parquet", tables, **options)
        (place / f"{name}.json").write_text(json.dumps(found))


def bombs_in(place: Path) -> list[tuple[Path, str]]:
    """What `make_bombs` wrote, with what each is."""
    return [(found, found.name.partition("-")[0]) for found in sorted(place.glob("*-*.parquet"))]


def _bombs_of(folder: Path) -> Path:
    """Where the bombs of a run lie: in a folder beside the copy that is damaged, or some folders above it."""
    return next(parent / BOMBS for parent in folder.parents if (parent / BOMBS).is_dir())


def _three(*names: str) -> pa.Schema:
    return pa.schema([pa.field(name, pa.int32(), nullable=False) for name in names])


def faiss_head(rng: random.Random, folder: Path, groups: Groups) -> Groups:
    """Numbers in the head of the shard of centroids."""
    path = folder / "centroids.faiss"
    if path.exists():
        raw = bytearray(path.read_bytes())
        for _ in range(rng.choice((1, 2, 5))):
            wide = rng.random() < 0.5
            value = rng.choice((0, 1, 2**31 - 1, 2**32 - 1) if not wide else (0, 2**31, 2**40, 2**62, 2**64 - 1))
            packed = struct.pack("<Q" if wide else "<I", value)
            at = rng.randrange(0, min(len(raw) - 8, 400))
            raw[at : at + len(packed)] = packed
        path.write_bytes(raw)
    return groups


def odd_cells(rng: random.Random, folder: Path, groups: Groups) -> Groups:
    """Numbers, lists and bytes in a table: widths, sizes, positions, tokens, NaN."""
    path = rng.choice(_tables(folder))
    tables = read_groups(path)
    place = rng.randrange(len(tables))
    table = tables[place]
    if not len(table):
        return groups
    name = rng.choice(table.column_names)
    values = table.column(name).to_pylist()
    many = rng.random() < 0.3
    for at in range(len(values)) if many else [rng.randrange(len(values)) for _ in range(rng.choice((1, 3)))]:
        values[at] = _odd_cell(rng, values[at])
    if rng.random() < 0.2:
        rng.shuffle(values)
    field = table.schema.field(name)
    with contextlib.suppress(pa.ArrowException, ValueError, OverflowError):  # some cannot be written at all
        column = pa.array(values, field.type)
        tables[place] = table.set_column(table.schema.get_field_index(name), field, column)
        encoded = dict.fromkeys(_leaves(table.schema), "PLAIN")
        found = write_rows(path, tables, column_encoding=encoded)
        return found if path.name.startswith("rows") else groups
    return groups


def odd_rows(rng: random.Random, folder: Path, groups: Groups) -> Groups:
    """Rows of a table left out, repeated, in another order, or in other row groups."""
    path = rng.choice(_tables(folder))
    tables = read_groups(path)
    kind = rng.randrange(5)
    place = rng.randrange(len(tables))
    if kind == 0:
        tables[place] = tables[place].slice(rng.randrange(1, 3))
    elif kind == 1:
        tables[place] = pa.concat_tables([tables[place]] * rng.choice((2, 50)))
    elif kind == 2:
        order = list(range(len(tables[place])))
        rng.shuffle(order)
        tables[place] = tables[place].take(order)
    elif kind == 3:
        rng.shuffle(tables)
    else:
        tables = [pa.concat_tables(tables)]
    found = write_rows(path, tables)
    return found if path.name.startswith("rows") else groups


EDITS: tuple[Edit, ...] = (
    bit_flips,
    bit_flips,
    cut,
    swapped,
    odd_json,
    odd_json,
    lying_counts,
    no_file,
    other_parquet,
    bomb,
    faiss_head,
    odd_cells,
    odd_cells,
    odd_cells,
    odd_rows,
)


def _odd_cell(rng: random.Random, value: Any) -> Any:
    if isinstance(value, int):
        return rng.choice((*_SMALL_INTEGERS, value + 1, value - 1, 2 * value, value))
    if isinstance(value, list):
        kind = rng.randrange(4)
        if kind == 0 or not value:
            return [*value, rng.choice(_SMALL_INTEGERS)]
        if kind == 1:
            return value[:-1]
        at = rng.randrange(len(value))
        return [*value[:at], value[0] if kind == 2 else rng.choice(_SMALL_INTEGERS), *value[at + 1 :]]
    raw = bytearray(value)
    kind = rng.randrange(5)
    if kind == 0 or len(raw) < 4:
        return bytes(raw) + rng.randbytes(rng.choice((1, 2, 64)))
    if kind == 1:
        return bytes(raw[: rng.randrange(len(raw))])
    if kind == 2:
        return rng.randbytes(len(raw))
    packed = np.float32(rng.choice(_NUMBERS)).tobytes()
    packed = packed[2:] if kind == 3 else packed  # bfloat16 or float32
    at = rng.randrange(0, len(raw) - len(packed) + 1, len(packed))
    raw[at : at + len(packed)] = packed
    return bytes(raw)


def _nullable(table: pa.Table) -> pa.Table:
    name = table.column_names[-1]
    values = [None, *table.column(name).to_pylist()[1:]] if len(table) else []
    place, field = table.num_columns - 1, table.schema.field(name).with_nullable(True)
    return table.set_column(place, field, pa.array(values, field.type))


def _retyped(rng: random.Random, table: pa.Table) -> pa.Table:
    place = rng.randrange(table.num_columns)
    texts = pa.array([str(value) for value in table.column(place).to_pylist()])
    return table.set_column(place, table.column_names[place], texts)


def _leaves(schema: pa.Schema) -> list[str]:
    return [f"{field.name}.list.element" if pa.types.is_list(field.type) else field.name for field in schema]


def _files(folder: Path) -> list[Path]:
    return sorted(found for found in folder.iterdir() if found.is_file())


def _tables(folder: Path) -> list[Path]:
    return [found for found in _files(folder) if found.suffix == ".parquet" and found.name != MANIFEST_FILE]
