"""The transforms of a catalog: fitted once, stored once under their SHA-256, shared by all its archives."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from ragkv.archive.files import system_errors
from ragkv.archive.publish import publishing_in, sweep, write_whole
from ragkv.archive.snapshot import SHARED_TRANSFORMS, read_shared
from ragkv.archive.transforms import LayerTransforms, Transforms, transforms_bytes
from ragkv.build.builder import BuildRequest, Progress, fit_transforms, stage
from ragkv.catalog.head import is_document_id
from ragkv.errors import ArchiveCorruptError, ArchiveNotFoundError, ConfigError
from ragkv.model.load import LoadedModel
from ragkv.model.prompt import PromptLayout
from ragkv.recipe import Recipe

_SUFFIX = ".parquet"


def fit_on_texts(
    model: LoadedModel,
    texts: Sequence[str],
    *,
    recipe: Recipe,
    layout: PromptLayout,
    on_progress: Progress | None = None,
) -> dict[int, LayerTransforms]:
    """Transforms that suit `texts`, by layer.

    Raises
    ------
    ConfigError
        If a text cannot be archived, or none is long enough to have tokens that are grouped into clusters.
    """
    if isinstance(texts, str):
        raise ConfigError("texts is one text; give a list of texts")
    requests = [BuildRequest.of(model, text, recipe=recipe, layout=layout) for text in texts]
    caches = [request.prefill(stage(on_progress, "prefill")) for request in requests]
    layers = fit_transforms(requests, caches)
    if not layers:
        raise ConfigError("the texts are too short to fit transforms to; give some thousand tokens together")
    return layers


class SharedTransforms:
    """The transforms in the folder ``transforms`` of a catalog; there is one file there at most.

    Whoever fits them first writes them; whoever comes second uses those. They are read once and kept.
    """

    def __init__(self, catalog: Path, device: torch.device) -> None:
        self._catalog = catalog
        self._folder = catalog / SHARED_TRANSFORMS
        self._device = device
        self._held: Transforms | None = None
        self._lock = threading.Lock()

    def get(self) -> Transforms | None:
        """The transforms, None where none were fitted yet.

        Raises
        ------
        ArchiveCorruptError, ArchiveReadError
            If their file is damaged, or cannot be read now.
        """
        with self._lock:
            if self._held is None:
                named = self._named()
                self._held = None if named is None else read_shared(self._catalog, named).to(self._device)
            return self._held

    def of(self, sha256: str) -> Transforms:
        """The transforms if they have this SHA-256.

        Raises
        ------
        ArchiveCorruptError
            If they have another: the archive that asks was not built for this catalog.
        """
        held = self.get()
        if held is None or held.sha256 != sha256:
            raise ArchiveCorruptError(
                f"the archive was coded with the transforms {sha256[:12]}..., those of {str(self._catalog)!r} "
                f"are {held.sha256[:12] + '...' if held else 'not there'}; remove it and add its text again"
            )
        return held

    def publish(self, layers: Mapping[int, LayerTransforms]) -> Transforms:
        """Write transforms, unless there are some by now; returns those of the catalog.

        Raises
        ------
        ConfigError
            If they cannot be written.
        """
        try:
            self._folder.mkdir(exist_ok=True)
            sweep(self._folder)
            with publishing_in(self._folder):
                if self._named() is None:
                    raw = transforms_bytes(layers)
                    write_whole(self._folder / f"{hashlib.sha256(raw).hexdigest()}{_SUFFIX}", raw)
        except OSError as error:
            raise ConfigError(f"cannot write the transforms of {str(self._catalog)!r}: {error.strerror}") from error
        found = self.get()
        assert found is not None
        return found

    @property
    def resident_bytes(self) -> int:
        """Bytes held in memory, however many archives share them."""
        return 0 if self._held is None else self._held.resident_bytes

    def _named(self) -> str | None:
        """The SHA-256 that a file in the folder is named by."""
        try:
            with system_errors(f"{str(self._folder)!r}"):
                found = os.listdir(self._folder)  # a glob would find nothing where it may not look
        except ArchiveNotFoundError:
            return None
        names = (name.removesuffix(_SUFFIX) for name in found if name.endswith(_SUFFIX))
        return min(filter(is_document_id, names), default=None)
