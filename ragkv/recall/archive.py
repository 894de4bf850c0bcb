"""An open archive: one document, ready to be recalled by one model."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from ragkv.archive.files import system_errors
from ragkv.archive.manifest import OWN_TRANSFORMS, Manifest
from ragkv.archive.parquet import flat_lists
from ragkv.archive.snapshot import Snapshot, read_snapshot
from ragkv.archive.tokens import TokenTable
from ragkv.archive.transforms import Transforms
from ragkv.errors import ArchiveCorruptError, ModelMismatchError, NonFiniteError
from ragkv.model.fingerprint import require_match
from ragkv.model.load import LoadedModel, check_loaded, padded_inputs, question_inputs
from ragkv.model.prompt import PromptLayout, decoded, decoded_spans, document_sha256
from ragkv.model.shape import ModelShape, check_length, model_shape
from ragkv.recall.layers import ArchivedLayer, ClusterTable, cluster_table, whole_layer
from ragkv.recipe import RecallPolicy

log = logging.getLogger(__name__)


class Archive:
    """One document's archive, opened for one model; never changes, and serves any number of threads at once.

    Use `Archive.open`. ``manifest`` says what was built; ``layers`` hold the tensors.
    """

    def __init__(self, snapshot: Snapshot, model: LoadedModel, layers: tuple[ArchivedLayer, ...]) -> None:
        self.path = snapshot.path
        self.manifest = snapshot.manifest
        self.tokens: TokenTable = snapshot.tokens
        self.model = model
        self.layers = layers
        self._rows, self._transforms = snapshot.rows, snapshot.transforms
        self._whole: dict[int, ArchivedLayer] = {}
        self._positions: dict[int, torch.Tensor] = {}
        self._lock = threading.Lock()

    @classmethod
    def open(
        cls, path: str | Path, model: LoadedModel, *, transforms: Callable[[str], Transforms] | None = None
    ) -> Archive:
        """Open the archive in the folder `path` for `model`.

        Wholly one archive is opened, also while it is being replaced. Of its archived rows nothing is read: the
        checksum of each row group is looked at when recall first touches it. Nothing is written, but that an archive
        is put back whose replacement died half-way.

        Parameters
        ----------
        transforms
            Gives the transforms of a SHA-256, for archives of a catalog. By default they are read from the catalog that
            the archive stands in.

        Raises
        ------
        ArchiveNotFoundError, ArchiveFormatError, ArchiveCorruptError
            If there is no archive, of another version, or its files do not match their checksums.
        ArchiveReadError
            If the system did not let it be read: no descriptors or no memory left, an I/O error, a permission.
        ModelMismatchError
            If `model` is not the one the archive was built with; both sides are named.
        UnsupportedModelError
            If a length-dependent RoPE does not reach over the document.
        """
        check_loaded(model)
        shape = model_shape(model.model.config)

        def accept(manifest: Manifest) -> None:
            require_match(manifest.fingerprint, model)
            _check_shape(manifest, shape)
            check_length(shape, manifest.n_tokens + 1)

        snapshot = read_snapshot(path, transforms=transforms, accept=accept)
        _check_vocabulary(snapshot, model)
        stored = getattr(torch, snapshot.manifest.fingerprint.dtype)
        if stored != model.model.dtype:
            log.warning("archive %s holds %s, the model is %s: values are cast", path, stored, model.model.dtype)
        with system_errors(f"archive {str(path)!r}"):
            return cls(snapshot, model, _layers(snapshot, device=model.model.device, dtype=model.model.dtype))

    def require_unchanged(self) -> None:
        """Refuse to go on when the rows file was changed in place since the archive was opened.

        Raises
        ------
        ArchiveCorruptError
            If it was; open the archive again.
        """
        if self._rows.changed():
            raise ArchiveCorruptError(
                f"{str(self.path)!r}: its rows were changed in place since it was opened; open it again, and replace "
                "archives by 'ragkv build' or by renaming its folder"
            )

    @property
    def n_tokens(self) -> int:
        """Prefix and document tokens: the position of the first question token."""
        return self.manifest.n_tokens

    @property
    def prefix_tokens(self) -> int:
        """Tokens in front of the document."""
        return self.manifest.prefix_tokens

    @property
    def layout(self) -> PromptLayout:
        """Prompt around the document."""
        return self.manifest.layout

    @property
    def name(self) -> str:
        """Name of the document, or of the archive's folder."""
        return self.manifest.document_name or self.path.name

    @property
    def policy(self) -> RecallPolicy:
        """What is recalled unless a request says otherwise."""
        return self.manifest.recipe.recall

    @property
    def text(self) -> str:
        """The document, decoded from its tokens: what was archived, unless its tokenizer changes texts."""
        return self._text_and_spans[0]

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Character offsets into `text` of each document token."""
        return self._text_and_spans[1]

    @cached_property
    def _text_and_spans(self) -> tuple[str, list[tuple[int, int]]]:
        ids, tokenizer = self.tokens.ids[self.prefix_tokens :].tolist(), self.model.tokenizer
        text = decoded(tokenizer, ids)
        if document_sha256(text) == self.manifest.document_sha256:
            start, end = (column[self.prefix_tokens :].tolist() for column in (self.tokens.start, self.tokens.end))
            return text, list(zip(start, end, strict=True))
        return decoded_spans(tokenizer, ids)

    def positions(self, index: int) -> torch.Tensor:
        """Position of every archived token of layer `index`, by KV head and cluster: (n_kv_heads, n_tokens) int64.

        Raises
        ------
        ArchiveCorruptError
            If they are not each archived position once, in clusters of the sizes that are held.
        """
        with self._lock:
            if index not in self._positions:
                table = self.layers[index].clusters
                flat = torch.empty(0, dtype=torch.int64)
                if table is not None:
                    column = self._rows.columns(list(range(*table.groups)), ["positions"])["positions"]
                    flat = _checked_positions(column, table, self.manifest)
                self._positions[index] = flat.view(self.manifest.layers[index].n_kv_heads, -1)
            return self._positions[index]

    def whole_layer(self, index: int) -> ArchivedLayer:
        """Layer `index` with every token decoded into memory: for layers that a policy keeps dense."""
        positions = self.positions(index)
        with self._lock:
            if index not in self._whole:
                self._whole[index] = whole_layer(self.layers[index], positions)
            return self._whole[index]

    @property
    def transforms(self) -> Transforms | None:
        """What its codes are written in; archives of a catalog share one."""
        return self._transforms

    @property
    def resident_bytes(self) -> int:
        """Bytes held in memory: prototypes, exact tokens, tables, and the layers that were decoded to stay dense.

        Transforms are counted if they are the archive's own; those of a catalog are counted once, by the catalog. The
        rows are mapped from disk and not counted; what a step recalls from them is counted per request.
        """
        held = sum(layer.resident_bytes for layer in self.layers) + self._rows.resident_bytes
        if self._transforms is not None and self.has_own_transforms:
            held += self._transforms.resident_bytes
        whole = (layer for index, layer in tuple(self._whole.items()) if layer is not self.layers[index])
        return held + sum(layer.resident_bytes for layer in whole)

    @property
    def has_own_transforms(self) -> bool:
        """Whether the archive carries its transforms, rather than sharing those of a catalog."""
        return OWN_TRANSFORMS in self.manifest.files

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
        return question_inputs(self.model, self.layout, questions, first_position=self.n_tokens)

    def pad(self, token_ids: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
        """As `questions`, from token ids that already follow the document."""
        return padded_inputs(self.model, token_ids, first_position=self.n_tokens)


def _check_shape(manifest: Manifest, shape: ModelShape) -> None:
    """Refuse layers of other shapes than the model's, and more tokens than its context: before memory is taken."""
    found = [(each.window, each.n_kv_heads, each.key_dim, each.value_dim) for each in manifest.layers]
    wanted = [(each.window, each.n_kv_heads, each.head_dim, each.head_dim) for each in shape.layers]
    if found != wanted:
        raise ModelMismatchError(
            f"the archive has {len(found)} layers like {found[:1]}, the model {len(wanted)} like {wanted[:1]} (window, "
            "KV heads, numbers of a key and of a value); load the model it was built with"
        )
    if shape.max_positions is not None and manifest.n_tokens > shape.max_positions:
        raise ArchiveCorruptError(
            f"the manifest counts {manifest.n_tokens:,} tokens and the model's context holds {shape.max_positions:,}"
        )


def _check_vocabulary(snapshot: Snapshot, model: LoadedModel) -> None:
    """Refuse tokens that the model does not have: to decode or prefill them would fail somewhere else."""
    largest, n_known = int(snapshot.tokens.ids.max()), int(model.model.config.get_text_config(decoder=True).vocab_size)
    if largest >= n_known:
        raise ArchiveCorruptError(f"the archive holds the token id {largest}, and the model has {n_known} tokens")


def _checked_positions(column: pa.ChunkedArray, table: ClusterTable, manifest: Manifest) -> torch.Tensor:
    """The positions (n_kv_heads * n_tokens,) int64 in the lists of `column`, one a cluster."""
    flat, sizes = flat_lists(column), table.sizes[table.sizes > 0].cpu().long()
    lengths = torch.from_numpy(np.concatenate([chunk.value_lengths().to_numpy() for chunk in column.chunks])).long()
    if torch.equal(lengths, sizes):
        wanted = torch.arange(manifest.archived_tokens) + manifest.head_tokens
        if bool((flat.view(len(table.sizes), -1).sort(dim=1).values == wanted).all()):
            return flat
    raise ArchiveCorruptError("the clusters of a layer do not hold every archived position once; build it again")


def _layers(snapshot: Snapshot, *, device: torch.device, dtype: torch.dtype) -> tuple[ArchivedLayer, ...]:
    transforms = {} if snapshot.transforms is None else snapshot.transforms.to(device).layers
    layers = []
    for entry in snapshot.manifest.layers:
        exact, clusters = snapshot.exact[entry.index], None
        if entry.clusters:
            clusters = cluster_table(
                snapshot.prototypes[entry.index],
                transforms[entry.index],
                transforms[entry.index].payload(exact.keys.dtype),
                snapshot.rows,
                snapshot.groups[entry.index],
                n_tokens=snapshot.manifest.archived_tokens,
                device=device,
            )
        keys, values = exact.keys.to(device, dtype), exact.values.to(device, dtype)
        if dtype != exact.keys.dtype and not bool(torch.isfinite(keys).all() & torch.isfinite(values).all()):
            raise NonFiniteError(
                f"{str(snapshot.path)!r}: layer {entry.index} does not fit {dtype} ({exact.keys.dtype} archived); load "
                f"the model in {exact.keys.dtype}"
            )
        layers.append(ArchivedLayer(entry.index, entry.window, keys, values, exact.positions.to(device), clusters))
    return tuple(layers)
