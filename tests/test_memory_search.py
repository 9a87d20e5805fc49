"""The most that fits: every answer fits and the next does not; and a wrong cache gives wrong answers."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_shapes import deepseek_v3, gemma_4_26b, with_cache
from strategies import NDP_SYSTEM, mixtral, models
from test_memory import HOST_SYSTEM, uneven_model, with_gpu

from perfmodel.errors import ModelConfigError
from perfmodel.families import Cache
from perfmodel.memory import (
    GpuExperts,
    Parallel,
    largest_batch,
    largest_context,
    largest_gpu_experts,
    memory_report,
)
from perfmodel.memory.sums import largest
from perfmodel.storage import Storage


@given(st.integers(-2, 40), st.integers(0, 60), st.integers(-3, 70))
def test_bisection(low, span, last) -> None:
    high = low + span
    found = largest(lambda number: number <= last, low, high)
    assert found == max((number for number in range(low, high + 1) if number <= last), default=low - 1)


def roomy(capacity_gb: float) -> Any:
    return with_gpu(capacity_gb, NDP_SYSTEM).with_values({"ndp.capacity_gb": 1e6})


@given(models(), st.integers(1, 30), st.integers(1, 4), st.sampled_from([None, "monde", "hobbit:cache_low=1"]))
def test_answers_fit_and_the_next_do_not(model, context, batch, policy) -> None:
    system = roomy(0.1)
    capacity = system.gpu.memory_capacity_bytes
    options: dict[str, Any] = {"policy": policy, "reserve_bytes": capacity * 0.98}

    def fits(**changes: Any) -> bool:
        return memory_report(model, system, **{**options, "context": context, "batch": batch, **changes}).fits

    found = largest_batch(model, system, context=context, **options)
    assert found == 0 or fits(batch=found)
    assert found == 10**9 or not fits(batch=found + 1)
    longest = largest_context(model, system, batch=batch, **options)
    assert longest == 0 or fits(context=longest)
    assert longest == 10**9 or not fits(context=longest + 1)


@given(models(max_experts=8), st.floats(0, 1.2))
def test_experts_that_fit(model, scale) -> None:
    system = roomy(0.1)
    counts = [kind.experts.count for kind in model.feed_forward for _ in kind.layers if kind.experts is not None]
    everything = memory_report(model, system, reserve_bytes=0).gpu
    without = memory_report(model, system, reserve_bytes=0, gpu_experts=0).gpu
    room = without.use_bytes + scale * (everything.use_bytes - without.use_bytes)
    reserve = system.gpu.memory_capacity_bytes - room
    found = largest_gpu_experts(model, system, reserve_bytes=reserve)
    one = model.expert_bytes()
    free = room - without.use_bytes
    slack = 1e-6 * one  # of a reserve that is large beside the model
    assert found is None or found.per_layer * len(counts) * one <= free + slack
    if found is None:
        assert free < slack
        return
    for size, number, most in (
        (len(counts) * one, found.per_layer, counts[0]),
        (one, found.total, sum(counts)),
        (counts[0] * one, found.layers, len(counts)),
    ):
        assert number * size <= free + slack
        assert number == most or (number + 1) * size > free - slack
    assert len(counts) * found.per_layer <= found.total
    assert counts[0] * found.layers <= found.total


def test_experts_of_uneven_layers() -> None:
    """2 experts of 20 bytes and 6 of 40; the last layer comes first, and rounds go over the layers."""
    model = uneven_model()
    bare = memory_report(model, HOST_SYSTEM, gpu_experts=0, reserve_bytes=0).gpu.use_bytes
    for free, expected in (
        (0, (0, 0, 0)),
        (20, (0, 1, 0)),
        (59, (0, 1, 0)),
        (60, (1, 2, 0)),
        (120, (2, 4, 0)),
        (160, (3, 5, 0)),
        (240, (5, 7, 1)),
        (280, (6, 8, 2)),
    ):
        reserve = HOST_SYSTEM.gpu.memory_capacity_bytes - bare - free
        assert largest_gpu_experts(model, HOST_SYSTEM, reserve_bytes=reserve) == expected, free
    assert largest_gpu_experts(model, HOST_SYSTEM, reserve_bytes=24e9) is None


def test_nothing_fits() -> None:
    tiny = with_gpu(2)
    assert largest_batch(mixtral(), tiny) == 0
    assert largest_context(mixtral(), tiny, gpu_experts=0) == 0
    assert largest_gpu_experts(mixtral(), tiny) is None
    # Nor does it where only the memory behind the link is too small.
    short = NDP_SYSTEM.with_values({"ndp.capacity_gb": 50})
    assert largest_batch(mixtral(), short, policy="monde") == 0
    assert largest_batch(mixtral(), short, gpu_experts=6) > 0


def test_a_constant_state_bounds_no_context() -> None:
    model = with_cache(mixtral(), Cache(name="keys and values", elements=2048, flops_per_entry=1, window=64))
    assert largest_context(model, NDP_SYSTEM, gpu_experts=0) == 10**9
    assert largest_context(model, NDP_SYSTEM, gpu_experts=0, kv_layout="full") < 10**6


def test_options_are_checked_and_the_searched_one_does_not_count() -> None:
    assert largest_batch(mixtral(), NDP_SYSTEM, gpu_experts=0, batch=7) == largest_batch(
        mixtral(), NDP_SYSTEM, gpu_experts=0
    )
    for search in (largest_batch, largest_context, largest_gpu_experts):
        with pytest.raises(ModelConfigError, match="kv_bits is 0"):
            search(mixtral(), NDP_SYSTEM, kv_bits=0)


def test_a_free_placement_gives_way_to_the_batch() -> None:
    fixed = largest_batch(mixtral(), NDP_SYSTEM, policy="context-aware:gpu_experts=4")
    free = largest_batch(mixtral(), NDP_SYSTEM, policy="context-aware")
    assert free == largest_batch(mixtral(), NDP_SYSTEM, policy="context-aware:gpu_experts=0") > fixed
    assert memory_report(mixtral(), NDP_SYSTEM, policy="context-aware", batch=free).gpu_experts == 0


def test_several_gpus_hold_more() -> None:
    model, system = mixtral(), NDP_SYSTEM
    assert largest_batch(model, system) == 0
    batches = [
        largest_batch(model, system, parallel=parallel)
        for parallel in (Parallel(pipeline=2), Parallel(tensor=2), Parallel(expert=4, tensor=4), Parallel(expert=8))
    ]
    assert all(batches)
    assert largest_gpu_experts(model, system, parallel=Parallel(expert=2, tensor=2)) == GpuExperts(8, 256, 32)
    one = largest_gpu_experts(model, system)
    assert one is not None
    assert 6 <= one.per_layer < 8


# --- published facts: the cache decides what fits


def test_a_latent_cache_priced_as_heads_caps_the_batch() -> None:
    """DeepSeek-V3.2 on eight GPUs of 141 GB: a cache of 128 heads ends near 64 sequences where hundreds fit."""
    model = deepseek_v3(indexer=True)
    heads = Cache(name="keys and values", elements=2 * 128 * 56, flops_per_entry=1, heads=128)
    wrong = with_cache(model, heads)
    assert wrong.kv_bytes(1) == 1_748_992
    assert deepseek_v3().kv_bytes(1) == 70_272
    assert wrong.kv_bytes(1) / deepseek_v3().kv_bytes(1) == pytest.approx(24.9, abs=0.05)
    options: dict[str, Any] = {"context": 2800, "parallel": Parallel(expert=8)}
    assert largest_batch(wrong, with_gpu(141), **options) == 64
    found = largest_batch(model, with_gpu(141), **options)
    assert found >= 242
    # The indexer has its own line and its share of the room.
    assert largest_batch(deepseek_v3(), with_gpu(141), **options) > found


def test_a_cache_without_windows_leaves_no_layer_on_the_gpu() -> None:
    """Gemma-4-26B-A4B in 8 bits on 8 GB: 4 to 6 layers of experts fit, and none with every layer priced as global."""
    model = gemma_4_26b(Storage.uniform("q8_0"))
    wrong = with_cache(model, Cache(name="keys and values", elements=7168, flops_per_entry=1))
    for context, wrong_gb in ((4096, 1.76), (8192, 3.52), (32768, 14.09), (131072, 56.37)):
        assert wrong.kv_bytes(context) == pytest.approx(wrong_gb * 1e9, rel=0.001)
    options: dict[str, Any] = {"context": 10_000, "kv_layout": "llama.cpp"}
    found = largest_gpu_experts(model, with_gpu(8), **options)
    assert found is not None
    assert 4 <= found.layers <= 6
    misled = largest_gpu_experts(wrong, with_gpu(8), **options)
    assert misled is not None
    assert misled.layers == 0


def test_a_longer_context_and_a_wider_cache_leave_less() -> None:
    model = gemma_4_26b(Storage.uniform("q4_k"))
    layers = [
        found.layers
        for bits in (8, 16)
        for context in (4096, 131072)
        if (found := largest_gpu_experts(model, with_gpu(8), context=context, kv_bits=bits)) is not None
    ]
    assert layers[0] >= layers[1] > layers[3]
    assert layers[0] >= layers[2] > layers[3]
    assert dataclasses.replace(model).kv_bytes(4096) < model.kv_bytes(4096, layout="full")
