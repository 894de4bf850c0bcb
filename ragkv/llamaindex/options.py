"""What the synthesizer and the query engine can be told."""

from __future__ import annotations

from dataclasses import dataclass

from llama_index.core.schema import MetadataMode

from ragkv.answer.ask import check_options
from ragkv.errors import ConfigError
from ragkv.llamaindex.documents import PREFILL, check_on_missing
from ragkv.recall.composition import CONSECUTIVE, POSITIONS
from ragkv.recall.placed import Weighting
from ragkv.recipe import RecallPolicy, check_whole


@dataclass(frozen=True)
class AnswerOptions:
    """How retrieved nodes are answered from.

    ``on_missing`` as for `ragkv.llamaindex.documents.resolve`; ``positions`` and ``weighting`` as for
    `ragkv.Composition`; ``recompute_tokens`` first tokens of each later document are computed again, 0 for none;
    ``policy``, ``budget``, ``max_new_tokens`` and ``evidence`` as for `ragkv.ask`. With ``best_last`` the best
    document stands next to the question instead of first. ``metadata_mode`` says which metadata belongs to a
    node's text.
    """

    on_missing: str = PREFILL
    positions: str = CONSECUTIVE
    weighting: Weighting | None = None
    recompute_tokens: int = 0
    policy: RecallPolicy | None = None
    budget: int | None = None
    max_new_tokens: int = 64
    evidence: bool = True
    best_last: bool = False
    metadata_mode: MetadataMode = MetadataMode.NONE

    def __post_init__(self) -> None:
        check_on_missing(self.on_missing)
        if self.positions not in POSITIONS:
            raise ConfigError(f"positions is {self.positions!r}; give one of {', '.join(POSITIONS)}")
        if self.recompute_tokens:
            check_whole("recompute_tokens", self.recompute_tokens, 0)
        check_options(budget=self.budget, max_new_tokens=self.max_new_tokens)
