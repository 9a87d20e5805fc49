"""An empty figure to draw on, and a finished one in a file."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from numpy.typing import NDArray

from perfmodel.errors import PerfModelError
from perfmodel.paths import replace_when_done
from perfmodel.plots.formats import check_suffix
from perfmodel.plots.style import DPI, SETTINGS

#: How each format is written: small files, and no dates in them.
_WRITING: dict[str, dict[str, Any]] = {
    ".png": {"dpi": DPI, "pil_kwargs": {"compress_level": 2}},
    ".svg": {"metadata": {"Date": None}},
    ".pdf": {"metadata": {"CreationDate": None}},
}


@contextmanager
def canvas(
    rows: int, columns: int, size: tuple[float, float], *, sharey: bool = False
) -> Iterator[tuple[Figure, NDArray[Any]]]:
    """A figure of a size [inch] and its axes [rows, columns], to be drawn on inside the block."""
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=size, dpi=DPI)
        FigureCanvasAgg(figure)
        yield figure, figure.subplots(rows, columns, squeeze=False, sharey=sharey)
        # Laid out once for all formats: a figure that owns an engine lays out and draws again on every save.
        lay_out(figure)


def lay_out(figure: Figure) -> None:
    """Put panels, legends and captions in their places; drawing code calls it where labels depend on places."""
    ConstrainedLayoutEngine().execute(figure)


def save(figure: Figure, path: str | Path) -> None:
    """Write a figure to .png (200 dpi), .svg or .pdf, complete or not at all; equal figures give equal files.

    Raises
    ------
    PerfModelError : another suffix, or the file cannot be written.
    """
    target = Path(path)
    suffix = check_suffix(target)
    try:
        with matplotlib.rc_context(SETTINGS), replace_when_done(target) as temporary:
            figure.savefig(temporary, format=suffix[1:], **_WRITING[suffix])
    except OSError as error:
        raise PerfModelError(f"figure {target}: cannot be written ({error.strerror or error})") from error
