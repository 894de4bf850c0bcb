"""Build the golden archives of the current format version: ``python -m tests.make_golden``.

The tiny model is stored beside them, so that reading a golden archive never depends on how random weights are drawn or
a tokenizer is trained; all versions share it. Existing golden archives are refused, not replaced: they guard what older
releases wrote.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from pathlib import Path

import torch

from ragkv import Archive, ArchiveCache, LoadedModel, PromptLayout, Recipe, attach, build_archive
from ragkv.archive.manifest import FORMAT_VERSION
from ragkv.archive.publish import LOCK_FILE
from ragkv.catalog.catalog import Catalog
from tests.tiny import TEXT, tiny_model, tiny_tokenizer

FOLDER = Path(__file__).resolve().parent.parent / "indexes" / "golden"
MODEL = FOLDER / "model"
EXPECTED = FOLDER / f"v{FORMAT_VERSION}-expected.json"
OLD = {"v1": 1, "v2": 2}
"""Manifests of versions that are no longer read, and their number."""

DOCUMENT = TEXT
QUESTION = "Who kept the book of ships?"
CODED = Recipe(
    tokens_per_cluster=4,
    window_tokens=16,
    sink_tokens=4,
    exact_codec="int8",
    key_codec="int3",
    value_codec="int3",
    key_prototype_bits=4,
    value_prototype_bits=2,
)
"""Every codec is stated: the defaults may change, and what these archives hold may not."""

LOSSLESS = dataclasses.replace(CODED, exact_codec="lossless", key_codec="lossless", value_codec="lossless")
ARCHIVES = {
    f"v{FORMAT_VERSION}": (torch.float32, LOSSLESS),
    f"v{FORMAT_VERSION}-bfloat16": (torch.bfloat16, LOSSLESS),
    f"v{FORMAT_VERSION}-int3": (torch.bfloat16, CODED),
}
CATALOG = f"v{FORMAT_VERSION}-catalog"
CATALOG_TEXTS = {"ferry": TEXT, "barge": TEXT.replace("ferry", "barge")}
EVERYTHING, FEW = 1 << 20, 16
N_NEW = 12
N_LOGITS = 8


def load_golden_model(dtype: torch.dtype = torch.float32) -> LoadedModel:
    """The stored tiny model under the name that its archives record; its weights are exact in bfloat16."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=dtype, local_files_only=True, use_safetensors=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(MODEL, local_files_only=True)
    return LoadedModel(model=attach(model), tokenizer=tokenizer, name="golden")


@torch.no_grad()
def first_logits(archive: Archive, budget: int) -> list[float]:
    """The first few logits of the token that follows the question."""
    inputs, cache = archive.questions([QUESTION]), ArchiveCache(archive, budget=budget)
    logits: list[float] = archive.model.model(**inputs, cache=cache).logits[0, -1, :N_LOGITS].tolist()
    return logits


def greedy_tokens(archive: Archive) -> list[int]:
    """A greedy answer with every cluster recalled."""
    inputs = archive.questions([QUESTION])
    out = archive.model.model.generate(
        **inputs,
        cache=ArchiveCache(archive, budget=EVERYTHING),
        max_new_tokens=N_NEW,
        min_new_tokens=N_NEW,
        do_sample=False,
    )
    return out[0, inputs["input_ids"].shape[1] :].tolist()


def all_ids(archive: Archive) -> list[int]:
    """Document and question as the model would prefill them."""
    ids: list[int] = archive.tokens.ids.tolist() + archive.questions([QUESTION])["input_ids"][0].tolist()
    return ids


def main() -> None:
    standing = [path.name for path in (EXPECTED, *(FOLDER / name for name in (*ARCHIVES, CATALOG))) if path.exists()]
    if standing:
        sys.exit(f"{', '.join(standing)} stand in {FOLDER.name} already; raise FORMAT_VERSION, or delete them yourself")
    try:
        _make()
    except BaseException:
        for name in (*ARCHIVES, CATALOG):
            shutil.rmtree(FOLDER / name, ignore_errors=True)
        raise


def _make() -> None:
    if not MODEL.exists():
        tiny_model("llama").to(torch.bfloat16).save_pretrained(MODEL)
        tiny_tokenizer().save_pretrained(MODEL)
    reader = load_golden_model()
    expected: dict[str, object] = {"question": QUESTION}
    for name, (dtype, recipe) in ARCHIVES.items():
        build_archive(
            load_golden_model(dtype),
            DOCUMENT,
            FOLDER / name,
            recipe=recipe,
            layout=PromptLayout.plain(),
            document_name="ferry",
        )
        expected[name] = _answers(Archive.open(FOLDER / name, reader))
    writer = load_golden_model(torch.bfloat16)
    catalog = Catalog.create(FOLDER / CATALOG, writer, layout=PromptLayout.plain(), recipe=CODED)
    for name, text in CATALOG_TEXTS.items():
        entry = catalog.add(text, name=name)
        expected[f"{CATALOG}/{name}"] = {"id": entry.id, **_answers(Archive.open(entry.path, reader))}
    catalog.add(TEXT, name="the ferry again")
    for lock in FOLDER.rglob(LOCK_FILE):
        lock.unlink()
    EXPECTED.write_text(json.dumps(expected, indent=1) + "\n", encoding="utf-8")


def _answers(archive: Archive) -> dict[str, object]:
    """What the tests compare a golden archive's answers with."""
    return {
        "logits_everything": first_logits(archive, EVERYTHING),
        "logits_few": first_logits(archive, FEW),
        "greedy_tokens": greedy_tokens(archive),
    }


if __name__ == "__main__":
    main()
