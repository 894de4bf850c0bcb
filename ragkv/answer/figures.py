"""Figures of the page of `ragkv.answer.page`: attention along a text, and recall by layer, as inline SVG.

The SVG holds bars only and is stretched to the width there is; numbers stand beside it as text, so that they have one
size on a phone and on a desktop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ragkv.answer.passages import DocumentEvidence, Passage
from ragkv.page import escape_text
from ragkv.recall.trace import LayerMeans

_STRIP_BINS = 96
_NO_NUMBER = "\N{EN DASH}"


def format_share(share: float) -> str:
    """A share as a percentage with as much precision as a reader can use: "31%", "0.4%", "<0.1%"."""
    if not math.isfinite(share):
        return _NO_NUMBER
    if share >= 0.095 or share <= 0:
        return f"{max(share, 0.0):.0%}"
    return f"{share:.1%}" if share >= 0.001 else "<0.1%"


def strip_figure(document: DocumentEvidence, passages: Sequence[Passage]) -> str:
    """Where along the text the attention fell; bars that lie in one of `passages` stand out."""
    n_chars = max(len(document.text), 1)
    n_bins = min(_STRIP_BINS, n_chars)
    bins = [0.0] * n_bins
    for start, end, weight in document.spans:
        middle = min(max((start + end) // 2, 0), n_chars - 1)
        bins[middle * n_bins // n_chars] += max(weight, 0.0) if math.isfinite(weight) else 0.0
    top = max(bins)
    if top <= 0:
        return ""
    shaded = {
        index
        for passage in passages
        for index in range(passage.start * n_bins // n_chars, max(passage.end - 1, 0) * n_bins // n_chars + 1)
    }
    bars = "".join(
        f'<rect{" class=" + chr(34) + "in" + chr(34) if index in shaded else ""} x="{index + 0.1:.1f}" '
        f'y="{40 * (1 - value / top):.2f}" width="0.8" height="{40 * value / top:.2f}"/>'
        for index, value in enumerate(bins)
        if value > 0
    )
    peak = (bins.index(top) + 0.5) / n_bins
    return f"""<figure class="strip">
<svg viewBox="0 0 {n_bins} 40" preserveAspectRatio="none" role="img" aria-label="Attention along the text">
<title>Attention along the text</title>
<desc>Bars from the beginning of the text to its end. The highest is {peak:.0%} into the text.</desc>
{bars}
</svg>
<figcaption class="ends"><span>beginning</span><span>attention along the text</span><span>end</span></figcaption>
</figure>
"""


def layer_section(layers: Sequence[LayerMeans]) -> str:
    """Charts of both columns, and the numbers in a folded table."""
    if not layers:
        return ""
    mass = [row.unrecalled_mass for row in layers]
    tokens = [row.recalled_tokens for row in layers]
    rows = "\n".join(
        f'<tr><th scope="row" class="n">{row.layer}</th><td class="n">{_tokens(row.recalled_tokens)}</td>'
        f'<td class="n">{format_share(row.unrecalled_mass)}</td></tr>'
        for row in layers
    )
    names = [row.layer for row in layers]
    return f"""<section aria-labelledby="layers-heading">
<h2 id="layers-heading">Recall by layer</h2>
<p class="note">In each layer the tokens that matter most are read exactly; the rest of the attention is estimated from
summaries of their clusters.</p>
<div class="charts">
{_chart(names, tokens, "Tokens read per KV head and step", _tokens)}
{_chart(names, mass, "Share of the attention that was estimated", format_share)}
</div>
<details>
<summary>The numbers of both charts</summary>
<table>
<thead><tr><th scope="col" class="n">Layer</th><th scope="col" class="n">Tokens read</th>\
<th scope="col" class="n">Estimated</th></tr></thead>
<tbody>
{rows}
</tbody>
</table>
</details>
</section>
"""


def _chart(names: Sequence[int], values: Sequence[float], caption: str, form: Callable[[float], str]) -> str:
    finite = [value if math.isfinite(value) else 0.0 for value in values]
    limit = _round_up(max(finite))
    bars = "".join(
        f'<rect x="{index + 0.12:.2f}" y="{100 * (1 - max(value, 0.0) / limit):.2f}" width="0.76" '
        f'height="{100 * max(value, 0.0) / limit:.2f}"><title>Layer {name}: {form(shown)}</title></rect>'
        for index, (name, value, shown) in enumerate(zip(names, finite, values, strict=True))
    )
    low, high = finite.index(min(finite)), finite.index(max(finite))
    text = f"Highest in layer {names[high]}: {form(finite[high])}; lowest in layer {names[low]}: {form(finite[low])}."
    n = len(names)
    return f"""<figure>
<figcaption>{escape_text(caption)}</figcaption>
<div class="plot">
<div class="y" aria-hidden="true"><span>{form(limit)}</span><span>{form(limit / 2)}</span><span>0</span></div>
<svg viewBox="0 0 {n} 100" preserveAspectRatio="none" role="img" aria-label="{escape_text(caption)}">
<title>{escape_text(caption)}</title>
<desc>Bars for layers {names[0]} to {names[-1]}. {escape_text(text)}</desc>
<line x1="0" x2="{n}" y1="0.5" y2="0.5"/><line x1="0" x2="{n}" y1="50" y2="50"/>
{bars}
</svg>
<div class="ends" aria-hidden="true"><span>layer {names[0]}</span><span>layer {names[-1]}</span></div>
</div>
<p class="note">{escape_text(text)}</p>
</figure>"""


def _round_up(value: float) -> float:
    """The next of 1, 2, 4, 6, 8, 10 times a power of ten, so that the axis and its half read well."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next((step * power for step in (1, 2, 4, 6, 8) if value <= step * power * (1 + 1e-9)), 10 * power)


def _tokens(number: float) -> str:
    if not math.isfinite(number):
        return _NO_NUMBER
    return f"{number:,.0f}" if number >= 10 or number == int(number) else f"{number:,.1f}"
