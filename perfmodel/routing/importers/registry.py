"""Which layouts are known, which one a file has, and reading it."""

import difflib
import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType

from perfmodel.errors import TraceError
from perfmodel.routing.defects import Finding, check, mend
from perfmodel.routing.defects.rows import counted
from perfmodel.routing.importers.base import Format, Imported, ImportOptions, option_name
from perfmodel.routing.importers.options import options_of
from perfmodel.routing.importers.probe import Probe
from perfmodel.routing.npz import one_line, shown
from perfmodel.routing.profile import PROFILE_KEYS
from perfmodel.routing.trace import RoutingTrace


@cache
def formats() -> Mapping[str, Format]:
    """Every known layout by its name: those of traces first. A module of this package that has a FORMAT adds one."""
    package = importlib.import_module(__package__)
    names = [f"{__package__}.{one.name}" for one in pkgutil.iter_modules(package.__path__)]
    found = [getattr(importlib.import_module(name), "FORMAT", None) for name in names]
    known = sorted((one for one in found if one is not None), key=lambda one: (one.gives != "trace", one.name))
    return MappingProxyType({one.name: one for one in known})


def find_format(name: str) -> Format:
    """The layout of this name; otherwise TraceError, with the names that are close."""
    if name not in formats():
        near = difflib.get_close_matches(name, [*formats(), "auto"], n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise TraceError(f"no format is called {shown(name)}{hint} (allowed: auto, {', '.join(formats())})")
    return formats()[name]


def recognise(path: str | Path) -> dict[str, str]:
    """Layouts that a file or folder may have, by what is in it, with the reason of each."""
    probe = Probe.of(path)
    reasons = {name: one.recognise(probe) for name, one in formats().items()}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def import_files(format: str, files: Sequence[str | Path], options: ImportOptions | None = None) -> Imported:  # noqa: A002
    """Read files of one recording.

    Parameters
    ----------
    format : name of a layout, see `formats`; "auto" takes the only one that the first file's content allows
    files : files in the order of the recording; what each is, is up to the layout
    options : what the files leave open

    Returns what they hold, with what is wrong with it; the defects of ``options.mend`` are mended.
    Raises :class:`TraceError` for everything that is wrong with the request or the files.
    """
    said = _checked_options(options)
    paths = [_path(file) for file in files]
    if not paths:
        raise TraceError("no files to import, expected at least one")
    found = find_format(_only_format(paths[0]) if format == "auto" else format)
    check_taken(found, said)
    return with_defects(found.read(paths, said), said)


def _checked_options(options: object) -> ImportOptions:
    if options is not None and not isinstance(options, ImportOptions):
        raise TraceError(f"options are {shown(options)}, expected ImportOptions")
    found = options or ImportOptions()
    return options_of({name: getattr(found, name) for name in found.given()})


def _path(file: str | Path) -> Path:
    try:
        return Path(file)
    except TypeError:
        raise TraceError(f"expected the path of a file, found {shown(file)}") from None


def _only_format(path: Path) -> str:
    candidates = recognise(path)
    if len(candidates) == 1:
        return next(iter(candidates))
    if not candidates:
        raise TraceError(f"{one_line(path)}: {_unknown(Probe.of(path))}")
    reasons = "; ".join(f"{name} ({reason})" for name, reason in candidates.items())
    raise TraceError(f"{one_line(path)}: may be of {len(candidates)} formats, name the right one: {reasons}")


def _unknown(probe: Probe) -> str:
    """Why a file that no format recognises is refused: what it is, or what it nearly is."""
    if probe.kind == "npz" and set(probe.shapes) >= PROFILE_KEYS:
        return (
            "is a frequency profile already, so there is nothing to import; --policy static:profile=FILE, trace synth "
            "--profile FILE and trace stats take it"
        )
    near = [f"looks like {name}, but {why}" for name, one in formats().items() if (why := one.nearly(probe))]
    kind = f"is of no known format ({'a folder' if probe.kind == 'folder' else f'a {probe.kind} file'})"
    return f"{kind}; {'; or it '.join(near)}" if near else f"{kind}; allowed: {', '.join(formats())}"


def check_taken(found: Format, said: ImportOptions) -> None:
    """Refuse an option that the layout has no use for."""
    refused = sorted(said.given() - found.takes - {"model", "mend"})
    if refused:
        names = ", ".join(option_name(one) for one in refused)
        allowed = ", ".join(option_name(one) for one in sorted({*found.takes, "model", "mend"}))
        raise TraceError(f"{names}: has no meaning for the format {found.name}; allowed: {allowed}")


def with_defects(imported: Imported, said: ImportOptions) -> Imported:
    """A reader's trace with what is wrong with it, and mended as asked; counts have nothing to look at."""
    trace = imported.result
    if not isinstance(trace, RoutingTrace):
        if said.mend:
            raise TraceError(f"--mend: {trace.metadata['how']}: counts have no rows to mend")
        return imported
    if not said.mend:
        return Imported(trace, (*imported.findings, *_news(imported, check(trace))))
    names = said.mend
    if imported.unassigned and not _news(imported, tuple(one for one in check(trace) if one.defect == "padding")):
        names -= {"padding"}  # the reader did all that can be done
    mended, findings = mend(trace, names)
    return Imported(mended, (*imported.findings, *_news(imported, findings)))


def _news(imported: Imported, findings: tuple[Finding, ...]) -> list[Finding]:
    """Without the finding that only counts the missing picks of which the reader told."""
    if not imported.unassigned:
        return list(findings)
    told = f"{counted(imported.unassigned, 'pick')} unassigned"
    return [one for one in findings if one.defect != "padding" or one.mend or not one.found.startswith(told)]
