"""Build an archive: text -> tokens -> prefill -> keys/values -> clusters -> files, manifest last."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import DynamicCache

from ragkv.archive import publish
from ragkv.archive.manifest import Manifest, read_manifest
from ragkv.archive.tables import write_tokens
from ragkv.build.layer import document_span, write_layer
from ragkv.build.probes import probe_ids, query_moments
from ragkv.errors import ArchiveCorruptError, ArchiveFormatError, ArchiveNotFoundError, ModelMismatchError
from ragkv.model.fingerprint import require_match
from ragkv.model.load import LoadedModel
from ragkv.model.prefill import captured_layers, check_document_length, prefill_cache
from ragkv.model.prompt import PromptLayout, PromptTokens, document_sha256, tokenize_prompt
from ragkv.model.shape import model_shape
from ragkv.recipe import Recipe
from ragkv.version import __version__

Progress = Callable[[str, int, int], None]
"""Called with a stage name, steps done and steps in all."""


@dataclass(frozen=True)
class BuildResult:
    """What a build did. Times in seconds: ``prefill_s``, and ``build_s`` for clustering, encoding and writing."""

    path: Path
    manifest: Manifest
    prefill_s: float
    build_s: float


def build_archive(
    model: LoadedModel,
    document: str,
    path: str | Path,
    *,
    recipe: Recipe | None = None,
    layout: PromptLayout | None = None,
    document_name: str = "",
    on_progress: Progress | None = None,
) -> BuildResult:
    """Prefill `document` once and archive its keys and values in the folder `path`.

    The archive appears whole or not at all: it is written to a temporary folder beside `path`, checked, and renamed.
    An archive that stood at `path` is replaced.

    Parameters
    ----------
    model
        From `load_model`; weights and code stay untouched.
    document
        The text. Literal special tokens in it are archived as text.
    recipe, layout
        Default to `Recipe()` and the model's own `layout`.
    on_progress
        Called with ("prefill" | "cluster", done, total).

    Raises
    ------
    ConfigError
        If the document is empty or longer than the model's context.
    UnsupportedModelError
        If this model's cache cannot be archived exactly.
    NonFiniteError
        If the model computed a NaN or infinite key or value.
    """
    recipe = recipe or Recipe()
    layout = layout or model.layout
    return build_from_tokens(
        model,
        tokenize_prompt(model.tokenizer, layout, document),
        path,
        document_sha256=document_sha256(document),
        recipe=recipe,
        layout=layout,
        document_name=document_name,
        on_progress=on_progress,
    )


@torch.no_grad()
def build_from_tokens(
    model: LoadedModel,
    tokens: PromptTokens,
    path: str | Path,
    *,
    document_sha256: str,
    recipe: Recipe,
    layout: PromptLayout,
    document_name: str = "",
    keep: Callable[[Path], bool] | None = None,
    on_progress: Progress | None = None,
) -> BuildResult:
    """The part of `build_archive` after the tokenizer; `keep` as in `write_archive`."""
    publish.check_place(Path(path).resolve())
    prompt_ids = (*tokens.prefix_ids, *tokens.document_ids)
    check_document_length(model.model, len(prompt_ids))

    def report(stage: str) -> Callable[[int, int], None] | None:
        return None if on_progress is None else lambda done, total: on_progress(stage, done, total)

    started = time.perf_counter()
    cache = prefill_cache(model.model, prompt_ids, on_progress=report("prefill"))
    prefill_s = time.perf_counter() - started
    build = write_archive(
        model,
        tokens,
        cache,
        path,
        document_sha256=document_sha256,
        recipe=recipe,
        layout=layout,
        document_name=document_name,
        keep=keep,
        on_progress=report("cluster"),
    )
    return dataclasses.replace(build, prefill_s=prefill_s)


@torch.no_grad()
def write_archive(
    model: LoadedModel,
    tokens: PromptTokens,
    cache: DynamicCache,
    path: str | Path,
    *,
    document_sha256: str,
    recipe: Recipe,
    layout: PromptLayout,
    document_name: str = "",
    keep: Callable[[Path], bool] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> BuildResult:
    """The part of `build_archive` after the prefill: cluster, encode and write what `cache` holds (it is not changed).

    Parameters
    ----------
    keep
        Asked of an archive that stands at `path` when this one is done. Where it says true that one stays, this one is
        dropped, and the result still describes this one.
    on_progress
        Called with (layers done, layers in all).
    """
    started = time.perf_counter()
    captured = captured_layers(cache)
    recipe.check_layers(len(captured))
    moments = query_moments(model.model, cache, probe_ids(model.tokenizer, layout, tokens.document_ids))
    span, shape = document_span(tokens, recipe), model_shape(model.model.config)
    with publish.staging(Path(path), keep) as folder:
        (folder / "layers").mkdir()
        entries, asked = [], 0
        for index, layer in enumerate(captured):
            window = shape.layers[index].window
            entry, asked_here = write_layer(
                folder, index, layer, window=window, span=span, recipe=recipe, query_moment=moments.get(index)
            )
            entries.append(entry)
            asked = max(asked, asked_here)
            if on_progress is not None:
                on_progress(index + 1, len(captured))
        write_tokens(folder, tokens)
        manifest = Manifest(
            created_by=f"ragkv {__version__}",
            model_name=model.name,
            fingerprint=model.fingerprint(captured[0].keys.dtype),
            layout=layout,
            prefix_seam_differs=tokens.prefix_seam_differs,
            question_seam_differs=tokens.question_seam_differs,
            document_name=document_name.encode("utf-8", "replace").decode(),
            document_sha256=document_sha256,
            recipe=recipe,
            clusters_asked=asked,
            prefix_tokens=len(tokens.prefix_ids),
            document_tokens=len(tokens.document_ids),
            archived_tokens=span.tail - span.head,
            head_tokens=span.head,
            layers=tuple(entries),
            files={},
        )
        manifest = publish.seal(folder, manifest)
    return BuildResult(path=Path(path), manifest=manifest, prefill_s=0.0, build_s=time.perf_counter() - started)


def is_current(model: LoadedModel, document: str, path: str | Path, *, recipe: Recipe, layout: PromptLayout) -> bool:
    """Whether `path` holds an archive of this text, model, recipe and layout, so that building again is no use.

    Checksums are not read here; opening the archive or ``ragkv verify`` does that.
    """
    try:
        manifest = read_manifest(path)
        require_match(manifest.fingerprint, model)
    except (ArchiveNotFoundError, ArchiveFormatError, ArchiveCorruptError, ModelMismatchError):
        return False
    same_dtype = manifest.fingerprint.dtype == str(model.model.dtype).removeprefix("torch.")
    return same_dtype and (manifest.document_sha256, manifest.recipe, manifest.layout) == (
        document_sha256(document),
        recipe,
        layout,
    )
