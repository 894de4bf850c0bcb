"""An open archive: one document, ready to be recalled by one model."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import torch

from ragkv.architecture import ModelShape, check_length, model_shape
from ragkv.attention import is_attached
from ragkv.errors import ArchiveCorruptError, ArchiveNotFoundError, ConfigError
from ragkv.fingerprint import require_match
from ragkv.layers import ArchivedLayer, load_layer, whole_layer
from ragkv.layout import question_ids
from ragkv.manifest import Manifest, read_manifest
from ragkv.models import LoadedModel
from ragkv.publish import hash_file
from ragkv.tables import TokenTable, read_tokens

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
        require_match(manifest.fingerprint, model.model, model.tokenizer)
        check_length(model_shape(model.model.config), manifest.n_tokens + 1)
        stored = getattr(torch, manifest.fingerprint.dtype)
        if stored != model.model.dtype:
            log.warning("archive %s holds %s, the model is %s: values are cast", path, stored, model.model.dtype)
        device, dtype = model.model.device, model.model.dtype
        layers = tuple(load_layer(path, entry, stored, device=device, dtype=dtype) for entry in manifest.layers)
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
        for layer in self.layers:
            held += [layer.keys, layer.values, layer.bias, layer.exact_positions]
            if layer.recall is not None:
                table = layer.recall
                held += [table.sizes, table.priority, table.address, table.axes, table.axis_variances]
                for basis in (layer.recall.payload.key_basis, layer.recall.payload.value_basis):
                    held += [] if basis is None else [basis.rows, basis.mean]
        for index, whole in tuple(self._whole.items()):
            held += [whole.keys, whole.values] if whole is not self.layers[index] else []
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
