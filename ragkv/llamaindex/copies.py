"""What copying and pickling mean for parts of LlamaIndex that hold an open model."""

from __future__ import annotations

import copy
from typing import Any, NoReturn, Self

from ragkv.errors import ConfigError


class HoldsModel:
    """Mixin of pydantic components: deep copies share the model, and pickling is refused.

    A deep copy would hold the weights twice, and match no archive, which is opened for one model object. Half of a
    component in another process, which is what LlamaIndex makes of parts that cannot be pickled, would answer nothing.
    """

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        return copy.copy(self)

    def __getstate__(self) -> NoReturn:
        raise ConfigError(
            f"{type(self).__name__} holds an open model and cannot be pickled or sent to another process; make one "
            "there (an IngestionPipeline: run it without num_workers)"
        )


class PlainHoldsModel(HoldsModel):
    """The same for classes that pydantic does not copy."""

    def __copy__(self) -> Self:
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other
