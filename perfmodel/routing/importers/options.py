"""Import options from plain values, checked: each is of the right kind and a size that a recording may have."""

import itertools
import os
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from perfmodel.errors import TraceError
from perfmodel.routing.checks import MAX_EXPERTS, as_count
from perfmodel.routing.defects import checked_names
from perfmodel.routing.importers.base import ImportOptions, option_name
from perfmodel.routing.npz import shown

#: Most numbers of one option, such as a prompt length for each sequence.
MOST_NUMBERS = 1_000_000
_LARGEST = 2**31 - 1


def bounds(name: str) -> tuple[int, int]:
    """Smallest and largest number of an option that takes numbers."""
    if name in ("num_experts", "top_k"):
        return 1, MAX_EXPERTS
    return int(name == "sequence_len"), _LARGEST


def options_of(said: Mapping[str, Any]) -> ImportOptions:
    """Options by the names of :class:`ImportOptions`; entries that are None count as not said.

    Raises :class:`TraceError` for a name that is none, and for a value of the wrong kind or size.
    """
    names = {one.name for one in fields(ImportOptions)}
    unknown = sorted(set(said) - names)
    if unknown:
        raise TraceError(f"no import option is called {shown(unknown[0])}; allowed: {', '.join(sorted(names))}")
    return ImportOptions(**{name: _checked(name, value) for name, value in said.items() if value is not None})


def _checked(name: str, value: Any) -> Any:
    option = option_name(name)
    if name in ("model", "family"):
        if not isinstance(value, str) or not value.strip() or not value.isprintable():
            raise TraceError(f"{option} is {shown(value)}, expected a name")
        return value
    if name in ("num_experts", "top_k"):
        return as_count(option, value, *bounds(name))
    if name == "mend":
        return checked_names(value)
    if name in ("config", "expert_map"):
        if not isinstance(value, str | os.PathLike):
            raise TraceError(f"{option} is {shown(value)}, expected a path")
        return Path(value)
    lowest, highest = bounds(name)
    every = [value] if isinstance(value, int | np.integer) else value
    if isinstance(every, str) or not isinstance(every, Iterable):
        raise TraceError(f"{option} is {shown(value)}, expected integers >= {lowest}")
    numbers = tuple(as_count(option, one, lowest, highest) for one in every)
    if not 1 <= len(numbers) <= MOST_NUMBERS:
        raise TraceError(f"{option} has {len(numbers)} numbers; allowed: 1 to {MOST_NUMBERS}")
    if name == "layers" and any(b <= a for a, b in itertools.pairwise(numbers)):
        raise TraceError(f"{option} is {shown(list(numbers))}, expected layers that increase")
    return numbers
