"""Scores of an answer against the gold answers: numbers in [0, 1], the best over several gold answers.

English extractive answers are scored by the rule of SQuAD v1.1 (Rajpurkar et al. 2016, ``evaluate-v1.1.py``: lower
case, no ASCII punctuation, no articles, single spaces) as torchmetrics implements it; one difference is that two texts
which are both empty after that count as equal, as in SQuAD v2. Chinese answers follow MLQA (Lewis et al. 2020): all
punctuation goes and each CJK character is a token.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ragkv.errors import ConfigError, MissingExtraError

# Han with extension A and the compatibility block, and kana: scripts written without spaces.
_CJK = re.compile("([\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff])")

Metric = Callable[[str, tuple[str, ...]], dict[str, float]]


@dataclass(frozen=True)
class MeanScore:
    """A mean over items and its standard error, items of one document taken as one cluster.

    ``standard_error`` is None for fewer than two documents, which say nothing about how documents differ.
    """

    value: float
    standard_error: float | None
    n_items: int
    n_documents: int


def exact_match(prediction: str, answers: tuple[str, ...]) -> float:
    """1 if the prediction equals a gold answer after SQuAD normalisation, else 0."""
    return _squad(prediction, answers)["em"]


def f1(prediction: str, answers: tuple[str, ...]) -> float:
    """Harmonic mean of precision and recall of words after SQuAD normalisation."""
    return _squad(prediction, answers)["f1"]


def exact_match_chinese(prediction: str, answers: tuple[str, ...]) -> float:
    """As `exact_match`, without any punctuation and with each CJK character a token."""
    return _squad_chinese(prediction, answers)["em"]


def f1_chinese(prediction: str, answers: tuple[str, ...]) -> float:
    """As `f1`, without any punctuation and with each CJK character a token."""
    return _squad_chinese(prediction, answers)["f1"]


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


def mean_score(scores: Sequence[float], documents: Sequence[str]) -> MeanScore:
    """Mean of `scores` with a standard error that knows which document each item belongs to.

    Questions about one document share its text and its archive, so they are not independent; the error is the
    cluster-robust one of a mean, with the factor n / (n - 1) for n documents.

    Raises
    ------
    ConfigError
        If there are no scores, or not one document name for each.
    """
    if not scores or len(scores) != len(documents):
        raise ConfigError(f"{len(scores)} scores and {len(documents)} document names: give one name a score")
    mean = math.fsum(scores) / len(scores)
    off_by_document = dict.fromkeys(documents, 0.0)
    for score, document in zip(scores, documents, strict=True):
        off_by_document[document] += score - mean
    n_documents = len(off_by_document)
    error = None
    if n_documents > 1:
        squares = math.fsum(off**2 for off in off_by_document.values())
        error = math.sqrt(squares * n_documents / (n_documents - 1)) / len(scores)
    return MeanScore(value=mean, standard_error=error, n_items=len(scores), n_documents=n_documents)


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
    return _CJK.sub(r" \1 ", words)


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
