"""What is compared: dense attention, archives under a recall policy, and the policies of other systems."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from transformers import Cache, DynamicCache

from ragkv.build.builder import BuildRequest, write_archive
from ragkv.build.layer import document_span
from ragkv.build.probes import probe_ids
from ragkv.errors import ConfigError
from ragkv.evaluation.peers.policies import PeerCache, PeerPolicy, PreparedPeer, prepare
from ragkv.model.load import LoadedModel
from ragkv.model.prefill import fork_cache, kv_nbytes, layer_tensors
from ragkv.model.prompt import PromptLayout, PromptTokens
from ragkv.recall.archive import Archive
from ragkv.recall.attention import BlockRecall
from ragkv.recall.cache import ArchiveCache
from ragkv.recall.placed import PlacedLayer
from ragkv.recipe import RecallPolicy, Recipe

DENSE = "dense"


@dataclass(frozen=True)
class Trial:
    """A fresh ``cache`` for one question, at the position behind the document.

    ``bytes_read`` gives, afterwards, the mean bytes of the document that an answer token read; None without any.
    """

    cache: Cache
    bytes_read: Callable[[], float | None]


class Subject(Protocol):
    """One thing under test on one document. Bytes are over all layers; ``disk_bytes`` is what a restart would read."""

    name: str
    resident_bytes: int
    disk_bytes: int

    def trial(self) -> Trial: ...


@dataclass(frozen=True)
class SubjectSpec:
    """How to make a subject: an archive by `recipe` under `policy`, or a `peer`; exactly one of them."""

    name: str
    recipe: Recipe | None = None
    policy: RecallPolicy | None = None
    peer: PeerPolicy | None = None

    def __post_init__(self) -> None:
        if (self.recipe is None) == (self.peer is None):
            raise ConfigError(f"subject {self.name!r}: give either a recipe or a peer policy")


@dataclass(frozen=True)
class DenseDocument:
    """A document as it was prefilled: its tokens under a layout, and the model's own cache of them."""

    tokens: PromptTokens
    layout: PromptLayout
    dense: DynamicCache
    sha256: str


class DenseSubject:
    """The model's own attention over its own cache."""

    name = DENSE

    def __init__(self, dense: DynamicCache) -> None:
        self._dense = dense
        self.resident_bytes = self.disk_bytes = kv_nbytes(dense)

    def trial(self) -> Trial:
        return Trial(fork_cache(self._dense), lambda: float(self.resident_bytes))


class ArchiveSubject:
    """An archive under a policy."""

    def __init__(self, name: str, archive: Archive, policy: RecallPolicy) -> None:
        self.name, self._archive, self._policy = name, archive, policy
        layers = [archive.whole_layer(x.index) if x.index in policy.dense_layers else x for x in archive.layers]
        self.resident_bytes, self.disk_bytes = archive.resident_bytes, archive.disk_bytes
        self._held_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
        self._held_bytes += sum(layer.clusters.resident_bytes for layer in layers if layer.clusters is not None)
        self._recalls = any(layer.clusters is not None for layer in layers)

    def trial(self) -> Trial:
        """Every step reads all prototypes and exact tokens, and the rows it recalls."""
        meter = _ReadMeter()

        def bytes_read() -> float | None:
            recalled = meter.bytes_per_answer_token if self._recalls else 0.0
            return None if recalled is None else self._held_bytes + recalled

        return Trial(ArchiveCache(self._archive, policy=self._policy, observer=meter), bytes_read)


class PeerSubject:
    """Another system's policy over the dense cache; layers with a window count as in the dense cache."""

    def __init__(self, name: str, dense: DynamicCache, prepared: PreparedPeer) -> None:
        self.name, self._dense, self._prepared = name, dense, prepared
        others = [pair for index, pair in enumerate(layer_tensors(dense)) if index not in prepared.layers]
        self._other_bytes = sum(keys.nbytes + values.nbytes for keys, values in others)
        self.resident_bytes = prepared.resident_bytes + self._other_bytes
        self.disk_bytes = prepared.disk_bytes + self._other_bytes

    def trial(self) -> Trial:
        cache = PeerCache(self._dense, self._prepared)

        def bytes_read() -> float | None:
            read = cache.bytes_read_per_step
            return None if read is None else read + self._other_bytes

        return Trial(cache, bytes_read)


class SubjectMaker:
    """Makes the subjects of one document; an archive is built once for subjects that differ in their policy only."""

    def __init__(self, model: LoadedModel, document: DenseDocument, folder: Path) -> None:
        self._model, self._document, self._folder = model, document, folder
        self._built: Recipe | None = None
        self._archive: Archive | None = None

    def make(self, spec: SubjectSpec) -> Subject:
        """The subject of `spec`; ask for those of one recipe one after another, only the last archive is kept."""
        if spec.peer is not None:
            return _peer(spec, spec.peer, self._model, self._document)
        recipe = spec.recipe or Recipe()
        return ArchiveSubject(spec.name, self.archive(recipe), spec.policy or recipe.recall)

    def archive(self, recipe: Recipe) -> Archive:
        """The document's archive by `recipe`; whatever the recipe says of recall is not in it."""
        bare = dataclasses.replace(recipe, recall=RecallPolicy())
        if self._archive is None or bare != self._built:
            self._archive, self._built = None, bare
            request = BuildRequest(
                model=self._model,
                tokens=self._document.tokens,
                layout=self._document.layout,
                recipe=bare,
                document_sha256=self._document.sha256,
            )
            build = write_archive(request, self._document.dense, self._folder / "archive")
            self._archive = Archive.open(build.path, self._model)
        return self._archive


def _peer(spec: SubjectSpec, policy: PeerPolicy, model: LoadedModel, document: DenseDocument) -> PeerSubject:
    probes = probe_ids(model.tokenizer, document.layout, document.tokens.document_ids)
    span = document_span(document.tokens, Recipe())
    return PeerSubject(
        spec.name, document.dense, prepare(policy, document.dense, span, model=model.model, probes=probes)
    )


class _ReadMeter:
    """Adds up the bytes that answer tokens recall; the first call of each layer is the question."""

    def __init__(self) -> None:
        self._bytes = self._steps = 0
        self._asked: set[int] = set()
        self._first: int | None = None

    def on_recall(self, layer: PlacedLayer, recall: BlockRecall, *, begins: bool) -> None:
        if not begins or recall.choice is None:
            return
        if layer.index not in self._asked:
            self._asked.add(layer.index)
            self._first = layer.index if self._first is None else self._first
            return
        self._bytes += recall.fetched_bytes
        self._steps += layer.index == self._first

    @property
    def bytes_per_answer_token(self) -> float | None:
        return self._bytes / self._steps if self._steps else None
