"""Sizes, fonts, and how every series looks.

Colours are Okabe and Ito's, which colour-blind readers can tell apart; hatches and markers carry the same
distinction in grey.
"""

from typing import Any, NamedTuple

#: Widths of one column and of the whole page [inch]; PNG resolution [dot/inch].
COLUMN, PAGE, DPI = 3.4, 7.0, 200
FONT = "DejaVu Sans"

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, RED, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
LIGHT, GREY = "#E3E3E3", "#8C8C8C"


class Look(NamedTuple):
    """How one series is drawn."""

    label: str
    colour: str
    hatch: str = ""

    def options(self) -> dict[str, Any]:
        """Arguments for bars."""
        return {
            "label": self.label,
            "color": self.colour,
            "hatch": self.hatch,
            "edgecolor": BLACK,
            "linewidth": 0.5,
        }


class Line(NamedTuple):
    """How one series of points is drawn."""

    colour: str
    marker: str
    dashes: str | tuple[int, tuple[int, ...]]

    def options(self, size: float = 3.6) -> dict[str, Any]:
        """Arguments for lines; markers have a black rim, so that light colours show on white."""
        return {
            "color": self.colour,
            "marker": self.marker,
            "linestyle": self.dashes,
            "linewidth": 1.2,
            "markersize": size,
            "markeredgecolor": BLACK,
            "markeredgewidth": 0.5,
        }


#: Series in their order; colour, marker and dashes each tell them apart.
LINES = (
    Line(BLUE, "o", "-"),
    Line(ORANGE, "s", "--"),
    Line(GREEN, "^", "-."),
    Line(RED, "D", ":"),
    Line(SKY, "v", (0, (5, 1, 1, 1, 1, 1))),
    Line(PURPLE, "P", (0, (7, 2))),
    Line(BLACK, "X", (0, (3, 1, 1, 1))),
    Line(GREY, "p", (0, (1, 2))),
)

#: The computed columns of a reproduction.
COLUMN_LOOKS = {
    "datasheet": Look("datasheet peaks", LIGHT, "////"),
    "evidence": Look("evidence, nothing fitted", SKY),
    "calibrated": Look("calibrated", BLUE),
}
#: The parts of ``evaluate.PARTS``, in the order of the stack.
PART_LOOKS = {
    "attention": Look("attention", BLUE),
    "router": Look("router", YELLOW),
    "dense": Look("dense layers", PURPLE, "xxxx"),
    "experts_gpu": Look("experts on GPU", SKY),
    "link": Look("link", GREY),
    "ndp": Look("experts near data", ORANGE, "\\\\\\\\"),
    "cpu": Look("experts on CPU", GREEN, "...."),
    "head": Look("LM head", BLACK),
    "overhead": Look("layer overhead", RED, "----"),
}

#: Settings of matplotlib, in force while a figure is drawn and saved.
SETTINGS: Any = {
    "font.family": [FONT],
    "font.size": 7.0,
    "axes.labelsize": 7.5,
    "axes.titlesize": 8.0,
    "xtick.labelsize": 7.0,
    "ytick.labelsize": 7.0,
    "legend.fontsize": 7.0,
    "legend.frameon": False,
    "legend.handlelength": 1.6,
    "legend.columnspacing": 1.2,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.facecolor": "white",
    "figure.facecolor": "white",
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.5,
    "grid.linestyle": "-",
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "patch.linewidth": 0.5,
    "hatch.linewidth": 0.5,
    "text.usetex": False,
    "text.parse_math": False,  # a dollar sign in somebody's model name is no formula
    "savefig.facecolor": "auto",
    "savefig.bbox": None,
    "svg.fonttype": "path",
    "svg.hashsalt": "perfmodel",
    "pdf.fonttype": 42,
}
