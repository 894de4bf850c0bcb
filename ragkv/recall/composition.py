"""Several documents behind one shared prefix, put together for a request without copying or rewriting any of them.

Every document was prefilled behind the same prefix. The prefix is attended once; the documents stand one after another
(or all at the same positions), which turning their queries does. Whatever is recalled is chosen among the clusters of
all documents together, by mass, so that a document that has nothing to say costs its prototypes only.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Protocol

import torch

from ragkv.archive.tokens import TokenTable
from ragkv.errors import ConfigError, ModelMismatchError
from ragkv.ledger.ledger import kv_bytes
from ragkv.model.attention import is_attached
from ragkv.model.fingerprint import Fingerprint, require_match
from ragkv.model.load import LoadedModel, padded_inputs, question_inputs
from ragkv.model.prompt import PromptLayout
from ragkv.model.rope import turn_back
from ragkv.model.shape import ModelShape, check_length, model_shape
from ragkv.recall.archive import Archive
from ragkv.recall.layers import ArchivedLayer
from ragkv.recall.placed import Part, PlacedLayer, Weighting, alone
from ragkv.recipe import RecallPolicy

CONSECUTIVE, REUSED = POSITIONS = ("consecutive", "reused")


class Document(Protocol):
    """One document behind the prefix: an open archive, or a text that was prefilled for this request."""

    @property
    def model(self) -> LoadedModel: ...
    @property
    def layout(self) -> PromptLayout: ...
    @property
    def name(self) -> str: ...
    @property
    def text(self) -> str: ...
    @property
    def spans(self) -> Sequence[tuple[int, int]]: ...
    @property
    def tokens(self) -> TokenTable: ...
    @property
    def n_tokens(self) -> int: ...
    @property
    def prefix_tokens(self) -> int: ...
    @property
    def layers(self) -> tuple[ArchivedLayer, ...]: ...
    @property
    def policy(self) -> RecallPolicy: ...
    @property
    def resident_bytes(self) -> int: ...
    @property
    def disk_bytes(self) -> int: ...
    def whole_layer(self, index: int) -> ArchivedLayer: ...
    def positions(self, index: int) -> torch.Tensor: ...
    def require_unchanged(self) -> None: ...


@dataclass(frozen=True)
class Recomputed:
    """First tokens of all documents but the first, computed again with the documents before them in sight.

    They take the place of the first ``count`` tokens of each document; ``layers`` hold them where they stand.
    """

    count: int
    layers: tuple[ArchivedLayer, ...]


class Composition:
    """Documents in the order in which a question sees them; never changes, and serves any number of threads at once.

    Parameters
    ----------
    documents
        At least one, opened for one model and built with one layout. The same document may stand in it more than once.
    positions
        ``consecutive``: one after another, as if their texts had been joined; together they must fit the model's
        context. ``reused``: all begin right behind the prefix, so that their total may exceed the context; the
        question follows the longest. A sliding layer sees what stands within its window of the question, by position:
        of documents that end well before the longest it then sees nothing.
    weighting
        How much attention documents get against prefix and question, in layers without a window.
    recomputed
        From `ragkv.recall.recompute.recompute`: first tokens of the documents that were computed again.

    Raises
    ------
    ConfigError
        If there are no documents, their layouts differ, or they do not fit the context.
    ModelMismatchError
        If they were opened for different model objects.
    UnsupportedModelError
        If a length-dependent RoPE does not reach over where they stand.
    """

    def __init__(
        self,
        documents: Sequence[Document],
        *,
        positions: str = CONSECUTIVE,
        weighting: Weighting | None = None,
        recomputed: Recomputed | None = None,
    ) -> None:
        if positions not in POSITIONS:
            raise ConfigError(f"positions is {positions!r}; give one of {', '.join(POSITIONS)}")
        self.documents = tuple(documents)
        _check_fit_together(self.documents)
        self.model, self.layout = self.documents[0].model, self.documents[0].layout
        self.prefix_tokens = self.documents[0].prefix_tokens
        self.positions, self.weighting = positions, weighting or Weighting()
        self.recomputed = recomputed
        lengths = [document.n_tokens - self.prefix_tokens for document in self.documents]
        self.shifts = tuple(accumulate(lengths[:-1], initial=0)) if positions == CONSECUTIVE else (0,) * len(lengths)
        self.n_tokens = self.prefix_tokens + max(map(sum, zip(self.shifts, lengths, strict=True)))
        self.n_context = self.prefix_tokens + sum(lengths)
        self._check_context()
        self._placed: dict[tuple[int, bool], PlacedLayer] = {}
        self._turns: dict[tuple[bool, int], torch.Tensor] = {}
        self._lock = threading.Lock()

    @classmethod
    def of(cls, source: Document | Composition) -> Composition:
        """A single document as a composition of one; a composition is returned as it is."""
        return source if isinstance(source, Composition) else cls((source,))

    @cached_property
    def shape(self) -> ModelShape:
        """The cache of the model that the documents are opened for."""
        return model_shape(self.model.model.config)

    @cached_property
    def first_full_layer(self) -> int:
        """Index of the first layer without a window, or 0 where every layer has one."""
        return next((layer.index for layer in self.shape.layers if layer.is_global), 0)

    @cached_property
    def token_ids(self) -> torch.Tensor:
        """Token ids of the prefix and of all documents, one after another: (n_context,) int64."""
        p = self.prefix_tokens
        return torch.cat([self.documents[0].tokens.ids[:p], *(each.tokens.ids[p:] for each in self.documents)])

    @property
    def recomputed_tokens(self) -> tuple[int, ...]:
        """How many first tokens of each document were computed again."""
        count = 0 if self.recomputed is None else self.recomputed.count
        lengths = [document.n_tokens - self.prefix_tokens for document in self.documents]
        return (0, *(min(count, length) for length in lengths[1:]))

    @property
    def policy(self) -> RecallPolicy:
        """What is recalled unless a request says otherwise: the policy of the first document that has clusters."""
        archived = (each.policy for each in self.documents if any(layer.n_clusters for layer in each.layers))
        return next(archived, self.documents[0].policy)

    @property
    def resident_bytes(self) -> int:
        """Bytes that the documents hold in memory, each counted once, and those of recomputed and moved tokens."""
        once = {id(document): document for document in self.documents}
        extra = [] if self.recomputed is None else list(self.recomputed.layers)
        if len(self.documents) > 1:
            extra += [placed.parts[0].layer for placed in tuple(self._placed.values()) if placed.window is not None]
        return sum(document.resident_bytes for document in once.values()) + sum(
            layer.keys.nbytes + layer.values.nbytes for layer in extra
        )

    @property
    def disk_bytes(self) -> int:
        """Bytes of the documents' files, each counted once."""
        return sum(document.disk_bytes for document in {id(each): each for each in self.documents}.values())

    @property
    def dense_bytes(self) -> int:
        """Bytes of the model's own cache of prefix and documents, joined, in the model's dtype."""
        return kv_bytes(self.shape.layers, self.n_context, value_bytes=self.model.model.dtype.itemsize).logical

    def questions(self, questions: Sequence[str]) -> dict[str, torch.Tensor]:
        """Inputs of ``model.generate`` for a left-padded batch of questions, as `Archive.questions`."""
        return question_inputs(self.model, self.layout, questions, first_position=self.n_tokens)

    def pad(self, token_ids: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
        """As `questions`, from token ids that already follow the documents."""
        return padded_inputs(self.model, token_ids, first_position=self.n_tokens)

    def layer(self, index: int, *, whole: bool = False) -> PlacedLayer:
        """Layer `index` of all documents, where they stand; `whole`: with every token decoded and held."""
        with self._lock:
            if (index, whole) not in self._placed:
                layers = [each.whole_layer(index) if whole else each.layers[index] for each in self.documents]
                window = layers[0].window
                placed = self._placed_parts(layers) if window is None else self._joined_window(layers, window)
                self._placed[index, whole] = placed
            return self._placed[index, whole]

    def require_usable(self) -> None:
        """Refuse to answer through a model whose attention would ignore the documents, or from documents that changed.

        Raises
        ------
        ConfigError
            If ragkv is not attached to the model.
        ModelMismatchError, ArchiveCorruptError
            If the model's weights, or a file under an open archive, changed since it was opened.
        """
        if not is_attached(self.model.model):
            raise ConfigError(
                f"the model's attention is {self.model.model.config._attn_implementation!r}, which would ignore the "
                "archive; call ragkv.attach(model) first"
            )
        self.require_model()
        for document in {id(each): each for each in self.documents}.values():
            document.require_unchanged()

    def require_model(self) -> None:
        """Refuse to answer through a model whose weights changed since the archives were opened."""
        checked: list[Fingerprint] = []
        for document in self.documents:
            if isinstance(document, Archive) and document.manifest.fingerprint not in checked:
                require_match(document.manifest.fingerprint, self.model)
                checked.append(document.manifest.fingerprint)

    def _check_context(self) -> None:
        """Refuse documents that leave the question no position that the model knows."""
        longest = self.shape.max_positions
        if len(self.documents) > 1 and longest is not None and self.n_tokens >= longest:
            if self.positions == REUSED:
                found, cure = "with the longest document prefix and documents are", "leave that one out"
            else:
                found, cure = "prefix and documents are", f"give fewer, or put all at the same positions ({REUSED!r})"
            raise ConfigError(f"{found} {self.n_tokens:,} tokens and the model's context holds {longest:,}; {cure}")
        check_length(self.shape, self.n_tokens + 1)

    def _first_attended(self, place: int) -> int:
        """Position in its own archive of the first token attended of a document: the prefix is the first one's."""
        if place == 0:
            return 0
        return self.prefix_tokens + (0 if self.recomputed is None else self.recomputed.count)

    def _placed_parts(self, layers: Sequence[ArchivedLayer]) -> PlacedLayer:
        parts = []
        for place, layer in enumerate(layers):
            bias = _without(layer, self._first_attended(place))
            parts.append(Part(layer, self._turn(layer, self.shifts[place]), bias, n_prefix=self.prefix_tokens))
        if self.recomputed is not None:
            parts.append(Part(self.recomputed.layers[layers[0].index]))
        return PlacedLayer(tuple(parts), self.weighting)

    def _joined_window(self, layers: Sequence[ArchivedLayer], window: int) -> PlacedLayer:
        """One layer of what a question still sees of a sliding layer: few tokens, whose keys are moved."""
        if len(layers) == 1:
            return alone(layers[0])
        pieces = [
            _moved(layer, self._turn(layer, shift), shift, first=self._first_attended(place))
            for place, (layer, shift) in enumerate(zip(layers, self.shifts, strict=True))
        ]
        if self.recomputed is not None:
            pieces.append(self.recomputed.layers[layers[0].index])
        positions = torch.cat([piece.exact_positions for piece in pieces])
        seen = positions > self.n_tokens - window
        return alone(
            ArchivedLayer(
                index=layers[0].index,
                window=window,
                keys=torch.cat([piece.keys for piece in pieces], dim=1)[:, seen],
                values=torch.cat([piece.values for piece in pieces], dim=1)[:, seen],
                exact_positions=positions[seen],
                clusters=None,
            )
        )

    def _turn(self, layer: ArchivedLayer, shift: int) -> torch.Tensor | None:
        """What turns queries back by `shift`; layers of one kind share it."""
        if shift == 0:
            return None
        kind = (layer.window is None, shift)
        if kind not in self._turns:
            self._turns[kind] = turn_back(self.model.model, shift, layer=layer.index, key_dim=layer.keys.shape[-1])
        return self._turns[kind]


def _without(layer: ArchivedLayer, first: int) -> torch.Tensor | None:
    """What is added to the logits of exact tokens (n_exact,): -inf at those before position `first`."""
    out = layer.exact_positions < first
    if first == 0 or not bool(out.any()):
        return None
    return torch.zeros(len(out), device=out.device).masked_fill_(out, -torch.inf)


def _moved(layer: ArchivedLayer, turn: torch.Tensor | None, shift: int, *, first: int) -> ArchivedLayer:
    """The tokens of a sliding layer from position `first` on, where they stand after a shift."""
    kept = layer.exact_positions >= first
    keys = layer.keys[:, kept]
    return ArchivedLayer(
        index=layer.index,
        window=layer.window,
        keys=keys if turn is None else (keys.float() @ turn.T).to(keys.dtype),
        values=layer.values[:, kept],
        exact_positions=layer.exact_positions[kept] + shift,
        clusters=None,
    )


def _check_fit_together(documents: Sequence[Document]) -> None:
    """Refuse documents that cannot stand behind one prefix."""
    if not documents:
        raise ConfigError("there are no documents to compose; give at least one")
    if any(isinstance(document, Composition) for document in documents):
        raise ConfigError("one of the documents is a composition; give the documents that it is of, one by one")
    odd = next((each for each in documents if not hasattr(each, "prefix_tokens")), None)
    if odd is not None:
        raise ConfigError(f"a document to compose is a {type(odd).__name__}; give what Archive.open returned")
    first = documents[0]
    prefix = first.tokens.ids[: first.prefix_tokens]
    for other in documents[1:]:
        if other.model.model is not first.model.model:
            raise ModelMismatchError(
                f"{other.name!r} is opened for another model object than {first.name!r}; open both for the same one"
            )
        if other.layout != first.layout or not torch.equal(other.tokens.ids[: other.prefix_tokens], prefix):
            raise ConfigError(
                f"{other.name!r} was built with another layout than {first.name!r}, so that they share no prefix; "
                "build them with the same one"
            )
