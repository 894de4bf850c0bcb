"""Archive what an ingestion pipeline takes in."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.schema import BaseNode, MetadataMode, TransformComponent

from ragkv.catalog.catalog import Catalog
from ragkv.llamaindex.documents import DOCUMENT_KEY, document_name, loaded_model, naming, node_text
from ragkv.llamaindex.llm import HoldsModel
from ragkv.llamaindex.streaming import ShouldStop, in_thread, stop_check

log = logging.getLogger(__name__)


class ArchiveTransform(HoldsModel, TransformComponent):
    """Archives the text of each node and notes the archive's id in its metadata, unseen by embeddings and prompts.

    In front of a node parser it archives whole documents, whose chunks inherit the id; behind it, chunks. The nodes
    given are not changed: copies are returned, so that a document store goes on knowing the originals by their hash.
    Texts that the catalog holds already are not built again; nodes without text get no id.

    A pipeline's cache is keyed by the catalog's folder, model, layout and recipe. On a hit the transform does not run,
    also if the archive was removed meanwhile: `RagKVSynthesizer(on_missing=...)` says what happens then.

    Parameters
    ----------
    catalog
        Opened with its model.
    on_progress
        Receives (nodes done, nodes in all) after each node.
    metadata_mode
        Which metadata is archived with the text; by default none. Give the synthesizer the same.
    """

    catalog_path: str
    catalog_key: dict[str, Any]
    metadata_mode: MetadataMode = MetadataMode.NONE
    _catalog: Catalog = PrivateAttr()
    _on_progress: Callable[[int, int], None] | None = PrivateAttr()

    def __init__(
        self,
        catalog: Catalog,
        *,
        on_progress: Callable[[int, int], None] | None = None,
        metadata_mode: MetadataMode = MetadataMode.NONE,
    ) -> None:
        loaded_model(catalog)
        fields: dict[str, Any] = {
            "catalog_path": str(Path(catalog.path).resolve()),
            "catalog_key": {
                "model": catalog.fingerprint.to_dict(),
                "layout": catalog.layout.to_dict(),
                "recipe": catalog.recipe.to_dict(),
            },
            "metadata_mode": metadata_mode,
        }
        super().__init__(**fields)
        self._catalog, self._on_progress = catalog, on_progress

    @classmethod
    def class_name(cls) -> str:
        """The name that stands in the key of a pipeline's cache."""
        return "ArchiveTransform"

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """Archive `nodes` and return copies that name their archives; what else a pipeline passes is not used."""
        return self._archive(nodes, None)

    async def acall(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """As calling it, without blocking the event loop; ends early when the task is cancelled."""
        return await in_thread(lambda should_stop: self._archive(nodes, should_stop))

    def _archive(self, nodes: Sequence[BaseNode], should_stop: ShouldStop | None) -> list[BaseNode]:
        check = stop_check(should_stop)
        archived = []
        for done, node in enumerate(nodes, start=1):
            text = node_text(node, self.metadata_mode)
            if text:
                with naming(node):
                    entry = self._catalog.add(text, name=document_name(node), on_progress=check)
                archived.append(_with_id(node, entry.id))
            else:
                log.warning("node %r has no text and is not archived", node.node_id)
                archived.append(node)
            if self._on_progress is not None:
                self._on_progress(done, len(nodes))
        return archived


def _with_id(node: BaseNode, document_id: str) -> BaseNode:
    return node.model_copy(
        update={
            "metadata": {**node.metadata, DOCUMENT_KEY: document_id},
            "excluded_embed_metadata_keys": _with_key(node.excluded_embed_metadata_keys),
            "excluded_llm_metadata_keys": _with_key(node.excluded_llm_metadata_keys),
        }
    )


def _with_key(keys: Sequence[str]) -> list[str]:
    return [*keys, *([] if DOCUMENT_KEY in keys else [DOCUMENT_KEY])]
