"""Names of modules in quantisation configs: what they match, and that no list of them hangs or crashes the reader."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from storages import EXPERTS, keys, network, stored

from perfmodel.errors import ModelConfigError
from perfmodel.families import FeedForward
from perfmodel.storage import compute_format, kv_cache_bits
from perfmodel.storage.patterns import Patterns
from perfmodel.storage.steps import most_steps


def shares(*names: str, module: str = "mlp.down_proj", layer: int | None = 3, copies: int = 1) -> float:
    return Patterns(names, "config: ignore").share(module, layer, copies)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.3.mlp.down_proj",
        "model.layers.3.mlp.down_proj.weight",
        "model.layers.3.mlp",
        "model.layers.3",
        "layers.3.mlp.down_proj",
        "model.language_model.layers.3.mlp",
        "language_model.model.layers.3.mlp",
        "backbone.layers.3.mlp",
        "transformer.blocks.3.mlp",
        "model.decoder.layers.3.mlp",
        "mlp.down_proj",
        "down_proj",
        "model.layers.3*",
        "model.layers.3.*",
        "model.layers.3.mlp*",
        "model.layers.*.mlp",
        "model.layers.?.mlp.down_proj",
        "model.language_model.layers.3.mlp*",
        "*.mlp.*",
        "*down_proj*",
        "*.mlp.down_proj.weight",
        "re:.*mlp.*",
        r"re:.*mlp\.(gate|up|down)_proj.*",
        r"re:model\.layers\.[0-3]\.mlp\..*",
        r"re:^language_model\.model\.layers\.\d+\.mlp",
        r"re:.*\.(1|2|3)\.mlp\.down_proj$",
        r"model\.layers\.\d+\.mlp",
    ],
)
def test_names_of_a_module(name: str) -> None:
    assert shares(name) == 1


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.13.mlp.down_proj",
        "model.layers.30*",
        "model.layers.4.*",
        "layers.3.mlp.down",
        "mlp.down",
        "mtp.layers.3.mlp.down_proj",
        "mtp.layers.3*",
        "visual.blocks.3.mlp",
        "vision_tower*",
        "model.vision_tower.encoder.layers.3.mlp",
        "lm_head",
        "model",
        "re:mlp.*",
        r"re:.*mlp\.(gate|up)_proj.*",
        r"model\.layers\.\d+\.ml",
        "encoder.block.3.mlp",
    ],
)
def test_names_of_other_modules(name: str) -> None:
    assert shares(name) == 0


def test_a_prefix_of_a_component_is_no_match_and_a_glob_is() -> None:
    assert shares("mlp.gate", module="mlp.gate_proj") == 0
    assert shares("*mlp.gate*", module="mlp.gate_proj") == 1
    assert shares("model.layers.1*", layer=10) == 1  # as globs go
    assert shares("model.layers.1.*", layer=10) == 0


def test_modules_outside_layers() -> None:
    for name in ("lm_head", "language_model.lm_head", "lm_head.weight", "re:.*lm_head.*", "*lm_head*", "lm_head.*"):
        assert shares(name, module="lm_head", layer=None) == 1
    assert shares("model.embed_tokens", module="embed_tokens", layer=None) == 1


def test_experts_with_and_without_index() -> None:
    module = "mlp.experts.up_proj"
    for name in (
        "model.layers.3.mlp.experts",
        "model.layers.3.mlp.experts.*",
        "model.layers.3.mlp.experts.*.up_proj",
        "model.layers.*.mlp.experts",
        r"re:.*experts\.\d+\.(up|gate)_proj",
        "re:.*experts.*",
    ):
        assert shares(name, module=module, copies=EXPERTS) == 1
    assert shares("model.layers.3.mlp.experts.7.up_proj", module=module, copies=EXPERTS) == 1 / EXPERTS
    assert shares("model.layers.3.mlp.experts.7", module=module, copies=EXPERTS) == 1 / EXPERTS
    assert shares(r"re:.*experts\.[0-3]\.", module=module, copies=EXPERTS) == 4 / EXPERTS
    assert shares(r"re:.*experts\.7\.", "model.layers.3.mlp.experts.6", module=module, copies=EXPERTS) == 2 / EXPERTS
    assert shares("model.layers.3.mlp.experts.99.up_proj", module=module, copies=EXPERTS) == 0
    assert shares(r"re:.*mlp\.(gate|up|gate_up|down)_proj.*", module=module, copies=EXPERTS) == 0


def test_layers_of_an_encoder_and_a_decoder_are_told_apart() -> None:
    shape = network(encoder_layers=6)
    base = {"quant_method": "fp8", "weight_block_size": None}
    for names, kept in (
        (["encoder.block.1.mlp"], 1),
        ([f"encoder.block.{layer}" for layer in range(6)], 5),  # the first is dense
        (["model.decoder.layers.0"], 1),
        (["encoder.block.9"], 0),
        (["encoder.*"], 5),
        (["*decoder*"], 6),
    ):
        bits = stored({**base, "modules_to_not_convert": names}, shape).expert.bits
        assert bits == pytest.approx((8 * (11 - kept) + 16 * kept) / 11, rel=1e-12)


@pytest.mark.parametrize(
    "names",
    [
        [f"model.layers.{layer}.mlp" for layer in (1, 2, 10)],
        [f"model.layers.{layer}.mlp*" for layer in (1, 2, 10)],
        [r"re:.*layers\.(1|2|10)\.mlp.*"],
        ["model.layers.1.mlp", r"re:.*layers\.10\..*", "model.layers.2.*"],
    ],
)
def test_layers_that_differ_give_the_weighted_mean(names: list[str]) -> None:
    storage = stored({"quant_algo": "NVFP4", "ignore": ["lm_head", *names]})
    assert storage.expert.name == "nvfp4+bfloat16"
    assert storage.expert.bits == pytest.approx((8 * 4.5 + 3 * 16) / 11, rel=1e-12)
    assert storage.expert.parts[0][1] == pytest.approx(8 / 11, rel=1e-12)


def test_layers_with_equally_many_digits_are_asked_once_and_counted_all() -> None:
    storage = stored({"quant_algo": "NVFP4", "ignore": ["lm_head", "model.layers.?.mlp*"]})
    assert storage.expert.bits == pytest.approx((2 * 4.5 + 9 * 16) / 11, rel=1e-12)  # layers 10 and 11


# --- hostile names


@pytest.mark.parametrize(
    "name",
    [
        "re:(a+)+$",
        "re:(.*)*x",
        "re:(a|a)*$",
        "re:((a|b)+c)+",
        "re:.*.*.*.*.*.*x",
        "re:" + "(e|.)" * 60 + "Q",
        "re:" + "a?" * 60 + "Q",
        "re:(a)\\1+",
        "re:(?x)( . ) *x",
        "re:(?i:a)*",
        "re:[",
        "re:(",
        "re:*",
        "re:a{99999999999999999999}",
        "re:[[a]--b]",
        "re:" + "x" * 600,
        "*" * 501,
        "",
        "(a+)+",
    ],
)
def test_patterns_that_could_take_long_or_are_none_are_refused(name: str) -> None:
    with pytest.raises(ModelConfigError) as caught:
        shares(name)
    assert "config: ignore" in str(caught.value)
    assert "\n" not in str(caught.value)


def refusal(call: Callable[[], object]) -> str:
    """The message with which a call is refused; empty where it is not."""
    try:
        call()
    except ModelConfigError as error:
        return str(error)
    return ""


@given(st.text(alphabet="ae.*+?()|[]{}\\d1,^$:=!<", max_size=24))
def test_any_pattern_is_quick_or_refused(text: str) -> None:
    module = "self_attn." + 30 * "a"
    for name in (f"re:{text}", text):
        assert "\n" not in refusal(lambda name=name: shares(name, module=module))  # type: ignore[misc]


@pytest.mark.parametrize(
    ("expression", "steps"),
    [
        ("abc", 1),
        ("a|b", 2),
        ("(a|b)(c|d|e)", 6),
        ("a?b?", 4),
        (r"\d+", 8),
        (".*", 100),
        (".*a.*", 5000),
        ("[ab]*", 100),
    ],
)
def test_bound_on_steps(expression: str, steps: float) -> None:
    assert most_steps(expression) == steps


_LEAF = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.just(10**30),
    st.floats(),
    st.sampled_from(["fp8", "NVFP4", "re:.*", "lm_head", "Linear", "int", "float", "group", "", "x" * 300, "re:(a+)+"]),
)
_VALUE = st.recursive(
    _LEAF,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["weights", "num_bits", "a"]), inner),
    max_leaves=6,
)
_METHODS = [
    "fp8",
    "mxfp4",
    "mxfp8",
    "nvfp4",
    "fbgemm_fp8",
    "gptq",
    "awq",
    "auto-round",
    "bitsandbytes",
    "hqq",
    "modelopt",
]
_METHODS += ["compressed-tensors"]
_GOOD: dict[str, Any] = {
    "bits": 4,
    "group_size": 32,
    "load_in_4bit": True,
    "packing_format": "auto_round:auto_gptq",
    "quant_algo": "NVFP4",
    "format": "pack-quantized",
    "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64}},
    "config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32, "symmetric": False}}},
    "ignore": ["lm_head", "re:.*self_attn.*"],
    "modules_to_not_convert": ["lm_head", "model.layers.1*"],
    "weight_block_size": [128, 128],
    "dynamic": {"-:.*self_attn.*": {}},
    "quantized_layers": {"model.layers.3.mlp.experts": {"quant_algo": "FP8"}},
    "kv_cache_scheme": {"num_bits": 8},
    "extra_config": {"model.layers.0": {"bits": 16}},
}


@given(
    st.sampled_from(_METHODS),
    st.sets(st.sampled_from(sorted(_GOOD)), max_size=8),
    st.dictionaries(st.sampled_from(sorted(_GOOD)), _VALUE, max_size=2),
)
def test_any_quantisation_config_is_read_or_refused(method: str, good: set[str], bad: dict[str, Any]) -> None:
    table = {"quant_method": method, **{key: _GOOD[key] for key in sorted(good)}, **bad}

    def read() -> None:
        storage = stored(table)
        assert all(1 < form.bits <= 64 for form in storage.by_class().values())
        assert compute_format(keys(table))
        assert kv_cache_bits(keys(table)) in (None, 8.0, 4.5)

    said = refusal(read)
    assert "\n" not in said
    assert len(said) < 2000


@given(_VALUE, _VALUE)
def test_any_other_values_are_refused_in_one_line(config: Any, beside: Any) -> None:
    assert "\n" not in refusal(lambda: stored(config, beside=beside, expert_dtype=beside))


def test_deep_nesting_is_refused() -> None:
    deep: Any = "x"
    for _ in range(5000):
        deep = {"weights": deep}
    for key in ("config_groups", "ignore", "quant_algo", "kv_cache_scheme"):
        table = {"quant_method": "compressed-tensors", "format": "pack-quantized", key: deep}
        with pytest.raises(ModelConfigError):
            stored(table)


def test_many_layers_and_names_end_soon() -> None:
    shape = network()
    layers = tuple(range(10_000))
    many = dataclasses.replace(
        shape,
        num_layers=10_000,
        attention=(dataclasses.replace(shape.attention[0], layers=layers),),
        feed_forward=(FeedForward(name="none", layers=layers, norm_params=0),),
    )
    half = [f"model.layers.{layer}.self_attn" for layer in range(5000)]
    whole = stored({"quant_algo": "NVFP4"}, shape).attention.bits
    assert stored({"quant_algo": "NVFP4", "ignore": half}, many).attention.bits == pytest.approx((whole + 16) / 2)
    for names in (["re:.*1.*2.*3"] * 1500, [f"*{layer}*q*" for layer in range(1500)], ["re:.*a"] * 3000):
        with pytest.raises(ModelConfigError, match=r"takes too long|more than 2000 patterns|too many layers"):
            stored({"quant_algo": "NVFP4", "ignore": names}, many)
