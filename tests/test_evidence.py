"""What an answer looked at: the attention on each token of its documents, as dense attention would give it."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import normalizers

import ragkv.recall.attention
from ragkv import Archive, ArchiveCache, PromptLayout, build_archive
from ragkv.answer.ask import ask
from ragkv.answer.evidence import AttentionMass
from ragkv.archive.snapshot import read_snapshot
from ragkv.errors import ConfigError
from ragkv.recall.attention import BlockRecall, PartShare
from ragkv.recall.composition import Composition, Document
from ragkv.recall.placed import PlacedLayer
from ragkv.recall.prefilled import prefill_document
from ragkv.recall.recompute import recompute
from ragkv.recipe import RecallPolicy
from tests.archives import CODED, DOCUMENT, EVERYTHING, QUESTIONS, SMALL, archive_of, loaded
from tests.dense import stock_copy
from tests.tiny import tiny_tokenizer

N_NEW = 4
TEXTS = (DOCUMENT[:700], "Agnes Moore kept the lighthouse.", DOCUMENT[700:1500])


def measured(
    source: Document | Composition, *, budget: int = EVERYTHING, policy: RecallPolicy | None = None, n_new: int = N_NEW
) -> tuple[AttentionMass, list[int]]:
    """Attention of one greedy answer, and its tokens."""
    composition = Composition.of(source)
    mass = AttentionMass(composition)
    inputs = composition.questions([QUESTIONS[1]])
    cache = ArchiveCache(composition, policy=policy or RecallPolicy(budget=budget), observer=mass)
    out = composition.model.model.generate(
        **inputs, cache=cache, max_new_tokens=n_new, min_new_tokens=n_new, do_sample=False
    )
    return mass, out[0, inputs["input_ids"].shape[1] :].tolist()


@torch.no_grad()
def dense_mass(archive: Archive, answer: list[int]) -> torch.Tensor:
    """Attention of the stock model on the archived tokens, from the rows that predict the answer: (n_layers, n)."""
    question = archive.questions([QUESTIONS[1]])["input_ids"][0].tolist()
    ids = [*archive.tokens.ids.tolist(), *question, *answer]
    found = stock_copy(archive.model.model)(torch.tensor([ids]), use_cache=False, output_attentions=True).attentions
    rows = slice(archive.n_tokens + len(question) - 1, len(ids) - 1)
    return torch.stack([layer[0, :, rows, : archive.n_tokens].double().sum((0, 1)) for layer in found])


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "gpt_oss", "glm"])
@pytest.mark.parametrize("layers", [(), (1,), (0, 1, 2)], ids=("recalled", "one dense", "dense"))
def test_everything_recalled_is_the_attention_of_the_model(name: str, layers: tuple[int, ...], tmp_path: Path) -> None:
    """Tokens of a layer that a policy keeps dense stand in another order than those that are recalled."""
    archive = archive_of(tmp_path / "archive", model=name, document=TEXTS[0])
    mass, answer = measured(archive, policy=RecallPolicy(budget=EVERYTHING, dense_layers=layers))
    found, expected = mass.by_layer(0), dense_mass(archive, answer)
    for index, layer in enumerate(archive.layers):
        if layer.window is None:
            torch.testing.assert_close(found[index], expected[index], atol=1e-4, rtol=0)
        else:
            assert float(found[index].sum()) == 0


def test_a_short_document_of_exact_tokens_is_counted_too(tmp_path: Path) -> None:
    archive = archive_of(tmp_path / "archive", document=TEXTS[1])
    mass, answer = measured(archive)
    torch.testing.assert_close(mass.by_layer(0), dense_mass(archive, answer), atol=1e-4, rtol=0)


def test_what_is_estimated_is_spread_over_the_cluster(tmp_path: Path) -> None:
    """One cluster is recalled per head; the tokens of each other one have equal weights per head."""
    archive = archive_of(tmp_path / "archive", document=TEXTS[0])
    mass, _ = measured(archive, budget=1, n_new=1)
    table, rows = archive.layers[0].clusters, mass.by_row(0, 0)
    assert table is not None
    assert rows is not None
    rows = rows[:, : table.n_tokens]
    for head, sizes in enumerate(table.sizes.tolist()):
        groups = rows[head].split(sizes)
        uneven = [index for index, group in enumerate(groups) if len(group) > 1 and float(group.std()) > 1e-12]
        assert len(uneven) <= 1
    assert 0 < float(rows.sum()) < 4


class SpreadEachRow(AttentionMass):
    """The same sum by the plain way: each row is spread over all tokens at once, and kept by layer and document."""

    def __init__(self, composition: Composition) -> None:
        super().__init__(composition)
        self.rows: dict[tuple[int, int], list[torch.Tensor]] = {}

    def on_recall(self, layer: PlacedLayer, recall: BlockRecall, *, begins: bool) -> None:
        super().on_recall(layer, recall, begins=begins)
        for place, share in enumerate(recall.shares):
            kept = self.rows.setdefault((layer.index, place), [])
            if not begins:
                kept.pop()  # an earlier block of the same call
            kept.append(self.spread(share))

    @staticmethod
    def spread(share: PartShare) -> torch.Tensor:
        held = share.held[:, -1].sum(1).double()
        table = share.part.layer.clusters
        if table is None:
            return held
        tokens = []
        for head, sizes in enumerate(table.sizes.tolist()):
            each = [held[head, cluster].repeat(size) / size for cluster, size in enumerate(sizes) if size]
            first = [sum(sizes[:cluster]) for cluster in range(len(sizes))]
            tokens.append(torch.cat(each))
            if share.choice is not None and share.near is not None:
                weights, at = share.near[head, -1].sum(0).double(), 0
                for cluster in share.choice.hit_ids()[head, -1].tolist():
                    if cluster >= 0:
                        rows = slice(first[cluster], first[cluster] + sizes[cluster])
                        tokens[-1][rows] += weights[at : at + sizes[cluster]]
                        at += sizes[cluster]
        return torch.cat([torch.stack(tokens), held[:, table.n_clusters :]], dim=1)


@pytest.mark.parametrize("budget", [1, 30, 120, EVERYTHING])
@pytest.mark.parametrize("block_floats", [1, 1 << 22])
def test_spreading_once_in_the_end_gives_what_spreading_each_row_does(
    budget: int, block_floats: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ragkv.recall.attention, "_BLOCK_FLOATS", block_floats)
    archives = [archive_of(tmp_path / str(place), document=text, recipe=CODED) for place, text in enumerate(TEXTS)]
    composition = Composition(archives)
    mass = SpreadEachRow(composition)
    cache = ArchiveCache(composition, budget=budget, observer=mass)
    composition.model.model.generate(
        **composition.questions([QUESTIONS[1]]), cache=cache, max_new_tokens=12, min_new_tokens=12, do_sample=False
    )
    assert mass.rows
    for (index, place), rows in mass.rows.items():
        torch.testing.assert_close(mass.by_row(index, place), torch.stack(rows).sum(0), atol=1e-9, rtol=0)


@pytest.mark.parametrize("budget", [8, EVERYTHING])
def test_no_attention_is_lost(tmp_path: Path, budget: int) -> None:
    """Documents, prefix, question and answer together get all of it, from every head and row."""
    archives = [archive_of(tmp_path / str(place), document=text, recipe=CODED) for place, text in enumerate(TEXTS)]
    composition = Composition(archives)
    mass = AttentionMass(composition)
    local = LocalMass()
    inputs = composition.questions([QUESTIONS[1]])
    cache = ArchiveCache(composition, budget=budget, observer=mass)
    with torch.no_grad():
        composition.model.model(**inputs, cache=cache)
        composition.model.model(
            **composition.questions([QUESTIONS[1]]), cache=ArchiveCache(composition, budget=budget, observer=local)
        )
    for index in range(len(composition.shape.layers)):
        held = sum(float(mass.by_layer(place)[index].sum()) for place in range(3))
        assert held == pytest.approx(local.on_documents[index], rel=1e-5)


class LocalMass:
    """The attention on documents and prefix, straight from the weights."""

    def __init__(self) -> None:
        self.on_documents: dict[int, float] = {}

    def on_recall(self, layer: object, recall: object, *, begins: bool) -> None:
        total = 0.0
        for share in recall.shares:
            total += float(share.held[:, -1].sum())
            total += 0.0 if share.near is None else float(share.near[:, -1].sum())
        self.on_documents[layer.index] = total


def test_recomputed_tokens_count_for_their_document(tmp_path: Path) -> None:
    recipe = dataclasses.replace(SMALL, sink_tokens=60)
    archives = [archive_of(tmp_path / str(place), document=text, recipe=recipe) for place, text in enumerate(TEXTS)]
    repaired = recompute(Composition(archives), 6)
    mass, _ = measured(repaired)
    prefix = archives[0].prefix_tokens
    for place in (1, 2):
        first = mass.by_layer(place)[:, prefix : prefix + 6]
        assert bool((first.sum(0) > 0).all())
        assert float(mass.by_layer(place)[:, :prefix].sum()) == 0


def test_evidence_names_documents_shares_and_passages(tmp_path: Path) -> None:
    archives = [archive_of(tmp_path / f"text{place}", document=text) for place, text in enumerate(TEXTS)]
    prefilled = prefill_document(archives[0].model, "The tide rose.", layout=archives[0].layout, name="tide")
    answer = ask(Composition([*archives, prefilled]), QUESTIONS[1], max_new_tokens=4, evidence=True)
    assert [document.name for document in answer.evidence] == ["text0", "text1", "text2", "tide"]
    assert [document.text for document in answer.evidence] == [*TEXTS, "The tide rose."]
    assert sum(document.share for document in answer.evidence) == pytest.approx(1)
    for document in answer.evidence:
        assert sum(weight for _, _, weight in document.spans) == pytest.approx(document.share)
        assert "".join(document.text[start:end] for start, end, _ in document.spans) == document.text
        for passage in document.passages:
            assert passage.text == document.text[passage.start : passage.end]
    assert answer.to_dict()["evidence"][3]["document"] == "tide"


def test_evidence_does_not_change_the_answer(tmp_path: Path) -> None:
    archive = archive_of(tmp_path / "archive", document=TEXTS[0])
    plain, looked = (ask(archive, QUESTIONS[1], max_new_tokens=8, budget=20, evidence=e) for e in (False, True))
    assert plain.token_ids == looked.token_ids
    assert plain.evidence == ()


def test_dense_answers_have_no_evidence(tmp_path: Path) -> None:
    archive = archive_of(tmp_path / "archive", document=TEXTS[0])
    with pytest.raises(ConfigError, match="leave mode at 'recall'"):
        ask(archive, "Who?", mode="dense", evidence=True)


def test_offsets_follow_the_text_where_a_tokenizer_changes_it(tmp_path: Path) -> None:
    """A manifest of another text: what its tokens decode to is shown, with offsets of its own."""
    archive = archive_of(tmp_path / "archive", document=TEXTS[0])
    other = dataclasses.replace(archive.manifest, document_sha256="0" * 64)
    snapshot = dataclasses.replace(read_snapshot(archive.path), manifest=other)
    changed = Archive(snapshot, archive.model, archive.layers)
    assert changed.text == TEXTS[0]
    assert [changed.text[start:end] for start, end in changed.spans] == [TEXTS[0][s:e] for s, e in archive.spans]


def test_a_character_of_several_tokens_is_whole_where_a_tokenizer_changes_texts(tmp_path: Path) -> None:
    """An accent that the tokenizer composes: its text is another, and emoji of four tokens each stay emoji."""
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    model = dataclasses.replace(loaded("llama"), tokenizer=tokenizer)
    document = "cafe\u0301 \U0001f600\U0001f600 of more. " * 20
    build_archive(model, document, tmp_path / "archive", recipe=SMALL, layout=PromptLayout.plain())
    archive = Archive.open(tmp_path / "archive", model)
    assert archive.text == document.replace("e\u0301", "\u00e9")
    starts = [start for start, _ in archive.spans]
    assert starts == sorted(starts)
    assert {archive.text[start:end] for start, end in archive.spans} >= {"\U0001f600"}
    assert all("\ufffd" not in archive.text[start:end] for start, end in archive.spans)


def test_an_open_archive_needs_its_files_no_more(tmp_path: Path) -> None:
    archive = archive_of(tmp_path / "archive", document=TEXTS[0])
    expected = ask(archive_of(tmp_path / "other", document=TEXTS[0]), QUESTIONS[1], max_new_tokens=4, evidence=True)
    shutil.rmtree(tmp_path / "archive")
    found = ask(archive, QUESTIONS[1], max_new_tokens=4, evidence=True)
    assert found.text == expected.text
    assert found.evidence[0].spans == expected.evidence[0].spans
    assert ask(archive, QUESTIONS[1], max_new_tokens=4, policy=RecallPolicy(dense_layers=(0, 1, 2))).text


def test_a_question_beyond_the_context_is_refused(tmp_path: Path) -> None:
    archive = archive_of(tmp_path / "archive", document=TEXTS[0])
    with pytest.raises(ConfigError, match="the documents leave"):
        ask(archive, "Who? " * 3000)


def test_generation_ends_when_nobody_wants_the_rest(tmp_path: Path) -> None:
    archive = archive_of(tmp_path / "archive", document=TEXTS[0])
    asked: list[int] = []

    def should_stop() -> bool:
        asked.append(1)
        return len(asked) == 3

    answer = ask(archive, QUESTIONS[1], max_new_tokens=20, should_stop=should_stop)
    assert len(answer.token_ids) == 3
