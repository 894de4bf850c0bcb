"""Build an archive: text -> tokens -> prefill -> keys/values -> clusters -> codes -> files, manifest last."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
from transformers import DynamicCache

from ragkv.archive import publish
from ragkv.archive.files import local_path
from ragkv.archive.manifest import MANIFEST_FILE, LayerEntry, Manifest, read_manifest
from ragkv.archive.prototypes import write_prototypes
from ragkv.archive.rows import ROWS_FILE, RowsWriter
from ragkv.archive.tokens import write_tokens
from ragkv.archive.transforms import TRANSFORMS_FILE, LayerTransforms, Transforms, transforms_bytes
from ragkv.archive.verify import is_sound
from ragkv.build.layer import (
    ClusteredLayer,
    CodedLayer,
    Span,
    cluster_layer,
    document_span,
    encode_layer,
    exact_payload,
    fit_layer,
)
from ragkv.build.probes import probe_ids, query_moments
from ragkv.errors import (
    ArchiveCorruptError,
    ArchiveFormatError,
    ArchiveNotFoundError,
    ConfigError,
    ModelMismatchError,
)
from ragkv.model.fingerprint import require_match
from ragkv.model.load import LoadedModel, check_loaded
from ragkv.model.prefill import CapturedLayer, captured_layers, check_document_length, prefill_cache
from ragkv.model.prompt import PromptLayout, PromptTokens, document_sha256, tokenize_prompt
from ragkv.model.shape import model_shape
from ragkv.recipe import Recipe
from ragkv.version import __version__

log = logging.getLogger(__name__)

MISFIT = 2.0
"""Distortion, as a multiple of that under transforms of its own, from which a document is said to fit badly."""

Progress = Callable[[str, int, int], None]
"""Called with a stage name, steps done and steps in all."""


@dataclass(frozen=True, kw_only=True)
class BuildRequest:
    """Everything that decides an archive, but for the transforms of a catalog that it is built for."""

    model: LoadedModel
    tokens: PromptTokens
    layout: PromptLayout
    recipe: Recipe
    document_sha256: str
    document_name: str = ""

    @classmethod
    def of(
        cls,
        model: LoadedModel,
        document: str,
        *,
        recipe: Recipe | None = None,
        layout: PromptLayout | None = None,
        document_name: str = "",
    ) -> BuildRequest:
        """The request to archive a text; recipe and layout default to `Recipe()` and the model's own."""
        check_loaded(model)
        for what, given, kind in (
            ("recipe", recipe, Recipe),
            ("layout", layout, PromptLayout),
            ("document_name", document_name, str),
        ):
            if given is not None and not isinstance(given, kind):
                raise ConfigError(f"{what} is a {type(given).__name__}; give a {kind.__name__}")
        layout = layout or model.layout
        return cls(
            model=model,
            tokens=tokenize_prompt(model.tokenizer, layout, document),
            layout=layout,
            recipe=recipe or Recipe(),
            document_sha256=document_sha256(document),
            document_name=document_name or "",
        )

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """Token ids of prefix and document."""
        return (*self.tokens.prefix_ids, *self.tokens.document_ids)

    def prefill(self, on_progress: Callable[[int, int], None] | None = None) -> DynamicCache:
        """The model's own cache of prefix and document."""
        check_document_length(self.model.model, len(self.prompt_ids))
        return prefill_cache(self.model.model, self.prompt_ids, on_progress=on_progress)


@dataclass(frozen=True)
class BuildResult:
    """What a build did. Times in seconds: ``prefill_s``, and ``build_s`` for clustering, encoding and writing.

    ``misfit`` is the distortion of the codes as a multiple of what transforms of its own would leave, mean of
    the layers; about 1 where it has its own.
    """

    path: Path
    manifest: Manifest
    prefill_s: float
    build_s: float
    misfit: float = 1.0


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
        From `load_model` or `LoadedModel.of`; weights and code stay untouched.
    document
        The text. Literal special tokens in it are archived as text.
    recipe, layout
        Default to `Recipe()` and the model's own `layout`.
    on_progress
        Called with ("prefill" | "cluster", done, total).

    Raises
    ------
    ConfigError
        If the document is empty or longer than the model's context, or `path` is a URL.
    UnsupportedModelError
        If this model's cache cannot be archived exactly.
    NonFiniteError
        If the model computed a NaN or infinite key or value.
    """
    path = local_path(path)
    request = BuildRequest.of(model, document, recipe=recipe, layout=layout, document_name=document_name)
    publish.check_place(path.resolve())
    started = time.perf_counter()
    cache = request.prefill(stage(on_progress, "prefill"))
    prefill_s = time.perf_counter() - started
    return write_archive(request, cache, path, prefill_s=prefill_s, on_progress=stage(on_progress, "cluster"))


@torch.no_grad()
def write_archive(
    request: BuildRequest,
    cache: DynamicCache,
    path: str | Path,
    *,
    transforms: Transforms | None = None,
    keep: Callable[[Path], bool] | None = None,
    rubble: bool = False,
    prefill_s: float = 0.0,
    on_progress: Callable[[int, int], None] | None = None,
) -> BuildResult:
    """The part of `build_archive` after the prefill: cluster, encode and write what `cache` holds (it is not changed).

    Parameters
    ----------
    transforms
        Those of the catalog that the archive is for; without, it is given its own.
    keep
        Asked of an archive that stands at `path` when this one is done. Where it says true that one stays, this one is
        dropped, and the result still describes this one.
    rubble
        Replace whatever stands at `path`.
    on_progress
        Called with (layers done, layers in all).
    """
    started = time.perf_counter()
    captured = captured_layers(cache)
    request.recipe.check_layers(len(captured))
    span, shape = document_span(request.tokens, request.recipe), model_shape(request.model.model.config)
    windows = [layer.window for layer in shape.layers]
    clusters = span.tail > span.head and None in windows
    moments = _moments(request, cache, transforms) if clusters else {}
    with publish.staging(Path(path), keep, rubble=rubble) as folder:
        coded, own, entries, asked = {}, {}, [], 0
        with RowsWriter(folder / ROWS_FILE) as rows:
            for index, layer in enumerate(captured):
                positions = span.exact(first=layer.first_position, window=windows[index])
                rows.add_exact(index, positions, exact_payload(layer, positions, request.recipe.exact_codecs(index)))
            for index, layer in enumerate(captured):
                if windows[index] is None and clusters:
                    part = cluster_layer(layer, span, request.recipe, moment=moments.get(index))
                    own[index] = _own_or_shared(part, request.recipe, index, transforms)
                    coded[index] = encode_layer(part, own[index], judged=transforms is not None)
                    rows.add_clusters(index, coded[index].sizes, coded[index].positions, coded[index].payload)
                    coded[index] = _without_rows(coded[index])
                    asked = max(asked, part.clusters.asked)
                entries.append(_entry(index, layer, windows[index], span, coded.get(index)))
                if on_progress is not None:
                    on_progress(index + 1, len(captured))
        write_tokens(folder, request.tokens)
        named = transforms.sha256 if transforms is not None and clusters else None
        if clusters:
            write_prototypes(folder, {index: each.prototypes for index, each in coded.items()})
            if named is None:
                raw = transforms_bytes(Transforms("", own).without_moments().layers)
                (folder / TRANSFORMS_FILE).write_bytes(raw)
                named = hashlib.sha256(raw).hexdigest()
        manifest = publish.seal(folder, _manifest(request, captured, span, tuple(entries), asked, named))
    misfit = fmean(each.misfit for each in coded.values()) if coded else 1.0
    if transforms is not None and misfit > MISFIT:
        log.warning(
            "%s fits the transforms of its catalog badly: its codes lose %.1f times what transforms of its own would; "
            "put documents of its kind in a catalog of their own",
            request.document_name or path,
            misfit,
        )
    return BuildResult(Path(path), manifest, prefill_s, time.perf_counter() - started, misfit)


@torch.no_grad()
def fit_transforms(requests: Sequence[BuildRequest], caches: Sequence[DynamicCache]) -> dict[int, LayerTransforms]:
    """Transforms that suit some documents of one model and recipe, by layer; empty where no token is archived.

    Raises
    ------
    ConfigError
        If there are no documents.
    """
    if not requests:
        raise ConfigError("there are no documents to fit transforms to; give at least one")
    recipe, windows = requests[0].recipe, [each.window for each in model_shape(requests[0].model.model.config).layers]
    parts: dict[int, list[ClusteredLayer]] = {index: [] for index, window in enumerate(windows) if window is None}
    for request, cache in zip(requests, caches, strict=True):
        span, moments = document_span(request.tokens, recipe), _moments(request, cache, None)
        captured = captured_layers(cache)
        if span.tail > span.head:
            for index, own in parts.items():
                own.append(cluster_layer(captured[index], span, recipe, moment=moments.get(index)))
    return {index: fit_layer(own, recipe, index) for index, own in parts.items() if own}


def is_current(model: LoadedModel, document: str, path: str | Path, *, recipe: Recipe, layout: PromptLayout) -> bool:
    """Whether `path` holds a sound archive of this text, model, recipe and layout, so that building again is no use.

    Every checksum is looked at. What is recalled by default does not count.

    Raises
    ------
    ArchiveReadError
        If the system did not let it be read just now.
    """
    try:
        manifest = read_manifest(path)
        require_match(manifest.fingerprint, model)
    except (ArchiveNotFoundError, ArchiveFormatError, ArchiveCorruptError, ModelMismatchError):
        return False
    same_dtype = manifest.fingerprint.dtype == str(model.model.dtype).removeprefix("torch.")
    asked = (document_sha256(document), recipe.identity(), layout)
    same = (manifest.document_sha256, manifest.recipe.identity(), manifest.layout) == asked
    return same_dtype and same and is_sound(path, manifest)


def keep_policy(path: str | Path, recipe: Recipe) -> bool:
    """Let the archive at `path` recall by default what `recipe` says; whether that is a change.

    Only the manifest is written, whole or not at all: keys, values and clusters stay as they are.

    Raises
    ------
    ConfigError
        If the manifest cannot be written.
    """
    place = Path(path).resolve()
    manifest = read_manifest(place)
    if manifest.recipe.recall == recipe.recall:
        return False
    changed = dataclasses.replace(manifest, recipe=dataclasses.replace(manifest.recipe, recall=recipe.recall))
    try:
        with publish.publishing_in(place.parent):
            publish.write_whole(place / MANIFEST_FILE, changed.to_json().encode())
    except OSError as error:
        raise ConfigError(f"cannot write the manifest of {str(place)!r}: {error.strerror}") from error
    return True


def stage(on_progress: Progress | None, name: str) -> Callable[[int, int], None] | None:
    """A callback of (done, total) that reports the stage `name`."""
    return None if on_progress is None else lambda done, total: on_progress(name, done, total)


def _moments(request: BuildRequest, cache: DynamicCache, transforms: Transforms | None) -> Mapping[int, torch.Tensor]:
    """Second moments of queries by layer: those of the transforms, or else of probes of the document.

    Rounded as they are stored, so that the first document of a catalog is clustered as it would be later.
    """
    if transforms is not None:
        known = ((index, layer.query_moment) for index, layer in transforms.layers.items())
        return {index: moment for index, moment in known if moment is not None}
    probes = probe_ids(request.model.tokenizer, request.layout, request.tokens.document_ids)
    found = query_moments(request.model.model, cache, probes)
    return {index: moment.to(torch.bfloat16).float() for index, moment in found.items()}


def _own_or_shared(part: ClusteredLayer, recipe: Recipe, index: int, transforms: Transforms | None) -> LayerTransforms:
    if transforms is None:
        return fit_layer([part], recipe, index)
    if index not in transforms.layers:
        raise ConfigError(f"the transforms of the catalog have none for layer {index}; make the catalog again")
    return transforms.layers[index].to(part.keys.device)


def _without_rows(coded: CodedLayer) -> CodedLayer:
    """What is still needed of a layer once its rows are written."""
    nothing = coded.payload.new_empty(0)
    return CodedLayer(coded.prototypes, nothing, nothing, coded.sizes, coded.misfit)


def _entry(index: int, layer: CapturedLayer, window: int | None, span: Span, coded: CodedLayer | None) -> LayerEntry:
    exact = span.exact(first=layer.first_position, window=window)
    return LayerEntry(
        index=index,
        window=window,
        n_kv_heads=layer.keys.shape[0],
        key_dim=layer.keys.shape[2],
        value_dim=layer.values.shape[2],
        exact_tokens=len(exact),
        clusters=() if coded is None else tuple(len(sizes) for sizes in coded.sizes),
    )


def _manifest(
    request: BuildRequest,
    captured: Sequence[CapturedLayer],
    span: Span,
    entries: tuple[LayerEntry, ...],
    asked: int,
    transforms: str | None,
) -> Manifest:
    tokens = request.tokens
    return Manifest(
        created_by=f"ragkv {__version__}",
        model_name=request.model.name,
        fingerprint=request.model.fingerprint(captured[0].keys.dtype),
        layout=request.layout,
        prefix_seam_differs=tokens.prefix_seam_differs,
        question_seam_differs=tokens.question_seam_differs,
        document_name=request.document_name.encode("utf-8", "replace").decode(),
        document_sha256=request.document_sha256,
        recipe=request.recipe,
        clusters_asked=asked,
        prefix_tokens=len(tokens.prefix_ids),
        document_tokens=len(tokens.document_ids),
        archived_tokens=span.tail - span.head,
        head_tokens=span.head,
        layers=entries,
        transforms=transforms,
        files={},
    )
