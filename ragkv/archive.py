"""An open archive: prototypes and exact tokens in memory, keys and values mapped from disk until they are recalled."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pyarrow as pa
import torch

from ragkv.architecture import ModelShape, check_length, model_shape
from ragkv.attention import is_attached
from ragkv.errors import ArchiveCorruptError, ArchiveNotFoundError, ConfigError, NonFiniteError
from ragkv.fingerprint import require_match
from ragkv.layout import question_ids
from ragkv.manifest import LayerEntry, Manifest, read_manifest
from ragkv.models import LoadedModel
from ragkv.publish import hash_file
from ragkv.rows import map_file, read_rows, row_groups
from ragkv.tables import Prototypes, TokenTable, read_prototypes, read_tokens

log = logging.getLogger(__name__)

MAX_CORRECTION = 0.5
"""Limit of the Jensen correction, in nats; measured best of 0.35, 0.5, 0.7 and 1."""


@dataclass(frozen=True)
class ArchivedLayer:
    """What attention needs of one layer, on the model's device.

    ``keys`` (n_kv_heads, n_held, key_dim) and ``values`` (n_kv_heads, n_held, value_dim) hold the centroids and mean
    values first, then the tokens that are always attended exactly. ``bias`` (n_kv_heads, n_held) float32 is the
    additive logit: log(size) of a cluster with its Jensen correction (-inf where a head has fewer clusters), 0 of a
    token; None without clusters.
    ``exact_positions`` (n_exact,) int64. ``recall`` is None for sliding layers and very short documents.
    """

    index: int
    window: int | None
    keys: torch.Tensor
    values: torch.Tensor
    bias: torch.Tensor | None
    exact_positions: torch.Tensor
    recall: RecallTables | None


@dataclass(frozen=True)
class RecallTables:
    """Where the tokens behind each prototype lie.

    ``sizes`` and ``address`` (n_kv_heads, n_clusters) int64: the tokens of a cluster and the byte of its first row in
    ``payload``, the mapped layer file (n_bytes,) uint8 on the host. A row is ``key_dim`` and then ``value_dim`` numbers
    of ``payload_dtype``. ``priority`` (n_kv_heads, n_clusters) float32 is what a cluster's mass is weighted with when
    clusters are ranked, see `recall_priority`. ``largest`` is the size of the largest cluster, ``n_tokens`` the
    archived tokens of a head; ``padded`` says that some head has fewer clusters than others, its last sizes being 0.
    """

    sizes: torch.Tensor
    priority: torch.Tensor
    address: torch.Tensor
    payload: torch.Tensor
    payload_dtype: torch.dtype
    key_dim: int
    value_dim: int
    largest: int
    n_tokens: int
    padded: bool

    @property
    def n_clusters(self) -> int:
        return self.sizes.shape[1]

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's key and value in the payload."""
        return (self.key_dim + self.value_dim) * self.payload_dtype.itemsize


class Archive:
    """One document's archive, opened for one model; never changes, and serves any number of threads at once.

    Use `Archive.open`. ``manifest`` says what was built; ``layers`` hold the tensors.
    """

    def __init__(self, path: Path, manifest: Manifest, model: LoadedModel, layers: tuple[ArchivedLayer, ...]) -> None:
        self.path = path
        self.manifest = manifest
        self.model = model
        self.layers = layers

    @classmethod
    def open(cls, path: str | Path, model: LoadedModel) -> Archive:
        """Open the archive in the folder `path` for `model`.

        Format version, checksums of all files and the model's fingerprint are checked first. Nothing is written.

        Raises
        ------
        ArchiveNotFoundError, ArchiveFormatError, ArchiveCorruptError
            If there is no archive, of another version, or its files do not match their checksums.
        ModelMismatchError
            If `model` is not the one the archive was built with; both sides are named.
        UnsupportedModelError
            If a length-dependent RoPE does not reach over the document.
        """
        path = Path(path)
        manifest = read_manifest(path)
        check_files(path, manifest)
        require_match(manifest.fingerprint, model.model, model.tokenizer)
        check_length(model_shape(model.model.config), manifest.n_tokens + 1)
        stored = getattr(torch, manifest.fingerprint.dtype)
        if stored != model.model.dtype:
            log.warning("archive %s holds %s, the model is %s: values are cast", path, stored, model.model.dtype)
        layers = tuple(_load_layer(path, entry, stored, model) for entry in manifest.layers)
        return cls(path, manifest, model, layers)

    @property
    def n_tokens(self) -> int:
        """Prefix and document tokens: the position of the first question token."""
        return self.manifest.n_tokens

    @cached_property
    def shape(self) -> ModelShape:
        """The cache of the model that the archive is opened for."""
        return model_shape(self.model.model.config)

    @cached_property
    def first_full_layer(self) -> int:
        """Index of the first layer without a window, or 0 where every layer has one."""
        return next((layer.index for layer in self.layers if layer.window is None), 0)

    @cached_property
    def tokens(self) -> TokenTable:
        """Token ids and character offsets of prefix and document."""
        return read_tokens(self.path, self.manifest)

    @cached_property
    def resident_bytes(self) -> int:
        """Bytes held in memory for as long as the archive is open: prototypes, exact tokens and address tables.

        The payload is mapped from disk and not counted; what a step recalls from it is counted per request.
        """
        held: list[torch.Tensor | None] = []
        for layer in self.layers:
            held += [layer.keys, layer.values, layer.bias, layer.exact_positions]
            if layer.recall is not None:
                held += [layer.recall.sizes, layer.recall.priority, layer.recall.address]
        return sum(tensor.nbytes for tensor in held if tensor is not None)

    @cached_property
    def disk_bytes(self) -> int:
        """Bytes of all files of the archive but the manifest."""
        return sum(entry.bytes for entry in self.manifest.files.values())

    @property
    def dense_bytes(self) -> int:
        """Bytes of the model's own cache of the same tokens, in the archive's dtype."""
        return self.manifest.dense_bytes

    def questions(self, questions: Sequence[str]) -> dict[str, torch.Tensor]:
        """Inputs of ``model.generate`` for a left-padded batch of questions over this archive.

        Returns ``input_ids``, ``attention_mask`` and ``position_ids``, each (n_questions, n_longest) int64; positions
        start where the document ends. Pass them with ``cache=ArchiveCache(archive)``.
        """
        if not questions or isinstance(questions, str):
            raise ConfigError("give a list with at least one question")
        tokenizer = self.model.tokenizer
        return self.pad([question_ids(tokenizer, self.manifest.layout, question) for question in questions])

    def pad(self, token_ids: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
        """As `questions`, from token ids that already follow the document."""
        longest = max(len(ids) for ids in token_ids)
        device = self.model.model.device
        fill = self.model.tokenizer.pad_token_id
        fill = self.model.tokenizer.eos_token_id if fill is None else fill
        input_ids = torch.full((len(token_ids), longest), 0 if fill is None else fill, dtype=torch.int64)
        mask = torch.zeros_like(input_ids)
        for row, ids in enumerate(token_ids):
            input_ids[row, longest - len(ids) :] = torch.tensor(ids)
            mask[row, longest - len(ids) :] = 1
        positions = self.n_tokens + (mask.cumsum(1) - 1).clamp_min(0)
        return {
            "input_ids": input_ids.to(device),
            "attention_mask": mask.to(device),
            "position_ids": positions.to(device),
        }

    def require_attached(self) -> None:
        """Refuse to answer through a model whose attention would ignore the archive."""
        if not is_attached(self.model.model):
            raise ConfigError(
                f"the model's attention is {self.model.model.config._attn_implementation!r}, which would ignore the "
                "archive; call ragkv.attach(model) first"
            )


def check_files(path: Path, manifest: Manifest) -> None:
    """Compare length and SHA-256 of every file with the manifest."""
    for name, expected in manifest.files.items():
        try:
            found = hash_file(path / name)
        except OSError as error:
            raise ArchiveNotFoundError(f"{str(path)!r}: file {name} cannot be read ({error.strerror})") from error
        if found != expected:
            raise ArchiveCorruptError(
                f"{str(path)!r}: file {name} has {found.bytes} bytes and SHA-256 {found.sha256[:12]}..., the manifest "
                f"says {expected.bytes} and {expected.sha256[:12]}...; build the archive again"
            )


def jensen_correction(logit_variance: torch.Tensor) -> torch.Tensor:
    """What to add to log(size), so that the estimated mass of a cluster is right on average and not just a lower bound.

    The mean of exp(x) exceeds exp(mean of x) by half the variance of x in the exponent, to second order; the expansion
    fails for widely spread clusters, hence the limit.
    """
    return (logit_variance / 2).clamp_max(MAX_CORRECTION)


def recall_priority(logit_variance: torch.Tensor, value_spread: torch.Tensor) -> torch.Tensor:
    """Weight of a cluster's mass when clusters are ranked: how badly its prototype stands in for it.

    The standard deviation of a typical query's logit inside the cluster, times how far its values lie from the mean;
    the Jensen correction is taken out of the mass again. All ones where the archive holds no variances (documents too
    short for probes).
    """
    if not bool((logit_variance > 0).any()):
        return torch.ones_like(logit_variance)
    return (logit_variance * value_spread).sqrt() * (-jensen_correction(logit_variance)).exp()


def _load_layer(path: Path, entry: LayerEntry, stored: torch.dtype, model: LoadedModel) -> ArchivedLayer:
    device, dtype = model.model.device, model.model.dtype
    try:
        exact = read_rows(path / entry.rows_file, entry.key_dim, stored, exact_only=True)
        shape = (entry.n_kv_heads, entry.exact_tokens)
        keys, values = exact.keys.reshape(*shape, entry.key_dim), exact.values.reshape(*shape, entry.value_dim)
        bias = recall = None
        if entry.clusters:
            prototypes = read_prototypes(path, entry, stored)
            keys = torch.cat([prototypes.centroids, keys], dim=1)
            values = torch.cat([prototypes.mean_values, values], dim=1)
            correction = jensen_correction(prototypes.logit_variance)
            bias = torch.cat([prototypes.sizes.float().log() + correction, torch.zeros(shape)], dim=1).to(device)
            recall = _recall_tables(path, entry, prototypes, stored, device)
    except (pa.ArrowException, OSError, RuntimeError, KeyError) as error:
        raise ArchiveCorruptError(f"{str(path)!r}: layer {entry.index} cannot be read ({error})") from error
    keys, values = keys.to(device, dtype), values.to(device, dtype)
    if dtype != stored and not bool(torch.isfinite(keys).all() & torch.isfinite(values).all()):
        raise NonFiniteError(
            f"{str(path)!r}: layer {entry.index} does not fit {dtype} ({stored} archived); load the model in {stored}"
        )
    return ArchivedLayer(
        index=entry.index,
        window=entry.window,
        keys=keys,
        values=values,
        bias=bias,
        exact_positions=exact.position.reshape(shape)[0].to(device),
        recall=recall,
    )


def _recall_tables(
    path: Path, entry: LayerEntry, prototypes: Prototypes, stored: torch.dtype, device: torch.device
) -> RecallTables:
    rows_path, sizes = path / entry.rows_file, prototypes.sizes
    row_bytes = (entry.key_dim + entry.value_dim) * stored.itemsize
    groups = row_groups(rows_path, row_bytes)
    flat = sizes.reshape(-1)
    first_row = flat.cumsum(0) - flat  # archived rows lie head by head, cluster by cluster
    used = torch.arange(sizes.shape[1]) < torch.tensor(entry.clusters).unsqueeze(1)
    starts = torch.tensor(groups.first_row)
    group = torch.searchsorted(starts, first_row, right=True) - 1  # row group of each cluster
    inside = first_row + flat <= (starts + torch.tensor(groups.n_rows))[group]
    if int(flat.sum()) != sum(groups.n_rows) or bool((sizes[used] < 1).any()) or not bool(inside.all()):
        raise ArchiveCorruptError(f"{entry.rows_file}: cluster sizes and rows disagree")
    address = torch.tensor(groups.first_byte)[group] + (first_row - starts[group]) * row_bytes
    return RecallTables(
        sizes=sizes.to(device),
        priority=recall_priority(prototypes.logit_variance, prototypes.value_spread).to(device),
        address=address.reshape(sizes.shape).to(device),
        payload=map_file(rows_path),
        payload_dtype=stored,
        key_dim=entry.key_dim,
        value_dim=entry.value_dim,
        largest=int(flat.max()),
        n_tokens=int(sizes.sum(1).max()),
        padded=not bool(used.all()),
    )
