"""Key-value records: one of many pairs of UUIDs is looked up."""

from __future__ import annotations

import json

from ragkv.evaluation.data.suite import EvalDocument, Item, Request, Suite, evenly

KV_INTRODUCTION = "The JSON object below holds {n_pairs} keys, one on each line with its value."
KV_QUESTION = 'What is the value of the key "{key}"?'


def load_kv75(request: Request) -> Suite:
    """Text: `KV_INTRODUCTION`, then all pairs of a record of ``kv75_100.jsonl`` as JSON. Question: `KV_QUESTION`.

    The record's own key is asked first, then others at even distances.
    """
    records = request.read("kv75_100.jsonl", "key-value records, one a line with 'ordered_kv_records'", _kv_records)
    chosen = request.choose(list(enumerate(records, 1)), "records")
    return Suite(
        name=request.name,
        metric="contains",
        documents=tuple(_kv_document(request, number, *record) for number, record in chosen),
        description="75 UUID keys with UUID values; the value of a key is looked up; scored by whether it is given.",
        max_new_tokens=96,
    )


def _kv_records(text: str) -> list[tuple[str, dict[str, str]]]:
    """(key to ask, all pairs) of each record."""
    records = []
    for number, line in enumerate(text.rstrip().split("\n"), 1):
        record = json.loads(line)
        key, pairs = record["key"], {str(key): str(value) for key, value in record["ordered_kv_records"]}
        if pairs.get(key) != record["value"]:
            raise ValueError(f"the pair to look up on line {number} is not among the others")
        records.append((key, pairs))
    return records


def _kv_document(request: Request, number: int, key: str, pairs: dict[str, str]) -> EvalDocument:
    lines = ",\n ".join(f'"{name}": "{value}"' for name, value in pairs.items())
    text = f"{KV_INTRODUCTION.format(n_pairs=len(pairs))}\n{{{lines}}}"
    name = f"{request.name}-{number:03d}"
    request.fitting(lambda n: text, 1, f"document {name!r}")
    others = [other for other in pairs if other != key]
    asked = (key, *evenly(others, request.items_per_document - 1, f"document {name!r}"))
    items = []
    for one in asked:
        start = text.index(f'"{one}": "') + len(f'"{one}": "')
        items.append(Item(KV_QUESTION.format(key=one), (pairs[one],), ((start, start + len(pairs[one])),)))
    return EvalDocument(name, text, tuple(items))
