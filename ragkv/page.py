"""What every HTML page of ragkv shares: one file without network or scripts, one look, text that is never markup."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

from ragkv.errors import ConfigError

# Contrast of --ink, --soft and --link on --page and --mark is at least 4.5 : 1 in both schemes.
BASE_STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #1f2430; --soft: #565d6d; --line: #d5d9e0; --mark: #e4effb;
  --link: #0b5394; }
@media (prefers-color-scheme: dark) { :root { --page: #14171d; --ink: #e6e8ec; --soft: #a9b0bd; --line: #3a404c;
  --mark: #1d3350; --link: #8cc2ff; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.25rem; max-width: 52rem; background: var(--page); color: var(--ink);
  font: 1rem/1.55 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0.5rem 0; }
h2 { font-size: 1.25rem; line-height: 1.3; margin: 2.25rem 0 0.5rem; }
a { color: var(--link); }
a:focus-visible, summary:focus-visible, .box:focus-visible { outline: 3px solid var(--link); outline-offset: 2px; }
table { border-collapse: collapse; font-size: 0.92rem; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { padding: 0.35rem 0.7rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
thead th { border-bottom-width: 2px; }
tbody th { font-weight: inherit; }
.n { text-align: right; white-space: nowrap; }
caption { color: var(--soft); font-size: 0.9rem; text-align: left; padding-bottom: 0.4rem; }
"""

# What HTML may not hold: control characters other than white space, half surrogates, and characters that are none.
_UNPRINTABLE = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")
# A page break inside a text is a line break on a page.
_BREAKS = str.maketrans({"\x0b": "\n", "\x0c": "\n", "\x85": "\n"})


def clean_line(text: str) -> str:
    """Text of one line without control characters and half surrogates, which neither HTML nor SVG may hold."""
    return "".join(character if character.isprintable() else " " for character in text)


def escape_line(text: str) -> str:
    """`clean_line` as HTML."""
    return escape(clean_line(text))


def escape_text(text: str) -> str:
    """Text as it is, line breaks, joiners and direction marks included; what HTML may not hold becomes U+FFFD."""
    return escape(_UNPRINTABLE.sub("\ufffd", text.translate(_BREAKS)))


def render_page(*, title: str, style: str, body: str) -> str:
    """A page of `body` (HTML) with rules that follow `BASE_STYLE`; `title` is plain text.

    The policy in its head keeps a browser from loading or running anything, whatever `body` holds.
    """
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{escape_line(title)}</title>
<style>{BASE_STYLE}{style}</style>
</head>
<body>
{body}</body>
</html>
"""


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
