"""From router logits to picks and gate weights: the rule of each model family, as Transformers applies it.

A model's outputs hold the logits of its routers, not what was made of them. Families differ in what follows, and
some use numbers that are not in the logits. `routing_rule` knows the families whose picks can be recovered; the
others are refused. A rule is one function of logits [T, E]; ties go to the lower expert and are counted, because
which of two equal experts a model took is not in its logits.

Rules follow the routers of Transformers 5.24, ``models/FAMILY/modeling_FAMILY.py``, outside of training.
"""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import TraceError
from perfmodel.families import ConfigKeys
from perfmodel.routing.npz import shown

Floats = NDArray[np.float32]


class Picks(NamedTuple):
    """What a rule makes of logits [T, E]: experts and weights [T, k], and which tokens [T] had a tie for a pick."""

    ids: NDArray[np.int64]
    weights: Floats
    tied: NDArray[np.bool_]


@dataclass(frozen=True)
class Rule:
    """The rule of one model.

    family : ``model_type`` of its config
    top_k : picks of a token
    weight_rule : how weights come from logits, in a few words
    every_layer : whether all layers of the family have experts, so that layers can be counted from 0
    needs_bias : whether the choice also depends on a bias [E] that each router adds
    capacity : tokens of one sequence that an expert takes in one call, further ones go without; None for no limit
    apply : logits [T, E] and the bias [E] (zeros where there is none) to picks
    """

    family: str
    top_k: int
    weight_rule: str
    every_layer: bool
    apply: Callable[[Floats, Floats], Picks]
    needs_bias: bool = False
    capacity: int | None = None


def routing_rule(family: str, config: Mapping[str, object], top_k: int | None, experts: int, where: str) -> Rule:
    """The rule of a family.

    family : ``model_type``; one that is not known, or whose picks cannot be had from logits, is a TraceError
    config : values of the model's ``config.json``, empty where there is none; a missing flag is off
    top_k : picks of a token, where the user said; it must agree with the config
    experts : routed experts of a layer, columns of the logits
    where : start of every message
    """
    if family not in FAMILIES:
        close = difflib.get_close_matches(family, FAMILIES, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise TraceError(
            f"{where}: the rule from router logits to picks of family {shown(family)} is not known{hint}; "
            f"allowed: {', '.join(FAMILIES)}"
        )
    try:
        return FAMILIES[family](_Settings(family, config, top_k, experts, where))
    except TraceError:
        raise
    except ValueError as error:  # of a config's key; it names neither the recording nor the way out
        hint = "" if config else f"; the rule of {family} depends on it, give the model's config.json"
        raise TraceError(f"{where}: {error}{hint}") from None


@dataclass(frozen=True)
class _Settings:
    """Access to what a rule depends on."""

    family: str
    values: Mapping[str, object]
    given_top_k: int | None
    experts: int
    where: str

    @property
    def config(self) -> ConfigKeys:
        return ConfigKeys(self.values, "config.json")

    @property
    def top_k(self) -> int:
        if self.given_top_k is None and not self.values:
            raise TraceError(f"{self.where}: nothing says how many experts a token picks; --top-k or --config says it")
        stated = self.config.size("top_k") if self.values else self.given_top_k
        if stated is None or self.given_top_k not in (None, stated):
            raise TraceError(f"{self.where}: top_k is {self.given_top_k}, but the config says {stated}")
        if stated > self.experts:
            raise TraceError(f"{self.where}: top_k is {stated}, but the logits are of {self.experts} experts")
        return stated

    def flag(self, key: str) -> bool:
        """A switch; without a config there is nothing to read it from."""
        if not self.values:
            raise self.config.error(key, "true or false")
        return self.config.flag(key) if self.config.has(key) else False

    def number(self, key: str) -> float:
        value = self.values.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e6:
            raise self.config.error(key, "a number >= 0")
        return float(value)

    def groups(self) -> tuple[int, int]:
        """Groups of experts, and how many of them a token may pick from."""
        groups, allowed = self.config.size("n_group"), self.config.size("topk_group")
        if self.experts % groups or allowed > groups or allowed * (self.experts // groups) < self.top_k:
            raise TraceError(
                f"{self.where}: {self.experts} experts in n_group {groups} with topk_group {allowed} leave no "
                f"{self.top_k} picks; n_group divides the experts, topk_group is at most n_group"
            )
        return groups, allowed


# ---- steps that rules are made of ----


def _largest(values: Floats, k: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Columns of the k largest values of each row, largest first, and whether a left-out one is as large."""
    order = np.argsort(-values, axis=1, kind="stable")
    chosen = order[:, :k]
    if k == values.shape[1]:
        return chosen, np.zeros(len(values), dtype=np.bool_)
    last, next_one = (np.take_along_axis(values, order[:, at : at + 1], 1)[:, 0] for at in (k - 1, k))
    return chosen, last == next_one


def _softmax(logits: Floats) -> Floats:
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(shifted / shifted.sum(axis=1, keepdims=True), dtype=np.float32)


def _sigmoid(logits: Floats) -> Floats:
    with np.errstate(over="ignore"):
        return np.asarray(1 / (1 + np.exp(-logits)), dtype=np.float32)


def _at(values: Floats, ids: NDArray[np.int64]) -> Floats:
    return np.take_along_axis(values, ids, 1)


def _in_best_groups(values: Floats, scores: Floats, allowed: int) -> tuple[Floats, NDArray[np.bool_]]:
    """``values`` [T, E] with minus infinity outside the ``allowed`` groups of the largest ``scores`` [T, groups]."""
    groups, tied = _largest(scores, allowed)
    kept = np.zeros(scores.shape, dtype=np.bool_)
    np.put_along_axis(kept, groups, True, 1)
    inside = np.repeat(kept, values.shape[1] // scores.shape[1], axis=1)
    return np.where(inside, values, np.float32(-np.inf)), tied


# ---- families ----


def _softmax_then_top_k(settings: _Settings, weight_rule: str, normalise: bool, every_layer: bool) -> Rule:
    k = settings.top_k

    def apply(logits: Floats, bias: Floats) -> Picks:
        # The logits and not their softmax decide, because rounding may make two probabilities equal.
        ids, tied = _largest(logits, k)
        weights = _at(_softmax(logits), ids)
        return Picks(ids, weights / weights.sum(axis=1, keepdims=True) if normalise else weights, tied)

    return Rule(settings.family, k, weight_rule, every_layer, apply)


def _always_normalised(settings: _Settings) -> Rule:
    return _softmax_then_top_k(settings, "softmax over all, top-k, renormalised", True, settings.family == "mixtral")


def _never_normalised(settings: _Settings) -> Rule:
    return _softmax_then_top_k(settings, "softmax over all, top-k", False, False)


def _normalised_by_flag(settings: _Settings) -> Rule:
    every_layer = settings.family in ("olmoe", "flex_olmo")
    if settings.flag("norm_topk_prob"):
        return _softmax_then_top_k(settings, "softmax over all, top-k, renormalised", True, every_layer)
    return _softmax_then_top_k(settings, "softmax over all, top-k", False, every_layer)


def _top_k_then(settings: _Settings, squash: Callable[[Floats], Floats], name: str, every_layer: bool) -> Rule:
    k = settings.top_k

    def apply(logits: Floats, bias: Floats) -> Picks:
        ids, tied = _largest(logits, k)
        return Picks(ids, squash(_at(logits, ids)), tied)

    return Rule(settings.family, k, f"top-k of the logits, {name} of them", every_layer, apply)


def _top_k_then_softmax(settings: _Settings) -> Rule:
    return _top_k_then(settings, _softmax, "softmax", settings.family != "granitemoehybrid")


def _top_k_then_sigmoid(settings: _Settings) -> Rule:
    return _top_k_then(settings, _sigmoid, "sigmoid", False)


def _phimoe(settings: _Settings) -> Rule:
    """Sparse mixer (arXiv:2409.12136): each of two choices is weighed among the experts that come close to it."""
    if settings.top_k != 2:
        raise TraceError(f"{settings.where}: top_k is {settings.top_k}, the rule of phimoe picks 2")
    close = np.float32(2 * settings.number("router_jitter_noise"))

    def weigh(left: Floats, logits: Floats) -> tuple[NDArray[np.int64], Floats, NDArray[np.bool_]]:
        ids, tied = _largest(left, 1)
        best = _at(left, ids)
        with np.errstate(divide="ignore", invalid="ignore"):
            far = (best - logits) / np.maximum(np.abs(logits), best) > close
        return ids, _at(_softmax(np.where(far, np.float32(-np.inf), left)), ids), tied

    def apply(logits: Floats, bias: Floats) -> Picks:
        first, first_weight, _ = weigh(logits, logits)
        left = logits.copy()
        np.put_along_axis(left, first, np.float32(-np.inf), 1)
        second, second_weight, tied = weigh(left, logits)
        both = np.concatenate([first, second], axis=1)
        # Of two equal best experts both are picked, so only a tie for the second place leaves a doubt.
        return Picks(both, np.concatenate([first_weight, second_weight], axis=1), tied)

    return Rule(settings.family, 2, "sparse mixer, each pick among those close to it", True, apply)


def _deepseek_v2(settings: _Settings) -> Rule:
    k, scale = settings.top_k, np.float32(settings.number("routed_scaling_factor"))
    method = settings.config.choice("topk_method", "greedy", "group_limited_greedy")
    groups, allowed = settings.groups() if method == "group_limited_greedy" else (1, 1)

    def apply(logits: Floats, bias: Floats) -> Picks:
        # A group is as good as its best expert, and logits are in the order of their softmax.
        best = logits.reshape(len(logits), groups, -1).max(axis=2)
        choice, tied_groups = _in_best_groups(logits, best, allowed)
        ids, tied = _largest(choice, k)
        return Picks(ids, _at(_softmax(logits), ids) * scale, tied | tied_groups)

    limited = "" if groups == 1 else f" in the best {allowed} of {groups} groups"
    return Rule(settings.family, k, f"softmax over all, top-k{limited}, times {scale:g}", False, apply)


def _sigmoid_with_bias(settings: _Settings, groups: int, allowed: int, normalise: bool, scale: float) -> Rule:
    k, factor = settings.top_k, np.float32(scale)

    def apply(logits: Floats, bias: Floats) -> Picks:
        scores = _sigmoid(logits)
        choice = scores + bias
        tied_groups = np.zeros(len(logits), dtype=np.bool_)
        if groups > 1:
            best_two = np.sort(choice.reshape(len(choice), groups, -1), axis=2)[:, :, -2:].sum(axis=2)
            choice, tied_groups = _in_best_groups(choice, best_two, allowed)
        ids, tied = _largest(choice, k)
        weights = _at(scores, ids)
        # The choice was by biased scores; picks are listed by their weight.
        order = np.argsort(-weights, axis=1, kind="stable")
        ids, weights = np.take_along_axis(ids, order, 1), _at(weights, order)
        if normalise:
            weights = weights / (weights.sum(axis=1, keepdims=True) + np.float32(1e-20))
        return Picks(ids, weights * factor, tied | tied_groups)

    rule = f"sigmoid, top-k with a bias{', renormalised' * normalise}, times {scale:g}"
    return Rule(settings.family, k, rule, False, apply, needs_bias=True)


def _deepseek_v3(settings: _Settings) -> Rule:
    groups, allowed = settings.groups()
    if settings.experts < 2 * groups:
        raise TraceError(f"{settings.where}: groups of one expert; the rule of {settings.family} adds the best two")
    scale = settings.number("routed_scaling_factor")
    return _sigmoid_with_bias(settings, groups, allowed, settings.flag("norm_topk_prob"), scale)


def _minimax_m2(settings: _Settings) -> Rule:
    return _sigmoid_with_bias(settings, 1, 1, True, 1.0)


def _switch(settings: _Settings) -> Rule:
    if settings.given_top_k not in (None, 1):
        raise TraceError(f"{settings.where}: top_k is {settings.given_top_k}, the rule of {settings.family} picks 1")
    capacity = settings.config.size("expert_capacity")

    def apply(logits: Floats, bias: Floats) -> Picks:
        ids, tied = _largest(logits, 1)
        return Picks(ids, _at(_softmax(logits), ids), tied)

    return Rule(settings.family, 1, "softmax over all, top-1 up to a capacity", False, apply, capacity=capacity)


FAMILIES: Mapping[str, Callable[[_Settings], Rule]] = MappingProxyType(
    {
        **dict.fromkeys(("mixtral", "minimax", "qwen3_5_moe_text", "qwen3_vl_moe_text"), _always_normalised),
        **dict.fromkeys(("qwen2_moe", "qwen3_moe", "qwen3_next", "olmoe", "flex_olmo"), _normalised_by_flag),
        "jamba": _never_normalised,
        **dict.fromkeys(("gpt_oss", "granitemoe", "granitemoeshared", "granitemoehybrid"), _top_k_then_softmax),
        "llama4_text": _top_k_then_sigmoid,
        "phimoe": _phimoe,
        "deepseek_v2": _deepseek_v2,
        **dict.fromkeys(("deepseek_v3", "deepseek_v32", "dots1", "exaone_moe"), _deepseek_v3),
        **dict.fromkeys(("glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "solar_open"), _deepseek_v3),
        "minimax_m2": _minimax_m2,
        "switch_transformers": _switch,
    }
)
"""The rule of each ``model_type``."""
