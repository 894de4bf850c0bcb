"""What plain LlamaIndex does with retrieved texts: all in one prompt, which the model reads for each question."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from transformers import DynamicCache

from ragkv.evaluation.fidelity import Decoded, decode_answer
from ragkv.evaluation.timing import timed_prefill
from ragkv.model.load import LoadedModel, padded_inputs
from ragkv.model.prefill import fork_cache
from ragkv.model.prompt import QUESTION_SLOT, PromptLayout, prefix_ids
from ragkv.model.shape import model_shape

_BETWEEN = "\n\n"  # what its compact response mode puts between texts


class PlainPrompt:
    """Texts in one prompt of a layout, read by the model's own attention.

    Questions behind the same texts share the prefill of what their prompts begin with; `prefill_s` are its seconds.
    """

    def __init__(self, model: LoadedModel, layout: PromptLayout, texts: Sequence[str]) -> None:
        self._model, self._layout = model, layout
        self._before = layout.prefix + _BETWEEN.join(text.strip() for text in texts)
        self.prefill_s = 0.0

    def ids(self, question: str) -> list[int]:
        """Token ids of the whole prompt, tokenised in one piece."""
        asked = self._layout.question.replace(QUESTION_SLOT, question)
        return prefix_ids(self._model.tokenizer, self._before + asked)

    def decode(self, question: str, *, max_new_tokens: int, forced: Sequence[int] | None = None) -> Decoded:
        """The model's answer, or what it says along the tokens `forced`."""
        ids = self.ids(question)
        cache, n_read = self._read(ids)
        inputs = padded_inputs(self._model, [ids[n_read:]], first_position=n_read)
        stop = self._layout.stop
        return decode_answer(self._model, inputs, cache, stop=stop, max_new_tokens=max_new_tokens, forced=forced)

    @cached_property
    def _held(self) -> tuple[list[int], DynamicCache]:
        ids = prefix_ids(self._model.tokenizer, self._before)
        cache, self.prefill_s = timed_prefill(self._model.model, ids)
        return ids, cache

    def _read(self, ids: list[int]) -> tuple[DynamicCache, int]:
        """A cache of the first tokens of a prompt, all but some at its end, and how many they are."""
        if model_shape(self._model.model.config).sliding_layers:  # such a cache cannot be cut back
            return DynamicCache(config=self._model.model.config), 0
        held, cache = self._held
        same = next((n for n, (a, b) in enumerate(zip(held, ids, strict=False)) if a != b), min(len(held), len(ids)))
        own = fork_cache(cache)
        if same < len(held):
            own.crop(same - len(held))  # it takes how many to remove, as a negative number
        return own, same
