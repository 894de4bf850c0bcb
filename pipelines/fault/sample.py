"""The tiny archives that faults are tried on: built once, from one prefilled document each."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from transformers import DynamicCache

from ragkv import Archive, PromptLayout, Recipe
from ragkv.build.builder import BuildRequest, write_archive
from tests.archives import CODED, loaded
from tests.tiny import TEXT

LAYOUT = PromptLayout.plain()
LINES = TEXT.splitlines(keepends=True)
TEXTS = tuple("".join(LINES[turn:] + LINES[:turn]) for turn in range(3))
"""Three texts of the same number of tokens."""


class Prefilled:
    """One document and the model's cache of it, so that building it again costs no prefill."""

    def __init__(self, text: str, *, model: str = "llama", recipe: Recipe = CODED) -> None:
        self.request = BuildRequest.of(loaded(model), text, recipe=recipe, layout=LAYOUT)
        self.cache: DynamicCache = self.request.prefill()

    def build(self, path: Path) -> None:
        """Archive it at `path`."""
        write_archive(self.request, self.cache, path)


def digest_of(archive: Archive) -> str:
    """One hash over all that an open archive holds: tokens, prototypes, exact tokens, transforms, and every row."""
    hasher = hashlib.sha256(archive.manifest.to_json().encode())
    for tensor in _tensors(archive):
        hasher.update(np.ascontiguousarray(tensor.cpu().contiguous().view(torch.uint8).numpy()).tobytes())
    return hasher.hexdigest()


def _tensors(archive: Archive) -> Iterator[torch.Tensor]:
    yield from (archive.tokens.ids, archive.tokens.start, archive.tokens.end)
    for layer in archive.layers:
        yield from (layer.keys, layer.values, layer.exact_positions)
        table = layer.clusters
        if table is not None:
            held = table.prototypes
            yield from (held.key_codes, held.value_codes, held.sizes, held.spreads)
            yield from (table.transforms.key_mean, table.transforms.key_prototypes.rows)
            yield table.all_rows()
            yield archive.positions(layer.index)


def bytes_below(folder: Path) -> dict[str, bytes]:
    """The bytes of every file below `folder`, by its path."""
    return {found.relative_to(folder).as_posix(): found.read_bytes() for found in folder.rglob("*") if found.is_file()}
