"""Answer text while it is generated: timed, cut at the layout's stop strings, never half a character."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from transformers import Cache, PreTrainedTokenizerBase
from transformers.generation import BaseStreamer, StoppingCriteria

from ragkv.model.prompt import INCOMPLETE


class AnswerStreamer(BaseStreamer):
    """Follows one greedy answer (batch 1).

    What `on_text` received, joined, equals `text`. ``times`` holds one `time.perf_counter` reading per token, and
    ``prefilled_tokens`` the length of the cache when the first token came: the tokens that really went through the
    model before it.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        cache: Cache,
        *,
        stop: tuple[str, ...],
        on_text: Callable[[str], None] | None = None,
    ) -> None:
        self._tokenizer, self._cache, self._stop, self._on_text = tokenizer, cache, stop, on_text
        self._prompt_seen = False
        self._shown = self._settled = ""
        self.text = ""
        self.stopped = False
        self.prefilled_tokens = 0
        self.token_ids: list[int] = []
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt (first call, ignored) or the next token."""
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        self.times.append(time.perf_counter())
        if not self.token_ids:
            self.prefilled_tokens = self._cache.get_seq_length()
        self.token_ids += value.reshape(-1).tolist()
        self._read()
        if not self.text.endswith(INCOMPLETE):
            self._show(self._settled)

    def end(self) -> None:
        self._show(self.text)

    def _read(self) -> None:
        """Set the text: whitespace at the ends is dropped, and so is all from the first stop string on."""
        text = str(self._tokenizer.decode(self.token_ids, skip_special_tokens=True)).lstrip()
        cuts = [place for stop in self._stop if (place := text.find(stop)) >= 0]
        self.stopped = bool(cuts)
        self.text = (text[: min(cuts)] if cuts else text).rstrip()
        begun = (n for stop in self._stop for n in range(1, len(stop)) if text.endswith(stop[:n]))
        self._settled = self.text if cuts else text[: len(text) - max(begun, default=0)].rstrip()

    def _show(self, text: str) -> None:
        if self._on_text is not None and text.startswith(self._shown) and len(text) > len(self._shown):
            self._on_text(text[len(self._shown) :])
            self._shown = text


class StopAnswer(StoppingCriteria):
    """Ends generation once the streamer saw a stop string after the answer began, or nobody wants the rest."""

    def __init__(self, streamer: AnswerStreamer, should_stop: Callable[[], bool] | None = None) -> None:
        self._streamer, self._should_stop = streamer, should_stop

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
        stop = self._streamer.stopped or (self._should_stop is not None and self._should_stop())
        return torch.full((input_ids.shape[0],), stop, device=input_ids.device)
