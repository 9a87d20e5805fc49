"""Real configs: every one is read or refused by key, and counts equal what the publishers say."""

import copy
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.errors import ModelConfigError
from perfmodel.model import MoEModel, supported_families

#: Totals that differ from the published ones by more than 1 %, and why.
TOTAL_EXCEPTIONS = {
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": "the published total holds the vision tower",
    "microsoft/Phi-tiny-MoE-instruct": "the config is a reconstruction, and the figure is rounded to two digits",
    "ibm-granite/granite-3.1-1b-a400m-instruct": "the figure is rounded to two digits",
}
#: Active counts that differ by more than 3 % under the convention that comes closest, and why.
ACTIVE_EXCEPTIONS = {
    "Qwen/Qwen3-Next-80B-A3B-Instruct": "the figure is rounded to one digit",
    "microsoft/Phi-tiny-MoE-instruct": "the config is a reconstruction, and the figure is rounded to two digits",
    "ibm-granite/granite-3.1-1b-a400m-instruct": "the figure is rounded to one digit",
}


def config_paths(shared: Path) -> list[Path]:
    return sorted((shared / "configs").glob("*/config.json"))


def published(shared: Path) -> Iterator[tuple[str, dict[str, Any], MoEModel]]:
    figures = json.loads((shared / "configs" / "published_params.json").read_text())
    for name, figure in figures.items():
        yield name, figure, MoEModel.from_config(shared / "configs" / name.replace("/", "__"))


def read_or_message(source: Any) -> MoEModel | str:
    """The model, or what the refusal says, on one line."""
    try:
        return MoEModel.from_config(source)
    except ModelConfigError as error:
        return str(error) if str(error).isprintable() else ""


def active(model: MoEModel, convention: str) -> int:
    return {
        "all": model.active_params,
        "minus_input_embedding": model.active_params_without_input_embedding,
        "minus_both": model.active_params_without_embeddings,
    }[convention]


def test_every_config_is_read_or_refused_by_its_key(shared: Path) -> None:
    paths = config_paths(shared)
    refused: dict[str, str] = {}
    for path in paths:
        found = read_or_message(path)
        if isinstance(found, str):
            assert found.startswith(str(path))
            assert "key '" in found
            refused[path.parent.name] = found
        else:
            assert found.name == path.parent.name
            assert found.family in supported_families()
    assert len(paths) - len(refused) >= 120, refused


def test_totals_equal_the_published_ones(shared: Path) -> None:
    off, count = {}, 0
    for name, figure, model in published(shared):
        count += 1
        error = model.total_params / 1e9 / figure["published_total_b"] - 1
        if abs(error) > 0.01:
            off[name] = error
        # A second count of the same configs, made by other code.
        assert math.isclose(model.total_params, figure["config_total_params"], rel_tol=2e-3), name
        assert math.isclose(model.routed_expert_params, figure["routed_expert_params"], rel_tol=2e-3), name
    assert count == 56
    assert off.keys() <= TOTAL_EXCEPTIONS.keys(), off


def test_active_counts_equal_the_published_ones(shared: Path) -> None:
    off, count = {}, 0
    for name, figure, model in published(shared):
        if figure["published_active_b"] is None:
            continue
        count += 1
        error = active(model, figure["best_active_convention"]) / 1e9 / figure["published_active_b"] - 1
        if abs(error) > 0.03:
            off[name] = error
    assert count == 53
    assert off.keys() <= ACTIVE_EXCEPTIONS.keys(), off


def test_parts_add_up_in_every_config(shared: Path) -> None:
    for path in config_paths(shared):
        try:
            model = MoEModel.from_config(path)
        except ModelConfigError:
            continue
        by_class = model.params_by_class()
        assert sum(by_class.values()) == model.total_params
        assert all(count >= 0 for count in by_class.values())
        rows = model.params_by_layer()
        for one in ("attention", "dense", "shared", "router", "expert"):
            assert sum(int(row[one]) for row in rows) == by_class[one]
        assert [row["layer"] for row in rows] == list(range(model.num_layers))
        assert 0 < model.active_params_without_embeddings < model.active_params <= model.total_params
        assert math.isclose(model.weight_bytes, sum(model.bytes_by_class().values()), rel_tol=1e-12)
        assert model.weight_bytes <= 4.01 * model.total_params
        for tokens in (1, 5000):
            read, kept = model.kv_read_bytes(tokens), model.kv_bytes(tokens)
            borrowed = any(cache.borrowed for kind in model.attention for cache in kind.caches)
            assert 0 < read <= kept * (1 + borrowed)  # Hunyuan-Large: every second layer reads what the one before kept
            assert kept <= model.kv_bytes(tokens, layout="full")
            assert kept <= model.kv_bytes(tokens, mla_cache="expanded")


def levels(config: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Paths to every key of a config, keys of objects inside included."""
    for key, value in config.items():
        yield (key,)
        if isinstance(value, dict):
            for rest in levels(value):
                yield (key, *rest)


def changed(config: dict[str, Any], path: tuple[str, ...], *value: Any) -> dict[str, Any]:
    """A copy without the key at a path, or with another value there."""
    key, *rest = path
    copied = {**config}  # what is not on the path is shared: it may be huge
    if rest:
        copied[key] = changed(copied[key], tuple(rest), *value)
    elif value:
        copied[key] = value[0]
    else:
        del copied[key]
    return copied


def numbers(model: MoEModel) -> tuple[Any, ...]:
    """Everything that counts."""
    kinds = (model.attention, model.feed_forward, model.embedding, model.head, model.tied_embeddings)
    return (*kinds, model.storage, model.compute, model.hidden_size, model.num_layers, model.vocab_size)


def test_a_key_that_is_left_out_never_changes_a_number_in_silence(shared: Path) -> None:
    seen: set[tuple[str, ...]] = set()
    # Each key of a family once, in the smallest config that has it.
    for path in sorted(config_paths(shared), key=lambda path: path.stat().st_size):
        config = json.loads(path.read_text())
        if path.stat().st_size > 10**6:
            # The formats of a hundred thousand matrices would be read anew for every key beside them.
            del config["quantization_config"]
        try:
            whole = MoEModel.from_config(config)
        except ModelConfigError:
            continue
        for place in levels(config):
            case = (whole.family, *place)
            if case in seen or "quantization_config" in place or "vision_config" in place:
                continue
            seen.add(case)
            try:
                model = MoEModel.from_config(changed(config, place))
            except ModelConfigError:
                continue
            if numbers(model) != numbers(whole):
                new = set(model.assumptions) - set(whole.assumptions)
                assert new, f"{path.parent.name}: {'.'.join(place)} changes numbers, and nothing says so"


def test_other_keys_change_nothing(shared: Path) -> None:
    for path in config_paths(shared):
        config = json.loads(path.read_text())
        try:
            whole = MoEModel.from_config(config)
        except ModelConfigError:
            continue
        more = {"my_note": "x", "rope_theta": 1e6, "use_cache": True, "initializer_range": 0.5, "nested": {"a": [1]}}
        assert numbers(MoEModel.from_config({**more, **config})) == numbers(whole)


@pytest.mark.parametrize("key", ["n_hot_experts", "moe_style", "router_kind", "num_routed_things"])
def test_keys_that_speak_of_experts_are_understood_or_refused(key: str, shared: Path) -> None:
    for path in config_paths(shared)[::9]:
        config = json.loads(path.read_text())
        inner = next((name for name in ("text_config", "language_config") if name in config), None)
        config = changed(config, (inner, key), 7) if inner else {**config, key: 7}
        with pytest.raises(ModelConfigError, match=key):
            MoEModel.from_config(config)


JUNK: list[Any] = [
    None, True, False, 0, -1, 1, 3, 7.5, -0.0, math.nan, math.inf, 10**7, 10**9, 10**400, "", "8", "x" * 500, [], [1],
    [[]], [None] * 5, {}, {"a": {"b": []}}, [0] * 200, ["full_attention"] * 48, {"quant_method": "fp8"},
]  # fmt: skip


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=300)
def test_fuzzed_configs_are_read_or_refused(seed: int, shared: Path) -> None:
    random_ = random.Random(seed)
    path = random_.choice(config_paths(shared))
    config = json.loads(path.read_text())
    for place in random_.choices(list(levels(config)), k=random_.choice([1, 1, 2, 4])):
        try:
            config = changed(config, place, copy.deepcopy(random_.choice(JUNK)))
        except (KeyError, TypeError):  # an object above was replaced before
            continue
    model = read_or_message(config)
    assert model
    if isinstance(model, str):
        return
    sizes = [model.total_params, model.active_params, model.weight_bytes, model.kv_bytes(4096), model.kv_read_bytes(10)]
    assert all(0 < size < 1e30 for size in sizes)
    assert all(size >= 0 for size in (*model.params_by_class().values(), *model.bytes_by_class().values()))
    assert model.active_params <= model.total_params
