"""Build an archive: text -> tokens -> prefill -> keys/values -> clusters -> files, manifest last."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import DynamicCache

from ragkv import publish
from ragkv.architecture import model_shape
from ragkv.errors import ArchiveCorruptError, ArchiveFormatError, ArchiveNotFoundError, ModelMismatchError
from ragkv.faiss_io import write_centroids
from ragkv.fingerprint import fingerprint, require_match
from ragkv.kmeans import cluster_keys, group_sizes, group_sums
from ragkv.layout import PromptLayout, PromptTokens, tokenize_prompt
from ragkv.manifest import LayerEntry, Manifest, read_manifest
from ragkv.models import LoadedModel
from ragkv.prefill import CapturedLayer, captured_layers, check_document_length, prefill_cache
from ragkv.probes import probe_ids, query_moments
from ragkv.recipe import Recipe
from ragkv.rows import EXACT, Rows, write_rows
from ragkv.tables import write_prototypes, write_tokens
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


@dataclass(frozen=True)
class Span:
    """Positions of a prompt: exact ones are [0, head) and [tail, end), archived ones [head, tail)."""

    head: int
    tail: int
    end: int


@torch.no_grad()
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
    publish.check_place(Path(path).resolve())
    recipe = recipe or Recipe()
    layout = layout or model.layout
    tokens = tokenize_prompt(model.tokenizer, layout, document)
    prompt_ids = (*tokens.prefix_ids, *tokens.document_ids)
    check_document_length(model.model, len(prompt_ids))

    def report(stage: str) -> Callable[[int, int], None] | None:
        return None if on_progress is None else lambda done, total: on_progress(stage, done, total)

    started = time.perf_counter()
    cache = prefill_cache(model.model, prompt_ids, on_progress=report("prefill"))
    prefill_s = time.perf_counter() - started
    build = write_archive(
        model,
        document,
        tokens,
        cache,
        path,
        recipe=recipe,
        layout=layout,
        document_name=document_name,
        on_progress=report("cluster"),
    )
    return dataclasses.replace(build, prefill_s=prefill_s)


@torch.no_grad()
def write_archive(
    model: LoadedModel,
    document: str,
    tokens: PromptTokens,
    cache: DynamicCache,
    path: str | Path,
    *,
    recipe: Recipe,
    layout: PromptLayout,
    document_name: str = "",
    on_progress: Callable[[int, int], None] | None = None,
) -> BuildResult:
    """The part of `build_archive` after the prefill: cluster, encode and write what `cache` holds (it is not changed).

    `on_progress` is called with (layers done, layers in all).
    """
    started = time.perf_counter()
    captured = captured_layers(cache)
    moments = query_moments(model.model, cache, probe_ids(model.tokenizer, layout, tokens.document_ids))
    span, shape = document_span(tokens, recipe), model_shape(model.model.config)
    with publish.staging(Path(path)) as folder:
        (folder / "layers").mkdir()
        entries, asked = [], 0
        for index, layer in enumerate(captured):
            window = shape.layers[index].window
            entry, asked_here = _write_layer(
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
            fingerprint=fingerprint(model.model, model.tokenizer, captured[0].keys.dtype),
            layout=layout,
            prefix_seam_differs=tokens.prefix_seam_differs,
            question_seam_differs=tokens.question_seam_differs,
            document_name=document_name.encode("utf-8", "replace").decode(),
            document_sha256=document_sha256(document),
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
        require_match(manifest.fingerprint, model.model, model.tokenizer)
    except (ArchiveNotFoundError, ArchiveFormatError, ArchiveCorruptError, ModelMismatchError):
        return False
    same_dtype = manifest.fingerprint.dtype == str(model.model.dtype).removeprefix("torch.")
    return same_dtype and (manifest.document_sha256, manifest.recipe, manifest.layout) == (
        document_sha256(document),
        recipe,
        layout,
    )


def document_sha256(document: str) -> str:
    """SHA-256 of the document's UTF-8 bytes."""
    return hashlib.sha256(document.encode("utf-8", "surrogatepass")).hexdigest()


def document_span(tokens: PromptTokens, recipe: Recipe) -> Span:
    """Which positions are archived: all but the prefix (or the first sink tokens) and the window at the end."""
    end = len(tokens.prefix_ids) + len(tokens.document_ids)
    head = min(end, max(len(tokens.prefix_ids), recipe.sink_tokens))
    return Span(head=head, tail=max(head, end - recipe.window_tokens), end=end)


def _write_layer(
    folder: Path,
    index: int,
    layer: CapturedLayer,
    *,
    window: int | None,
    span: Span,
    recipe: Recipe,
    query_moment: torch.Tensor | None,
) -> tuple[LayerEntry, int]:
    """Write the files of one layer; returns its manifest entry and the clusters asked for."""
    n_kv_heads, n_tokens, key_dim = layer.keys.shape
    entry = LayerEntry(
        index=index,
        window=window,
        n_kv_heads=n_kv_heads,
        key_dim=key_dim,
        value_dim=layer.values.shape[-1],
        exact_tokens=n_tokens if window is not None else span.end - (span.tail - span.head),
        clusters=(),
    )
    rows_path = folder / entry.rows_file
    if window is not None or span.tail == span.head:
        write_rows(rows_path, exact_rows(layer, slice(0, n_tokens)), None, [])
        return entry, 0
    keys, values = layer.keys[:, span.head : span.tail], layer.values[:, span.head : span.tail]
    clusters = cluster_keys(keys, recipe, values=values, query_moment=query_moment)
    n_clusters = int(clusters.n_clusters.max())
    sizes = group_sizes(clusters.labels, n_clusters)  # (n_kv_heads, n_clusters)
    counts = sizes.unsqueeze(-1).clamp_min(1)
    centroids = (group_sums(keys, clusters.labels, n_clusters) / counts).to(keys.dtype)
    means = (group_sums(values, clusters.labels, n_clusters) / counts).to(values.dtype)
    variance = logit_variance(keys, clusters.labels, centroids, query_moment)
    order = clusters.labels.argsort(dim=1, stable=True)  # cluster order, positions ascending inside a cluster
    heads = torch.arange(n_kv_heads, device=order.device).unsqueeze(1).expand_as(order)
    per_head = clusters.n_clusters.tolist()
    archived = Rows(
        kv_head=heads.reshape(-1),
        cluster=clusters.labels.gather(1, order).reshape(-1),
        position=(order + span.head).reshape(-1),
        keys=keys[heads, order].reshape(-1, key_dim),
        values=values[heads, order].reshape(-1, values.shape[-1]),
    )
    exact = exact_rows(layer, slice(0, span.head), slice(span.tail, span.end))
    write_rows(rows_path, exact, archived, [row[:n] for row, n in zip(sizes.tolist(), per_head, strict=True)])
    used = torch.arange(n_clusters, device=sizes.device) < clusters.n_clusters.unsqueeze(1)
    spread = value_spread(values, clusters.labels, n_clusters)
    write_prototypes(folder / entry.prototypes_file, used, sizes, variance, spread, means)
    write_centroids(folder / entry.centroids_file, centroids[used])
    entry = LayerEntry(**{**entry.__dict__, "clusters": tuple(per_head)})
    return entry, clusters.asked


def logit_variance(
    keys: torch.Tensor, labels: torch.Tensor, centroids: torch.Tensor, query_moment: torch.Tensor | None
) -> torch.Tensor:
    """Mean squared change of a typical query's logit when a key is replaced by its centroid, per cluster.

    Shapes as in `_write_layer`; (n_kv_heads, n_clusters) float32, zero without a query moment.
    """
    n_kv_heads, n_clusters, _ = centroids.shape
    if query_moment is None:
        return torch.zeros(n_kv_heads, n_clusters, device=keys.device)
    heads = torch.arange(n_kv_heads, device=keys.device).unsqueeze(1)
    off = keys.float() - centroids[heads, labels].float()
    squared = ((off @ query_moment) * off).sum(-1, keepdim=True).clamp_min(0)
    return (group_sums(squared, labels, n_clusters) / group_sizes(labels, n_clusters).unsqueeze(-1).clamp_min(1))[
        ..., 0
    ]


def value_spread(values: torch.Tensor, labels: torch.Tensor, n_clusters: int) -> torch.Tensor:
    """Mean squared distance of a cluster's values from the mean value of its head: (n_kv_heads, n_clusters) float32."""
    off = values.float() - values.float().mean(dim=1, keepdim=True)
    sums = group_sums(off.square().sum(-1, keepdim=True), labels, n_clusters)
    return (sums / group_sizes(labels, n_clusters).unsqueeze(-1).clamp_min(1))[..., 0]


def exact_rows(layer: CapturedLayer, *parts: slice) -> Rows:
    """Rows of the tokens that are attended exactly, KV head by KV head."""
    keys = torch.cat([layer.keys[:, part] for part in parts], dim=1)
    values = torch.cat([layer.values[:, part] for part in parts], dim=1)
    positions = torch.arange(layer.first_position, layer.first_position + layer.keys.shape[1])
    positions = torch.cat([positions[part] for part in parts])
    n_kv_heads, n_tokens = keys.shape[:2]
    return Rows(
        kv_head=torch.arange(n_kv_heads).repeat_interleave(n_tokens),
        cluster=torch.full((n_kv_heads * n_tokens,), EXACT),
        position=positions.repeat(n_kv_heads),
        keys=keys.reshape(-1, keys.shape[-1]),
        values=values.reshape(-1, values.shape[-1]),
    )
