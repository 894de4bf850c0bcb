"""Token ids are spliced, text stays data, and exactly one BOS opens the prompt."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from ragkv.errors import ConfigError
from ragkv.model.prompt import PLAIN_PREFIX, PLAIN_QUESTION, PromptLayout, question_ids, tokenize_prompt
from tests.tiny import BOS, BOS_ID, EOS, EOS_ID, PAD, tiny_tokenizer

PLAIN = PromptLayout.plain()
CHAT = (
    "{% if bos %}<|bos|>{% endif %}{% for message in messages %}user: {{ message['content'] }}<|eos|>{% endfor %}"
    "{% if add_generation_prompt %}{{ '\nanswer:' }}{% endif %}"
)


def chat_tokenizer(*, bos: bool, adds_bos: bool = False) -> PreTrainedTokenizerFast:
    """A tokenizer whose chat template renders BOS or not."""
    tokenizer = tiny_tokenizer(adds_bos=adds_bos)
    tokenizer.chat_template = CHAT.replace("{% if bos %}", "{% if " + str(bos).lower() + " %}")
    return tokenizer


def data_ids(text: str) -> list[int]:
    return tiny_tokenizer()(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]


def refusal(raised: pytest.ExceptionInfo[ConfigError]) -> str:
    assert "\n" not in str(raised.value)
    return str(raised.value)


# BOS


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("renders_bos", [True, False])
def test_at_most_one_bos_whoever_adds_it(adds_bos: bool, renders_bos: bool) -> None:
    tokenizer = chat_tokenizer(bos=renders_bos, adds_bos=adds_bos)
    tokens = tokenize_prompt(tokenizer, PromptLayout.chat(tokenizer), "The keeper wrote.")
    everything = [*tokens.prefix_ids, *tokens.document_ids, *question_ids(tokenizer, PromptLayout.chat(tokenizer), "Q")]
    assert everything.count(BOS_ID) == (1 if adds_bos or renders_bos else 0)
    assert not (adds_bos or renders_bos) or everything[0] == BOS_ID


def test_a_prefix_with_two_bos_keeps_one() -> None:
    layout = PromptLayout(prefix=f"{BOS}{BOS}Read.", question="{question}")
    tokens = tokenize_prompt(tiny_tokenizer(adds_bos=True), layout, "text")
    assert list(tokens.prefix_ids) == [BOS_ID, *data_ids("Read.")]


def test_an_empty_prefix_is_bos_alone_or_nothing() -> None:
    layout = PromptLayout(prefix="", question="{question}")
    assert tokenize_prompt(tiny_tokenizer(adds_bos=True), layout, "text").prefix_ids == (BOS_ID,)
    assert tokenize_prompt(tiny_tokenizer(), layout, "text").prefix_ids == ()


# Special tokens in data


@pytest.mark.parametrize("special", [BOS, EOS, PAD])
def test_a_literal_special_token_in_a_document_is_text(special: str) -> None:
    tokenizer = tiny_tokenizer(adds_bos=True)
    tokens = tokenize_prompt(tokenizer, PLAIN, f"before {special} after")
    assert not {0, 1, 2} & set(tokens.document_ids)
    assert tokenizer.decode(tokens.document_ids) == f"before {special} after"


@pytest.mark.parametrize("special", [BOS, EOS, PAD])
def test_a_literal_special_token_in_a_question_is_text(special: str) -> None:
    tokenizer = chat_tokenizer(bos=True)
    layout = PromptLayout.chat(tokenizer)
    ids = question_ids(tokenizer, layout, f"What is {special}?")
    assert [token for token in ids if token in (0, 1, 2)] == [EOS_ID]  # the one of the template
    assert f"What is {special}?" in tokenizer.decode(ids)


def test_threads_that_share_a_tokenizer_never_mix_text_and_special_tokens() -> None:
    """A tokenizer keeps in itself whether special tokens are split: two calls at once would swap it."""
    tokenizer = chat_tokenizer(bos=True)
    layout = PromptLayout.chat(tokenizer)
    texts = [f"What is {BOS} or {EOS}{' or that' * i}?" for i in range(8)]
    expected = [question_ids(tokenizer, layout, text) for text in texts]

    def repeat(text: str) -> list[list[int]]:
        return [question_ids(tokenizer, layout, text) for _ in range(100)]

    with ThreadPoolExecutor(8) as pool:
        for found, ids in zip(pool.map(repeat, texts, timeout=60), expected, strict=True):
            assert found == [ids] * 100


def test_slots_inside_a_document_or_question_are_text() -> None:
    tokenizer = tiny_tokenizer()
    tokens = tokenize_prompt(tokenizer, PLAIN, "a {question} b {document}")
    assert tokenizer.decode(tokens.document_ids) == "a {question} b {document}"
    ids = question_ids(tokenizer, PLAIN, "{question} or {document}?")
    assert tokenizer.decode(ids) == PLAIN_QUESTION.replace("{question}", "{question} or {document}?")


def test_special_tokens_that_have_no_name_are_still_parsed_in_the_layout() -> None:
    """As in Phi-3 and GLM: turn markers are special added tokens, and no attribute of the tokenizer names them."""
    tokenizer = tiny_tokenizer()
    markers = ["<|user|>", "<|end|>", "<|assistant|>"]
    tokenizer.backend_tokenizer.add_special_tokens([AddedToken(marker, special=True) for marker in markers])
    user, end, assistant = (tokenizer.convert_tokens_to_ids(marker) for marker in markers)
    layout = PromptLayout.from_prompt("<|user|>{document}<|end|><|user|>Q: {question}<|end|><|assistant|>")
    ids = question_ids(tokenizer, layout, "What is <|assistant|>?")
    assert [token for token in ids if token in (user, end, assistant)] == [end, user, end, assistant]
    assert ids[:2] == [end, user]
    assert ids[-2:] == [end, assistant]


# Splicing


@pytest.mark.parametrize(
    ("document", "prefix_differs", "question_differs"),
    [
        ("The ferry left.", False, False),
        ("rry left the", True, True),  # half words on both sides
        (" left the harbour", False, False),
        ("the town museum ", False, False),  # the space before " in" stays alone, as in the joined text
    ],
)
def test_seams_say_whether_joined_text_would_tokenise_differently(
    document: str, prefix_differs: bool, question_differs: bool
) -> None:
    tokenizer = tiny_tokenizer()
    layout = PromptLayout(prefix="The fe", question="se {question}")
    tokens = tokenize_prompt(tokenizer, layout, document)

    def splits(left: str, right: str) -> bool:
        return data_ids(left) + data_ids(right) != data_ids(left + right)

    assert tokens.prefix_seam_differs == splits("The fe", document)
    assert tokens.question_seam_differs == splits(document, "se ")


def test_hand_made_seams() -> None:
    tokenizer = tiny_tokenizer()
    the = tokenizer.convert_tokens_to_ids("the")
    assert data_ids("the") == [the]  # one token, while "th" and "e" apart are two
    half = PromptLayout(prefix="th", question="{question}")
    assert tokenize_prompt(tokenizer, half, "e").prefix_seam_differs
    whole = PromptLayout(prefix="th\n", question="\n{question}")
    clean = tokenize_prompt(tokenizer, whole, "e")
    assert not clean.prefix_seam_differs
    assert not clean.question_seam_differs
    glued = PromptLayout(prefix="", question="e {question}")
    assert tokenize_prompt(tokenizer, glued, "in th").question_seam_differs


@pytest.mark.parametrize("document", ["ends in a space ", "half a wor", " starts with one", "the", "\n\n", "a\r\nb"])
def test_the_document_keeps_its_own_ids_beside_any_layout(document: str) -> None:
    tokenizer = tiny_tokenizer(adds_bos=True)
    for layout in (PLAIN, PromptLayout(prefix="th", question="e {question}")):
        assert list(tokenize_prompt(tokenizer, layout, document).document_ids) == data_ids(document)


def test_question_and_layout_are_tokenised_as_one_text() -> None:
    ids = question_ids(tiny_tokenizer(), PLAIN, "Who kept the book?")
    assert ids == data_ids("\n\nQuestion: Who kept the book?\nShort answer:")


# Offsets


@pytest.mark.parametrize(
    "document",
    [
        "The keeper of the lighthouse, Agnes Moore.",
        " leading and trailing ",
        "caf\u00e9 \u6d77\u6d0b \U0001f30a\U0001f469\u200d\U0001f680 end",
        "zero\u200bwidth and NUL \x00 and\r\nlines\ttabs",
        f"{BOS} literal {EOS}",
        "e\u0301 combining, \u0627\u0644\u0628\u062d\u0631, \ufeffBOM",
    ],
)
def test_offsets_cover_the_document_and_ids_decode_to_it(document: str) -> None:
    tokenizer = tiny_tokenizer(adds_bos=True)
    tokens = tokenize_prompt(tokenizer, PLAIN, document)
    assert len(tokens.offsets) == len(tokens.document_ids)
    covered = sorted({place for start, end in tokens.offsets for place in range(start, end)})
    assert covered == list(range(len(document)))
    assert [start for start, _ in tokens.offsets] == sorted(start for start, _ in tokens.offsets)
    assert tokenizer.decode(tokens.document_ids) == document


def test_offsets_give_the_text_of_each_token() -> None:
    tokenizer = tiny_tokenizer()
    document = "The ferry left the harbour at seven."
    tokens = tokenize_prompt(tokenizer, PLAIN, document)
    for token, (start, end) in zip(tokens.document_ids, tokens.offsets, strict=True):
        assert document[start:end] == tokenizer.decode([token])


# Layouts


def test_the_chat_template_is_split_at_the_slots() -> None:
    tokenizer = chat_tokenizer(bos=True)
    layout = PromptLayout.chat(tokenizer)
    assert layout.prefix == f"{BOS}user: {PLAIN_PREFIX}"
    assert layout.question.endswith(f"Answer briefly and only from the document.{EOS}\nanswer:")
    ids = question_ids(tokenizer, layout, "Who?")
    eos = ids.index(EOS_ID)
    assert ids[eos + 1 :] == data_ids("\nanswer:")


def test_the_default_layout_follows_the_tokenizer() -> None:
    assert PromptLayout.default(tiny_tokenizer()) == PLAIN
    tokenizer = chat_tokenizer(bos=False)
    assert PromptLayout.default(tokenizer) == PromptLayout.chat(tokenizer)


def test_a_layout_round_trips_to_plain_values() -> None:
    layout = PromptLayout(prefix="a\n", question="b {question} \u6d77", stop=("\n", "###"))
    assert PromptLayout.from_dict(layout.to_dict()) == layout


def test_the_chat_layout_without_a_template_is_refused() -> None:
    with pytest.raises(ConfigError) as raised:
        PromptLayout.chat(tiny_tokenizer())
    assert "use 'plain'" in refusal(raised)


@pytest.mark.parametrize("question", ["", "no slot", "{question} and {question}", "{ question }"])
def test_a_layout_holds_the_question_once(question: str) -> None:
    with pytest.raises(ConfigError) as raised:
        PromptLayout(prefix="", question=question)
    assert "{question}" in refusal(raised)


@pytest.mark.parametrize(
    "prompt", ["", "{question}", "{document}", "{question} {document}", "{document} {document} {question}", "a\nb"]
)
def test_a_prompt_holds_document_and_then_question(prompt: str) -> None:
    with pytest.raises(ConfigError) as raised:
        PromptLayout.from_prompt(prompt)
    assert "{question}" in refusal(raised)


# What is no text


@pytest.mark.parametrize("question", ["", " ", "\n\t "])
def test_an_empty_question_is_refused(question: str) -> None:
    with pytest.raises(ConfigError, match="question is empty") as raised:
        question_ids(tiny_tokenizer(), PLAIN, question)
    refusal(raised)


def test_an_empty_document_is_refused() -> None:
    with pytest.raises(ConfigError, match="document is empty") as raised:
        tokenize_prompt(tiny_tokenizer(adds_bos=True), PLAIN, "")
    refusal(raised)


def test_half_a_surrogate_pair_is_refused_by_place() -> None:
    with pytest.raises(ConfigError, match=r"document.*character 4") as raised:
        tokenize_prompt(tiny_tokenizer(), PLAIN, "sea \ud83c wave")
    refusal(raised)
    with pytest.raises(ConfigError, match=r"question.*character 0") as raised:
        question_ids(tiny_tokenizer(), PLAIN, "\udc80?")
    refusal(raised)
