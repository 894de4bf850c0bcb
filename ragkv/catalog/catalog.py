"""A catalog: many archives in one folder, built under one model and one prompt prefix, so that they can be combined.

A document's id is the hash of what decides its archive, so the same text has the same id on every machine and an
archive never has to be replaced. Adding, removing and reading go on at once, in any number of processes: archives
appear whole, removing only marks, and what is marked is deleted after a grace period.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import torch

from ragkv.archive.files import Stamp
from ragkv.build.builder import BuildRequest, Progress, fit_transforms, stage, write_archive
from ragkv.catalog.entries import CatalogEntry, as_built, find_entry, with_match
from ragkv.catalog.folder import CatalogFolder, GcResult
from ragkv.catalog.head import CatalogHead, check_same, has_head, read_head, write_head
from ragkv.catalog.transforms import SharedTransforms, fit_on_texts
from ragkv.errors import ArchiveCorruptError, ConfigError, ModelMismatchError, RagkvError
from ragkv.model.fingerprint import Fingerprint, require_match
from ragkv.model.load import LoadedModel, check_loaded
from ragkv.model.prompt import PromptLayout, PromptTokens, document_sha256, tokenize_prompt
from ragkv.model.shape import model_shape
from ragkv.recall.archive import Archive
from ragkv.recipe import Recipe, check_whole
from ragkv.version import __version__

__all__ = ["Catalog", "CatalogEntry", "GcResult"]

MAX_OPEN = 64
_ATTEMPTS = 3


class Catalog:
    """The documents of one folder, for one model; serves any number of threads at once.

    Use `Catalog.create` or `Catalog.open`.
    """

    def __init__(self, path: Path, head: CatalogHead, model: LoadedModel | None, max_open: int) -> None:
        check_whole("max_open", max_open, 1)
        self.path = path
        self.model = model
        self._head = head
        self._folder = CatalogFolder(path, head)
        self._transforms = SharedTransforms(path, torch.device("cpu") if model is None else model.model.device)
        self._max_open = max_open
        self._slots: OrderedDict[str, _Slot] = OrderedDict()
        self._lock = threading.Lock()

    @classmethod
    def create(
        cls,
        path: str | Path,
        model: LoadedModel,
        *,
        layout: PromptLayout | None = None,
        recipe: Recipe | None = None,
        texts: Sequence[str] = (),
        max_open: int = MAX_OPEN,
        on_progress: Progress | None = None,
    ) -> Catalog:
        """Make a catalog in the folder `path`, or open the one that is there, whoever makes it first.

        Parameters
        ----------
        layout, recipe
            Of every document. Default to those of the catalog that is there, else to the model's own layout and
            `Recipe()`. What a recipe recalls by default may differ from the catalog's.
        texts
            What the transforms of the catalog are fitted on: a few texts like those that it will hold, of some thousand
            tokens together. By default they are fitted on the first document that is added. Left alone where there are
            transforms already.
        max_open
            Archives that `archive` keeps open; the one that was not asked for longest is let go.

        Raises
        ------
        ModelMismatchError
            If the catalog that is there is of another model.
        ConfigError
            If it has another layout or recipe, or something that is not a catalog stands there.
        """
        check_loaded(model)
        fitted = None
        if not has_head(path):
            layout, recipe = layout or model.layout, recipe or Recipe()
            recipe.check_layers(len(model_shape(model.model.config).layers))
            if texts:  # before anything is written, so that texts that are refused leave no catalog behind
                fitted = fit_on_texts(model, texts, recipe=recipe, layout=layout, on_progress=on_progress)
            head = CatalogHead(
                created_by=f"ragkv {__version__}",
                model_name=model.name,
                fingerprint=model.fingerprint(),
                layout=layout,
                recipe=recipe,
            )
            write_head(path, head)
        head = read_head(path)  # also after writing: another process may have come first
        _check_model(Path(path), head, model)
        if layout is not None:
            check_same(f"catalog {str(path)!r}: layout", head.layout.to_dict(), layout.to_dict())
        if recipe is not None:
            check_same(f"catalog {str(path)!r}: recipe", head.recipe.identity(), recipe.identity())
        catalog = cls(Path(path), head, model, max_open)
        if fitted is not None:
            catalog._transforms.publish(fitted)
        elif texts:
            catalog.fit_transforms(texts, on_progress=on_progress)
        return catalog

    @classmethod
    def open(cls, path: str | Path, model: LoadedModel | None = None, *, max_open: int = MAX_OPEN) -> Catalog:
        """Open the catalog in the folder `path`; without a model it can be listed and cleared up, but not read.

        Nothing is written.

        Raises
        ------
        ArchiveNotFoundError, ArchiveFormatError, ArchiveCorruptError
            If there is no catalog, of another version, or its head was altered.
        ModelMismatchError
            If `model` is not the one the catalog was made with; both are named.
        """
        head = read_head(path)
        if model is not None:
            check_loaded(model)
            _check_model(Path(path), head, model)
        return cls(Path(path), head, model, max_open)

    @property
    def layout(self) -> PromptLayout:
        """The prompt layout of every document."""
        return self._head.layout

    @property
    def recipe(self) -> Recipe:
        """The recipe of every document."""
        return self._head.recipe

    @property
    def resident_bytes(self) -> int:
        """Bytes that the archives held open take in memory, and the transforms that they share."""
        with self._lock:
            held = [slot.archive for slot in self._slots.values() if slot.archive is not None]
        return self._transforms.resident_bytes + sum(archive.resident_bytes for archive in held)

    @property
    def has_transforms(self) -> bool:
        """Whether it is decided what the archives are coded in: by `fit_transforms`, or by the first document."""
        return self._transforms.get() is not None

    @property
    def model_name(self) -> str:
        """The name by which the model was loaded when the catalog was made."""
        return self._head.model_name

    @property
    def fingerprint(self) -> Fingerprint:
        """The model of every document."""
        return self._head.fingerprint

    def document_id(self, text: str) -> str:
        """The id that `text` has, or would have, in this catalog: 64 hexadecimal digits."""
        return self._id(self._tokens(text))

    def add(self, text: str, *, name: str = "", on_progress: Progress | None = None) -> CatalogEntry:
        """Archive a document, unless this text is in the catalog already: then its entry, with the name it has.

        A removed document comes back without being built. If another process adds the same text meanwhile, the archive
        that is there first stays. A damaged archive is replaced where its damage shows (in its manifest or in the
        length of a file; of a removed document, in any byte).

        Raises
        ------
        ConfigError
            If the document cannot be archived (see `build_archive`) or written, the catalog was opened without a
            model, the model is loaded in another dtype than the catalog's, or another catalog stands there by now.
        ArchiveNotFoundError, ArchiveFormatError, ArchiveCorruptError
            If the catalog was deleted or damaged since it was opened.
        """
        model, tokens = self._loaded("to add a document"), self._tokens(text)
        self._check_dtype(model)
        _check_model(self.path, self._head, model)
        if read_head(self.path) != self._head:
            raise ConfigError(f"catalog {str(self.path)!r} is another one than when it was opened; open it again")
        document_id, built = self._id(tokens), False
        request = BuildRequest(
            model=model,
            tokens=tokens,
            layout=self.layout,
            recipe=self.recipe,
            document_sha256=document_sha256(text),
            document_name=name,
        )
        for _ in range(_ATTEMPTS):  # again where the archive was cleared away before its mark could be taken away
            stamp = self._folder.stamp(document_id)
            entry = self._folder.revive(document_id, stamp, self._transforms)
            if entry is not None:
                self._folder.add_name(document_id, request.document_name)
                return as_built(self._folder.named(entry), built)
            keeper = _Keeper(self._folder, document_id, stamp, self._transforms)
            self._build(request, document_id, keeper, on_progress)
            built = not keeper.kept
        entry = self._folder.revive(document_id, self._folder.stamp(document_id), self._transforms)
        if entry is None:
            raise self._folder.not_found(document_id)
        return as_built(entry, built)

    def fit_transforms(self, texts: Sequence[str], *, on_progress: Progress | None = None) -> None:
        """Fit the transforms of the catalog on `texts`, unless it has some.

        Raises
        ------
        ConfigError
            If a text cannot be archived, or none is long enough to have tokens that are grouped into clusters.
        """
        if self._transforms.get() is not None:
            return
        model = self._loaded("to fit its transforms")
        self._transforms.publish(
            fit_on_texts(model, texts, recipe=self.recipe, layout=self.layout, on_progress=on_progress)
        )

    def _build(self, request: BuildRequest, document_id: str, keeper: _Keeper, on_progress: Progress | None) -> None:
        """Build an archive where its place in the catalog is; transforms are fitted on it if there are none yet."""
        cache = request.prefill(stage(on_progress, "prefill"))
        shared = self._transforms.get()
        if shared is None:
            layers = fit_transforms([request], [cache])
            shared = self._transforms.publish(layers) if layers else None
        write_archive(
            request,
            cache,
            self._folder.document(document_id),
            transforms=shared,
            keep=keeper,
            rubble=True,
            on_progress=stage(on_progress, "cluster"),
        )

    def entries(self, match: str = "") -> list[CatalogEntry]:
        """The documents, by name and then id; with `match`, those with it in the name or at the start of the id.

        What cannot be read is logged and left out.
        """
        return with_match(self._folder.entries(), match)

    def __contains__(self, document_id: str) -> bool:
        return document_id in self._folder

    def entry(self, word: str) -> CatalogEntry:
        """The one document with this id, start of an id (6 characters or more) or name.

        Raises
        ------
        ArchiveNotFoundError
            If there is none.
        ConfigError
            If there are several; they are named.
        """
        return find_entry(self._folder.entries(), word)

    def archive(self, document_id: str) -> Archive:
        """The archive of a document, opened on first use and kept open; every thread gets the same one.

        An archive that is open goes on answering when its document is removed.

        Raises
        ------
        ArchiveNotFoundError
            If there is no such document, or it was removed.
        ModelMismatchError, ArchiveFormatError, ArchiveCorruptError
            If what stands there is damaged, or is not the document that its id says.
        ConfigError
            If the catalog was opened without a model, or `document_id` is not an id.
        """
        model, path = self._loaded("to open a document"), self._folder.document(document_id)
        if document_id not in self._folder:
            with self._lock:
                self._slots.pop(document_id, None)
            raise self._folder.not_found(document_id)
        with self._lock:
            slot = self._slots.setdefault(document_id, _Slot())
            self._slots.move_to_end(document_id)
            while len(self._slots) > self._max_open:
                self._slots.popitem(last=False)
        with slot.lock:
            if slot.archive is None:
                slot.archive = self._open(document_id, path, model)
            return slot.archive

    def remove(self, document_id: str, *, name: str | None = None) -> None:
        """Take a document out of the catalog; its files stay until `gc`, and whoever reads it is not disturbed.

        With `name`, that name of the document is taken away, and the document only if it has no other.

        Raises
        ------
        ArchiveNotFoundError
            If there is no such document, it was removed already, or it is not called `name`.
        """
        if name is not None and self._folder.drop_name(document_id, name):
            return
        self._folder.remove(document_id)
        with self._lock:
            self._slots.pop(document_id, None)

    def gc(self, grace_s: float = 3600.0, *, dry_run: bool = False) -> GcResult:
        """Delete the files of documents that were removed at least `grace_s` seconds ago, and what dead builds left.

        The period must be longer than a reader takes to open an archive; an open one needs its files no more. With
        `dry_run` nothing is deleted, and what would be is told.
        """
        return self._folder.gc(grace_s, dry_run=dry_run)

    def _open(self, document_id: str, path: Path, model: LoadedModel) -> Archive:
        """Open an archive, whole, or find that there is none: also while it is cleared away and put there again."""
        while (stamp := self._folder.stamp(document_id)) is not None:
            try:
                archive = Archive.open(path, model, transforms=self._transforms.of)
                ids = archive.tokens.ids.tolist()
            except (RagkvError, OSError):
                if self._folder.stamp(document_id) == stamp:
                    raise
                continue
            if self._folder.stamp(document_id) == stamp:
                self._check_belongs(document_id, archive, ids)
                return archive
        raise self._folder.not_found(document_id)

    def _check_belongs(self, document_id: str, archive: Archive, ids: list[int]) -> None:
        """Refuse an archive that was put there by hand and is not the one that the id says."""
        manifest, where = archive.manifest, f"document {document_id[:12]}... of the catalog {str(self.path)!r}"
        if manifest.fingerprint != self.fingerprint:
            ours, theirs = self.fingerprint.dtype, manifest.fingerprint.dtype
            raise ModelMismatchError(f"{where} holds {theirs}, the catalog {ours}; remove it and add its text again")
        if manifest.layout != self.layout:
            raise ArchiveCorruptError(f"{where} has another prompt layout than the catalog; remove it")
        head = manifest.prefix_tokens
        if (
            manifest.recipe.identity() != self.recipe.identity()
            or self._head.document_id(ids[:head], ids[head:]) != document_id
        ):
            raise ArchiveCorruptError(f"{where} is not the document that its id says; remove it")

    def _check_dtype(self, model: LoadedModel) -> None:
        dtype = str(model.model.dtype).removeprefix("torch.")
        if dtype != self.fingerprint.dtype:
            raise ConfigError(
                f"catalog {str(self.path)!r} holds {self.fingerprint.dtype} and the model is loaded in {dtype}; "
                f"load it in {self.fingerprint.dtype} to add documents"
            )

    def _tokens(self, text: str) -> PromptTokens:
        return tokenize_prompt(self._loaded("to cut a text into tokens").tokenizer, self.layout, text)

    def _id(self, tokens: PromptTokens) -> str:
        return self._head.document_id(tokens.prefix_ids, tokens.document_ids)

    def _loaded(self, purpose: str) -> LoadedModel:
        if self.model is None:
            raise ConfigError(f"{str(self.path)!r} was opened without a model; load {self.model_name!r} {purpose}")
        return self.model


class _Slot:
    """An open archive, or the place where one thread opens it while the others wait."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.archive: Archive | None = None


class _Keeper:
    """Keeps a whole archive that appeared since `stamp` was taken; called while nobody else may change the folder."""

    def __init__(
        self, folder: CatalogFolder, document_id: str, stamp: Stamp | None, transforms: SharedTransforms
    ) -> None:
        self._folder, self._document_id, self._stamp, self._transforms = folder, document_id, stamp, transforms
        self.kept = False

    def __call__(self, _path: Path) -> bool:
        appeared = self._folder.stamp(self._document_id) != self._stamp
        self.kept = appeared and self._folder.is_whole(self._document_id, self._transforms)
        return self.kept


def _check_model(path: Path, head: CatalogHead, model: LoadedModel) -> None:
    what = f"catalog {str(path)!r} ({head.model_name!r}; loaded is {model.name!r})"
    require_match(head.fingerprint, model, what=what)
