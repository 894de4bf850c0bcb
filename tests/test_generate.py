"""Stock `generate` over an archive: sampled, beams, batches, threads, streams; and the text that is shown."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel, TextIteratorStreamer

from ragkv import Archive, ArchiveCache, LoadedModel, PromptLayout, attach, build_archive
from ragkv.answer.ask import ask
from ragkv.answer.stream import AnswerStreamer
from ragkv.model.prompt import question_ids
from tests.archives import DOCUMENT, EVERYTHING, QUESTIONS, SMALL, archive_of
from tests.dense import stock_copy
from tests.tiny import EOS_ID, TEXT, tiny_model, tiny_tokenizer

MODELS = ("llama", "gemma2", "gpt_oss", "qwen2")
PARTIAL = 24
N_NEW = 8
SHORT = DOCUMENT[:900]


@pytest.fixture(scope="module", params=MODELS)
def archive(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Archive:
    return archive_of(tmp_path_factory.mktemp("generate") / "archive", model=request.param, document=SHORT)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Archive:
    return archive_of(tmp_path_factory.mktemp("generate") / "llama", document=SHORT)


def answers(archive: Archive, questions: list[str], *, budget: int = EVERYTHING, **options: object) -> list[list[int]]:
    """Answer tokens of stock generate through the archive, one list per returned sequence."""
    inputs = archive.questions(questions)
    options = {"max_new_tokens": N_NEW, "min_new_tokens": N_NEW, "do_sample": False, **options}
    out = archive.model.model.generate(**inputs, cache=ArchiveCache(archive, budget=budget), **options)
    return out[:, inputs["input_ids"].shape[1] :].tolist()


def dense_answers(archive: Archive, question: str, stock: PreTrainedModel, **options: object) -> list[list[int]]:
    """As `answers`, with the stock model over all token ids."""
    ids = archive.tokens.ids.tolist() + archive.questions([question])["input_ids"][0].tolist()
    options = {"max_new_tokens": N_NEW, "min_new_tokens": N_NEW, "do_sample": False, **options}
    prompt = torch.tensor([ids])
    cache = DynamicCache(config=stock.config)
    out = stock.generate(prompt, attention_mask=torch.ones_like(prompt), cache=cache, **options)
    return out[:, len(ids) :].tolist()


def seeded(seed: int, run: Callable[[], list[list[int]]]) -> list[list[int]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return run()


# Ways to generate


def test_sampling_with_a_seed_equals_dense(archive: Archive) -> None:
    stock = stock_copy(archive.model.model)
    options = {"do_sample": True, "temperature": 1.5, "top_k": 0}
    ours = seeded(3, lambda: answers(archive, [QUESTIONS[1]], **options))
    assert ours == seeded(3, lambda: dense_answers(archive, QUESTIONS[1], stock, **options))
    assert ours != seeded(4, lambda: answers(archive, [QUESTIONS[1]], **options))


def test_several_sampled_sequences_equal_dense(archive: Archive) -> None:
    stock = stock_copy(archive.model.model)
    options = {"do_sample": True, "temperature": 1.5, "num_return_sequences": 3}
    ours = seeded(5, lambda: answers(archive, [QUESTIONS[1]], **options))
    assert ours == seeded(5, lambda: dense_answers(archive, QUESTIONS[1], stock, **options))
    assert len({tuple(row) for row in ours}) > 1


def test_two_beams_equal_dense(archive: Archive) -> None:
    stock = stock_copy(archive.model.model)
    options = {"num_beams": 2, "num_return_sequences": 2}
    assert answers(archive, [QUESTIONS[1]], **options) == dense_answers(archive, QUESTIONS[1], stock, **options)


def test_beams_of_a_padded_batch_equal_each_question_alone(llama: Archive) -> None:
    together = answers(llama, [*QUESTIONS], budget=PARTIAL, num_beams=2)
    assert together == [answers(llama, [text], budget=PARTIAL, num_beams=2)[0] for text in QUESTIONS]


def test_an_iterator_streamer_gives_the_text_of_the_answer(llama: Archive) -> None:
    tokenizer = llama.model.tokenizer
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    thread = Thread(target=answers, args=(llama, [QUESTIONS[1]]), kwargs={"streamer": streamer})
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == tokenizer.decode(answers(llama, [QUESTIONS[1]])[0])


# Batches and threads


def questions_of_length(*lengths: int) -> list[list[int]]:
    ids = tiny_tokenizer()(TEXT, add_special_tokens=False)["input_ids"]
    return [ids[40 + 3 * n : 40 + 4 * n] for n in lengths]


@torch.no_grad()
def test_rows_of_a_padded_batch_equal_each_question_alone_at_a_partial_budget(archive: Archive) -> None:
    model, rows = archive.model.model, questions_of_length(1, 7, 30)
    together = model(**archive.pad(rows), cache=ArchiveCache(archive, budget=PARTIAL)).logits
    for ids, logits in zip(rows, together, strict=True):
        alone = model(**archive.pad([ids]), cache=ArchiveCache(archive, budget=PARTIAL)).logits[0]
        torch.testing.assert_close(logits[-len(ids) :], alone, atol=1e-4, rtol=0)


def test_answers_of_a_padded_batch_equal_each_question_alone_at_a_partial_budget(archive: Archive) -> None:
    rows = questions_of_length(1, 7, 30)

    def generate(batch: list[list[int]]) -> list[list[int]]:
        inputs = archive.pad(batch)
        cache = ArchiveCache(archive, budget=PARTIAL)
        out = archive.model.model.generate(
            **inputs, cache=cache, max_new_tokens=N_NEW, do_sample=False, eos_token_id=[]
        )
        return out[:, inputs["input_ids"].shape[1] :].tolist()

    assert generate(rows) == [generate([row])[0] for row in rows]


def test_a_partial_budget_is_not_dense(llama: Archive) -> None:
    """Guards the tests above: at this budget something really is left to estimates."""
    model = llama.model.model
    with torch.no_grad():
        logits = [
            model(**llama.questions([QUESTIONS[1]]), cache=ArchiveCache(llama, budget=budget)).logits
            for budget in (PARTIAL, EVERYTHING)
        ]
    assert (logits[0] - logits[1]).abs().max() > 1e-2


def test_eight_threads_give_the_serial_logits(llama: Archive) -> None:
    texts = [f"What happened on day {day}{' and after' * day}?" for day in range(8)]

    def run(text: str) -> tuple[torch.Tensor, list[list[int]]]:
        with torch.no_grad():
            cache = ArchiveCache(llama, budget=PARTIAL)
            logits = llama.model.model(**llama.questions([text]), cache=cache).logits
        return logits, answers(llama, [text], budget=PARTIAL)

    serial = [run(text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        threaded = list(pool.map(run, texts, timeout=100))
    for (logits, tokens), (expected, expected_tokens) in zip(threaded, serial, strict=True):
        torch.testing.assert_close(logits, expected, atol=1e-6, rtol=0)
        assert tokens == expected_tokens


# What ask streams


def stream(ids: list[int], stop: tuple[str, ...] = ()) -> tuple[AnswerStreamer, list[str]]:
    """Feed token ids to a streamer as `generate` does: the prompt first, then one token at a time, then the end."""
    pieces: list[str] = []
    streamer = AnswerStreamer(tiny_tokenizer(), DynamicCache(), stop=stop, on_text=pieces.append)
    streamer.put(torch.tensor([[7, 8, 9]]))
    for token in ids:
        streamer.put(torch.tensor([token]))
        if streamer.stopped:
            break
    streamer.end()
    return streamer, pieces


def bytes_of(text: str) -> list[int]:
    """One token per UTF-8 byte, so that every character beyond ASCII is split."""
    tokenizer = tiny_tokenizer()
    alphabet = tokenizer.backend_tokenizer.pre_tokenizer
    ids = [tokenizer.convert_tokens_to_ids(char) for word, _ in alphabet.pre_tokenize_str(text) for char in word]
    assert len(ids) == len(text.encode())
    return ids


@pytest.mark.parametrize(
    "text", ["sea \U0001f30a and \u6d77\u6d0b \u043c\u043e\u0440\u0435", "\U0001f469\u200d\U0001f680", "\u6d77"]
)
def test_split_characters_are_never_shown_in_part(text: str) -> None:
    streamer, pieces = stream(bytes_of(text))
    assert "".join(pieces) == streamer.text == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_an_answer_cut_inside_a_character_still_streams_its_text() -> None:
    streamer, pieces = stream(bytes_of("sea \U0001f30a")[:-1])
    assert "".join(pieces) == streamer.text == "sea \ufffd"


@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        ("two cranes\nQuestion: who", ("\n",), "two cranes"),
        ("two cranes Question: who", ("Question:",), "two cranes"),
        ("a\n\nb", ("\n\n",), "a"),
        ("a\nb\n\nc", ("\n\n", "###"), "a\nb"),
        ("one Quest for two", ("Question:",), "one Quest for two"),
        ("ends with Quest", ("Question:",), "ends with Quest"),
        ("\n two", ("\n",), "two"),
        ("\u6d77\u3002next", ("\u3002",), "\u6d77"),
        ("END", ("END",), ""),
    ],
)
def test_stop_strings_end_the_text_and_are_never_shown(text: str, stop: tuple[str, ...], shown: str) -> None:
    streamer, pieces = stream(bytes_of(text), stop)
    assert streamer.text == shown
    assert "".join(pieces) == shown


def test_special_tokens_are_not_text() -> None:
    streamer, pieces = stream([*bytes_of("two"), EOS_ID])
    assert "".join(pieces) == streamer.text == "two"
    assert streamer.token_ids[-1] == EOS_ID


def test_ask_streams_the_answer_it_returns(archive: Archive) -> None:
    pieces: list[str] = []
    answer = ask(archive, QUESTIONS[1], max_new_tokens=20, on_text=pieces.append)
    assert "".join(pieces) == answer.text
    assert 1 <= len(answer.token_ids) <= 20


def test_ask_with_everything_recalled_equals_dense_mode(archive: Archive) -> None:
    recall = ask(archive, QUESTIONS[1], budget=EVERYTHING, max_new_tokens=12)
    dense = ask(archive, QUESTIONS[1], mode="dense", max_new_tokens=12)
    assert recall.token_ids == dense.token_ids
    assert recall.text == dense.text


def test_an_exception_in_on_text_reaches_the_caller(llama: Archive) -> None:
    def fail(piece: str) -> None:
        raise BrokenPipeError(piece)

    with pytest.raises(BrokenPipeError):
        ask(llama, QUESTIONS[1], max_new_tokens=20, on_text=fail)
    assert ask(llama, QUESTIONS[1], max_new_tokens=4).token_ids  # the archive still answers


def test_generation_stops_at_a_stop_string_of_the_layout(tmp_path: Path) -> None:
    subject = LoadedModel(model=attach(tiny_model("llama")), tokenizer=tiny_tokenizer(), name="tiny")
    folder = tmp_path / "archive"
    build_archive(subject, SHORT, folder, recipe=SMALL, layout=PromptLayout(prefix="", question="{question}"))
    free = ask(Archive.open(folder, subject), QUESTIONS[1], max_new_tokens=20)
    stop = free.text[5:7]
    layout = PromptLayout(prefix="", question="{question}", stop=(stop,))
    build_archive(subject, SHORT, folder, recipe=SMALL, layout=layout)
    stopped = ask(Archive.open(folder, subject), QUESTIONS[1], max_new_tokens=20)
    assert stopped.text == free.text[: free.text.index(stop)].rstrip()
    assert len(stopped.token_ids) < len(free.token_ids) == 20


def test_ask_prompts_with_the_ids_of_the_layout(llama: Archive) -> None:
    ids = question_ids(llama.model.tokenizer, llama.manifest.layout, QUESTIONS[1])
    assert llama.questions([QUESTIONS[1]])["input_ids"].tolist() == [ids]
