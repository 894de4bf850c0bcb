"""What the synthesizer and the query engine can be told: the one list of it, and how it is shown where it is taken."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from llama_index.core.schema import MetadataMode

from ragkv.answer.ask import check_options
from ragkv.errors import ConfigError
from ragkv.llamaindex.documents import PREFILL, check_on_missing
from ragkv.recall.composition import CONSECUTIVE, POSITIONS
from ragkv.recall.placed import Weighting
from ragkv.recipe import RecallPolicy, check_whole

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """How retrieved nodes are answered from.

    Parameters
    ----------
    on_missing
        What to do for a node whose archive cannot be used: ``prefill`` its text, ``build`` it, or ``raise``.
    positions, weighting
        How documents stand to each other and to the question (see `ragkv.Composition`).
    recompute_tokens
        First tokens of each later document that are computed again (see `ragkv.recompute`); 0 for none.
    policy, budget, max_new_tokens, evidence
        As for `ragkv.ask`.
    best_last
        Put the best node's document next to the question, instead of first.
    metadata_mode
        Which metadata belongs to a node's text; as given to `ArchiveTransform`.

    Raises
    ------
    ConfigError
        If a value is out of its range.
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


def shows_options_of(taker: Callable[..., object]) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Show the keyword options of `taker`, with their defaults, in a signature that has them as ``**options``.

    So ``help()`` and editors name each option, and it is written down once.
    """

    def shown(function: Callable[..., T]) -> Callable[..., T]:
        own = [each for each in inspect.signature(function).parameters.values() if each.kind != each.VAR_KEYWORD]
        names = {each.name for each in own}
        known = inspect.signature(taker).parameters.values()
        more = [each for each in known if each.kind == each.KEYWORD_ONLY and each.name not in names]
        signature = inspect.signature(function).replace(parameters=[*own, *more])
        vars(function)["__signature__"] = signature
        return function

    return shown
