"""Scores of an answer against the gold answers: numbers in [0, 1], the best over several gold answers.

English extractive answers are scored by the rule of SQuAD v1.1 (Rajpurkar et al. 2016, ``evaluate-v1.1.py``: lower
case, no ASCII punctuation, no articles, single spaces) as torchmetrics implements it; one difference is that two texts
which are both empty after that count as equal, as in SQuAD v2. Chinese answers follow MLQA (Lewis et al. 2020): all
punctuation goes and each CJK character is a token.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

from ragkv.errors import ConfigError, MissingExtraError
from ragkv.text import UNSPACED

Metric = Callable[[str, tuple[str, ...]], dict[str, float]]


def contains(prediction: str, answers: tuple[str, ...]) -> float:
    """1 if a gold answer stands in the prediction as whole words, in any case, else 0.

    For look-ups with one short, unmistakable answer; a prediction that lists many candidates would pass.
    """
    return float(any(_holds(prediction, answer, re.IGNORECASE) for answer in _some(answers)))


def entity_share(prediction: str, answers: tuple[str, ...]) -> float:
    """Share of the names in `answers` that stand in the prediction as whole words, in the same case."""
    return sum(_holds(prediction, name, re.NOFLAG) for name in _some(answers)) / len(answers)


def first_line(answer: str) -> str:
    """The first line with text: what follows in a chat model's answer explains it, and is no part of it."""
    return next((line.strip() for line in answer.splitlines() if line.strip()), "")


def _squad(prediction: str, answers: tuple[str, ...]) -> dict[str, float]:
    """Raises MissingExtraError without torchmetrics, and ConfigError without gold answers."""
    try:
        from torchmetrics.functional.text import squad
    except ImportError as error:
        raise MissingExtraError("answer scores need torchmetrics: pip install 'ragkv[eval]'") from error
    texts: dict[str, list[str] | list[int]] = {"answer_start": [0] * len(answers), "text": list(_some(answers))}
    gold: dict[str, str | dict[str, list[str] | list[int]]] = {"answers": texts, "id": "0"}
    percent = squad({"prediction_text": prediction, "id": "0"}, gold)
    return {"em": float(percent["exact_match"]) / 100, "f1": float(percent["f1"]) / 100}


def _squad_chinese(prediction: str, answers: tuple[str, ...]) -> dict[str, float]:
    return _squad(_spaced(prediction), tuple(_spaced(answer) for answer in answers))


def _spaced(text: str) -> str:
    words = "".join(character for character in text if not unicodedata.category(character).startswith("P"))
    return UNSPACED.sub(r" \g<0> ", words)


def _holds(text: str, words: str, flags: re.RegexFlag) -> bool:
    return re.search(rf"(?<!\w){re.escape(words)}(?!\w)", text, flags) is not None


def _some(answers: tuple[str, ...]) -> tuple[str, ...]:
    if not answers:
        raise ConfigError("an item has no gold answers; give at least one")
    return answers


METRICS: dict[str, Metric] = {
    "squad": lambda prediction, answers: _squad(first_line(prediction), answers),
    "squad_zh": lambda prediction, answers: _squad_chinese(first_line(prediction), answers),
    "contains": lambda prediction, answers: {"contains": contains(prediction, answers)},
    "entity_share": lambda prediction, answers: {"entity_share": entity_share(prediction, answers)},
}
