"""Where the document and the question stand in the prompt, and how their token ids are spliced.

Token ids are joined, never re-tokenised: the archived ids of prefix and document stay as they were when the keys were
computed. Text that comes from a document or a question is data: a literal special token in it stays text.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from ragkv.errors import ConfigError

DOCUMENT_SLOT = "{document}"
QUESTION_SLOT = "{question}"
_SEAM_CHARS = 256
INCOMPLETE = "\ufffd"
"""What decoding gives for a character whose last bytes are still to come."""

_LONGEST_CHARACTER = 8  # tokens; text that really holds the replacement character must not be waited for
_ONE_CALL = threading.Lock()  # a tokenizer call sets whether special tokens are split, on the tokenizer itself

PLAIN_PREFIX = "Read the document, then answer the question about it.\n\n"
PLAIN_QUESTION = "\n\nQuestion: {question}\nShort answer:"
CHAT_PROMPT = (
    "Read the document, then answer the question about it.\n\n{document}\n\n"
    "Question: {question}\nAnswer briefly and only from the document."
)

TEMPLATE_DATE = datetime(2024, 7, 26)
"""The date that a chat template gets for today's: the one that Llama's templates write where they are given none."""

_ANOTHER_DATE = datetime(2001, 11, 23)
_CLOCK = "strftime_now"
_DATE_DIRECTIVES = (
    *(f"%-{letter}" for letter in "dmHIMSjy"),
    *(f"%{letter}" for letter in "aAbBcdDeFGHIjmMpSTuUVwWxXyY%"),
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PromptLayout:
    """A prompt in three parts: `prefix`, the document, and `question` with the slot ``{question}``.

    `stop` are strings that end an answer (a plain layout would otherwise go on to invent further questions).
    """

    prefix: str
    question: str
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.question.count(QUESTION_SLOT) != 1:
            raise ConfigError(f"layout: the text after the document is {self.question!r}; give {QUESTION_SLOT} once")

    @classmethod
    def from_prompt(cls, prompt: str, stop: tuple[str, ...] = ()) -> PromptLayout:
        """Split one text that holds ``{document}`` and then ``{question}``, each once."""
        prefix, found, rest = prompt.partition(DOCUMENT_SLOT)
        if not found or DOCUMENT_SLOT in rest:
            raise ConfigError(f"layout: {prompt!r} must hold {DOCUMENT_SLOT} once, before {QUESTION_SLOT}")
        return cls(prefix=prefix, question=rest, stop=stop)

    @classmethod
    def plain(cls) -> PromptLayout:
        """The default for base models: an instruction, the document, ``Question: ... Short answer:``."""
        return cls(prefix=PLAIN_PREFIX, question=PLAIN_QUESTION, stop=("\n",))

    @classmethod
    def chat(cls, tokenizer: PreTrainedTokenizerBase) -> PromptLayout:
        """The default for instruct models: one user turn of the tokenizer's chat template, split at the slots.

        A template that writes today's date gets `TEMPLATE_DATE` instead, with a warning: archives of two days would
        have different prefixes, so that each day all of them were built again, and they could not be composed.
        """
        if not tokenizer.chat_template:
            raise ConfigError("layout 'chat' needs a tokenizer with a chat template; use 'plain'")
        rendered = _rendered(tokenizer, TEMPLATE_DATE)
        if _rendered(tokenizer, _ANOTHER_DATE) != rendered:
            _warn_of_date(rendered)
        return cls.from_prompt(rendered)

    @classmethod
    def default(cls, tokenizer: PreTrainedTokenizerBase) -> PromptLayout:
        """The chat layout where the tokenizer has a chat template, else the plain one."""
        return cls.chat(tokenizer) if tokenizer.chat_template else cls.plain()

    def to_dict(self) -> dict[str, Any]:
        return {"prefix": self.prefix, "question": self.question, "stop": list(self.stop)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> PromptLayout:
        return cls(prefix=values["prefix"], question=values["question"], stop=tuple(values["stop"]))


def _rendered(tokenizer: PreTrainedTokenizerBase, today: datetime) -> str:
    """`CHAT_PROMPT` as a turn of the tokenizer's chat template, whose clock shows `today`."""
    turn, template = [{"role": "user", "content": CHAT_PROMPT}], tokenizer.get_chat_template()
    if _CLOCK in template:
        template = _stopped_clock(today) + template
    return str(tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True, chat_template=template))


def _stopped_clock(today: datetime) -> str:
    """A Jinja macro in the place of the function that transformers gives to templates (functions it does not take)."""
    formatted = "format" + "".join(
        f"|replace('{directive}', '{today.strftime(directive)}')" for directive in _DATE_DIRECTIVES
    )
    # The empty text keeps what follows at its place: Jinja drops a line break behind a block.
    return f"{{%- macro {_CLOCK}(format) -%}}{{{{ {formatted} }}}}{{%- endmacro %}}{{{{ '' }}}}"


@lru_cache(maxsize=64)
def _warn_of_date(rendered: str) -> None:
    """Say once for each prompt that its date is made up."""
    log.warning(
        "the chat template writes today's date; %s is written instead, so that archives of different days have one "
        "prompt; to give the model another date, or none, write the prompt yourself: --layout prompt.toml, or "
        "PromptLayout.from_prompt",
        TEMPLATE_DATE.strftime("%d %b %Y"),
    )


@dataclass(frozen=True)
class PromptTokens:
    """Token ids of prefix and document as they are prefilled.

    ``offsets`` are (start, end) character offsets of each document token. The seam flags are true where tokenising
    the joined text would have given other ids than splicing did.
    """

    prefix_ids: tuple[int, ...]
    document_ids: tuple[int, ...]
    offsets: tuple[tuple[int, int], ...]
    prefix_seam_differs: bool
    question_seam_differs: bool


def tokenize_prompt(tokenizer: PreTrainedTokenizerBase, layout: PromptLayout, document: str) -> PromptTokens:
    """Tokenise prefix and document apart, with exactly one BOS if the tokenizer uses one.

    Raises
    ------
    ConfigError
        If the document has no tokens, or the tokenizer gives no character offsets.
    """
    if not tokenizer.is_fast:
        raise ConfigError(f"{type(tokenizer).__name__} gives no character offsets; load its fast version")
    _require_text("document", document)
    with _ONE_CALL:
        encoded = tokenizer(document, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True)
    if not encoded["input_ids"]:
        raise ConfigError("the document is empty: it has no tokens; give some text")
    head, tail = document[:_SEAM_CHARS], document[-_SEAM_CHARS:]
    after = layout.question.partition(QUESTION_SLOT)[0][:_SEAM_CHARS]
    return PromptTokens(
        prefix_ids=tuple(prefix_ids(tokenizer, layout.prefix)),
        document_ids=tuple(encoded["input_ids"]),
        offsets=tuple((int(start), int(end)) for start, end in encoded["offset_mapping"]),
        prefix_seam_differs=_seam_differs(tokenizer, layout.prefix, head),
        question_seam_differs=_seam_differs(tokenizer, tail, after),
    )


def check_question(question: str) -> None:
    """Refuse what is no text, and a question that asks nothing."""
    _require_text("question", question)
    if not question.strip():
        raise ConfigError("the question is empty; ask something")


def question_ids(tokenizer: PreTrainedTokenizerBase, layout: PromptLayout, question: str) -> list[int]:
    """Token ids that follow the document: the layout's text with `question` in its slot, the question as data.

    Special tokens of the layout (the end of a chat turn) are parsed; the ones a question contains are not.
    """
    check_question(question)
    _require_text("question", question)
    before, _, after = layout.question.partition(QUESTION_SLOT)
    unnamed = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]  # as in Phi-3 and GLM
    specials = [token for token in (*tokenizer.all_special_tokens, *unnamed) if token]
    cut = max((before.rfind(token) + len(token) for token in specials if token in before), default=0)
    end = min((after.find(token) for token in specials if token in after), default=len(after))
    ids = _template_ids(tokenizer, before[:cut])
    ids += data_ids(tokenizer, before[cut:] + question + after[:end])
    return ids + _template_ids(tokenizer, after[end:])


def prefix_ids(tokenizer: PreTrainedTokenizerBase, prefix: str) -> list[int]:
    """Token ids of what a prompt begins with: special tokens are parsed, one BOS if the tokenizer has one."""
    ids = _template_ids(tokenizer, prefix)
    bos = tokenizer.bos_token_id
    with _ONE_CALL:
        adds_bos = bos is not None and list(tokenizer("a")["input_ids"])[:1] == [bos]
    while bos is not None and ids[:2] == [bos, bos]:
        ids = ids[1:]
    return [bos, *ids] if adds_bos and ids[:1] != [bos] else ids


def _template_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return _ids(tokenizer, text, split_special_tokens=False)


def data_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of `text` as data: literal special tokens are cut up like any other text."""
    return _ids(tokenizer, text, split_special_tokens=True)


def _ids(tokenizer: PreTrainedTokenizerBase, text: str, *, split_special_tokens: bool) -> list[int]:
    if not text:
        return []
    with _ONE_CALL:
        encoded = tokenizer(text, add_special_tokens=False, split_special_tokens=split_special_tokens)
    return list(encoded["input_ids"])


def decoded(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """The text of token ids, as it is: no spaces are cleaned up."""
    return str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))


def decoded_spans(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> tuple[str, list[tuple[int, int]]]:
    """The text of token ids and the character offsets of each, where those of the original text are of no use.

    Tokens that are parts of one character all have the whole of it.
    """
    text, spans, begun, anchor = "", [], 0, list[int]()
    for place in range(1, len(ids) + 1):
        group = ids[begun:place]
        piece = decoded(tokenizer, [*anchor, *group])[len(decoded(tokenizer, anchor)) :]  # a space may lead a word
        if piece.endswith(INCOMPLETE) and place < len(ids) and len(group) < _LONGEST_CHARACTER:
            continue
        spans += [(len(text), len(text) + len(piece))] * len(group)
        text, begun, anchor = text + piece, place, list(group[-1:])
    return text, spans


def document_sha256(document: str) -> str:
    """SHA-256 of a document's UTF-8 bytes."""
    return hashlib.sha256(document.encode("utf-8", "surrogatepass")).hexdigest()


def _require_text(name: str, text: object) -> None:
    if not isinstance(text, str):
        raise ConfigError(f"the {name} is a {type(text).__name__}; give a text, a str")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"the {name} is not valid text: character {error.start} is half a surrogate pair "
            f"({text[error.start]!a}); decode it as UTF-8"
        ) from error


def _seam_differs(tokenizer: PreTrainedTokenizerBase, left: str, right: str) -> bool:
    """Whether tokenising two texts together gives other ids than tokenising them apart."""
    apart = data_ids(tokenizer, left) + data_ids(tokenizer, right)
    return data_ids(tokenizer, left + right) != apart
