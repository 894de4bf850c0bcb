"""From the options of an evaluation to what is done: documents with their questions, and the subjects compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from ragkv.errors import ConfigError
from ragkv.evaluation.compare import Questions
from ragkv.evaluation.data.squality import EXPECTED, FILE, parse_squality
from ragkv.evaluation.data.suite import read_data
from ragkv.evaluation.data.suites import SUITES, load_suite
from ragkv.evaluation.peers.policies import PEERS, PeerPolicy
from ragkv.evaluation.run import Task
from ragkv.evaluation.subjects import DENSE, SubjectSpec
from ragkv.model.prompt import PromptLayout, data_ids, question_ids, tokenize_prompt
from ragkv.model.shape import ModelShape
from ragkv.recipe import RecallPolicy, Recipe

PERPLEXITY = "perplexity"
EVAL_SUITES: tuple[str, ...] = (*SUITES, PERPLEXITY)
SHORT, LONG = "short", "long"
SHORT_TOKENS, FORCED_TOKENS = 768, 256
"""Context of a short document of the perplexity suite, and what follows a short or long one and is forced."""

UNBUDGETED = ("quantised-8", "quantised-4")
BOUNDS = ("oracle",)
"""Peers that no system can be: they are shown, and beat nobody."""

CLUSTERS_ONLY, CODES_ONLY = "clusters only", "codes only"
DEFAULT_NAME = "ragkv"

Kind = Literal["archive", "step", "peer"]


@dataclass(frozen=True)
class EvalOptions:
    """What is evaluated.

    ``tokens`` is the length of prefix and document. Without ``budgets`` an archive follows its recipe, and the peers
    get the first recipe's budget. ``peers`` are names of `PEERS`. With ``steps`` each recipe is also measured with
    clusters only and with codes only. Without ``max_new_tokens`` each suite has its own limit.

    Raises
    ------
    ConfigError
        If a name is unknown or given twice, or a number is out of range.
    """

    data: Path
    suites: tuple[str, ...]
    documents: int = 4
    items: int = 6
    tokens: int = 8192
    recipes: Mapping[str, Recipe] = field(default_factory=lambda: {DEFAULT_NAME: Recipe()})
    budgets: tuple[int, ...] = ()
    peers: tuple[str, ...] = ()
    steps: bool = False
    layers: bool = False
    max_new_tokens: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        _check_names("suite", self.suites, EVAL_SUITES)
        _check_names("peer", self.peers, tuple(PEERS))
        if not self.suites:
            raise ConfigError(f"no suite is given; take one or more of {', '.join(EVAL_SUITES)}")
        if not self.data.is_dir():
            raise ConfigError(f"the data folder {str(self.data)!r} does not exist")
        numbers = [("documents", self.documents), ("items", self.items), ("tokens", self.tokens)]
        numbers += [("budget", budget) for budget in self.budgets]
        numbers += [] if self.max_new_tokens is None else [("max-new-tokens", self.max_new_tokens)]
        for name, value in numbers:
            if value < 1:
                raise ConfigError(f"{name} is {value}; give at least 1")
        if len(set(self.budgets)) < len(self.budgets):
            raise ConfigError(f"a budget is given twice: {', '.join(map(str, self.budgets))}")
        if not self.recipes or set(self.recipes) & {DENSE, *PEERS}:
            raise ConfigError(f"recipes are named {', '.join(self.recipes)}; dense and the names of peers are taken")
        if PERPLEXITY in self.suites and self.tokens <= SHORT_TOKENS + FORCED_TOKENS:
            raise ConfigError(
                f"tokens is {self.tokens}; the perplexity suite compares documents of "
                f"{SHORT_TOKENS + FORCED_TOKENS} tokens with longer ones, so give more"
            )
        if self.layers and set(self.suites) == {PERPLEXITY}:
            raise ConfigError("layers are measured while questions are answered; add a suite other than perplexity")

    def check_context(self, shape: ModelShape) -> None:
        """Refuse documents that are longer than the model's context."""
        limit = context_limit(shape)
        if limit is not None and self.tokens > limit:
            raise ConfigError(f"tokens is {self.tokens} and the model's context is {limit}; ask for fewer")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as they are kept beside the results."""
        values = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        recipes = {name: recipe.to_dict() for name, recipe in self.recipes.items()}
        lists = {name: list(values[name]) for name in ("suites", "budgets", "peers")}
        return {**values, **lists, "data": str(self.data), "recipes": recipes}


@dataclass(frozen=True)
class Contender:
    """A subject and how reports group it: subjects of one `family` differ in `budget` only.

    Of each recipe's archives one is ``usual``: steps, layers and verdicts are about it. It has the recipe's own budget
    where that is swept, else the first one.
    """

    spec: SubjectSpec
    kind: Kind
    family: str
    budget: int | None
    usual: bool = False

    @property
    def name(self) -> str:
        return self.spec.name


def context_limit(shape: ModelShape) -> int | None:
    """Positions a model can have; None if its configuration does not say."""
    limits = [limit for limit in (shape.max_positions, shape.static_positions) if limit is not None]
    return min(limits, default=None)


def plan_subjects(options: EvalOptions, shape: ModelShape) -> tuple[Contender, ...]:
    """Every archive under every budget, its steps, then the peers; those that share an archive stand together."""
    planned: list[Contender] = []
    budgets: tuple[int | None, ...] = options.budgets or (None,)
    for name, recipe in options.recipes.items():
        recipe.check_layers(len(shape.layers))
        usual = recipe.recall.budget if recipe.recall.budget in budgets else budgets[0]
        for budget in budgets:
            spec = SubjectSpec(_label(name, budget), recipe=recipe, policy=_policy(recipe, budget))
            planned.append(Contender(spec, "archive", name, budget, usual=budget == usual))
        if options.steps:
            planned += _steps(name, recipe, _policy(recipe, usual), len(shape.layers))
    default = next(iter(options.recipes.values())).recall.budget
    for name in options.peers:
        for budget in (None,) if name in UNBUDGETED else budgets:
            peer = PeerPolicy(name=name, budget=budget or default)
            planned.append(Contender(SubjectSpec(_label(name, budget), peer=peer), "peer", name, budget))
    return tuple(planned)


def plan_tasks(options: EvalOptions, tokenizer: PreTrainedTokenizerBase, layout: PromptLayout) -> list[Task]:
    """The documents of every suite; the group of a task is its suite, and "short" or "long" for perplexity."""
    n_prefix = len(tokenize_prompt(tokenizer, layout, "a").prefix_ids)
    if options.tokens <= n_prefix:
        raise ConfigError(f"tokens is {options.tokens} and the prefix alone has {n_prefix}; ask for more")
    tasks: list[Task] = []
    for name in options.suites:
        if name == PERPLEXITY:
            tasks += _perplexity_tasks(options, tokenizer, n_prefix)
            continue
        suite = load_suite(
            name,
            options.data,
            n_documents=options.documents,
            items_per_document=options.items,
            document_length=options.tokens - n_prefix,
            count_tokens=lambda text: len(data_ids(tokenizer, text)),
            seed=options.seed,
        )
        limit = options.max_new_tokens or suite.max_new_tokens
        tasks += [
            Task(document.name, document.text, Questions(document.items, suite.metric, limit), group=name)
            for document in suite.documents
        ]
    return tasks


def check_tasks(
    tasks: Sequence[Task], shape: ModelShape, tokenizer: PreTrainedTokenizerBase, layout: PromptLayout
) -> None:
    """Refuse documents whose questions or answers would leave the model's context."""
    limit = context_limit(shape)
    for task in tasks:
        if limit is None or task.questions is None:
            continue
        tokens = tokenize_prompt(tokenizer, layout, task.text)
        asked = max(len(question_ids(tokenizer, layout, item.question)) for item in task.questions.items)
        n_tokens = len(tokens.prefix_ids) + len(tokens.document_ids) + asked + task.questions.max_new_tokens
        if n_tokens > limit:
            raise ConfigError(
                f"document {task.name!r} with its longest question and answer has {n_tokens} tokens and the model's "
                f"context is {limit}; ask for fewer"
            )


def _steps(name: str, recipe: Recipe, policy: RecallPolicy, n_layers: int) -> list[Contender]:
    """The recipe's codes without its clusters, and its clusters without its codes; nothing for a lossless recipe."""
    lossless = dataclasses.replace(recipe, key_codec="lossless", value_codec="lossless", layer_codecs={})
    if lossless == recipe:
        return []
    everything = RecallPolicy(dense_layers=tuple(range(n_layers)))
    specs = [
        SubjectSpec(f"{name}, {CODES_ONLY}", recipe=recipe, policy=everything),
        SubjectSpec(f"{name}, {CLUSTERS_ONLY}", recipe=lossless, policy=policy),
    ]
    return [Contender(spec, "step", name, None) for spec in specs]


def _perplexity_tasks(options: EvalOptions, tokenizer: PreTrainedTokenizerBase, n_prefix: int) -> list[Task]:
    """Short and long beginnings of ``squality_dev10.jsonl``, and what follows each.

    A document begins with a story of its own and goes on with the next ones where that is too short.
    """
    found = read_data(options.data / FILE, EXPECTED, parse_squality, suite=PERPLEXITY)
    stories = ["\n\n".join(story.paragraphs) for story in found]
    if options.documents > len(stories):
        raise ConfigError(f"suite {PERPLEXITY!r} has {len(stories)} stories and {options.documents} are asked for")
    lengths = {SHORT: SHORT_TOKENS, LONG: options.tokens - FORCED_TOKENS}
    tasks = []
    for group, n_tokens in lengths.items():
        if n_tokens <= n_prefix:
            raise ConfigError(f"the prefix has {n_prefix} tokens; the short documents of {n_tokens} do not hold it")
        for first in range(options.documents):
            text, continuation = _cut(stories[first:] + stories[:first], n_tokens - n_prefix, tokenizer)
            name = f"{PERPLEXITY}-{group}-{first + 1:02d}"
            tasks.append(Task(name, text, continuation=continuation, group=group))
    return tasks


def _cut(stories: Sequence[str], n_context: int, tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """The first `n_context` tokens of the stories as text, and the `FORCED_TOKENS` after them."""
    text, wanted = "", n_context + FORCED_TOKENS
    for story in stories:
        text += story + "\n\n"
        if len(text) < wanted:
            continue
        encoded = tokenizer(text, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True)
        ends = [end for _, end in encoded["offset_mapping"]]
        if len(ends) >= wanted:
            return text[: ends[n_context - 1]], text[ends[n_context - 1] : ends[wanted - 1]]
    raise ConfigError(f"all stories together are shorter than {wanted} tokens; ask for fewer")


def _policy(recipe: Recipe, budget: int | None) -> RecallPolicy:
    return recipe.recall if budget is None else recipe.recall.with_budget(budget)


def _label(name: str, budget: int | None) -> str:
    return name if budget is None else f"{name}@{budget}"


def _check_names(what: str, given: Sequence[str], allowed: tuple[str, ...]) -> None:
    for name in given:
        if name not in allowed:
            raise ConfigError(f"there is no {what} {name!r}; take of {', '.join(allowed)}")
    if len(set(given)) < len(given):
        raise ConfigError(f"a {what} is given twice: {', '.join(given)}")
