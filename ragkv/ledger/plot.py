"""Pictures of results; the only module that needs the ``plot`` extra."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ragkv.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ragkv.ledger.ledger import LedgerRow

SUFFIXES = (".png", ".svg")
DENSE, ARCHIVE, WEIGHTS, CARD = "#c2410c", "#1d4ed8", "#64748b", "#111827"
# As fractions of an axis: text closer than this would overlap.
LABEL_GAP = 0.07
TICK_GAP = 0.1


def plot_ledger(rows: Sequence[LedgerRow], path: str | Path, *, title: str | None = None) -> None:
    """Draw KV bytes against context length, dense and archived, with weights and card as horizontal lines.

    With both known, a further line shows what the weights leave of the card.

    Parameters
    ----------
    rows
        Result of `ragkv.ledger.ledger.build_ledger`, shortest context first.
    path
        File to write: PNG or SVG by its suffix.
    title
        Line above the picture; a plain description when None.

    Raises
    ------
    ConfigError
        If `rows` is empty, the suffix is not one of `SUFFIXES`, or the file cannot be written.
    MissingExtraError
        If matplotlib is not installed.
    """
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"plot file {str(path)!r} has suffix {path.suffix!r}; give one of {', '.join(SUFFIXES)}")
    if not rows:
        raise ConfigError("a plot needs at least one context length and got none")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("plots need matplotlib: pip install 'ragkv[plot]'") from error

    figure = Figure(figsize=(7.6, 4.2), dpi=160, layout="constrained")
    axes = figure.add_subplot()
    last = rows[-1]
    limits = (last.weights or 0, last.gpu_memory or 0)
    unit, scale = _unit(max(last.kv.logical, *limits))
    lines = _draw_lines(axes, rows, scale)
    axes.set_ylim(0, 1.06 * max(height for _, height, _ in lines))
    axes.set_xlim(0, 1.02 * last.n_tokens)
    axes.set_xlabel("context length (tokens)")
    axes.set_ylabel(f"memory ({unit})")
    axes.set_title(title or "KV cache: dense, and resident with an archive", loc="left", fontsize=11, pad=12)
    _style(axes, [row.n_tokens for row in rows])
    _label_lines(axes, lines, unit)
    _save(figure, path)


def _draw_lines(axes: Axes, rows: Sequence[LedgerRow], scale: int) -> list[tuple[str, float, str]]:
    """Draw every line; return its name, its height at the right edge and its colour."""
    x = [row.n_tokens for row in rows]
    last = rows[-1]
    lines = []
    for name, colour, bytes_at in (
        ("dense KV", DENSE, [row.kv.logical for row in rows]),
        ("archive, resident", ARCHIVE, [row.archive.resident for row in rows]),
    ):
        heights = [value / scale for value in bytes_at]
        axes.plot(x, heights, color=colour, linewidth=2.2, marker="o", markersize=5, clip_on=False, zorder=3)
        lines.append((name, heights[-1], colour))
    # KV has only what the weights leave of the card, so that line is the one to stay under.
    left = last.gpu_memory - last.weights if last.gpu_memory is not None and last.weights is not None else None
    for name, colour, dashes, level in (
        ("weights", WEIGHTS, (0, (5, 2.5)), last.weights),
        ("card", CARD, (0, (1, 1.5)), last.gpu_memory),
        ("card less weights", CARD, (0, (1, 1.5)), left),
    ):
        if level is not None and level > 0:
            axes.axhline(level / scale, color=colour, linewidth=1.5, linestyle=dashes, zorder=2)
            lines.append((name, level / scale, colour))
    return lines


def _label_lines(axes: Axes, lines: list[tuple[str, float, str]], unit: str) -> None:
    """Write each line's name and value beside its right end, moved apart where they would overlap."""
    top = axes.get_ylim()[1]
    ordered = sorted(lines, key=lambda line: line[1])
    places: list[float] = []
    for _, height, _ in ordered:
        places.append(max(height / top, places[-1] + LABEL_GAP if places else 0.0))
    ceiling = 1.0
    for index in reversed(range(len(places))):
        places[index] = min(places[index], ceiling)
        ceiling = places[index] - LABEL_GAP
    for (name, height, colour), place in zip(ordered, places, strict=True):
        axes.annotate(
            f"{name} {_number(height)} {unit}",
            xy=(1.0, place),
            xycoords="axes fraction",
            xytext=(10, 0),
            textcoords="offset points",
            va="center",
            color=colour,
            fontsize=10,
            fontweight="bold",
        )


def _style(axes: Axes, tokens: list[int]) -> None:
    ticks: list[int] = []
    for n_tokens in reversed(tokens):
        if not ticks or ticks[-1] - n_tokens >= TICK_GAP * tokens[-1]:
            ticks.append(n_tokens)
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=9.5)


def _unit(n_bytes: float) -> tuple[str, int]:
    """The binary unit in which `n_bytes` reads well, and its size."""
    for name, scale in (("GiB", 2**30), ("MiB", 2**20)):
        if n_bytes >= scale:
            return name, scale
    return "KiB", 2**10


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 0.95 else f"{value:.2f}"


def _save(figure: Figure, path: Path) -> None:
    # A file without the date is the same file when drawn again.
    metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
    try:
        figure.savefig(path, metadata=metadata)
    except OSError as error:
        raise ConfigError(f"plot file {str(path)!r} cannot be written: {error.strerror}") from error
