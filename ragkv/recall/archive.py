"""An open archive: one document, ready to be recalled by one model."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import torch

from ragkv.archive.manifest import Manifest, read_manifest
from ragkv.archive.publish import hash_file
from ragkv.archive.rows import read_positions
from ragkv.archive.tables import TokenTable, read_tokens
from ragkv.errors import ArchiveCorruptError, ArchiveNotFoundError
from ragkv.model.fingerprint import require_match
from ragkv.model.load import LoadedModel, padded_inputs, question_inputs
from ragkv.model.prompt import PromptLayout, decoded, decoded_spans, document_sha256
from ragkv.model.shape import check_length, model_shape
from ragkv.recall.layers import ArchivedLayer, load_layer, whole_layer
from ragkv.recipe import RecallPolicy

log = logging.getLogger(__name__)


class Archive:
    """One document's archive, opened for one model; never changes, and serves any number of threads at once.

    Use `Archive.open`. ``manifest`` says what was built; ``layers`` hold the tensors.
    """

    def __init__(self, path: Path, manifest: Manifest, model: LoadedModel, layers: tuple[ArchivedLayer, ...]) -> None:
        self.path = path
        self.manifest = manifest
        self.model = model
        self.layers = layers
        self._whole: dict[int, ArchivedLayer] = {}
        self._positions: dict[int, torch.Tensor] = {}
        self._lock = threading.Lock()

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
        require_match(manifest.fingerprint, model)
        check_length(model_shape(model.model.config), manifest.n_tokens + 1)
        stored = getattr(torch, manifest.fingerprint.dtype)
        if stored != model.model.dtype:
            log.warning("archive %s holds %s, the model is %s: values are cast", path, stored, model.model.dtype)
        device, dtype = model.model.device, model.model.dtype
        layers = tuple(load_layer(path, entry, stored, device=device, dtype=dtype) for entry in manifest.layers)
        archive = cls(path, manifest, model, layers)
        _ = archive.tokens  # read now: the files may be gone when they are asked for
        return archive

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
    def recall(self) -> RecallPolicy:
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
        """Position of every archived row of layer `index`, in the order of its file: (n_kv_heads, n_tokens) int64."""
        with self._lock:
            if index not in self._positions:
                entry = self.manifest.layers[index]
                table = self.layers[index].recall
                flat = torch.empty(0, dtype=torch.int64) if table is None else read_positions(table.mapped)
                self._positions[index] = flat.view(entry.n_kv_heads, -1)
            return self._positions[index]

    def whole_layer(self, index: int) -> ArchivedLayer:
        """Layer `index` with every token decoded into memory: for layers that a policy keeps dense."""
        with self._lock:
            if index not in self._whole:
                self._whole[index] = whole_layer(self.layers[index])
            return self._whole[index]

    @cached_property
    def tokens(self) -> TokenTable:
        """Token ids and character offsets of prefix and document."""
        return read_tokens(self.path, self.manifest)

    @property
    def resident_bytes(self) -> int:
        """Bytes held in memory: prototypes, exact tokens, tables, and the layers that were decoded to stay dense.

        The rows are mapped from disk and not counted; what a step recalls from them is counted per request.
        """
        held: list[torch.Tensor | None] = []
        n_bytes = 0
        for layer in self.layers:
            held += [layer.keys, layer.values, layer.bias, layer.exact_positions]
            if layer.recall is not None:
                table = layer.recall
                held += [table.sizes, table.priority, table.address, table.axes, table.axis_variances]
                bases = (table.payload.key_basis, table.payload.value_basis)
                n_bytes += sum(basis.resident_bytes for basis in bases if basis is not None)
        for index, whole in tuple(self._whole.items()):
            held += [whole.keys, whole.values] if whole is not self.layers[index] else []
        return n_bytes + sum(tensor.nbytes for tensor in held if tensor is not None)

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
