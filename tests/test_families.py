"""Families of decoders and encoder-decoders: counts from outside, and keys that may be missing, odd or wrong."""

import copy
import itertools
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
from family_configs import PRUNED, PUBLISHED
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.errors import ModelConfigError
from perfmodel.model import MoEModel

CONFIGS = [config for config, _, _ in PUBLISHED.values()] + [PRUNED]


@pytest.mark.parametrize("name", PUBLISHED)
def test_totals(name: str) -> None:
    config, total, active = PUBLISHED[name]
    model = MoEModel.from_config(config)
    assert model.total_params == total
    if active is not None:
        counts = (
            model.active_params,
            model.active_params_without_input_embedding,
            model.active_params_without_embeddings,
        )
        assert any(math.isclose(count / 1e9, active, rel_tol=0.03) for count in counts), counts


@pytest.mark.parametrize("config", CONFIGS, ids=[*PUBLISHED, "pruned"])
def test_every_layer_has_one_mixer_and_one_network(config: dict[str, Any]) -> None:
    model = MoEModel.from_config(config)
    every = list(range(model.num_layers))
    assert sorted(layer for kind in model.attention for layer in kind.layers) == every
    assert sorted(layer for kind in model.feed_forward for layer in kind.layers) == every


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to every key, inside objects and lists of objects as well."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        if isinstance(key, str):
            yield (*at, key)
        yield from places(inner, (*at, key))


def changed(config: dict[str, Any], place: tuple[Any, ...], *value: Any) -> dict[str, Any]:
    """A copy without the key at a place, or with another value there."""
    copied = copy.deepcopy(config)
    inside: Any = copied
    for key in place[:-1]:
        inside = inside[key]
    if value:
        inside[place[-1]] = value[0]
    else:
        del inside[place[-1]]
    return copied


def read(config: dict[str, Any]) -> MoEModel | ModelConfigError:
    try:
        return MoEModel.from_config(config)
    except ModelConfigError as error:
        return error


def numbers(model: MoEModel) -> tuple[Any, ...]:
    """Everything that counts."""
    kinds = (model.attention, model.feed_forward, model.embedding, model.head, model.tied_embeddings)
    return (*kinds, model.hidden_size, model.num_layers, model.vocab_size)


@pytest.mark.parametrize("config", CONFIGS, ids=[*PUBLISHED, "pruned"])
def test_a_key_that_is_left_out_is_missed_or_its_default_is_listed(config: dict[str, Any]) -> None:
    whole = MoEModel.from_config(config)
    missed = 0
    for place in places(config):
        model = read(changed(config, place))
        if isinstance(model, ModelConfigError):
            missed += "allowed" in str(model)
            continue
        assert numbers(model) == numbers(whole) or set(model.assumptions) - set(whole.assumptions), place
    assert missed >= 6


JUNK: list[Any] = [
    None, True, False, 0, -1, 1, 2, 7.5, math.nan, math.inf, 10**7, 10**400, "", "relu", "x" * 300, [], [0], [1, 1],
    [None] * 28, {}, {"a": []}, ["full_attention"] * 48, [1] * 48, [{"attention": {}, "ffn": {}}] * 5,
]  # fmt: skip


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=500)
def test_junk_is_read_or_refused(seed: int) -> None:
    random_ = random.Random(seed)
    config = random_.choice(CONFIGS)
    for place in random_.choices(list(places(config)), k=random_.choice([1, 1, 2, 3])):
        try:
            config = changed(config, place, copy.deepcopy(random_.choice(JUNK)))
        except (KeyError, TypeError, IndexError):  # an object above was replaced before
            continue
    model = read(config)
    if isinstance(model, ModelConfigError):
        assert str(model).isprintable()
        return
    sizes = [model.total_params, model.active_params, model.weight_bytes, model.kv_bytes(4096)]
    assert all(0 <= size < 1e30 for size in sizes)
    assert model.active_params <= model.total_params


WRONG = [
    ("Qwen2-57B-A14B", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size"),
    ("Qwen2-57B-A14B", {"use_sliding_window": True, "sliding_window": 9}, "layer_types"),
    ("Qwen2.5-7B", {"use_sliding_window": True, "sliding_window": None}, "sliding_window"),
    ("Qwen3-Next-80B-A3B", {"full_attention_interval": None}, "layer_types"),
    ("Qwen3-Next-80B-A3B", {"layer_types": ["full_attention"] * 48}, "full_attention_interval"),
    ("Qwen3-Next-80B-A3B", {"layer_types": ["mamba"] * 48}, "layer_types"),
    ("Qwen3-Next-80B-A3B", {"linear_num_value_heads": 24}, "linear_num_value_heads"),
    ("Qwen3.5-122B-A10B", {"mlp_only_layers": [3]}, "mlp_only_layers"),
    ("Llama-4-Scout", {"moe_layers": [48]}, "moe_layers"),
    ("Llama-4-Scout", {"moe_layers": [True]}, "moe_layers"),
    ("Llama-4-Scout", {"interleave_moe_layer_step": 49}, "interleave_moe_layer_step"),
    ("Llama-4-Scout", {"no_rope_layers": [2] * 48}, "no_rope_layers"),
    ("Llama-4-Maverick", {"intermediate_size_mlp": None}, "intermediate_size_mlp"),
    ("gemma-4-26B-A4B", {"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input"),
    ("gemma-4-26B-A4B", {"num_kv_shared_layers": 10}, "num_kv_shared_layers"),
    ("gemma-4-26B-A4B", {"enable_moe_block": False}, "moe_intermediate_size"),
    ("gemma-4-26B-A4B", {"layer_types": ["sliding_attention"] * 30}, "layer_types"),
    ("gemma-4-26B-A4B", {"num_global_key_value_heads": 3}, "num_global_key_value_heads"),
    ("gemma-4-26B-A4B", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
    ("gemma-3-1b", {"sliding_window_pattern": None}, "layer_types"),
    ("switch-base-8", {"num_sparse_encoder_layers": 5}, "num_sparse_encoder_layers"),
    ("switch-base-8", {"num_sparse_decoder_layers": 0}, "num_sparse_decoder_layers"),
    ("switch-base-8", {"decoder_sparse_step": 3}, "decoder_sparse_step"),
    ("switch-base-8", {"feed_forward_proj": "gated-gelu"}, "feed_forward_proj"),
    ("switch-base-8", {"is_gated_act": True}, "is_gated_act"),
    ("nllb-moe-54b", {"second_expert_policy": "random"}, "second_expert_policy"),
    ("nllb-moe-54b", {"num_hidden_layers": 12}, "num_hidden_layers"),
    ("nllb-moe-54b", {"decoder_attention_heads": 17}, "decoder_attention_heads"),
    ("nllb-moe-54b", {"num_experts": 1}, "top_k|num_experts"),
]


@pytest.mark.parametrize(("name", "change", "key"), WRONG, ids=itertools.count())
def test_what_cannot_be_counted_is_refused_by_its_key(name: str, change: dict[str, Any], key: str) -> None:
    config = PUBLISHED[name][0]
    inner = config.get("text_config")
    config = config | (change if inner is None else {"text_config": inner | change})
    with pytest.raises(ModelConfigError, match=key) as caught:
        MoEModel.from_config(config)
    assert "allowed" in str(caught.value)
