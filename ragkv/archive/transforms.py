"""Transforms: what the codes of an archive are written in, layer by layer; shared by the archives of a catalog.

They depend on the model far more than on the document, so that a catalog fits them once. An archive outside a catalog
carries its own. Either way their file is named in the manifest by its SHA-256.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from ragkv.archive.codec import Basis, Widths
from ragkv.archive.files import system_errors
from ragkv.archive.parquet import integers, plain_bytes, read_plain
from ragkv.archive.payload import Payload, fits, from_bits, to_bits
from ragkv.errors import ArchiveCorruptError

TRANSFORMS_FILE = "transforms.parquet"
N_AXES = 8
"""Axes along which the spread of clusters is kept; measured alike with 16."""

_BASES = ("key_prototypes", "value_prototypes", "key_rows", "value_rows")
_NUMBERS = ("key_mean", "value_mean", "key_axes", "query_moment")
_SCHEMA = pa.schema(
    [
        pa.field("layer", pa.int32(), nullable=False),
        pa.field("kv_head", pa.int32(), nullable=False),
        *(pa.field(f"{name}_{width}", pa.int32(), nullable=False) for name in _BASES for width in ("8", "4", "2")),
        *(pa.field(name, pa.binary(), nullable=False) for name in (*_NUMBERS, *_BASES)),
    ]
)


@dataclass(frozen=True)
class LayerTransforms:
    """Means, axes and bases of one layer.

    ``key_mean`` (n_kv_heads, key_dim) and ``value_mean`` (n_kv_heads, value_dim) float32 are what prototypes are coded
    relative to; ``key_axes`` (n_kv_heads, n_axes, key_dim) bfloat16 what the spreads of clusters are along. Bases of
    rows are None where their tensor is lossless. ``query_moment`` (n_kv_heads, key_dim, key_dim) float32 is the second
    moment of queries that the bases were fitted in; None where there were no probes, or it was not kept.
    """

    key_mean: torch.Tensor
    value_mean: torch.Tensor
    key_axes: torch.Tensor
    key_prototypes: Basis
    value_prototypes: Basis
    key_rows: Basis | None
    value_rows: Basis | None
    query_moment: torch.Tensor | None = None

    def to(self, device: torch.device) -> LayerTransforms:
        moved: dict[str, Any] = {}
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            moved[each.name] = None if value is None else value.to(device)
        return LayerTransforms(**moved)

    def payload(self, dtype: torch.dtype) -> Payload:
        """How the rows of the layer are laid out, in an archive of `dtype`."""
        return Payload(dtype, self.key_mean.shape[1], self.value_mean.shape[1], self.key_rows, self.value_rows)

    @property
    def resident_bytes(self) -> int:
        bases = [self.key_prototypes, self.value_prototypes, self.key_rows, self.value_rows]
        held = [self.key_mean, self.value_mean, self.key_axes, *(basis.rows for basis in bases if basis is not None)]
        held += [] if self.query_moment is None else [self.query_moment]
        return sum(tensor.nbytes for tensor in held)


@dataclass(frozen=True)
class Transforms:
    """Transforms of the layers that have clusters, by layer; ``sha256`` is that of their file."""

    sha256: str
    layers: Mapping[int, LayerTransforms]

    def to(self, device: torch.device) -> Transforms:
        return Transforms(self.sha256, {index: layer.to(device) for index, layer in self.layers.items()})

    def without_moments(self) -> Transforms:
        """The same without what only a build needs."""
        plain = {index: dataclasses.replace(layer, query_moment=None) for index, layer in self.layers.items()}
        return Transforms(self.sha256, plain)

    @property
    def resident_bytes(self) -> int:
        return sum(layer.resident_bytes for layer in self.layers.values())


def transforms_bytes(layers: Mapping[int, LayerTransforms]) -> bytes:
    """The bytes of a file of transforms, in order of layer and KV head."""
    columns: dict[str, list[object]] = {name: [] for name in _SCHEMA.names}
    for index, layer in sorted(layers.items()):
        n_heads = len(layer.key_mean)
        for head in range(n_heads):
            columns["layer"].append(index)
            columns["kv_head"].append(head)
            for name in _BASES:
                basis: Basis | None = getattr(layer, name)
                widths = Widths(0, 0, 0) if basis is None else basis.widths
                for width, count in zip(("8", "4", "2"), dataclasses.astuple(widths), strict=True):
                    columns[f"{name}_{width}"].append(count)
                columns[name].append(b"" if basis is None else _bits(basis.rows[head]))
            columns["key_mean"].append(_bits(layer.key_mean[head]))
            columns["value_mean"].append(_bits(layer.value_mean[head]))
            columns["key_axes"].append(_bits(layer.key_axes[head]))
            moment = layer.query_moment
            columns["query_moment"].append(b"" if moment is None else _bits(moment[head].to(torch.bfloat16)))
    return plain_bytes(_SCHEMA, [pa.array(columns[field.name], field.type) for field in _SCHEMA])


def read_transforms(raw: bytes) -> Transforms:
    """The transforms in the bytes of their file.

    Raises
    ------
    ArchiveCorruptError
        If the bytes are no transforms, or their shapes do not fit together.
    """
    table = read_plain(TRANSFORMS_FILE, raw, _SCHEMA)
    with system_errors(TRANSFORMS_FILE):
        layer_of, head_of = integers(table, "layer"), integers(table, "kv_head")
        found: dict[int, LayerTransforms] = {}
        starts = [0, *(np.flatnonzero(np.diff(layer_of)) + 1).tolist()] if len(layer_of) else []
        for start, stop in zip(starts, [*starts[1:], len(layer_of)], strict=True):
            index, n_heads = int(layer_of[start]), stop - start
            if index in found or head_of[start:stop].tolist() != list(range(n_heads)):
                raise ArchiveCorruptError(
                    f"{TRANSFORMS_FILE}: its rows are not one for each layer and KV head in order"
                )
            found[index] = _read_layer(table.slice(start, n_heads))
    return Transforms(hashlib.sha256(raw).hexdigest(), found)


def _read_layer(table: pa.Table) -> LayerTransforms:
    n_heads = table.num_rows
    key_mean, value_mean = (_numbers(table, name, torch.float32).view(n_heads, -1) for name in _NUMBERS[:2])
    key_dim, value_dim = key_mean.shape[1], value_mean.shape[1]
    axes = _numbers(table, "key_axes", torch.bfloat16).view(n_heads, -1, key_dim)
    moment = _numbers(table, "query_moment", torch.bfloat16)
    bases = {name: _basis(table, name, key_dim if name.startswith("key") else value_dim) for name in _BASES}
    key, value = bases["key_prototypes"], bases["value_prototypes"]
    if key is None or value is None or key.widths.two or value.widths.two:
        raise ArchiveCorruptError(f"{TRANSFORMS_FILE}: prototypes have no transform of 8 and 4 bits")
    return LayerTransforms(
        key_mean=key_mean,
        value_mean=value_mean,
        key_axes=axes,
        key_prototypes=key,
        value_prototypes=value,
        key_rows=bases["key_rows"],
        value_rows=bases["value_rows"],
        query_moment=moment.float().view(n_heads, key_dim, key_dim) if len(moment) else None,
    )


def _basis(table: pa.Table, name: str, dim: int) -> Basis | None:
    counts = [integers(table, f"{name}_{width}") for width in ("8", "4", "2")]
    eight, four, two = (int(count[0]) for count in counts)
    if any((count != count[0]).any() for count in counts) or min(eight, four, two) < 0:
        raise ArchiveCorruptError(f"{TRANSFORMS_FILE}: the widths of {name} differ between the KV heads of a layer")
    widths = Widths(eight, four, two)
    rows = _numbers(table, name, torch.bfloat16)
    if not widths.n_kept:
        return None
    if four % 2 or two % 4 or widths.n_kept > dim:
        raise ArchiveCorruptError(f"{TRANSFORMS_FILE}: the widths of {name} are {eight}, {four} and {two}")
    return Basis(widths=widths, rows=rows.view(table.num_rows, widths.n_kept, dim))


def _numbers(table: pa.Table, name: str, dtype: torch.dtype) -> torch.Tensor:
    """All numbers of a binary column, one after another; every one must be one that archives take."""
    raw = b"".join(value.as_py() for value in table.column(name))
    if not raw:
        return torch.empty(0, dtype=dtype)
    numbers = from_bits(torch.frombuffer(bytearray(raw), dtype=torch.uint8), dtype)
    if not (fits(numbers) if name != "query_moment" else bool(torch.isfinite(numbers).all())):  # that holds squares
        raise ArchiveCorruptError(f"{TRANSFORMS_FILE}: a number of {name} is NaN or infinite, or too large")
    return numbers


def _bits(tensor: torch.Tensor) -> bytes:
    return bytes(to_bits(tensor.cpu()).numpy().tobytes())
