"""The manifest of an archive: what was built, from what, and the checksum of every file.

The format is written up in ``indexes/FORMAT.md``. The manifest is written last; a folder without one is not an
archive. It carries a checksum of itself.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ragkv.archive.files import FileEntry, is_there, local_path, read_bounded, system_errors
from ragkv.archive.sealed import LONGEST, flag, sealed_text, sha256, text, unsealed, whole
from ragkv.errors import ArchiveFormatError, ArchiveNotFoundError
from ragkv.model.fingerprint import Fingerprint
from ragkv.model.prompt import PromptLayout
from ragkv.model.shape import DTYPE_NAMES, LayerShape, dtype_bytes
from ragkv.recipe import Recipe

FORMAT_NAME = "ragkv-archive"
FORMAT_VERSION = 3
MANIFEST_FILE = "manifest.json"
ALWAYS = ("tokens.parquet", "rows.parquet")
CLUSTERED = ("prototypes.parquet", "centroids.faiss")
"""Files that are there if some layer has clusters."""

OWN_TRANSFORMS = "transforms.parquet"
_COUNTS = ("prefix_tokens", "document_tokens", "archived_tokens", "head_tokens", "clusters_asked")
_MOST_LAYERS = 1 << 12
_MOST_TOKENS = 1 << 31


@dataclass(frozen=True)
class LayerEntry:
    """One decoder layer: its shapes, its exact tokens, and for a global layer the clusters of each KV head."""

    index: int
    window: int | None
    n_kv_heads: int
    key_dim: int
    value_dim: int
    exact_tokens: int
    clusters: tuple[int, ...]


@dataclass(frozen=True)
class Manifest:
    """Everything about an archive except its tensors; round-trips to JSON.

    ``transforms`` is the SHA-256 of the file of its transforms, its own or its catalog's; None where no layer has
    clusters.
    """

    created_by: str
    model_name: str
    fingerprint: Fingerprint
    layout: PromptLayout
    prefix_seam_differs: bool
    question_seam_differs: bool
    document_name: str
    document_sha256: str
    recipe: Recipe
    clusters_asked: int
    prefix_tokens: int
    document_tokens: int
    archived_tokens: int
    head_tokens: int
    layers: tuple[LayerEntry, ...]
    transforms: str | None
    files: dict[str, FileEntry]

    @property
    def n_tokens(self) -> int:
        """Prefix and document together: the position of the first question token."""
        return self.prefix_tokens + self.document_tokens

    @property
    def has_clusters(self) -> bool:
        return any(layer.clusters for layer in self.layers)

    @property
    def dense_bytes(self) -> int:
        """Bytes of the model's own cache of the same tokens, in the archive's dtype."""
        itemsize = dtype_bytes(self.fingerprint.dtype)
        total = 0
        for layer in self.layers:
            shape = LayerShape(layer.index, layer.window, layer.n_kv_heads, layer.key_dim)
            n_cached = shape.cached_tokens(self.n_tokens)
            total += n_cached * layer.n_kv_heads * (layer.key_dim + layer.value_dim) * itemsize
        return total

    def to_json(self) -> str:
        return sealed_text(self._body())

    def _body(self) -> dict[str, Any]:
        return {
            "format": FORMAT_NAME,
            "version": FORMAT_VERSION,
            "created_by": self.created_by,
            "model": {"name": self.model_name, **self.fingerprint.to_dict()},
            "layout": self.layout.to_dict(),
            "seams": {"prefix": self.prefix_seam_differs, "question": self.question_seam_differs},
            "document": {"name": self.document_name, "sha256": self.document_sha256},
            "recipe": self.recipe.identity(),
            "policy": self.recipe.recall.to_dict(),
            "counts": {name: getattr(self, name) for name in _COUNTS},
            "layers": [asdict(layer) for layer in self.layers],
            "transforms": self.transforms,
            "files": {name: asdict(entry) for name, entry in sorted(self.files.items())},
        }

    @classmethod
    def from_json(cls, raw: str) -> Manifest:
        """Parse and check a manifest.

        Raises
        ------
        ArchiveFormatError
            If it is another format or version, or a field is missing or of the wrong kind.
        ArchiveCorruptError
            If its own checksum does not hold.
        """
        body = unsealed(raw, file=MANIFEST_FILE, kind=FORMAT_NAME, version=FORMAT_VERSION)
        try:
            manifest = cls._from_body(body)
            if json.loads(json.dumps(manifest._body())) != body:
                raise ValueError(f"there are fields that format version {FORMAT_VERSION} does not have")
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise ArchiveFormatError(f"{MANIFEST_FILE}: field missing or of the wrong kind ({error})") from error
        return manifest

    @classmethod
    def _from_body(cls, body: dict[str, Any]) -> Manifest:
        model = dict(body["model"])
        name = text("model.name", model.pop("name"))
        if len(body["layers"]) > _MOST_LAYERS:
            raise ValueError(f"there are {len(body['layers'])} layers; at most {_MOST_LAYERS} are read")
        layers = tuple(_layer(place, entry) for place, entry in enumerate(body["layers"]))
        manifest = cls(
            created_by=text("created_by", body["created_by"]),
            model_name=name,
            fingerprint=checked_fingerprint(model),
            layout=checked_layout(body["layout"]),
            prefix_seam_differs=flag("seams.prefix", body["seams"]["prefix"]),
            question_seam_differs=flag("seams.question", body["seams"]["question"]),
            document_name=text("document.name", body["document"]["name"]),
            document_sha256=sha256("document.sha256", body["document"]["sha256"]),
            recipe=Recipe.from_dict({**body["recipe"], "recall": body["policy"]}),
            layers=layers,
            transforms=None if body["transforms"] is None else sha256("transforms", body["transforms"]),
            files={text("a file name", path): _file(path, entry) for path, entry in body["files"].items()},
            **{name: whole(name, body["counts"][name]) for name in _COUNTS},
        )
        if manifest.n_tokens >= _MOST_TOKENS:
            raise ValueError(f"{manifest.n_tokens} tokens; at most 2^31 - 1 are read")
        _check_files(manifest)
        return manifest


def read_manifest(folder: str | Path) -> Manifest:
    """Read the manifest of the archive in `folder`.

    Raises
    ------
    ArchiveNotFoundError
        If the folder has no manifest; archives inside it are named.
    ArchiveReadError
        If the system did not let it be read just now.
    """
    folder = local_path(folder)
    try:
        with system_errors(f"{str(folder)!r}: {MANIFEST_FILE}"):
            return Manifest.from_json(read_bounded(folder / MANIFEST_FILE, LONGEST).decode("utf-8"))
    except ArchiveNotFoundError as error:
        raise ArchiveNotFoundError(f"no archive in {str(folder)!r}: {_hint(folder)}") from error


def list_archives(folder: str | Path) -> list[str]:
    """Names of the archives directly inside `folder`."""
    names = (found.parent.name for found in Path(folder).glob(f"*/{MANIFEST_FILE}"))
    return sorted(name for name in names if not name.startswith("."))  # a dot marks an archive that is being built


def checked_fingerprint(values: dict[str, Any]) -> Fingerprint:
    """The fingerprint with these fields, each of its kind."""
    for name, value in values.items():
        if name != "rope_parameters":
            text(f"model.{name}", value)
    found = Fingerprint(**values)
    if not isinstance(found.rope_parameters, dict):
        raise TypeError(f"model.rope_parameters is {found.rope_parameters!r}, not an object")
    if found.dtype not in DTYPE_NAMES:
        raise ValueError(f"model.dtype is {found.dtype!r}; allowed are {', '.join(DTYPE_NAMES)}")
    return found


def checked_layout(values: dict[str, Any]) -> PromptLayout:
    """The prompt layout with these fields, each of its kind."""
    for name in ("prefix", "question"):
        text(f"layout.{name}", values[name])
    for place, stop in enumerate(values["stop"]):
        text(f"layout.stop[{place}]", stop)
    return PromptLayout.from_dict(values)


def _layer(place: int, entry: dict[str, Any]) -> LayerEntry:
    where = f"layers[{place}]"
    window = entry["window"]
    layer = LayerEntry(
        index=whole(f"{where}.index", entry["index"]),
        window=None if window is None else whole(f"{where}.window", window),
        clusters=tuple(whole(f"{where}.clusters", count) for count in entry["clusters"]),
        **{
            name: whole(f"{where}.{name}", entry[name])
            for name in ("n_kv_heads", "key_dim", "value_dim", "exact_tokens")
        },
    )
    if layer.index != place:
        raise ValueError(f"{where}.index is {layer.index}")
    if len(layer.clusters) not in (0, layer.n_kv_heads) or 0 in layer.clusters:
        raise ValueError(f"{where}.clusters is {list(layer.clusters)} for {layer.n_kv_heads} KV heads")
    if max(layer.n_kv_heads, layer.key_dim, layer.value_dim) > 1 << 16 or layer.exact_tokens >= _MOST_TOKENS:
        raise ValueError(f"{where}: {layer.n_kv_heads} KV heads of {layer.key_dim} and {layer.value_dim} numbers")
    return layer


def _file(path: str, entry: dict[str, Any]) -> FileEntry:
    if set(entry) != {"bytes", "sha256"}:
        raise ValueError(f"files[{path}] has the fields {sorted(entry)}")
    return FileEntry(whole(f"files[{path}].bytes", entry["bytes"]), sha256(f"files[{path}].sha256", entry["sha256"]))


def _check_files(manifest: Manifest) -> None:
    wanted = {*ALWAYS, *(CLUSTERED if manifest.has_clusters else ())}
    own = manifest.files.get(OWN_TRANSFORMS)
    if manifest.has_clusters != (manifest.transforms is not None):
        raise ValueError(f"transforms is {manifest.transforms!r} where clusters are {manifest.has_clusters}")
    if own is not None and own.sha256 != manifest.transforms:
        raise ValueError(f"transforms is {manifest.transforms!r} and its file is {own.sha256!r}")
    odd = sorted((set(manifest.files) - {OWN_TRANSFORMS}) ^ wanted)
    if odd:
        raise ValueError(f"the file list and the layers disagree on {odd[0]!r}")


def _hint(folder: Path) -> str:
    try:
        if not is_there(folder) or not folder.is_dir():
            return "there is no such folder"
        inside = list_archives(folder)
    except OSError as error:
        return f"the folder cannot be read ({error.strerror})"
    if inside:
        return f"it holds the archives {', '.join(inside[:5])}{', ...' if len(inside) > 5 else ''}; name one of them"
    if is_there(folder / "catalog.json"):
        return "it is a catalog, whose archives are in its folder 'documents'; name one of them"
    return f"it has no {MANIFEST_FILE}; build one with 'ragkv build'"
