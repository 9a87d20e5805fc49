"""A seeded generator of routing with chosen skew, for what-if studies where no recording exists.

Every layer has a load profile, every sequence its own variation of it, its decode steps a variation of that,
and recently used experts are a little more likely. A trace made here is marked ``synthetic`` and stays so.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from perfmodel.errors import TraceError
from perfmodel.routing.checks import MAX_EXPERTS, as_count
from perfmodel.routing.npz import MAX_BYTES, one_line, shown
from perfmodel.routing.trace import RoutingTrace

Floats = NDArray[np.float64]

_BLOCK = 256  # tokens drawn at once, which bounds the memory
_MEMORY_TOKENS = 2.0  # e-folding of the bonus for used experts: measured reuse decays within 4 to 8 tokens


class Skew(NamedTuple):
    """Parameters of :func:`generate` and where they come from; use as ``generate(..., **skew._asdict())``."""

    alpha: float
    sequence_concentration: float
    stickiness: float
    parameter_source: str


MIXTRAL_SKEW = Skew(
    alpha=9.1,
    sequence_concentration=60.0,
    stickiness=0.25,
    parameter_source=(
        "Mixtral-8x7B: alpha 9.1 is a moment fit to measured expert frequencies of the Instruct model (3.4 "
        "to 24.8); sequence_concentration 60 and stickiness 0.25 are assumed, as frequencies cannot tell "
        "them: neighbouring tokens then share an expert in 0.62 of cases, as reported for the middle layers"
    ),
)
"""Mixtral's skew between layers, with assumed variation between sequences and tokens."""


def generate(
    num_sequences: int,
    prompt: int,
    output: int,
    num_layers: int,
    num_experts: int,
    top_k: int,
    *,
    alpha: float = math.inf,
    sequence_concentration: float = math.inf,
    decode_concentration: float | None = None,
    stickiness: float = 0.0,
    seed: int = 0,
    layer_profile: ArrayLike | None = None,
    model: str = "synthetic routing",
    parameter_source: str = "chosen by the caller",
) -> RoutingTrace:
    """Draw a synthetic routing trace; the same arguments give the same trace.

    Parameters
    ----------
    num_sequences, prompt, output : sequences, prefill and decode tokens of each; one of the two may be 0
    num_layers, num_experts, top_k : shape of the routing
    alpha : > 0, Dirichlet parameter per expert of a layer's profile; smaller is more skewed, inf is uniform
    sequence_concentration : > 0, how closely a sequence follows its layer's profile; inf is exactly
    decode_concentration : > 0, how closely decode steps follow their own sequence; by default as the above
    stickiness : >= 0, added to the log-probability of an expert used by the previous token, fading with age
    seed : >= 0; sequence i is the same however many sequences there are
    layer_profile : positive or zero frequencies [L, E] or [E] to use in place of ``alpha``
    model : name to store in the metadata
    parameter_source : where the parameters come from, stored in the metadata

    Notes
    -----
    p_layer ~ Dirichlet(alpha), p_sequence ~ Dirichlet(c p_layer), p_decode ~ Dirichlet(c_decode p_sequence);
    a token's experts are the top k of log p + bonus + Gumbel noise, which is drawing without replacement.
    Gate weights are the softmax of those k sums; for 2 of 8 equal experts they average 0.70 and 0.30.
    The cosine between prefill and decode hardly pins these parameters down; choose them by hit rate and reuse.

    Raises
    ------
    TraceError : for parameters outside these ranges, or a trace too large for memory
    """
    num_sequences = as_count("num_sequences", num_sequences, 1, None)
    prompt = as_count("prompt", prompt, 0, None)
    output = as_count("output", output, 0, None)
    layers = as_count("num_layers", num_layers, 1, MAX_EXPERTS)
    experts = as_count("num_experts", num_experts, 1, MAX_EXPERTS)
    top_k = as_count("top_k", top_k, 1, experts)
    seed = as_count("seed", seed, 0, None)
    alpha = _positive("alpha", alpha)
    to_layer = _positive("sequence_concentration", sequence_concentration)
    to_sequence = to_layer
    if decode_concentration is not None:
        to_sequence = _positive("decode_concentration", decode_concentration)
    if not 0 <= _number("stickiness", stickiness) <= 100:
        raise TraceError(f"stickiness is {stickiness}, expected 0 to 100")
    tokens = prompt + output
    if tokens == 0:
        raise TraceError("prompt and output are both 0, expected at least one token")
    size = layers * max(num_sequences * tokens * top_k * 12, _BLOCK * experts * 8)
    if size > MAX_BYTES:
        raise TraceError(f"the trace would be too large for memory ({MAX_BYTES / 2**30:.0f} GiB)")

    seeds = np.random.SeedSequence(seed).spawn(num_sequences + 1)
    if layer_profile is None:
        uniform = np.full((layers, experts), -math.log(experts))
        profile = _vary(np.random.default_rng(seeds[0]), uniform, alpha * experts)
    else:
        profile = _given_profile(layer_profile, layers, experts, top_k)

    ids = np.empty((num_sequences * tokens, layers, top_k), dtype=np.uint16)
    weights = np.empty(ids.shape, dtype=np.float32)
    for s in range(num_sequences):
        # Separate streams, so that the lengths of the phases do not change each other.
        profiles, noise = (np.random.default_rng(child) for child in seeds[s + 1].spawn(2))
        in_prefill = _vary(profiles, profile, to_layer)
        in_decode = _vary(profiles, in_prefill, to_sequence)
        memory = np.zeros((layers, experts))
        start = s * tokens
        for log_p, first, count in ((in_prefill, start, prompt), (in_decode, start + prompt, output)):
            for at in range(first, first + count, _BLOCK):
                rows = slice(at, min(at + _BLOCK, first + count))
                _draw(noise, log_p, stickiness, memory, ids[rows], weights[rows])

    settings = {
        "alpha": None if layer_profile is not None else alpha,
        "sequence_concentration": to_layer,
        "decode_concentration": to_sequence,
        "stickiness": float(stickiness),
    }
    return RoutingTrace(
        topk_ids=ids,
        topk_weights=weights,
        sequence_offsets=np.arange(num_sequences + 1) * tokens,
        prompt_len=np.full(num_sequences, prompt),
        layer_index=np.arange(layers),
        num_experts=experts,
        metadata={
            "model": model,
            "source": "synthetic",
            "how": "Dirichlet profiles of layers, sequences and decode steps, Gumbel top-k, stickiness",
            "parameters": {key: str(value) if value == math.inf else value for key, value in settings.items()},
            "layer_profile": "given" if layer_profile is not None else "drawn",
            "parameter_source": parameter_source,
            "seed": seed,
        },
    )


def _vary(rng: np.random.Generator, log_p: Floats, concentration: float) -> Floats:
    """Logarithms of draws from Dirichlet(concentration * p) on the last axis; p itself if it is inf."""
    if math.isinf(concentration):
        return log_p
    shape = np.exp(log_p) * concentration
    # A gamma variate of a small shape underflows, its logarithm does not: Gamma(a) = Gamma(a + 1) U^(1 / a).
    with np.errstate(divide="ignore", over="ignore"):
        log_gamma = np.log(rng.standard_gamma(shape + 1)) + np.log1p(-rng.random(shape.shape)) / shape
    # An impossible expert stays impossible; one whose logarithm overflows keeps a tiny chance.
    log_gamma = np.where(np.isneginf(log_p), -np.inf, np.maximum(log_gamma, -1e300))
    largest = log_gamma.max(axis=-1, keepdims=True)
    with np.errstate(under="ignore"):
        total = np.exp(log_gamma - largest).sum(axis=-1, keepdims=True)
    varied: Floats = log_gamma - largest - np.log(total)
    return varied


def _draw(
    rng: np.random.Generator,
    log_p: Floats,
    stickiness: float,
    memory: Floats,
    ids: NDArray[np.uint16],
    weights: NDArray[np.float32],
) -> None:
    """Fill the rows of ``ids`` and ``weights``; ``memory`` [L, E] says how fresh an expert's last use is."""
    scores = log_p + rng.gumbel(size=(len(ids), *log_p.shape))
    if stickiness == 0:
        ids[:], weights[:] = _top(scores, ids.shape[-1])
        return
    fading = math.exp(-1 / _MEMORY_TOKENS)
    for token, score in enumerate(scores):
        picks, weights[token] = _top(score + stickiness * memory, ids.shape[-1])
        ids[token] = picks
        memory *= fading
        np.put_along_axis(memory, picks, 1.0, axis=-1)


def _top(scores: Floats, top_k: int) -> tuple[NDArray[np.intp], Floats]:
    """Experts of the ``top_k`` largest scores, largest first, and the softmax of those scores."""
    picks = np.argpartition(-scores, top_k - 1, axis=-1)[..., :top_k]
    best = np.take_along_axis(scores, picks, axis=-1)
    order = np.argsort(-best, axis=-1, kind="stable")
    picks, best = np.take_along_axis(picks, order, axis=-1), np.take_along_axis(best, order, axis=-1)
    with np.errstate(under="ignore"):
        gates = np.exp(best - best[..., :1])
    return picks, gates / gates.sum(axis=-1, keepdims=True)


def _given_profile(value: ArrayLike, layers: int, experts: int, top_k: int) -> Floats:
    try:
        table = np.asarray(value, dtype=np.float64)
    except (ValueError, TypeError) as error:
        raise TraceError(f"layer_profile is no table of numbers ({one_line(error)})") from error
    if table.shape not in ((layers, experts), (experts,)):
        raise TraceError(f"layer_profile has shape {table.shape}, expected {(layers, experts)} or {(experts,)}")
    if not (np.isfinite(table).all() and (table >= 0).all()):
        raise TraceError("layer_profile must hold finite frequencies >= 0")
    if ((table > 0).sum(axis=-1) < top_k).any():
        raise TraceError(f"layer_profile must give at least {top_k} experts (top_k) of each layer a chance")
    table = np.broadcast_to(table / table.max(axis=-1, keepdims=True), (layers, experts))
    with np.errstate(divide="ignore"):
        log_p: Floats = np.log(table / table.sum(axis=-1, keepdims=True))
    return log_p


def _number(name: str, value: object) -> float:
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.integer | np.floating):
        raise TraceError(f"{name} is {shown(value)}, expected a number")
    try:
        return float(value)
    except OverflowError as error:
        raise TraceError(f"{name} is too large for a number") from error


def _positive(name: str, value: object) -> float:
    number = _number(name, value)
    if not number > 0:
        raise TraceError(f"{name} is {number}, expected a number > 0 (inf for no variation)")
    return number
