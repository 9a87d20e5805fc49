"""The formats figures can be written in; needs no matplotlib."""

from pathlib import Path

from perfmodel.errors import PerfModelError

SUFFIXES = (".png", ".svg", ".pdf")


def check_suffix(path: str | Path) -> str:
    """The suffix of a figure's path in lower case, one of ``SUFFIXES``.

    Raises
    ------
    PerfModelError : the suffix names no format, or there is none.
    """
    target = Path(path)
    suffix = target.suffix.lower()
    if suffix not in SUFFIXES:
        found = f"the suffix {suffix!r}" if suffix else "no suffix"
        raise PerfModelError(f"figure {target}: {found} names no format; allowed: {', '.join(SUFFIXES)}")
    return suffix
