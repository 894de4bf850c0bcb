"""Loading a model and its tokenizer by name: the demo model, a hub id, a local folder or a GGUF file.

Remote code and pickled weights are never loaded.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ragkv.errors import ConfigError
from ragkv.model.attention import attach
from ragkv.model.fingerprint import Fingerprint, fingerprint
from ragkv.model.gguf import (
    DEMO,
    NAMES,
    GgufParts,
    checkpoint_errors,
    convert_gguf,
    gguf_config,
    one_line,
    quiet,
)
from ragkv.model.prompt import PromptLayout, question_ids
from ragkv.model.shape import DTYPES, model_shape

DEMO_NAME = "demo"
_LOCAL = (".", "~")  # no hub id begins like this
_MIN_TOKENS = 16  # transformers makes up an empty tokenizer of a few special tokens where the files are missing


@dataclass(frozen=True)
class LoadedModel:
    """A model in eval mode with ragkv's attention attached, its tokenizer, and the name it was loaded by.

    From `load_model`, or from `LoadedModel.of` for a model that is in memory already. Archives record ``name``, and
    commands load the model by it unless they are told another; that of a local folder begins with ``./``, ``../``,
    ``~`` or ``/``, so that it is never taken for a hub id.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str

    @classmethod
    def of(cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, name: str) -> LoadedModel:
        """Use a model of your own, which was loaded with transformers: check it and attach ragkv's attention to it.

        Weights and code stay as they are; the model is put in eval mode.

        Parameters
        ----------
        name
            What archives call it: the hub id or folder that it can be loaded by again, if there is one.

        Raises
        ------
        ConfigError
            If `model` or `tokenizer` is something else, or the model does not allow its attention to be chosen.
        UnsupportedModelError
            If the architecture cannot be archived exactly.
        """
        if not isinstance(model, PreTrainedModel):
            raise ConfigError(f"model is a {type(model).__name__}; give a transformers model, or use load_model(name)")
        if model.dtype not in DTYPES.values():
            raise ConfigError(f"the model is held in {model.dtype}; load it in one of {', '.join(DTYPES)}")
        if not isinstance(tokenizer, PreTrainedTokenizerBase) or not tokenizer.is_fast:
            raise ConfigError(
                f"tokenizer is a {type(tokenizer).__name__}, which gives no character offsets; give the model's fast "
                "tokenizer, as AutoTokenizer loads it"
            )
        if not isinstance(name, str) or not name:
            raise ConfigError(f"name is {name!r}; {NAMES}, by which the model can be loaded again")
        model_shape(model.config)
        attach(model.eval())
        return cls(model=model, tokenizer=tokenizer, name=local_name(name))

    @property
    def layout(self) -> PromptLayout:
        """The prompt layout to use when none is given.

        The demo model gets the plain one: it answers extractive questions far better from it than from its chat
        template.
        """
        return PromptLayout.plain() if self.name == DEMO_NAME else PromptLayout.default(self.tokenizer)

    def fingerprint(self, dtype: torch.dtype | None = None) -> Fingerprint:
        """Identity of the model as it is now, as if its weights were held in `dtype` (its own by default).

        The weights are hashed once for each dtype, and again when they changed; in between this takes milliseconds.

        Raises
        ------
        UnsupportedModelError
            If weights are not in memory, or of a kind that cannot be hashed.
        """
        return fingerprint(self.model, self.tokenizer, self.model.dtype if dtype is None else dtype)


def load_config(name: str) -> PreTrainedConfig:
    """The configuration of a model, without its weights; a GGUF file is not converted for it.

    Raises
    ------
    ConfigError
        If nothing can be loaded by `name`.
    MissingExtraError
        If the demo model, or the reader of GGUF files, is not installed.
    """
    source = _source(name)
    if isinstance(source, str):
        return _read_config(source, name)
    return gguf_config(source)


def check_loaded(model: object) -> None:
    """Refuse what is no `LoadedModel`, such as a transformers model by itself."""
    if not isinstance(model, LoadedModel):
        raise ConfigError(
            f"model is a {type(model).__name__}; give what load_model or LoadedModel.of(model, tokenizer, name=...) "
            "returned"
        )


def load_model(
    name: str | Path,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> LoadedModel:
    """Load a model that can be archived, with its tokenizer, and attach ragkv's attention.

    The architecture is checked before any weight is read. Only safetensors weights are read.

    Parameters
    ----------
    name
        ``demo``, a hub id, a local folder or a ``.gguf`` file. A folder is never looked up on the hub, and not
        later either, by the name that archives record: ``./`` is put in front where it could be read as a hub id.
    dtype
        bf16, fp16 or fp32; the checkpoint's own by default (bf16 for the demo model and GGUF files).
    device
        ``cuda`` where there is one, else ``cpu``, by default.
    progress
        Called with one line before each slow step.

    Raises
    ------
    ConfigError
        If nothing can be loaded by `name`, or `dtype` or `device` is not usable.
    UnsupportedModelError
        If the architecture cannot be archived exactly.
    MissingExtraError
        If the demo model, or the reader of GGUF files, is not installed.
    """
    chosen_dtype, chosen_device = _parse_dtype(dtype), _parse_device(device)
    if not isinstance(name, str | Path):
        raise ConfigError(f"name is {name!r}; {NAMES}")
    if isinstance(name, Path):  # never a hub id, and without the "./" that a Path drops it could be read as one
        name = str(name) if name.is_absolute() or str(name).startswith(_LOCAL) else f"./{name}"
    source = _source(name)
    location = source if isinstance(source, str) else str(convert_gguf(source, progress=progress))
    model_shape(_read_config(location, name))
    local = Path(location).is_dir()
    with quiet(keep_bars=not local):
        tokenizer = _read_tokenizer(location, name, local_files_only=local)
        if progress is not None:
            progress(f"loading {name} to {chosen_device}")
        model = _read_weights(location, name, dtype=chosen_dtype, device=chosen_device, local_files_only=local)
    return LoadedModel.of(model, tokenizer, name=name)


def question_inputs(
    model: LoadedModel, layout: PromptLayout, questions: Sequence[str], *, first_position: int
) -> dict[str, torch.Tensor]:
    """Inputs for a left-padded batch of questions whose first token stands at `first_position`.

    Returns ``input_ids``, ``attention_mask`` and ``position_ids``, each (n_questions, n_longest) int64.
    """
    if not questions or isinstance(questions, str):
        raise ConfigError("give a list with at least one question")
    ids = [question_ids(model.tokenizer, layout, question) for question in questions]
    return padded_inputs(model, ids, first_position=first_position)


def padded_inputs(
    model: LoadedModel, token_ids: Sequence[Sequence[int]], *, first_position: int
) -> dict[str, torch.Tensor]:
    """As `question_inputs`, from token ids."""
    empty = next((row for row, ids in enumerate(token_ids) if len(ids) == 0), None)
    if len(token_ids) == 0 or empty is not None:
        found = "there are no questions" if empty is None else f"question {empty} has no tokens"
        raise ConfigError(f"{found}; give at least one question, and each at least one token")
    longest = max(len(ids) for ids in token_ids)
    device, tokenizer = model.model.device, model.tokenizer
    fill = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    input_ids = torch.full((len(token_ids), longest), 0 if fill is None else fill, dtype=torch.int64)
    mask = torch.zeros_like(input_ids)
    for row, ids in enumerate(token_ids):
        input_ids[row, longest - len(ids) :] = torch.tensor(ids)
        mask[row, longest - len(ids) :] = 1
    positions = first_position + (mask.cumsum(1) - 1).clamp_min(0)
    return {
        "input_ids": input_ids.to(device),
        "attention_mask": mask.to(device),
        "position_ids": positions.to(device),
    }


def local_name(name: str) -> str:
    """`name`, with ``./`` in front where it is a folder that could be read as a hub id."""
    path = Path(name)
    if not path.is_dir() or path.is_absolute() or name.startswith(_LOCAL):
        return name
    return f"./{name}"


def _source(name: str) -> str | Path | GgufParts:
    """What a name stands for: a folder or hub id (str), a GGUF file (Path), or the demo model's parts.

    The path of a folder is such that transformers cannot take it for a hub id, should the folder go away meanwhile.
    """
    if name == DEMO_NAME:
        return DEMO
    path = Path(name).expanduser()
    if path.is_dir() and name:
        return os.path.expanduser(local_name(name))
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise ConfigError(f"model {name!r}: there is no such file; {NAMES}")
        return path
    if path.is_file():
        raise ConfigError(f"model {name!r} is a file but not a .gguf file; {NAMES}")
    if name.startswith(_LOCAL) or path.is_absolute():
        raise ConfigError(
            f"model {name!r} is a local folder, and there is no such folder here; run this where it is, or give the "
            f"model by another name; {NAMES}"
        )
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ConfigError(f"model {name!r} is neither a folder that exists nor a hub id; {NAMES}") from error
    return name


def _read_config(location: str, name: str) -> PreTrainedConfig:
    with quiet(), checkpoint_errors(name):
        return AutoConfig.from_pretrained(location, local_files_only=Path(location).is_dir(), trust_remote_code=False)


def _read_tokenizer(location: str, name: str, *, local_files_only: bool) -> PreTrainedTokenizerBase:
    with checkpoint_errors(name):
        tokenizer = AutoTokenizer.from_pretrained(location, local_files_only=local_files_only, trust_remote_code=False)
    if len(tokenizer) < _MIN_TOKENS:
        raise ConfigError(f"model {name!r} has no tokenizer files; add tokenizer.json and tokenizer_config.json to it")
    return tokenizer


def _read_weights(
    location: str, name: str, *, dtype: torch.dtype | str, device: torch.device, local_files_only: bool
) -> PreTrainedModel:
    with checkpoint_errors(name):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            location,
            dtype=dtype,
            device_map=None if device.type == "cpu" else device,
            local_files_only=local_files_only,
            trust_remote_code=False,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    model, info = loaded
    # transformers fills in random weights for these and only warns.
    bad = sorted(info["missing_keys"]) + sorted(str(key) for key in info["mismatched_keys"])
    if bad:
        raise ConfigError(
            f"model {name!r} is incomplete: {len(bad)} weights do not fit its config.json, first {bad[0]}"
        )
    return model


def _parse_dtype(dtype: str | torch.dtype | None) -> torch.dtype | str:
    if dtype is None:
        return "auto"
    chosen = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if chosen is None or chosen not in DTYPES.values():
        raise ConfigError(f"dtype {str(dtype)!r} is not known; give one of {', '.join(DTYPES)}")
    return chosen


def _parse_device(device: str | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        torch.zeros(1, device=chosen).item()
    except (RuntimeError, AssertionError) as error:  # torch asserts where it was built without the device
        raise ConfigError(
            f"device {device!r} cannot be used here: {one_line(error)}; give cpu, cuda or cuda:N"
        ) from error
    return chosen
