"""Means with their standard errors, differences between subjects that answered the same questions, and quantiles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ragkv.errors import ConfigError


@dataclass(frozen=True)
class MeanScore:
    """A mean over items and its standard error, items of one document taken as one cluster.

    ``standard_error`` is None for fewer than two documents, which say nothing about how documents differ.
    """

    value: float
    standard_error: float | None
    n_items: int
    n_documents: int


@dataclass(frozen=True)
class Quantiles:
    """Median and tail of some numbers, in their unit; between two of them, linear."""

    median: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quantiles:
        return cls(*(float(value) for value in np.quantile(np.asarray(values, dtype=np.float64), (0.5, 0.9, 0.99))))


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


def clustered_error(clusters: Sequence[Sequence[float]]) -> float:
    """Standard error of the mean over all values, those of one cluster (as the positions of a question) as one."""
    counts = np.array([len(values) for values in clusters], dtype=np.float64)
    sums = np.array([math.fsum(values) for values in clusters])
    mean = sums.sum() / counts.sum()
    return float(np.sqrt(np.square(sums - mean * counts).sum()) / counts.sum())


def standard_error(values: Sequence[float], *, ddof: int = 1) -> float:
    """Of the mean of independent values; 0 for too few to tell. With `ddof` 0, sqrt(p (1 - p) / n) of a share p."""
    if len(values) <= ddof:
        return 0.0
    return float(np.std(np.asarray(values, dtype=np.float64), ddof=ddof)) / math.sqrt(len(values))


def paired_error(one: Sequence[float], other: Sequence[float]) -> float:
    """Standard error of the mean difference of two, measured on the same questions in the same order."""
    return standard_error([a - b for a, b in zip(one, other, strict=True)])
