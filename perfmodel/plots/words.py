"""Numbers, names and captions as text that the font can show."""

import functools
import math
import re
import textwrap
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font

from perfmodel import __version__
from perfmodel.evidence.figures import OUTPUT, PROMPT
from perfmodel.evidence.reproduce import Reproduction
from perfmodel.plots.style import FONT

_MODEL_NAMES = {"mixtral-8x7b": "Mixtral 8x7B", "mixtral-8x22b": "Mixtral 8x22B"}
_SYSTEM_NAMES = {"monde": "MoNDE", "hobbit": "HOBBIT"}
_SOURCES = {
    "recorded": "recorded",
    "synthetic": "SYNTHETIC, not a recording",
    "from-counts": "SYNTHETIC, drawn from counts",
}


def number(value: float) -> str:
    """Three significant digits, never an exponent."""
    if value == 0:
        return "0"
    if not math.isfinite(value):
        return "-"
    decimals = 2 - math.floor(math.log10(abs(value)))
    return f"{value:.{min(max(decimals, 0), 4)}f}"


@functools.cache
def _glyphs() -> Mapping[int, int]:
    return get_font(findfont(FONT)).get_charmap()


def plain(text: object, most: int = 60) -> str:
    """Somebody's name in one line of characters that the font has."""
    shown = "".join(c if c.isprintable() and ord(c) in _glyphs() else "?" for c in str(text))
    return shown if len(shown) <= most else f"{shown[: most - 1]}…"


def model_name(name: str) -> str:
    """A model as people write it."""
    return _MODEL_NAMES.get(name, plain(name))


def system_name(name: str) -> str:
    """A published system as people write it."""
    return _SYSTEM_NAMES.get(name, name)


def short_policies(policies: Sequence[str]) -> list[str]:
    """Policies by name, with only those options that tell them from others of the same name."""
    split = [(name, options.split(",")) for name, _, options in (p.partition(":") for p in policies)]
    short = []
    for name, options in split:
        others = [o for n, o in split if n == name]
        kept = [option for option in options if option and not all(option in other for other in others)]
        short.append(f"{name}:{','.join(kept)}" if kept else name)
    return short


def policy_names(policies: Sequence[str]) -> list[str]:
    """Short policies as people write them: published systems by their names, mean bits always and as ``3-bit``."""
    names = []
    for policy, short in zip(policies, short_policies(policies), strict=True):
        name, _, options = short.partition(":")
        stated = [option.partition("=") for option in policy.partition(":")[2].split(",")]
        bits = [f" {value}-bit" for option, _, value in stated if option == "mean_bits"]
        others = [option for option in options.split(",") if option and not option.startswith("mean_bits=")]
        names.append(plain(f"{system_name(name)}{''.join(bits)}{': ' if others else ''}{', '.join(others)}", 60))
    return names


def routing(model: object, source: object) -> str:
    """The model whose routing was replayed, and whether that was recorded."""
    return f"{plain(model)} ({_SOURCES.get(str(source), f'source {plain(source)}')})"


def folded(text: str, width: int) -> str:
    """A label in lines of at most ``width`` characters, broken after colons and commas where it can be."""
    lines = [""]
    for piece in re.findall(r"[^:,]*[:,]|[^:,]+", text):
        for part in [piece] if len(piece) <= width else textwrap.wrap(piece, width):
            if len(lines[-1]) + len(part) > width:
                lines.append("")
            lines[-1] += part
    return "\n".join(line for line in lines if line)


def caption_lines(width: float, *sentences: str) -> list[str]:
    """The sentences that are not empty and the version after them, in lines for a figure of this width [inch]."""
    text = " ".join(s for s in (*sentences, f"perfmodel {__version__}.") if s)
    return textwrap.wrap(text, int(width * 18.5 - 2), break_on_hyphens=False)


def caption(figure: Figure, *sentences: str) -> None:
    """Write the sentences that are not empty below the figure, and the version after them."""
    lines = caption_lines(figure.get_figwidth(), *sentences)
    figure.supxlabel("\n".join(lines), fontsize=7, color="#404040", x=0.01, ha="left")


def provenance(result: Reproduction, *columns: str) -> str:
    """Where the numbers of the named columns come from."""
    replayed = routing(result.trace.metadata.get("model"), result.trace.metadata.get("source"))
    words = [
        f"Prompt {PROMPT}, output {OUTPUT} tokens, batch 1.",
        f"Routing: {replayed}, cycled or cut to each model's layers and to these lengths.",
    ]
    systems = {name: plain(system.name) for name, system in result.systems.items()}
    if "published" in columns:
        words.append("Published: arXiv 2512.04476.")
    if "datasheet" in columns:
        words.append(f"Datasheet: {systems['datasheet']} at its peaks.")
    if "evidence" in columns:
        words.append(f"Evidence: {systems['evidence']}, nothing fitted.")
    if "calibrated" in columns:
        fitted = ", ".join(f"{c['name']} = {number(c['value'])}" for c in result.fitted())
        start = "the same" if "evidence" in columns else systems["calibrated"]
        words.append(f"Calibrated: {start} with {fitted}, fitted to {len(result.fit_errors)} published figures.")
    return " ".join(words)
