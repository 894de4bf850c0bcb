"""Time to first token of a query engine over archives, beside plain LlamaIndex with the same model and the same nodes.

A text is cut into documents of equal length, which are archived once. Then each question is asked of both engines with
all documents retrieved, so that retrieval costs both alike: plain LlamaIndex puts their text into the prompt and the
model prefills it; RagKVQueryEngine composes their archives and prefills the question.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from llama_index.core import PromptTemplate, get_response_synthesizer
from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.response.schema import StreamingResponse
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from rich.table import Table

from ragkv import LoadedModel, RagkvError, load_model
from ragkv.catalog.catalog import Catalog
from ragkv.cli.common import progress
from ragkv.cli.output import err, out
from ragkv.errors import ConfigError
from ragkv.evaluation.data.own_questions import quotation_questions
from ragkv.evaluation.data.reference_text import default_text
from ragkv.llamaindex import RagKVLLM, RagKVQueryEngine
from ragkv.model.prompt import QUESTION_SLOT, PromptLayout, data_ids
from ragkv.text import read_text


class AllNodes(BaseRetriever):
    """Retrieves every node, in order."""

    def __init__(self, nodes: list[TextNode]) -> None:
        super().__init__()
        self._nodes = nodes

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return [NodeWithScore(node=node, score=1.0) for node in self._nodes]


@dataclass(frozen=True)
class Timed:
    """One length: tokens of all documents, seconds to build, and medians over the questions of both engines' TTFT.

    ``ragkv_query_ttft_s`` is without streaming, where generation has no thread of its own.
    """

    tokens: int
    documents: int
    questions: int
    build_s: float
    plain_ttft_s: float
    ragkv_ttft_s: float
    ragkv_query_ttft_s: float

    @property
    def ratio(self) -> float:
        """How many times sooner the first token comes."""
        return self.plain_ttft_s / self.ragkv_ttft_s


def main(arguments: list[str] | None = None) -> int:
    """Measure every length asked for and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="'demo', a hub id, a local folder or a .gguf file (demo)")
    parser.add_argument("--tokens", type=int, action="append", help="tokens of all documents; repeat for more (8192)")
    parser.add_argument("--documents", type=int, default=8, help="documents that are retrieved (8)")
    parser.add_argument("--questions", type=int, default=3, help="questions asked of both engines (3)")
    parser.add_argument("--text", type=Path, help="text to cut up (the Python reference that ships with Python)")
    parser.add_argument("--dtype", help="bf16, fp16 or fp32 (the checkpoint's own)")
    parser.add_argument("--device", help="cpu, cuda, cuda:1 ... (cuda if there is one)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    options = parser.parse_args(arguments)
    try:
        text = default_text() if options.text is None else read_text(options.text)
        check(options)
        with err.status(f"loading {options.model}") as status:
            model = load_model(options.model, dtype=options.dtype, device=options.device, progress=status.update)
        rows = [
            measure(model, text, n_tokens=n_tokens, n_documents=options.documents, n_questions=options.questions)
            for n_tokens in options.tokens or [8192]
        ]
    except RagkvError as error:
        err.print(f"error: {error}", markup=False, soft_wrap=True)
        return 2
    show(rows, model, as_json=options.json)
    return 0


def check(options: argparse.Namespace) -> None:
    """Refuse numbers that cannot be used before anything is loaded."""
    for name in ("documents", "questions"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name} is {getattr(options, name)}; give at least 1")
    for n_tokens in options.tokens or ():
        if n_tokens < 2 * options.documents:
            raise ConfigError(f"--tokens is {n_tokens} for {options.documents} documents; give more")


def measure(model: LoadedModel, text: str, *, n_tokens: int, n_documents: int, n_questions: int) -> Timed:
    """Archive `n_documents` of `n_tokens` tokens together and time both engines, question by question."""
    texts = cut(model, text, n_tokens=n_tokens, n_documents=n_documents)
    nodes = [TextNode(text=each) for each in texts]
    questions = quotation_questions("\n\n".join(texts), n_questions)
    with tempfile.TemporaryDirectory() as folder, progress(f"{n_tokens:,} tokens") as report:
        catalog = Catalog.create(Path(folder) / "catalog", model)
        started = time.perf_counter()
        for done, each in enumerate(texts, start=1):
            entry = catalog.add(each)
            catalog.archive(entry.id)
            report("archiving", done, len(texts))
        build_s = time.perf_counter() - started
        engines = (plain_engine(model, nodes), RagKVQueryEngine.from_args(AllNodes(nodes), catalog, streaming=True))
        engines[1].query(questions[0])  # what is read on first use is no part of a request
        unstreamed = RagKVQueryEngine.from_args(AllNodes(nodes), catalog, max_new_tokens=2)
        times: tuple[list[float], list[float]] = ([], [])
        queried = []
        for done, question in enumerate(questions, start=1):
            for own, engine in zip(times, engines, strict=True):
                own.append(time_to_first_token(engine, question))
            queried.append(time_of_query(unstreamed, question))
            report("asking", done, len(questions))
    plain_s, ragkv_s, query_s = map(statistics.median, (*times, queried))
    return Timed(n_tokens, n_documents, n_questions, build_s, plain_s, ragkv_s, query_s)


def cut(model: LoadedModel, text: str, *, n_tokens: int, n_documents: int) -> list[str]:
    """The first `n_tokens` tokens of `text` as documents of equal length."""
    ids = data_ids(model.tokenizer, text)
    if len(ids) < n_tokens:
        raise ConfigError(f"the text has {len(ids):,} tokens and {n_tokens:,} are wanted; give a longer --text")
    length = n_tokens // n_documents
    return [str(model.tokenizer.decode(ids[at : at + length])) for at in range(0, length * n_documents, length)]


def plain_engine(
    model: LoadedModel, nodes: list[TextNode], *, layout: PromptLayout | None = None, max_new_tokens: int = 64
) -> BaseQueryEngine:
    """LlamaIndex's own engine: the texts of the nodes in the prompt of the same layout, through the same model."""
    layout = layout or model.layout
    template = f"{layout.prefix}{{context_str}}{layout.question.replace(QUESTION_SLOT, '{query_str}')}"
    synthesizer = get_response_synthesizer(
        llm=RagKVLLM(model, stop=layout.stop, max_new_tokens=max_new_tokens),
        text_qa_template=PromptTemplate(template),
        streaming=True,
    )
    return RetrieverQueryEngine(AllNodes(nodes), response_synthesizer=synthesizer)


def time_to_first_token(engine: BaseQueryEngine, question: str) -> float:
    """Seconds from the question to the first piece of the answer."""
    started = time.perf_counter()
    response = engine.query(question)
    if not isinstance(response, StreamingResponse) or response.response_gen is None:
        raise ConfigError(f"the engine answered with a {type(response).__name__}; it should stream")
    next(iter(response.response_gen), "")
    seconds = time.perf_counter() - started
    for _ in response.response_gen:
        pass
    return seconds


def time_of_query(engine: RagKVQueryEngine, question: str) -> float:
    """Seconds to the first token of an answer that is not streamed, finding its documents included."""
    found = (engine.query(question).metadata or {})["ragkv"]
    return float(found["resolve_s"] + found["ttft_s"])


def show(rows: list[Timed], model: LoadedModel, *, as_json: bool) -> None:
    """Print what was measured with what it was measured on."""
    versions = {name: version(name) for name in ("torch", "transformers", "llama-index-core")}
    if as_json:
        lengths = [{**asdict(row), "ratio": row.ratio} for row in rows]
        out.print_json(
            json.dumps({"model": model.name, "threads": torch.get_num_threads(), **versions, "lengths": lengths})
        )
        return
    table = Table(title=f"{model.name}, time to first token, medians")
    for title in (
        "tokens",
        "documents",
        "questions",
        "archiving once",
        "plain LlamaIndex",
        "ragkv",
        "sooner",
        "not streamed",
    ):
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(
            f"{row.tokens:,}",
            str(row.documents),
            str(row.questions),
            f"{row.build_s:.1f} s",
            f"{row.plain_ttft_s:.2f} s",
            f"{row.ragkv_ttft_s:.2f} s",
            f"{row.ratio:.0f}x",
            f"{row.ragkv_query_ttft_s:.2f} s",
        )
    out.print(table)
    named = ", ".join(f"{name} {number}" for name, number in versions.items())
    out.print(f"{torch.get_num_threads()} threads, Python {platform.python_version()}, {named}", style="dim")


if __name__ == "__main__":
    sys.exit(main())
