"""An open archive: prototypes and exact tokens in memory, keys and values mapped from disk until they are recalled."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pyarrow as pa
import torch

from ragkv.architecture import check_length, model_shape
from ragkv.attention import is_attached
from ragkv.errors import ArchiveCorruptError, ArchiveNotFoundError, ConfigError
from ragkv.fingerprint import require_match
from ragkv.layout import question_ids
from ragkv.manifest import LayerEntry, Manifest, read_manifest
from ragkv.models import LoadedModel
from ragkv.publish import hash_file
from ragkv.rows import map_file, read_rows, row_addresses
from ragkv.tables import TokenTable, read_prototypes, read_tokens

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ArchivedLayer:
    """What recall needs of one layer, on the model's device unless said otherwise.

    ``exact_keys`` (n_kv_heads, n_exact, key_dim), ``exact_values`` and ``exact_positions`` (n_exact,) are always
    attended. A global layer with clusters adds ``centroids`` (n_kv_heads, n_clusters, key_dim), ``mean_values``,
    ``log_sizes`` float32 (-inf where a head has fewer clusters), ``sizes`` int32, and the byte addresses of each
    cluster's first key and value in ``payload``, the mapped layer file (n_bytes,) uint8 on the host.
    """

    index: int
    window: int | None
    exact_keys: torch.Tensor
    exact_values: torch.Tensor
    exact_positions: torch.Tensor
    recall: RecallTables | None


@dataclass(frozen=True)
class RecallTables:
    """Prototypes of a layer and where the rows behind them lie; shapes in `ArchivedLayer`."""

    centroids: torch.Tensor
    mean_values: torch.Tensor
    log_sizes: torch.Tensor
    sizes: torch.Tensor
    key_address: torch.Tensor
    value_address: torch.Tensor
    largest: int
    payload: torch.Tensor
    payload_dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of one key and one value in the payload."""
        return (self.centroids.shape[-1] + self.mean_values.shape[-1]) * self.payload_dtype.itemsize


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
    def tokens(self) -> TokenTable:
        """Token ids and character offsets of prefix and document."""
        return read_tokens(self.path, self.manifest)

    @cached_property
    def resident_bytes(self) -> int:
        """Bytes held in memory for as long as the archive is open: prototypes, exact tokens and address tables.

        The payload is mapped from disk and not counted; what a step recalls from it is counted per request.
        """
        total = 0
        for layer in self.layers:
            held = [layer.exact_keys, layer.exact_values, layer.exact_positions]
            if layer.recall is not None:
                table = layer.recall
                held += [table.centroids, table.mean_values, table.log_sizes, table.sizes]
                held += [table.key_address, table.value_address]
            total += sum(tensor.numel() * tensor.element_size() for tensor in held)
        return total

    @cached_property
    def disk_bytes(self) -> int:
        """Bytes of all files of the archive but the manifest."""
        return sum(entry.bytes for entry in self.manifest.files.values())

    @property
    def dense_bytes(self) -> int:
        """Bytes of the model's own cache of the same tokens, in the archive's dtype."""
        stored = getattr(torch, self.manifest.fingerprint.dtype)
        shape = model_shape(self.model.model.config)
        return sum(
            layer.cached_tokens(self.n_tokens) * layer.n_kv_heads * 2 * layer.head_dim * stored.itemsize
            for layer in shape.layers
        )

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


def _load_layer(path: Path, entry: LayerEntry, stored: torch.dtype, model: LoadedModel) -> ArchivedLayer:
    device, dtype = model.model.device, model.model.dtype
    try:
        exact = read_rows(path / entry.rows_file, stored, exact_only=True)
        shape = (entry.n_kv_heads, entry.exact_tokens)
        recall = _load_recall(path, entry, stored, model) if entry.clusters else None
        return ArchivedLayer(
            index=entry.index,
            window=entry.window,
            exact_keys=exact.keys.reshape(*shape, entry.key_dim).to(device, dtype),
            exact_values=exact.values.reshape(*shape, entry.value_dim).to(device, dtype),
            exact_positions=exact.position.reshape(shape)[0].to(device),
            recall=recall,
        )
    except (pa.ArrowException, OSError, RuntimeError, KeyError) as error:
        raise ArchiveCorruptError(f"{str(path)!r}: layer {entry.index} cannot be read ({error})") from error


def _load_recall(path: Path, entry: LayerEntry, stored: torch.dtype, model: LoadedModel) -> RecallTables:
    device, dtype = model.model.device, model.model.dtype
    prototypes = read_prototypes(path, entry, stored)
    rows_path = path / entry.rows_file
    key_bytes, value_bytes = entry.key_dim * stored.itemsize, entry.value_dim * stored.itemsize
    addresses = row_addresses(rows_path, key_bytes, value_bytes)
    sizes = prototypes.sizes.reshape(-1)
    first_row = sizes.cumsum(0) - sizes  # archived rows lie head by head, cluster by cluster
    if int(sizes.sum()) != sum(addresses.n_rows):
        raise ArchiveCorruptError(f"{entry.rows_file}: cluster sizes and rows disagree")
    starts = torch.tensor(addresses.first_row)
    group = torch.searchsorted(starts, first_row, right=True) - 1  # row group of each cluster
    inside = first_row - starts[group]

    def address(first_byte: tuple[int, ...], width: int) -> torch.Tensor:
        return (torch.tensor(first_byte)[group] + inside * width).reshape(prototypes.sizes.shape).to(device)

    return RecallTables(
        centroids=prototypes.centroids.to(device, dtype),
        mean_values=prototypes.mean_values.to(device, dtype),
        log_sizes=prototypes.sizes.float().log().to(device),
        sizes=prototypes.sizes.to(device, torch.int32),
        key_address=address(addresses.key_byte, key_bytes),
        value_address=address(addresses.value_byte, value_bytes),
        largest=int(sizes.max()),
        payload=map_file(rows_path),
        payload_dtype=stored,
    )
