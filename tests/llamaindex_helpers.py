"""A deterministic embedding, a catalog of three documents and models that are slow, fail or say what they are told."""

from __future__ import annotations

import hashlib
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from llama_index.core import VectorStoreIndex
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.schema import BaseNode, TextNode

from ragkv import LoadedModel, PromptLayout, attach
from ragkv.catalog.catalog import Catalog
from ragkv.llamaindex import DOCUMENT_KEY, ArchiveTransform
from ragkv.recall.composition import Composition
from tests.archives import SMALL
from tests.tiny import EOS_ID, TEXT, tiny_model, tiny_tokenizer

TEXTS = (
    "The lighthouse stands on the northern cliff. " + TEXT[:420],
    "The cranes of the harbour came from a yard. " + TEXT[200:700],
    "The museum shows a green book of ships and names. " + TEXT[100:560],
)
NAMES = ("lighthouse.txt", "cranes.txt", "museum.txt")
QUESTION = "Who kept the lighthouse on the cliff?"
N_NEW = 10


class WordEmbedding(BaseEmbedding):
    """Words, hashed into 64 places, counted and normalised: the same on every machine."""

    def _get_text_embedding(self, text: str) -> list[float]:
        counts = [0.0] * 64
        for word in re.findall(r"\w+", text.lower()):
            counts[hashlib.sha256(word.encode()).digest()[0] % 64] += 1.0
        length = math.sqrt(sum(count * count for count in counts)) or 1.0
        return [count / length for count in counts]

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)


def fresh() -> LoadedModel:
    """A model of this test's own, with the weights of `tests.archives.loaded("llama")`."""
    return LoadedModel(model=attach(tiny_model("llama")), tokenizer=tiny_tokenizer(), name="tiny-llama")


def make_catalog(path: Path, model: LoadedModel) -> Catalog:
    return Catalog.create(path, model, layout=PromptLayout.plain(), recipe=SMALL)


def text_nodes() -> list[TextNode]:
    """One node for each of `TEXTS`, with ids that stay the same."""
    return [
        TextNode(text=text, id_=f"node-{place}", metadata={"file_name": NAMES[place]})
        for place, text in enumerate(TEXTS)
    ]


def archived_nodes(catalog: Catalog) -> list[BaseNode]:
    return list(ArchiveTransform(catalog)(text_nodes()))


def retriever_of(nodes: Sequence[BaseNode], *, top_k: int = 2) -> BaseRetriever:
    index = VectorStoreIndex(list(nodes), embed_model=WordEmbedding())
    return index.as_retriever(similarity_top_k=top_k)


def composition_of(catalog: Catalog, sources: Sequence[Any]) -> Composition:
    """The archives of source nodes, in their order."""
    return Composition([catalog.archive(source.node.metadata[DOCUMENT_KEY]) for source in sources])


@contextmanager
def hooked(model: LoadedModel, before: Callable[[int], None]) -> Iterator[list[int]]:
    """Call ``before(n)`` in front of the model's forward call number n, from 0; gives the calls so far."""
    calls: list[int] = []

    def hook(*_: object) -> None:
        calls.append(len(calls))
        before(calls[-1])

    handle = model.model.get_decoder().register_forward_pre_hook(hook)  # documents are prefilled without the head
    try:
        yield calls
    finally:
        handle.remove()


def slow(model: LoadedModel, seconds: float = 0.03) -> Any:
    return hooked(model, lambda _call: time.sleep(seconds))


class BrokenError(Exception):
    """What `failing` raises."""


def failing(model: LoadedModel, at: int = 2) -> Any:
    """Fails where the token number `at` is worked out, from 0."""

    def before(call: int) -> None:
        if call == at:
            raise BrokenError(f"call {call}")

    return hooked(model, before)


@contextmanager
def saying(model: LoadedModel, text: str) -> Iterator[None]:
    """The model answers `text`, whatever it is asked."""
    script = [*model.tokenizer(text, add_special_tokens=False)["input_ids"], EOS_ID]
    said: list[int] = []

    def hook(_module: object, _inputs: object, output: Any) -> None:
        output.logits[:, -1] = -torch.inf
        output.logits[:, -1, script[min(len(said), len(script) - 1)]] = 0.0
        said.append(1)

    handle = model.model.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()
