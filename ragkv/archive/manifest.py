"""The manifest of an archive: what was built, from what, and the checksum of every file.

The format is written up in ``indexes/FORMAT.md``. The manifest is written last; a folder without one is not an
archive. It carries a checksum of itself.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ragkv.errors import ArchiveCorruptError, ArchiveFormatError, ArchiveNotFoundError
from ragkv.model.fingerprint import Fingerprint, json_sha256
from ragkv.model.prompt import PromptLayout
from ragkv.model.shape import DTYPE_NAMES, dtype_bytes
from ragkv.recipe import Recipe

FORMAT_NAME = "ragkv-archive"
FORMAT_VERSION = 2
MANIFEST_FILE = "manifest.json"
TOKENS_FILE = "tokens.parquet"


@dataclass(frozen=True)
class LayerEntry:
    """One decoder layer: its shapes and, for a global layer, the clusters of each KV head and how its rows are coded.

    ``key_widths`` and ``value_widths`` count the coefficients of 8, 4 and 2 bits; empty where the tensor is lossless.
    """

    index: int
    window: int | None
    n_kv_heads: int
    key_dim: int
    value_dim: int
    exact_tokens: int
    clusters: tuple[int, ...]
    key_widths: tuple[int, ...] = ()
    value_widths: tuple[int, ...] = ()

    @property
    def exact_file(self) -> str:
        return f"layers/{self.index:03d}.exact.parquet"

    @property
    def rows_file(self) -> str:
        return f"layers/{self.index:03d}.rows.parquet"

    @property
    def bases_file(self) -> str:
        return f"layers/{self.index:03d}.bases.parquet"

    @property
    def prototypes_file(self) -> str:
        return f"layers/{self.index:03d}.prototypes.parquet"

    @property
    def centroids_file(self) -> str:
        return f"layers/{self.index:03d}.centroids.faiss"

    def files(self) -> tuple[str, ...]:
        if not self.clusters:
            return (self.exact_file,)
        return (self.exact_file, self.rows_file, self.prototypes_file, self.centroids_file, self.bases_file)


@dataclass(frozen=True)
class FileEntry:
    sha256: str
    bytes: int


@dataclass(frozen=True)
class Manifest:
    """Everything about an archive except its tensors; round-trips to JSON."""

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
    files: dict[str, FileEntry]

    @property
    def n_tokens(self) -> int:
        """Prefix and document together: the position of the first question token."""
        return self.prefix_tokens + self.document_tokens

    @property
    def dense_bytes(self) -> int:
        """Bytes of the model's own cache of the same tokens, in the archive's dtype."""
        itemsize = dtype_bytes(self.fingerprint.dtype)
        total = 0
        for layer in self.layers:
            n_cached = self.n_tokens if layer.window is None else min(self.n_tokens, layer.window - 1)
            total += n_cached * layer.n_kv_heads * (layer.key_dim + layer.value_dim) * itemsize
        return total

    def to_json(self) -> str:
        body = self._body()
        return json.dumps({**body, "sha256": json_sha256(body)}, indent=1, ensure_ascii=False) + "\n"

    def _body(self) -> dict[str, Any]:
        return {
            "format": FORMAT_NAME,
            "version": FORMAT_VERSION,
            "created_by": self.created_by,
            "model": {"name": self.model_name, **self.fingerprint.to_dict()},
            "layout": self.layout.to_dict(),
            "seams": {"prefix": self.prefix_seam_differs, "question": self.question_seam_differs},
            "document": {"name": self.document_name, "sha256": self.document_sha256},
            "recipe": {"asked": self.recipe.to_dict(), "built": self._built()},
            "counts": {
                "prefix_tokens": self.prefix_tokens,
                "document_tokens": self.document_tokens,
                "archived_tokens": self.archived_tokens,
                "head_tokens": self.head_tokens,
            },
            "layers": [asdict(layer) for layer in self.layers],
            "files": {name: asdict(entry) for name, entry in sorted(self.files.items())},
        }

    def _built(self) -> dict[str, Any]:
        per_head = [count for layer in self.layers for count in layer.clusters]
        return {
            "clusters_asked": self.clusters_asked,
            "clusters_min": min(per_head, default=0),
            "clusters_max": max(per_head, default=0),
        }

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Parse and check a manifest.

        Raises
        ------
        ArchiveFormatError
            If it is another format or version, or a field is missing or of the wrong kind.
        ArchiveCorruptError
            If its own checksum does not hold.
        """
        if not text.endswith("}\n"):
            raise ArchiveCorruptError(
                f"{MANIFEST_FILE}: does not end in a closing brace and a newline; it was cut short"
            )
        try:
            body = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ArchiveCorruptError(f"{MANIFEST_FILE}: not valid JSON ({error})") from error
        if not isinstance(body, dict) or body.get("format") != FORMAT_NAME:
            raise ArchiveFormatError(f"{MANIFEST_FILE}: not a {FORMAT_NAME} manifest")
        if type(body.get("version")) is not int or body["version"] != FORMAT_VERSION:
            raise ArchiveFormatError(
                f"{MANIFEST_FILE}: format version {body.get('version')!r}, this release reads {FORMAT_VERSION}; "
                "build the archive again"
            )
        if body.pop("sha256", None) != json_sha256(body):
            raise ArchiveCorruptError(f"{MANIFEST_FILE}: its own checksum does not hold; the manifest was altered")
        try:
            return cls._from_body(body)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ArchiveFormatError(f"{MANIFEST_FILE}: field missing or of the wrong kind ({error})") from error

    @classmethod
    def _from_body(cls, body: dict[str, Any]) -> Manifest:
        model = dict(body["model"])
        name = model.pop("name")
        lists = ("clusters", "key_widths", "value_widths")
        layers = tuple(
            LayerEntry(**{**entry, **{name: tuple(entry[name]) for name in lists}}) for entry in body["layers"]
        )
        manifest = cls(
            created_by=body["created_by"],
            model_name=name,
            fingerprint=Fingerprint(**model),
            layout=PromptLayout.from_dict(body["layout"]),
            prefix_seam_differs=body["seams"]["prefix"],
            question_seam_differs=body["seams"]["question"],
            document_name=body["document"]["name"],
            document_sha256=body["document"]["sha256"],
            recipe=Recipe.from_dict(body["recipe"]["asked"]),
            clusters_asked=body["recipe"]["built"]["clusters_asked"],
            layers=layers,
            files={path: FileEntry(**entry) for path, entry in body["files"].items()},
            **body["counts"],
        )
        _check_kinds(manifest)
        if json.loads(json.dumps(manifest._body())) != body:
            raise ArchiveFormatError(
                f"{MANIFEST_FILE}: holds fields that format version {FORMAT_VERSION} does not have"
            )
        if manifest.fingerprint.dtype not in DTYPE_NAMES:
            raise ArchiveFormatError(
                f"{MANIFEST_FILE}: dtype {manifest.fingerprint.dtype!r}, allowed are {', '.join(DTYPE_NAMES)}"
            )
        expected = {TOKENS_FILE, *(path for layer in layers for path in layer.files())}
        if set(manifest.files) != expected:
            odd = sorted(set(manifest.files) ^ expected)
            raise ArchiveFormatError(f"{MANIFEST_FILE}: its file list and its layers disagree on {odd[0]!r}")
        return manifest


def read_manifest(folder: str | Path) -> Manifest:
    """Read the manifest of the archive in `folder`.

    Raises
    ------
    ArchiveNotFoundError
        If the folder has no manifest; archives inside it are named.
    """
    folder = Path(folder)
    try:
        text = (folder / MANIFEST_FILE).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ArchiveCorruptError(f"{MANIFEST_FILE}: not UTF-8 text") from error
    except OSError as error:
        raise ArchiveNotFoundError(f"no archive in {str(folder)!r}: {_hint(folder)}") from error
    return Manifest.from_json(text)


def list_archives(folder: str | Path) -> list[str]:
    """Names of the archives directly inside `folder`."""
    names = (found.parent.name for found in Path(folder).glob(f"*/{MANIFEST_FILE}"))
    return sorted(name for name in names if not name.startswith("."))  # a dot marks an archive that is being built


def _hint(folder: Path) -> str:
    if not folder.is_dir():
        return "there is no such folder"
    inside = list_archives(folder)
    if inside:
        return f"it holds the archives {', '.join(inside[:5])}{', ...' if len(inside) > 5 else ''}; name one of them"
    return f"it has no {MANIFEST_FILE}; build one with 'ragkv build'"


def _check_kinds(manifest: Manifest) -> None:
    """Refuse values that JSON allows and the tensors behind them do not: 1.0, true or -1 for a count, say."""
    model, counts = manifest.fingerprint, ("prefix_tokens", "document_tokens", "archived_tokens", "head_tokens")
    numbers = {name: getattr(manifest, name) for name in ("clusters_asked", *counts)}
    texts = {name: getattr(manifest, name) for name in ("created_by", "model_name", "document_name", "document_sha256")}
    texts |= {name: value for name, value in model.to_dict().items() if name != "rope_parameters"}
    texts |= {"layout.prefix": manifest.layout.prefix, "layout.question": manifest.layout.question}
    texts |= {f"layout.stop[{place}]": text for place, text in enumerate(manifest.layout.stop)}
    for place, layer in enumerate(manifest.layers):
        for name, value in asdict(layer).items():
            if isinstance(value, tuple):
                numbers |= {f"layers[{place}].{name}[{index}]": number for index, number in enumerate(value)}
            elif name != "window" or value is not None:
                numbers[f"layers[{place}].{name}"] = value
        for name, widths in (("key_widths", layer.key_widths), ("value_widths", layer.value_widths)):
            if len(widths) not in (0, 3) or (widths and not layer.clusters):
                raise ValueError(f"layers[{place}].{name} is {list(widths)}; three counts in a layer with clusters")
        if len(layer.clusters) not in (0, layer.n_kv_heads):
            raise ValueError(f"layers[{place}].clusters has {len(layer.clusters)} entries for {layer.n_kv_heads} heads")
    for path, entry in manifest.files.items():
        texts[f"files[{path}].sha256"], numbers[f"files[{path}].bytes"] = entry.sha256, entry.bytes
    for name, value in numbers.items():
        if type(value) is not int or not 0 <= value < 1 << 63:
            raise ValueError(f"{name} is {value!r}, not a whole number from 0 to 2^63 - 1")
    for name, value in texts.items():
        if not isinstance(value, str):
            raise TypeError(f"{name} is {value!r}, not text")
    for name in ("prefix_seam_differs", "question_seam_differs"):
        if not isinstance(getattr(manifest, name), bool):
            raise TypeError(f"{name} is {getattr(manifest, name)!r}, not true or false")
    if not isinstance(model.rope_parameters, dict):
        raise TypeError(f"rope_parameters is {model.rope_parameters!r}, not an object")
