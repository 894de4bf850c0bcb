"""From retrieved nodes to the documents of a composition: their archives, or what stands in for a missing one."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from llama_index.core.schema import BaseNode, MetadataMode

from ragkv.catalog.catalog import Catalog
from ragkv.catalog.head import is_document_id
from ragkv.errors import (
    ArchiveCorruptError,
    ArchiveFormatError,
    ArchiveNotFoundError,
    ConfigError,
    ModelMismatchError,
    NonFiniteError,
    RagkvError,
    UnsupportedModelError,
)
from ragkv.llamaindex.streaming import ShouldStop, Stopped, stop_check
from ragkv.model.load import LoadedModel
from ragkv.recall.archive import Archive
from ragkv.recall.composition import Document
from ragkv.recall.prefilled import prefill_document

log = logging.getLogger(__name__)

DOCUMENT_KEY = "ragkv_document"
"""Key of a node's metadata under which `ArchiveTransform` puts the id of its archive."""

NAME_KEY = "file_name"
"""Key of a node's metadata that names a document, as LlamaIndex's own readers set it."""

PREFILL, BUILD, RAISE = ON_MISSING = ("prefill", "build", "raise")
ARCHIVE, PREFILLED, BUILT = "archive", "prefilled", "built"
EMPTY = "empty"

_REASONS: dict[type[RagkvError], str] = {
    ArchiveNotFoundError: "not found",
    ArchiveCorruptError: "damaged",
    ArchiveFormatError: "another format",
    ModelMismatchError: "another model",
}
_UNUSABLE = tuple(_REASONS)


@dataclass(frozen=True)
class ResolvedDocument:
    """One document of a request: ``origin`` is ``archive``, ``prefilled`` or ``built``; ``node_ids`` who asked for it.

    ``id`` is the document's id in the catalog, also where it has no archive there.
    """

    id: str
    origin: str
    document: Document = field(repr=False, compare=False)
    node_ids: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values; ``tokens`` are those of the document without the prefix."""
        return {
            "id": self.id,
            "name": self.document.name,
            "tokens": self.document.n_tokens - self.document.prefix_tokens,
            "origin": self.origin,
            "nodes": list(self.node_ids),
        }


@dataclass(frozen=True)
class Resolution:
    """The documents of a request in the order of their first node, and why archives did not serve, by node id."""

    documents: tuple[ResolvedDocument, ...]
    reasons: dict[str, str]

    def count(self, origin: str) -> int:
        """How many documents came from an `origin`."""
        return sum(document.origin == origin for document in self.documents)

    @property
    def computed(self) -> frozenset[int]:
        """Places of the documents whose tokens went through the model for this request."""
        return frozenset(place for place, each in enumerate(self.documents) if each.origin != ARCHIVE)

    def reversed(self) -> Resolution:
        """The same documents, the first one last."""
        return Resolution(self.documents[::-1], self.reasons)

    def to_dict(self) -> dict[str, Any]:
        """Counts of documents and the reasons, as they stand in a response's metadata."""
        counts = {"served": ARCHIVE, "prefilled": PREFILLED, "built": BUILT}
        return {**{name: self.count(origin) for name, origin in counts.items()}, "reasons": dict(self.reasons)}


def check_on_missing(value: str) -> None:
    """Refuse a policy that does not exist."""
    if value not in ON_MISSING:
        raise ConfigError(f"on_missing is {value!r}; give one of {', '.join(ON_MISSING)}")


def loaded_model(catalog: Catalog) -> LoadedModel:
    """The model that the catalog was opened for.

    Raises
    ------
    ConfigError
        If it was opened without one.
    """
    if catalog.model is None:
        raise ConfigError(f"catalog {str(catalog.path)!r} was opened without a model; load {catalog.model_name!r}")
    return catalog.model


def node_text(node: BaseNode, metadata_mode: MetadataMode) -> str:
    """What is archived of a node; empty where there is nothing but white space.

    The id of its archive is no part of it, whatever the mode: the text of a node has to be the same before and after.
    """
    if metadata_mode != MetadataMode.NONE and DOCUMENT_KEY in node.metadata:
        rest = {key: value for key, value in node.metadata.items() if key != DOCUMENT_KEY}
        node = node.model_copy(update={"metadata": rest})
    text = node.get_content(metadata_mode=metadata_mode)
    return text if text.strip() else ""


@contextmanager
def naming(node: BaseNode) -> Iterator[None]:
    """Say of which node a text cannot be archived: there may be thousands."""
    try:
        yield
    except (ConfigError, UnsupportedModelError, NonFiniteError) as error:
        raise type(error)(f"node {node.node_id!r}: {error}") from error


def document_name(node: BaseNode) -> str:
    """The file that a node comes from, if its reader says so."""
    name = node.metadata.get(NAME_KEY)
    return name if isinstance(name, str) else ""


def resolve(
    nodes: Sequence[BaseNode],
    catalog: Catalog,
    *,
    on_missing: str = PREFILL,
    metadata_mode: MetadataMode = MetadataMode.NONE,
    should_stop: ShouldStop | None = None,
) -> Resolution:
    """The documents that answer for `nodes`, each once, in the order of their first node.

    A node's archive is the one that its metadata names, else that of its own text. `on_missing` says what to do where
    it is missing, removed, damaged, of another format or of another model: ``prefill`` the node's own text for this
    request, ``build`` the archive of that text, or ``raise``. Nodes without text are left out.

    Raises
    ------
    ArchiveNotFoundError
        With ``raise``, naming the node.
    ConfigError
        If the catalog was opened without a model, or a text cannot be archived.
    """
    check_on_missing(on_missing)
    finder = _Finder(catalog, loaded_model(catalog), on_missing, should_stop)
    for node in nodes:
        finder.add(node, node_text(node, metadata_mode))
    return Resolution(
        tuple(
            ResolvedDocument(document_id, held.origin, held.document, tuple(held.node_ids))
            for document_id, held in finder.found.items()
        ),
        finder.reasons,
    )


@dataclass
class _Held:
    """A document that was found, and the nodes that asked for it so far."""

    origin: str
    document: Document
    node_ids: list[str]


class _Finder:
    """Collects the documents of one request."""

    def __init__(self, catalog: Catalog, model: LoadedModel, on_missing: str, should_stop: ShouldStop | None) -> None:
        self._catalog, self._model, self._on_missing = catalog, model, on_missing
        self._on_progress = stop_check(should_stop)
        self._should_stop = should_stop
        self._unusable: dict[str, RagkvError] = {}
        self.found: dict[str, _Held] = {}
        self.reasons: dict[str, str] = {}

    def add(self, node: BaseNode, text: str) -> None:
        """Find the document of one node."""
        if self._should_stop is not None and self._should_stop():
            raise Stopped
        error = self._named(node)
        if error is None and node.metadata.get(DOCUMENT_KEY) is not None:
            return
        if not text:
            self._leave_out(node, error)
            return
        with naming(node):
            own = self._catalog.document_id(text)
        found = self._look_up(node, own)
        error = error or found
        if error is not None:
            self.reasons[node.node_id] = _reason(error)
            log.info("node %r: its archive does not serve: %s", node.node_id, error)
        if found is not None:
            with naming(node):
                self._stand_in(node, text, own, found)

    def _named(self, node: BaseNode) -> RagkvError | None:
        """Look up the document that a node's metadata names; why it does not serve."""
        named = node.metadata.get(DOCUMENT_KEY)
        if named is None:
            return None
        if not isinstance(named, str) or not is_document_id(named):
            return ArchiveNotFoundError(f"{DOCUMENT_KEY} is {named!r}, which is no document id")
        return self._look_up(node, named)

    def _look_up(self, node: BaseNode, document_id: str) -> RagkvError | None:
        """Take a document that was found before, or its archive; else why that does not serve."""
        held = self.found.get(document_id)
        if held is not None:
            held.node_ids.append(node.node_id)
            return None
        if document_id not in self._unusable:
            try:
                self._hold(node, document_id, ARCHIVE, self._catalog.archive(document_id))
                return None
            except _UNUSABLE as error:
                self._unusable[document_id] = error
        return self._unusable[document_id]

    def _hold(self, node: BaseNode, document_id: str, origin: str, document: Document) -> None:
        self.found[document_id] = _Held(origin, document, [node.node_id])

    def _leave_out(self, node: BaseNode, error: RagkvError | None) -> None:
        if error is not None and self._on_missing == RAISE:
            raise _not_served(node, error) from error
        self.reasons[node.node_id] = EMPTY if error is None else _reason(error)
        log.warning("node %r has no text and is left out", node.node_id)

    def _stand_in(self, node: BaseNode, text: str, document_id: str, error: RagkvError) -> None:
        """Do what the policy says for a node that has no archive."""
        if self._on_missing == RAISE:
            raise _not_served(node, error) from error
        if self._on_missing == BUILD:
            archive, is_new = self._build(text, document_name(node))
            self._hold(node, document_id, BUILT if is_new else ARCHIVE, archive)
            return
        held = prefill_document(
            self._model,
            text,
            layout=self._catalog.layout,
            name=document_name(node) or node.node_id,
            on_progress=self._on_progress,
        )
        self._hold(node, document_id, PREFILLED, held)

    def _build(self, text: str, name: str) -> tuple[Archive, bool]:
        """Add a text to the catalog; an archive whose damage only its checksums show is replaced."""
        entry = self._catalog.add(text, name=name, on_progress=self._on_progress)
        try:
            return self._catalog.archive(entry.id), entry.built
        except _UNUSABLE as error:
            log.warning("document %s is built again: %s", entry.id, error)
        with suppress(ArchiveNotFoundError):  # another thread may have removed it for the same reason
            self._catalog.remove(entry.id)
        entry = self._catalog.add(text, name=name, on_progress=self._on_progress)
        return self._catalog.archive(entry.id), entry.built


def _reason(error: RagkvError) -> str:
    return next(words for kind, words in _REASONS.items() if isinstance(error, kind))


def _not_served(node: BaseNode, error: RagkvError) -> ArchiveNotFoundError:
    return ArchiveNotFoundError(
        f"node {node.node_id!r} has no archive that serves ({error}); archive it again, or give "
        f"on_missing={PREFILL!r} or {BUILD!r}"
    )
