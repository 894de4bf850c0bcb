"""Documents, questions and loaded tiny models that the archive tests share."""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from pathlib import Path

from ragkv import Archive, LoadedModel, PromptLayout, Recipe, attach, build_archive
from tests.tiny import TEXT, tiny_model, tiny_tokenizer

DOCUMENT = TEXT + "".join(
    f"On day {day} the tide rose {day * 7 % 31} feet and {day * 3} boats came in.\n" for day in range(40)
)
QUESTIONS = ("Who?", "Who kept the book of ships?", "How many cranes were bought from a yard in the north in 1874?")
EVERYTHING = 1 << 20
"""A budget above any document here: every cluster is recalled."""

SMALL = Recipe(tokens_per_cluster=4, window_tokens=16, sink_tokens=4, key_codec="lossless", value_codec="lossless")
CODED = dataclasses.replace(SMALL, key_codec="int4", value_codec="int3")


@lru_cache(maxsize=16)
def loaded(name: str, *, adds_bos: bool = False) -> LoadedModel:
    """A tiny model with ragkv attached, shared by the tests of a process; do not change it."""
    return LoadedModel(model=attach(tiny_model(name)), tokenizer=tiny_tokenizer(adds_bos=adds_bos), name=f"tiny-{name}")


def archive_of(
    folder: Path, *, model: str = "llama", document: str = DOCUMENT, recipe: Recipe = SMALL, adds_bos: bool = False
) -> Archive:
    """Build and open an archive in `folder`."""
    subject = loaded(model, adds_bos=adds_bos)
    build_archive(subject, document, folder, recipe=recipe, layout=PromptLayout.plain())
    return Archive.open(folder, subject)
