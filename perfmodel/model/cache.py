"""What a sequence keeps in memory while it is decoded, and what one step reads of it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from perfmodel.errors import ModelConfigError
from perfmodel.families import Attention, Cache, one_line
from perfmodel.model.numbers import between, bits_of

MlaCache = Literal["compressed", "expanded"]

#: A constant state is accumulated over the whole sequence, so engines keep it in single precision; the state of a
#: short convolution holds plain activations.
RECURRENT_BITS, CONVOLUTION_BITS = 32, 16

_LONGEST = 1e12


@dataclass(frozen=True)
class CacheLayout:
    """How an engine allocates the cache of sliding-window layers.

    capped : room for the window only, instead of the whole context. extra_tokens : room beyond the window [token].
    """

    capped: bool
    extra_tokens: int
    meaning: str


#: Layouts by name.
LAYOUTS = {
    "capped": CacheLayout(True, 0, "no more than the window: the least an engine can keep"),
    "full": CacheLayout(
        False, 0, "pages for the whole context in every layer, as engines give that keep pages of equal size (vLLM)"
    ),
    "llama.cpp": CacheLayout(True, 512, "the window and one micro-batch of 512 tokens"),
}


def layout_of(name: object) -> CacheLayout:
    """The layout of this name.

    Raises
    ------
    ModelConfigError : there is none.
    """
    if not isinstance(name, str) or name not in LAYOUTS:
        raise ModelConfigError(f"cache layout is {one_line(name)}; allowed: {', '.join(LAYOUTS)}")
    return LAYOUTS[name]


def _elements(cache: Cache, mla_cache: object) -> int:
    if not isinstance(mla_cache, str) or mla_cache not in ("compressed", "expanded"):
        raise ModelConfigError(f"mla_cache is {one_line(mla_cache)}; allowed: 'compressed', 'expanded'")
    if mla_cache == "expanded" and cache.expanded_elements is not None:
        return cache.expanded_elements
    return cache.elements


def _entries(tokens: float, cache: Cache) -> float:
    """Entries that so many tokens fill; a group of tokens fills its entry when it is complete."""
    return float(math.floor(tokens / cache.tokens_per_entry)) if cache.tokens_per_entry > 1 else tokens


def allocated(
    attention: Sequence[Attention], context_tokens: object, bits: object, layout: object, mla_cache: object
) -> dict[str, float]:
    """Memory of one sequence at a context, over all layers, by what it is [byte]."""
    tokens = between(context_tokens, 0, _LONGEST, "kv_bytes: context_tokens")
    width = bits_of(bits, "kv_bytes: bits")
    rule = layout_of(layout)
    parts: dict[str, float] = {}
    for kind in attention:
        for cache in kind.caches:
            if cache.borrowed:
                continue
            kept = tokens
            if cache.window is not None and rule.capped:
                kept = min(tokens, cache.window + rule.extra_tokens)
            size = len(kind.layers) * _entries(kept, cache) * _elements(cache, mla_cache) * width / 8
            parts[cache.name] = parts.get(cache.name, 0.0) + size
    return parts | _states(attention)


def read(attention: Sequence[Attention], context_tokens: object, bits: object, mla_cache: object) -> dict[str, float]:
    """What one decode step reads of the cache of one sequence, over all layers, by what it is [byte]."""
    tokens = between(context_tokens, 0, _LONGEST, "kv_read_bytes: context_tokens")
    width = bits_of(bits, "kv_read_bytes: bits")
    parts: dict[str, float] = {}
    for kind in attention:
        for cache in kind.caches:
            seen = _entries(tokens if cache.window is None else min(tokens, cache.window), cache)
            if cache.read_entries is not None:
                seen = min(seen, cache.read_entries)
            size = len(kind.layers) * seen * _elements(cache, mla_cache) * width / 8
            parts[cache.name] = parts.get(cache.name, 0.0) + size
    return parts | _states(attention)


def state_bytes(kind: Attention) -> float:
    """Constant state of one sequence in one layer of this kind [byte]."""
    return kind.recurrent_elements * RECURRENT_BITS / 8 + kind.convolution_elements * CONVOLUTION_BITS / 8


def _states(attention: Sequence[Attention]) -> dict[str, float]:
    """Constant state of one sequence over all layers [byte]; no entry where there is none."""
    recurrent = sum(len(kind.layers) * kind.recurrent_elements for kind in attention) * RECURRENT_BITS / 8
    convolution = sum(len(kind.layers) * kind.convolution_elements for kind in attention) * CONVOLUTION_BITS / 8
    parts = {"recurrent state": recurrent, "convolution state": convolution}
    return {name: size for name, size in parts.items() if size}
