"""What every HTML page of ragkv shares: templates, one file without network or scripts, text that is never markup.

The policy in the head of `templates/base.html` keeps a browser from loading or running anything, whatever is below it.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragkv.errors import ConfigError

if TYPE_CHECKING:
    from jinja2 import Environment

# What HTML may not hold: control characters other than white space, half surrogates, and characters that are none.
_UNPRINTABLE = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")
# A page break inside a text is a line break on a page.
_BREAKS = str.maketrans({"\x0b": "\n", "\x0c": "\n", "\x85": "\n"})


def clean_line(text: str) -> str:
    """Text of one line without control characters and half surrogates, which neither HTML nor SVG may hold."""
    return "".join(character if character.isprintable() else " " for character in text)


def clean_text(text: str) -> str:
    """Text as it is, line breaks, joiners and direction marks included; what HTML may not hold becomes U+FFFD."""
    return _UNPRINTABLE.sub("\ufffd", text.translate(_BREAKS))


def render(template: str, **values: Any) -> str:
    """A page from a template of `ragkv/templates`: every text among `values` is cleaned and escaped on its way in."""
    return _environment().get_template(template).render(values)


def write_page(html: str, path: str | Path, *, what: str = "report") -> None:
    """Write a page; `what` names it in an error.

    Raises
    ------
    ConfigError
        If the file cannot be written.
    """
    try:
        Path(path).write_text(html, encoding="utf-8", errors="replace", newline="\n")
    except OSError as error:
        raise ConfigError(f"{what} {str(path)!r} cannot be written: {error.strerror}") from error


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    def finalize(value: Any) -> Any:
        return clean_text(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        finalize=finalize,
        keep_trailing_newline=True,
        lstrip_blocks=True,
        trim_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters["line"] = clean_line
    return environment
