"""A seeded generator of routing with chosen skew, for what-if studies where no recording exists.

Every layer has a load profile, every sequence its own variation of it, its decode steps a variation of that;
recently used experts are a little more likely, and so are the partners of those used in the layer before.
A trace made here is marked ``synthetic`` and stays so.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import TraceError
from perfmodel.routing.checks import MAX_EXPERTS, as_count
from perfmodel.routing.synthetic_checks import (
    BLOCK,
    MOST_SEQUENCES,
    TOO_LARGE,
    Floats,
    Profile,
    between,
    check_size,
    checked_groups,
    each_layer,
    labels_of,
    lengths,
    log_profiles,
    positive,
)
from perfmodel.routing.trace import RoutingTrace

_MEMORY_TOKENS = 2.0  # measured reuse decays within 4 to 8 tokens
_STICKIEST = 100.0
_REPEATED = BLOCK  # tokens that one may be like

#: One number for all layers, or one for each.
PerLayer = float | Sequence[float] | Floats


class Skew(NamedTuple):
    """Parameters of :func:`generate` and where they come from; use as ``generate(..., **skew._asdict())``."""

    alpha: float
    sequence_concentration: PerLayer
    stickiness: PerLayer
    parameter_source: str
    decode_concentration: PerLayer | None = None
    memory_tokens: float = _MEMORY_TOKENS
    next_layer: float = 0.0
    phase_concentration: float = math.inf
    gate_sharpness: float = 1.0
    order_noise: PerLayer = 1.0
    repeats: float = 0.0
    layer_profile: Profile | None = None
    decode_profile: Profile | None = None


MIXTRAL_SKEW = Skew(
    alpha=9.1,
    sequence_concentration=60.0,
    stickiness=0.25,
    parameter_source=(
        "Mixtral-8x7B: alpha 9.1 is a moment fit to measured expert frequencies of the Instruct model (3.4 "
        "to 24.8); sequence_concentration 60 is assumed, as frequencies cannot tell it; stickiness 0.25 is fitted, "
        "given that: neighbouring tokens then share an expert in 0.62 of cases, a published figure of the middle "
        "layers that was recalled, not checked"
    ),
)
"""Mixtral's skew between layers, with assumed variation between sequences and tokens."""


def generate(
    num_sequences: int,
    prompt: int | Sequence[int] | NDArray[np.int64],
    output: int | Sequence[int] | NDArray[np.int64],
    num_layers: int,
    num_experts: int,
    top_k: int,
    *,
    alpha: float = math.inf,
    sequence_concentration: PerLayer = math.inf,
    decode_concentration: PerLayer | None = None,
    stickiness: PerLayer = 0.0,
    memory_tokens: float = _MEMORY_TOKENS,
    next_layer: float = 0.0,
    phase_concentration: float = math.inf,
    gate_sharpness: float = 1.0,
    order_noise: PerLayer = 1.0,
    repeats: float = 0.0,
    expert_groups: int = 1,
    kept_groups: int = 1,
    seed: int = 0,
    layer_profile: Profile | None = None,
    decode_profile: Profile | None = None,
    labels: Sequence[str] | None = None,
    model: str = "synthetic routing",
    parameter_source: str = "chosen by the caller",
) -> RoutingTrace:
    """Draw a synthetic routing trace; the same arguments give the same trace.

    Parameters
    ----------
    num_sequences : sequences
    prompt, output : prefill and decode tokens, of all sequences or one a sequence; one of the two may be 0
    num_layers, num_experts, top_k : shape of the routing
    alpha : > 0, Dirichlet parameter per expert of a layer's profile; smaller is more skewed, inf is uniform
    sequence_concentration : > 0, how closely a sequence follows its layer's profile; inf is exactly; or [L]
    decode_concentration : > 0, how closely decode steps follow their own sequence; by default as the above; or [L]
    stickiness : -100 to 100, added to the log-probability of an expert used by the previous token, fading with
        age; or [L]. Below 0 neighbours avoid each other's experts.
    memory_tokens : > 0, tokens in which that bonus fades to 1/e; inf never fades
    next_layer : 0 to 1, how often an expert shares its luck with its partner in the layer before. It makes a
        layer's experts predictable from the ones before, and changes nothing within a layer.
    phase_concentration : > 0, how closely the layers' profiles in decode follow those in prefill, alike for all
        sequences; inf is exactly
    gate_sharpness : > 0, the scores are multiplied by this before the softmax that makes gate weights of them
    order_noise : 0 to 1, how much of the noise that chose a token's experts also orders and weighs them; or [L].
        Less makes the heaviest pick more often one that its sequence prefers; which experts are picked stays.
    repeats : 0 to 1, how often a token has the noise of the one that is 1 to 256 tokens before it, if there is one,
        in all layers: as a word does that comes again. Some tokens then find nearly all of their experts in a cache,
        and others few.
    expert_groups, kept_groups : equal groups of the experts of a layer, and how many of them one token picks from:
        those with the largest sums of their two best scores, as DeepSeek-V3's router does (which adds sigmoids, and
        here logarithms are added). By default one group, which is no limit.
    seed : >= 0; sequence i is the same however many sequences there are
    layer_profile : positive or zero frequencies [L, E] or [E] to use in place of ``alpha``, or such for each label;
        sequences take the labels in turn, unless ``labels`` says which
    decode_profile : the same for decode, in place of ``phase_concentration``, with the same labels
    labels : one text for each sequence, such as its domain, or None
    model : name to store in the metadata
    parameter_source : where the parameters come from, stored in the metadata

    Notes
    -----
    p_layer ~ Dirichlet(alpha), p_sequence ~ Dirichlet(c p_layer), p_decode ~ Dirichlet(c_decode p_sequence);
    a token's experts are the top k of log p + bonus + Gumbel noise, which is drawing without replacement.
    Where the phases have profiles of their own, p_sequence is first multiplied by decode over prefill profile.
    With probability ``next_layer`` the noise of an expert is that of its partner in the layer before, the one that
    is as popular there; noise stays independent between experts and between tokens.
    They are ordered by the same sum with ``order_noise`` times the noise.
    Gate weights are the softmax of the k sums that order; for 2 of 8 equal experts they average 0.70 and 0.30.
    The cosine between prefill and decode hardly pins these parameters down; choose them by hit rate and reuse
    (:func:`perfmodel.routing.fitting.fit`).

    Raises
    ------
    TraceError : for parameters outside these ranges, or a trace too large for memory
    """
    num_sequences = as_count("num_sequences", num_sequences, 1, None)
    if num_sequences > MOST_SEQUENCES:
        raise TraceError(TOO_LARGE)
    prompts, outputs = lengths("prompt", prompt, num_sequences), lengths("output", output, num_sequences)
    layers = as_count("num_layers", num_layers, 1, MAX_EXPERTS)
    experts = as_count("num_experts", num_experts, 1, MAX_EXPERTS)
    top_k = as_count("top_k", top_k, 1, experts)
    seed = as_count("seed", seed, 0, None)
    alpha = positive("alpha", alpha)
    to_layer = each_layer("sequence_concentration", sequence_concentration, layers, 0, math.inf)
    to_sequence = to_layer
    if decode_concentration is not None:
        to_sequence = each_layer("decode_concentration", decode_concentration, layers, 0, math.inf)
    sticky = each_layer("stickiness", stickiness, layers, -_STICKIEST, _STICKIEST)
    fading = math.exp(-1 / positive("memory_tokens", memory_tokens))
    next_layer = between("next_layer", next_layer, 0, 1)
    phase_concentration = positive("phase_concentration", phase_concentration)
    gate_sharpness = between("gate_sharpness", gate_sharpness, 1e-3, 1e3)
    repeats = between("repeats", repeats, 0, 1)
    in_order = each_layer("order_noise", order_noise, layers, 0, 1)
    groups, kept = checked_groups(expert_groups, kept_groups, experts, top_k)
    tokens = prompts + outputs
    # Before anything is drawn:
    check_size(tokens, layers, experts, top_k, next_layer=next_layer > 0, repeats=repeats > 0)

    shared, *seeds = np.random.SeedSequence(seed).spawn(num_sequences + 1)
    # Children of their own, so that what is drawn for all sequences alike does not change what is drawn for one.
    for_phase, for_partners = shared.spawn(2)
    if layer_profile is None:
        uniform = np.full((layers, experts), -math.log(experts))
        profiles = {"": _vary(np.random.default_rng(shared), uniform, alpha * experts)}
    else:
        profiles = log_profiles("layer_profile", layer_profile, layers, experts, top_k)
    if groups > 1 and any(np.isneginf(profile).any() for profile in profiles.values()):
        raise TraceError("layer_profile has experts that are never picked, which groups of experts may not have")
    of_sequence, names = labels_of(labels, list(profiles), num_sequences)
    changed: dict[str, Floats] | None = None
    if decode_profile is not None:
        changed = log_profiles("decode_profile", decode_profile, layers, experts, top_k)
        if set(changed) != set(profiles):
            raise TraceError("decode_profile and layer_profile have other labels, expected the same")
    elif math.isfinite(phase_concentration):
        rng = np.random.default_rng(for_phase)
        changed = {name: _vary(rng, profile, phase_concentration) for name, profile in profiles.items()}
    partners = None
    if next_layer > 0:
        partners = _partners(np.random.default_rng(for_partners), np.mean(list(map(np.exp, profiles.values())), axis=0))

    ids = np.empty((int(tokens.sum()), layers, top_k), dtype=np.uint16)
    weights = np.empty(ids.shape, dtype=np.float32)
    ends = np.append(0, np.cumsum(tokens))
    from perfmodel.kernels.generate import sticky_top  # compiled code is loaded only after everything is checked

    for s, start in enumerate(ends[:-1].tolist()):
        # Separate streams, so that profiles do not depend on lengths, nor tokens on how many follow them. The noise of
        # decode does depend on the length of the prefill, which is drawn before it.
        streams = [np.random.default_rng(child) for child in seeds[s].spawn(4)]
        profile = profiles[of_sequence[s]]
        for_prefill = _vary(streams[0], profile, to_layer)
        in_decode = for_prefill if changed is None else _shifted(for_prefill, profile, changed[of_sequence[s]])
        for_decode = _vary(streams[0], in_decode, to_sequence)
        memory, earlier = np.zeros((layers, experts)), np.empty((0, layers, experts))
        middle = start + int(prompts[s])
        for log_p, first, stop in ((for_prefill, start, middle), (for_decode, middle, int(ends[s + 1]))):
            for rows in _blocks(first, stop):
                noise = streams[1].gumbel(size=(rows.stop - rows.start, layers, experts))
                if partners is not None:
                    _link(streams[2], noise, partners, next_layer)
                if repeats > 0:
                    earlier = _repeat(streams[3], noise, earlier, repeats)
                best = np.empty((len(noise), layers, top_k))
                sticky_top(noise, log_p, sticky, in_order, fading, groups, kept, memory, ids[rows], best)
                weights[rows] = _gates(best, gate_sharpness)

    settings: dict[str, Any] = {
        "alpha": None if layer_profile is not None else _said(np.array([alpha])),
        "sequence_concentration": _said(to_layer),
        "decode_concentration": _said(to_sequence),
        "stickiness": _said(sticky),
    }
    further = {
        "memory_tokens": (np.array([float(memory_tokens)]), _MEMORY_TOKENS),
        "next_layer": (np.array([next_layer]), 0.0),
        "phase_concentration": (np.array([phase_concentration]), math.inf),
        "gate_sharpness": (np.array([gate_sharpness]), 1.0),
        "order_noise": (in_order, 1.0),
        "repeats": (np.array([repeats]), 0.0),
        "expert_groups": (np.array([groups]), 1),
        "kept_groups": (np.array([kept]), 1),
    }
    settings |= {key: _said(value) for key, (value, usual) in further.items() if (value != usual).any()}
    how_given = "given, by label" if list(profiles) != [""] else "given"
    given = {} if decode_profile is None else {"decode_profile": how_given}
    return RoutingTrace(
        topk_ids=ids,
        topk_weights=weights,
        sequence_offsets=ends,
        prompt_len=prompts,
        layer_index=np.arange(layers),
        num_experts=experts,
        metadata={
            "model": model,
            "source": "synthetic",
            "how": "Dirichlet profiles of layers, sequences and decode steps, Gumbel top-k, stickiness",
            "parameters": settings,
            "layer_profile": how_given if layer_profile is not None else "drawn",
            **given,
            "parameter_source": parameter_source,
            "seed": seed,
        },
        labels=names,
    )


def _vary(rng: np.random.Generator, log_p: Floats, concentration: float | Floats) -> Floats:
    """Logarithms of draws from Dirichlet(concentration * p) on the last axis; p itself where it is inf.

    concentration : one number, or one for each layer [L] of p [L, E]
    """
    each = np.broadcast_to(np.asarray(concentration, dtype=np.float64)[..., None], (*log_p.shape[:-1], 1))
    exact = np.isinf(each)
    if exact.all():
        return log_p
    shape = np.exp(log_p) * np.where(exact, 1.0, each)
    # A gamma variate of a small shape underflows, its logarithm does not: Gamma(a) = Gamma(a + 1) U^(1 / a).
    with np.errstate(divide="ignore", over="ignore"):
        log_gamma = np.log(rng.standard_gamma(shape + 1)) + np.log1p(-rng.random(shape.shape)) / shape
    # An impossible expert stays impossible; one whose logarithm overflows keeps a tiny chance.
    log_gamma = np.where(np.isneginf(log_p), -np.inf, np.maximum(log_gamma, -1e300))
    varied: Floats = np.where(exact, log_p, _normalised(log_gamma))
    return varied


def _normalised(logs: Floats) -> Floats:
    """Logarithms shifted so that their exponentials sum to one on the last axis."""
    largest = logs.max(axis=-1, keepdims=True)
    with np.errstate(under="ignore"):
        total = np.exp(logs - largest).sum(axis=-1, keepdims=True)
    shifted: Floats = logs - largest - np.log(total)
    return shifted


def _shifted(log_p: Floats, profile: Floats, decode: Floats) -> Floats:
    """A sequence's profile where its layers' profiles turn from that of prefill into that of decode."""
    used = np.isfinite(profile)
    change = np.subtract(decode, profile, out=np.zeros_like(profile), where=used)
    return _normalised(np.where(used, log_p + change, decode))


def _blocks(first: int, stop: int) -> Iterator[slice]:
    for at in range(first, stop, BLOCK):
        yield slice(at, min(at + BLOCK, stop))


def _partners(rng: np.random.Generator, profile: Floats) -> NDArray[np.int64]:
    """Partner in the layer before of every expert [L, E]: the one that is as popular there; the first row is unused.

    Experts that are equally popular are paired at random.
    """
    order = np.lexsort((rng.random(profile.shape), profile), axis=-1)
    partners = np.empty(profile.shape, np.int64)
    np.put_along_axis(partners, order, np.roll(order, 1, axis=0), axis=-1)
    return partners


def _link(rng: np.random.Generator, noise: Floats, partners: NDArray[np.int64], share: float) -> None:
    """Replace a share of every layer's noise [T, L, E] by that of the partners in the layer before."""
    copied = rng.random(noise.shape) < share
    for layer in range(1, noise.shape[1]):
        np.copyto(noise[:, layer], noise[:, layer - 1][:, partners[layer]], where=copied[:, layer])


def _repeat(rng: np.random.Generator, noise: Floats, earlier: Floats, share: float) -> Floats:
    """Replace the noise of a share of the tokens [T, L, E] by that of one before; the last of it, for what follows.

    earlier : [at most _REPEATED, L, E], noise of the tokens before the first one
    """
    # One draw, so that more tokens do not change what the first ones get.
    repeated, back = rng.random((len(noise), 2)).T
    every = np.concatenate([earlier, noise])
    sources = np.arange(len(noise)) + len(earlier) - 1 - (back * _REPEATED).astype(np.int64)
    for token in np.flatnonzero((repeated < share) & (sources >= 0)).tolist():
        noise[token] = every[len(earlier) + token] = every[sources[token]]
    return every[-_REPEATED:]


def _gates(best: Floats, sharpness: float) -> Floats:
    """Softmax of the scores of the picks, of which the first is the largest."""
    with np.errstate(under="ignore"):
        gates = np.exp(sharpness * (best - best[..., :1]))
    weights: Floats = gates / gates.sum(axis=-1, keepdims=True)
    return weights


def _said(values: Floats) -> Any:
    """A parameter as JSON: one number if all layers have the same; infinity, which JSON lacks, as a text."""
    found = ["inf" if math.isinf(value) else value for value in values.tolist()]
    return found[0] if len(set(found)) == 1 else found
