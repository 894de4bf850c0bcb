"""Evaluation suites by name: files of public data sets on disk become long documents with questions."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from ragkv.errors import ConfigError
from ragkv.evaluation.data.babi import load_babi
from ragkv.evaluation.data.keyvalue import load_kv75
from ragkv.evaluation.data.squad import load_xquad
from ragkv.evaluation.data.squality import load_squality_entities
from ragkv.evaluation.data.suite import Request, Suite

_LOADERS: dict[str, Callable[[Request], Suite]] = {
    "xquad-en": load_xquad,
    "xquad-zh": load_xquad,
    "kv75": load_kv75,
    "babi-qa1": load_babi,
    "babi-qa2": load_babi,
    "squality-entities": load_squality_entities,
}
SUITES: tuple[str, ...] = tuple(_LOADERS)
"""Names of the suites; each loader says what its texts and questions are, and which files it reads."""


def load_suite(
    name: str,
    folder: str | Path,
    *,
    n_documents: int,
    items_per_document: int,
    document_length: int,
    count_tokens: Callable[[str], int] = len,
    seed: int = 0,
) -> Suite:
    """Documents and questions of one of `SUITES`, the same for the same arguments.

    Parameters
    ----------
    folder
        Holds the data files; each loader names the one or two that it reads.
    items_per_document
        Questions for each document; ``squality-entities`` always asks one.
    document_length
        The most that a document may have, in units of `count_tokens`; characters by default.

    Raises
    ------
    ConfigError
        If the suite is unknown, a file is missing or has another shape, documents cannot be so short, or there are
        fewer documents or questions than asked for.
    """
    if name not in _LOADERS:
        raise ConfigError(f"there is no suite {name!r}; take one of {', '.join(SUITES)}")
    for label, value in (
        ("n_documents", n_documents),
        ("items_per_document", items_per_document),
        ("document_length", document_length),
    ):
        if value < 1:
            raise ConfigError(f"{label} is {value}; give at least 1")
    request = Request(
        name=name,
        folder=Path(folder),
        n_documents=n_documents,
        items_per_document=items_per_document,
        document_length=document_length,
        count_tokens=count_tokens,
        rng=random.Random(seed),
    )
    return _LOADERS[name](request)
