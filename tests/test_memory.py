"""Memory by device and use, against plain loops in exact fractions and published sums; several GPUs; bad arguments."""

import dataclasses
import itertools
import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_shapes import deepseek_v3, gemma_4_26b
from strategies import NDP_SYSTEM, mixtral, models, plain_model

from perfmodel.errors import ModelConfigError, PerfModelError, PlacementError, PolicyError
from perfmodel.families import Attention, Cache, Experts, FeedForward, Shape, Tensor
from perfmodel.hardware import System, load_system
from perfmodel.memory import RESERVE_BYTES, MemoryReport, Parallel, memory_report
from perfmodel.memory.ranks import rank_stages
from perfmodel.model import MoEModel
from perfmodel.placement import PUBLISHED_GPU_EXPERTS, gpu_footprint, memory_footprint
from perfmodel.policies import parse_policy
from perfmodel.routing import RoutingTrace
from perfmodel.run import plan_run
from perfmodel.storage import Storage, format_named
from perfmodel.storage.formats import mixed

HOST_SYSTEM = load_system("rtx4090-pcie4")
NO_ESTIMATES: dict[str, Any] = {"reserve_bytes": 0}


def with_gpu(capacity_gb: float, system: System = HOST_SYSTEM) -> System:
    return system.with_values({"gpu.memory_capacity_gb": capacity_gb})


def use_of(report: MemoryReport, use: str, device: int = 0) -> float:
    return report.devices[device].by_use().get(use, 0.0)  # type: ignore[call-overload]


def exact_weights(model: Shape, bits: dict[str, float]) -> Fraction:
    """Bytes of everything but routed experts, layer by layer."""
    total = Fraction(0)

    def add(count: int, kind: str) -> None:
        nonlocal total
        total += Fraction(count) * Fraction(bits[kind]) / 8

    for table in model.embedding:
        add(math.prod(table.shape), "embedding")
    for table in model.head:
        if not (model.tied_embeddings and len(table.shape) == 2):
            add(math.prod(table.shape), "head")
    add(model.final_norm_params, "norm")
    for layer in range(model.num_layers):
        mixer = next(kind for kind in model.attention if layer in kind.layers)
        network = next(kind for kind in model.feed_forward if layer in kind.layers)
        for tensors, kind in (
            (mixer.tensors, "attention"),
            (network.dense, "dense"),
            (network.shared, "shared"),
            (network.router, "router"),
        ):
            for tensor in tensors:
                add(math.prod(tensor.shape), kind)
        add(mixer.norm_params + network.norm_params, "norm")
    return total


def exact_experts(model: MoEModel, per_layer: int) -> Fraction:
    """Bytes of so many experts of every MoE layer."""
    total = Fraction(0)
    for network in model.feed_forward:
        for _ in network.layers if network.experts is not None else ():
            one = sum(math.prod(tensor.shape) for tensor in network.experts.tensors)
            total += min(per_layer, network.experts.count) * one * Fraction(model.storage.expert.bits) / 8
    return total


@given(models(), st.integers(0, 40), st.integers(1, 9), st.sampled_from([4.25, 8, 16]), st.data())
def test_every_part_is_the_sum_over_layers(model, context, batch, kv_bits, data) -> None:
    most = max(network.experts.count for network in model.feed_forward if network.experts is not None)
    count = data.draw(st.none() | st.integers(0, most))
    widths = tuple(data.draw(st.sets(st.integers(1, 4))))
    options = {"context": context, "batch": batch, "kv_bits": kv_bits, "gpu_experts": count, "replica_bits": widths}
    report = memory_report(model, NDP_SYSTEM, **options)
    bits = {name: stored.bits for name, stored in model.storage.by_class().items()}
    assert use_of(report, "weights") == pytest.approx(float(exact_weights(model, bits)), rel=1e-12)
    held = exact_experts(model, most if count is None else count)
    assert use_of(report, "experts") == pytest.approx(float(held), rel=1e-12)
    assert use_of(report, "kv") == pytest.approx(batch * model.kv_bytes(context, kv_bits), rel=1e-12)
    behind = exact_experts(model, most) - held
    copies = sum(exact_experts(model, most) * width / Fraction(model.storage.expert.bits) for width in widths)
    found = report.behind
    assert (found is None) == (behind + copies == 0)
    if found is not None:
        assert found.use_bytes == pytest.approx(float(behind + copies), rel=1e-12)
        assert found.by_use().get("replicas", 0.0) == pytest.approx(float(copies), rel=1e-12)
    for device in report.devices:
        assert device.headroom_bytes + device.use_bytes == pytest.approx(device.capacity_bytes, rel=1e-12)
        assert device.use_bytes == pytest.approx(sum(device.by_use().values()), rel=1e-12)
        assert all(part.bytes >= 0 for part in device.parts)


@given(models(), st.integers(0, 30), st.integers(1, 5), st.sampled_from([4, 8, 15.5]), st.integers(1, 600))
def test_memory_never_falls_as_something_grows(model, context, batch, kv_bits, tokens) -> None:
    now = {"context": context, "batch": batch, "kv_bits": kv_bits, "activation_tokens": tokens, "gpu_experts": 0}
    least = memory_report(model, NDP_SYSTEM, **now).gpu.use_bytes
    for key in now:
        assert memory_report(model, NDP_SYSTEM, **{**now, key: now[key] + 1}).gpu.use_bytes >= least, key
    wider = dataclasses.replace(model, storage=Storage.uniform(33.0))
    assert memory_report(wider, NDP_SYSTEM, **now).gpu.use_bytes >= least


def test_estimates_are_called_assumed_and_can_be_set() -> None:
    report = memory_report(mixtral(), NDP_SYSTEM)
    assumed = {part.use for part in report.gpu.parts if part.source == "assumed"}
    assert assumed == {"activations", "reserve"}
    assert use_of(report, "reserve") == RESERVE_BYTES
    assert len(report.notes) == 3
    told = memory_report(mixtral(), NDP_SYSTEM, activation_tokens=512, reserve_bytes=RESERVE_BYTES, kv_bits=16)
    assert told.devices == report.devices
    assert told.notes == ()


def test_the_config_says_the_width_of_the_cache() -> None:
    model = dataclasses.replace(mixtral(), kv_bits=8.0)
    report = memory_report(model, NDP_SYSTEM, context=10)
    assert (report.kv_bits, use_of(report, "kv")) == (8.0, 10 * model.kv_bytes(1, 8))
    assert not any("cache holds" in note for note in report.notes)
    assert use_of(memory_report(model, NDP_SYSTEM, context=10, kv_bits=4), "kv") == 10 * model.kv_bytes(1, 4)


def test_activations_of_mixtral_by_hand() -> None:
    report = memory_report(mixtral(), NDP_SYSTEM, activation_tokens=100, batch=7)
    parts = {part.name: part.bytes for part in report.gpu.parts if part.use == "activations"}
    # Gathered rows, gate, up and down of two experts outweigh queries, keys, values and outputs.
    width = 8 + 2 * (4096 + 14336 + 14336 + 4096)
    assert parts == {
        "residual stream": 2 * 100 * 4096 * 2,
        "layer workspace": 100 * width * 2,
        "logits": 7 * 32000 * 4,
    }
    # A batch above the tokens of a prefill runs at once as well.
    many = memory_report(mixtral(), NDP_SYSTEM, activation_tokens=1, batch=100)
    assert {part.name: part.bytes for part in many.gpu.parts}["layer workspace"] == 100 * width * 2


# --- published facts


def test_residency_follows_from_all_parameters(shared: Path) -> None:
    """Qwen3-Coder-Next in 4 bits holds 37 to 45 GB, however few parameters are active."""
    model = MoEModel.from_config(shared / "configs" / "Qwen__Qwen3-Next-80B-A3B-Instruct")
    model = dataclasses.replace(model, storage=Storage.uniform("int4_g128_zero"))
    report = memory_report(model, with_gpu(12))
    assert 37e9 < use_of(report, "weights") + use_of(report, "experts") < 45e9
    assert not report.fits
    assert model.active_params * model.expert_bits / 8 < 9.2e9  # what an estimate by active parameters sees
    with pytest.raises(PlacementError, match=r"capacity 12\.00 GB"):
        report.check()
    memory_report(model, with_gpu(12), gpu_experts=0).check()


def test_caches_by_what_they_are() -> None:
    report = memory_report(deepseek_v3(indexer=True), with_gpu(1000), context=1000, batch=3)
    kv = {part.name: part.bytes for part in report.gpu.parts if part.use == "kv"}
    assert kv == {"latent": 3 * 1000 * 70272, "index keys": 3 * 1000 * 61 * 128 * 2}
    expanded = memory_report(deepseek_v3(), with_gpu(1000), context=65536, mla_cache="expanded")
    assert use_of(expanded, "kv") == 65536 * 4_997_120


@pytest.mark.parametrize(("context", "gigabytes"), [(4096, 0.40), (8192, 0.48), (32768, 0.99), (131072, 3.00)])
def test_cache_of_gemma(context, gigabytes) -> None:
    report = memory_report(gemma_4_26b(Storage()), HOST_SYSTEM, context=context, kv_layout="llama.cpp")
    assert use_of(report, "kv") == pytest.approx(gigabytes * 1e9, rel=0.03)


# --- policies


@pytest.mark.parametrize(
    ("text", "experts", "buffers", "widths"),
    [
        ("context-aware", 4, 0.0, (1, 2, 3, 4)),
        ("context-aware:gpu_experts=3,min_bits=2", 3, 0.0, (2, 3, 4)),
        ("static:selector=full", 4, 0.0, ()),
        ("monde", 0, 1.0, ()),
        ("monde:reading=all-ndp", 0, 0.0, ()),
        ("monde:resident=2", 2, 0.0, ()),
        ("hobbit", 0, 1.0, (4,)),
        ("hobbit:cache_high=2,cache_low=3,low_bits=2", 2, 3 * 32 / 8, (2,)),
    ],
)
def test_residency_of_policies(text, experts, buffers, widths) -> None:
    model = mixtral()
    report = memory_report(model, NDP_SYSTEM, policy=text, context=2176)
    assert (report.policy, report.gpu_experts, report.replica_bits) == (parse_policy(text).spec, experts, widths)
    assert use_of(report, "experts") == experts * 32 * model.expert_bytes()
    assert use_of(report, "buffers") == buffers * model.expert_bytes()
    # Experts that move stay behind the link as well.
    assert use_of(report, "experts", 1) == 8 * 32 * model.expert_bytes()
    assert use_of(report, "replicas", 1) == sum(8 * 32 * model.expert_bytes(width) for width in widths)


@pytest.mark.parametrize("text", ["context-aware", "static:min_bits=3,mean_bits=3", "monde", "hobbit:cache_low=1"])
def test_plans_keep_what_is_reported(text) -> None:
    trace = RoutingTrace.load("tiny-mixtral-32l-mini")
    run = plan_run(mixtral(), NDP_SYSTEM, trace, text, prompt=16, output=2, layers="cycle")
    report = memory_report(mixtral(), NDP_SYSTEM, policy=text, context=18, **NO_ESTIMATES)
    assert report.gpu_experts == run.plan.gpu_experts
    assert report.replica_bits == run.plan.replica_bits
    use = gpu_footprint(mixtral(), run.plan.gpu_experts, 18, buffer_bytes=run.plan.gpu_buffer_bytes)
    assert report.gpu.use_bytes - use_of(report, "activations") == pytest.approx(use.total, rel=1e-12)
    assert report.behind.use_bytes == pytest.approx(memory_footprint(mixtral(), run.plan.replica_bits).total, rel=1e-12)


def test_a_placement_by_capacity_leaves_room_for_the_batch() -> None:
    model = mixtral()
    assert PUBLISHED_GPU_EXPERTS[32, 8, 4096] == 4
    counts = [
        memory_report(model, NDP_SYSTEM, policy="context-aware", batch=batch, context=8192).gpu_experts
        for batch in (1, 16, 32, 48, 64)
    ]
    assert counts[0] == 4
    assert counts == sorted(counts, reverse=True)
    assert len(set(counts)) > 2
    for batch in (16, 32, 48):
        report = memory_report(model, NDP_SYSTEM, policy="context-aware", batch=batch, context=8192)
        report.check()
        if report.gpu_experts < 4:
            more = memory_report(model, NDP_SYSTEM, batch=batch, context=8192, gpu_experts=report.gpu_experts + 1)
            assert not more.gpu.fits


def test_chosen_replicas_and_their_load_time() -> None:
    model = mixtral()
    report = memory_report(model, NDP_SYSTEM, policy="context-aware", replica_bits=(1, 3))
    size = 8 * 32 * 3 * 4096 * 14336 * (1 + 3) / 8
    assert use_of(report, "replicas", 1) == size
    link = NDP_SYSTEM.link
    rate = link.bandwidth_gb_per_s * 1e9 * link.efficiency
    start = link.latency_us * 1e-6 + link.n_half_kb * 1e3 / rate
    assert report.load_s["replicas on the near-data device"] == pytest.approx(start + size / rate, rel=1e-12)
    moved = 4 * 32 * model.expert_bytes()
    assert report.load_s["experts on the GPU"] == pytest.approx(start + moved / rate, rel=1e-12)
    # Copies in host memory do not cross the link.
    host = memory_report(model, HOST_SYSTEM, policy="hobbit")
    assert host.behind.role == "host"
    assert set(host.load_s) == {"weights on the GPU", "experts on the GPU"}
    assert host.load_s["experts on the GPU"] == 0


def test_a_host_without_stated_memory_is_not_checked() -> None:
    bare = System(name="bare", description="", gpu=HOST_SYSTEM.gpu, link=HOST_SYSTEM.link)
    report = memory_report(mixtral(), bare, gpu_experts=0)
    assert report.behind.fits is None
    assert report.behind.headroom_bytes is None
    assert report.fits
    assert any("not stated" in note for note in report.notes)
    assert json.loads(json.dumps(report.to_dict()))["devices"][1]["capacity_bytes"] is None


# --- refusal, JSON, other engines


def test_refusal_shows_the_sum_and_what_to_change() -> None:
    report = memory_report(mixtral(), NDP_SYSTEM, batch=4, policy="context-aware:gpu_experts=8")
    with pytest.raises(PlacementError) as caught:
        report.check()
    text = str(caught.value)
    assert "\n" not in text
    for term in ("weights 3.21", "experts 90.19", "kv 2.15", "reserve 0.80", "capacity 80.00 GB"):
        assert term in text
    assert f"= {report.gpu.use_bytes / 1e9:.2f} GB" in text
    assert "fewer experts there" in text
    small = NDP_SYSTEM.with_values({"ndp.capacity_gb": 100, "gpu.memory_capacity_gb": 10})
    with pytest.raises(PlacementError, match=r"do not fit h100.*do not fit monde.*fewer replicas"):
        memory_report(mixtral(), small, policy="context-aware:gpu_experts=4").check()


def test_reports_are_plain_values() -> None:
    report = memory_report(mixtral(), NDP_SYSTEM, policy="context-aware", parallel=Parallel())
    values = json.loads(json.dumps(report.to_dict()))
    assert values["fits"] is True
    assert values["parallel"] == {"expert": 1, "tensor": 1, "pipeline": 1, "expert_tensor": 1}
    for device, found in zip(report.devices, values["devices"], strict=True):
        assert found["use_bytes"] == device.use_bytes
        assert sum(part["bytes"] for part in found["parts"]) == pytest.approx(device.use_bytes)
        assert found["bytes_by_use"] == device.by_use()


def test_formats_without_kernels_are_unpacked() -> None:
    model = deepseek_v3(storage=dataclasses.replace(Storage(), expert=Storage.uniform("mxfp4").expert))
    packed = memory_report(model, with_gpu(3000), kernel_supports=("mxfp4",))
    unpacked = memory_report(model, with_gpu(3000), kernel_supports="fp8")
    assert packed.devices == memory_report(model, with_gpu(3000)).devices
    assert use_of(unpacked, "experts") == pytest.approx(use_of(packed, "experts") * 16 / 4.25)
    assert any("unpacked" in note for note in unpacked.notes)


def test_layers_of_different_bits_are_called_out_where_layers_are_divided() -> None:
    halves = mixed([(format_named("q4_k"), 0.5), (format_named("bfloat16"), 0.5)])
    model = deepseek_v3(storage=dataclasses.replace(Storage(), expert=halves))
    said = [note for note in memory_report(model, with_gpu(3000), gpu_experts=2).notes if "mean bits" in note]
    assert len(said) == 1
    assert "expert" in said[0]
    assert not any("mean bits" in note for note in memory_report(model, with_gpu(3000)).notes)


def test_dense_and_uneven_networks_are_summed() -> None:
    dense = plain_model(moe_layers=(), dense_params=100)
    dense = dataclasses.replace(dense, feed_forward=tuple(kind for kind in dense.feed_forward if kind.layers))
    assert memory_report(dense, NDP_SYSTEM).behind is None
    uneven = uneven_model()
    report = memory_report(uneven, NDP_SYSTEM, gpu_experts=3)
    assert use_of(report, "experts") == (2 * 10 + 3 * 20) * 2
    assert use_of(report, "experts", 1) == (0 * 10 + 3 * 20) * 2
    with pytest.raises(ModelConfigError, match="layers differ in their experts"):
        memory_report(uneven, NDP_SYSTEM, policy="monde")


def uneven_model() -> MoEModel:
    """Two layers with 2 experts of 10 parameters and 6 of 20."""
    model = plain_model(num_layers=2)
    kinds = tuple(
        FeedForward(
            name="moe",
            layers=(layer,),
            norm_params=0,
            experts=Experts(count=count, top_k=1, size=1, tensors=(Tensor("w", (size, 1)),)),
        )
        for layer, count, size in ((0, 2, 10), (1, 6, 20))
    )
    return dataclasses.replace(model, feed_forward=kinds)


# --- several GPUs


def test_division_of_deepseek() -> None:
    """Experts over the expert ranks, attention over the tensor ranks, both over the stages."""
    model = deepseek_v3()
    one = 3 * 7168 * 2048
    for parallel, experts in (
        (Parallel(expert=8), 58 * 256 * one / 8),
        (Parallel(expert=8, tensor=8), 58 * 256 * one / 8),
        (Parallel(tensor=8), 58 * 256 * one / 8),
        (Parallel(expert=4, expert_tensor=2, tensor=8), 58 * 256 * one / 8),
        (Parallel(expert=256), 58 * one),
    ):
        report = memory_report(model, with_gpu(1000), parallel=parallel)
        assert use_of(report, "experts") == experts, parallel
        weights = {part.name: part.bytes for part in report.gpu.parts if part.use == "weights"}
        ranks = parallel.tensor
        whole = 7168 * (1536 + 576) + 1536 + 512  # down-projections and their norms are on every rank
        cut = 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168
        assert weights["attention"] == 61 * (whole + cut / ranks)
        assert weights["dense"] == 3 * 3 * 7168 * 18432 / ranks
        assert weights["shared"] == 58 * one / ranks
        assert weights["router"] == 58 * 256 * 7168
        assert weights["embedding"] == weights["head"] == 129280 * 7168 / ranks
    # Not by tensor parallelism, and not every expert on every GPU.
    wide = memory_report(model, with_gpu(1000), parallel=Parallel(expert=16, tensor=8))
    assert use_of(wide, "experts") == 58 * 256 * one / 16


@pytest.mark.parametrize(("layers", "count", "sizes"), [(61, 2, (31, 30)), (10, 4, (2, 3, 3, 2)), (3, 3, (1, 1, 1))])
def test_stages_are_contiguous_and_the_last_is_spared(layers, count, sizes) -> None:
    stages = Parallel(pipeline=count).stages(layers)
    assert tuple(map(len, stages)) == sizes
    assert list(itertools.chain(*stages)) == list(range(layers))


def test_the_fullest_stage_decides() -> None:
    model = deepseek_v3()
    stages = rank_stages(model, Parallel(pipeline=4))
    moe = [15 - 3, 15, 16, 15]
    assert [len(stage.experts) for stage in stages] == moe
    assert [stage.weights["embedding"] > 0 for stage in stages] == [True, False, False, False]
    assert [stage.weights["head"] > 0 for stage in stages] == [False, False, False, True]
    report = memory_report(model, with_gpu(1000), parallel=Parallel(pipeline=4), context=1000, batch=2)
    assert use_of(report, "experts") == 16 * 256 * 3 * 7168 * 2048
    assert use_of(report, "kv") == 2 * 1000 * 16 * 576 * 2
    tied = dataclasses.replace(model, tied_embeddings=True)
    both = rank_stages(tied, Parallel(pipeline=2))
    assert [stage.weights["embedding"] for stage in both] == [129280 * 7168] * 2  # the table is needed at both ends
    assert rank_stages(tied, Parallel())[0].weights["embedding"] == 129280 * 7168


@given(models(max_experts=8), st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2]), st.integers(1, 4))
def test_parts_of_all_ranks_hold_at_least_the_whole(model, expert, expert_tensor, pipeline) -> None:
    fewest = min(network.experts.count for network in model.feed_forward if network.experts is not None)
    pipeline = min(pipeline, model.num_layers)
    parallel = Parallel(
        expert=min(expert, fewest), tensor=expert_tensor, pipeline=pipeline, expert_tensor=expert_tensor
    )
    stages = rank_stages(model, parallel)
    whole = model.bytes_by_class()
    for name, size in whole.items():
        if name == "expert":
            held = sum(
                parallel.stage_ranks * math.ceil(count / parallel.expert) * one
                for stage in stages
                for _, count, one in stage.experts
            )
            exact = fewest % parallel.expert == 0
        else:
            held = sum(parallel.stage_ranks * stage.weights[name] for stage in stages)
            tied = name == "embedding" and model.tied_embeddings and pipeline > 1
            exact = parallel.stage_ranks == 1 and not tied
        assert held >= size * (1 - 1e-12), name
        if exact:
            assert held == pytest.approx(size, rel=1e-12), name
    # Each layer's cache is in one stage, and with one tensor rank there in whole.
    if parallel.tensor == 1:
        elements = [cache.elements for stage in stages for kind in stage.attention for cache in kind.caches]
        assert sorted(set(elements)) == sorted({cache.elements for kind in model.attention for cache in kind.caches})


def test_key_value_heads_are_kept_whole() -> None:
    """8 heads over 2, 4, 8 ranks are divided; over 16 each is kept twice, with its projections."""
    per_token = mixtral().kv_bytes(1)
    for ranks, share in ((2, 1 / 2), (4, 1 / 4), (8, 1 / 8), (16, 1 / 8)):
        report = memory_report(mixtral(), NDP_SYSTEM, context=100, parallel=Parallel(tensor=ranks))
        assert use_of(report, "kv") == 100 * per_token * share
        weights = {part.name: part.bytes for part in report.gpu.parts}
        assert weights["attention"] == 32 * 2 * 4096 * (2 * 4096 / ranks + 2 * 1024 * share)
    latent = memory_report(deepseek_v3(), with_gpu(1000), context=100, parallel=Parallel(tensor=8))
    assert use_of(latent, "kv") == 100 * 70272
    expanded = memory_report(
        deepseek_v3(), with_gpu(1000), context=100, parallel=Parallel(tensor=8), mla_cache="expanded"
    )
    assert use_of(expanded, "kv") == 100 * 4_997_120 / 8
    # 6 heads over 4 ranks: some have two.
    ragged = plain_model()
    kinds = tuple(
        dataclasses.replace(kind, caches=(Cache(name="keys and values", elements=60, flops_per_entry=1, heads=6),))
        for kind in ragged.attention
    )
    ragged = dataclasses.replace(ragged, attention=kinds)
    report = memory_report(ragged, NDP_SYSTEM, context=10, parallel=Parallel(tensor=4))
    assert use_of(report, "kv") == 10 * 3 * 20 * 2


def test_fused_projections_follow_the_heads() -> None:
    cache = Cache(name="keys and values", elements=2 * 2 * 8, flops_per_entry=1, heads=2)
    fused = Tensor("attn.Wqkv", (64 + 32, 64))
    kind = Attention(name="full", layers=(0, 1, 2), tensors=(fused,), norm_params=0, caches=(cache,))
    model = plain_model(attention=(kind,))
    stage = rank_stages(model, Parallel(tensor=4))[0]
    assert stage.weights["attention"] == 3 * 2 * 64 * (64 / 4 + 32 / 2)


def test_what_every_rank_needs_is_on_every_rank() -> None:
    """An indexer of sparse attention, and a gate with fewer outputs than ranks."""
    indexer, gate = Tensor("self_attn.indexer.wq_b", (64, 16)), Tensor("mlp.shared_expert_gate", (1, 16))
    kind = Attention(name="latent", layers=(0, 1, 2), tensors=(indexer,), norm_params=0)
    model = plain_model(attention=(kind,))
    network = dataclasses.replace(model.feed_forward[0], shared=(gate, Tensor("mlp.shared_expert.up_proj", (24, 16))))
    model = dataclasses.replace(model, feed_forward=(network,))
    stage = rank_stages(model, Parallel(tensor=4))[0]
    assert stage.weights["attention"] == 3 * 2 * 64 * 16
    assert stage.weights["shared"] == 3 * 2 * (16 + 24 * 16 / 4)


@pytest.mark.parametrize(
    ("parallel", "networks", "picks", "cut"),
    [
        (Parallel(expert=8), 1, 1, 1),  # 8 replicas with 512 tokens each, whose picks spread over 8 ranks
        (Parallel(tensor=4), 1 / 4, 1, 1 / 4),
        (Parallel(expert=4, tensor=4), 1 / 4, 1 / 4, 1),
        (Parallel(expert=2, tensor=4), 1 / 4, 1 / 2, 1 / 2),
    ],
)
def test_activations_of_a_rank(parallel, networks, picks, cut) -> None:
    model = gemma_4_26b(Storage())
    report = memory_report(model, with_gpu(1000), parallel=parallel)
    parts = {part.name: part.bytes for part in report.gpu.parts}
    dense, router = (2 * 2112 + 2816) * networks, 128
    experts = 8 * picks * (2816 + (2 * 704 + 2816) * cut)
    assert parts["layer workspace"] == math.ceil(512 * (dense + router + experts)) * 2
    assert parts["residual stream"] == 2 * 512 * 2816 * 2


def test_constant_states_are_divided() -> None:
    kind = Attention(
        name="linear",
        layers=(0, 1, 2),
        tensors=(Tensor("in_proj", (64, 16)),),
        norm_params=0,
        recurrent_elements=1000,
        convolution_elements=30,
    )
    model = plain_model(attention=(kind,))
    report = memory_report(model, NDP_SYSTEM, batch=2, parallel=Parallel(tensor=4))
    assert use_of(report, "kv") == 2 * 3 * (250 * 4 + 8 * 2)


def test_sequences_are_shared_among_replicas_of_attention() -> None:
    model = deepseek_v3()
    for batch, own in ((1, 1), (8, 1), (9, 2), (64, 8)):
        report = memory_report(model, with_gpu(1000), context=100, batch=batch, parallel=Parallel(expert=8))
        assert use_of(report, "kv") == own * 100 * 70272
    # The tokens of all replicas share the experts, as their picks spread over all ranks.
    parts = {part.name: part.bytes for part in report.gpu.parts}
    mixer = 1536 + 128 * 192 + 576 + 128 * 256 + 7168
    dense = 2 * 18432 + 7168
    moe = (2 * 2048 + 7168) + 256 + 8 * (7168 + 2 * 2048 + 7168)
    assert parts["layer workspace"] == 512 * max(mixer, dense, moe) * 2


@pytest.mark.parametrize(
    ("degrees", "said"),
    [
        ({"expert": 0}, "expert is 0"),
        ({"tensor": -1}, "tensor is -1"),
        ({"pipeline": True}, "pipeline is True"),
        ({"expert": 2.0}, "expert is 2.0"),
        ({"expert": None}, "expert is None"),
        ({"tensor": "8"}, "tensor is '8'"),
        ({"expert_tensor": 0}, "expert_tensor is 0"),
        ({"expert": 10**9}, "expert is 1000000000"),
        ({"tensor": 8, "expert_tensor": 1}, "multiple of tensor, 8"),
        ({"tensor": 3, "expert": 2}, "multiple of tensor, 3"),
    ],
)
def test_impossible_degrees(degrees, said) -> None:
    with pytest.raises(PlacementError, match=said) as caught:
        Parallel(**degrees)
    assert "\n" not in str(caught.value)


def test_degrees_that_do_not_suit_the_model() -> None:
    for parallel, said in (
        (Parallel(expert=16), "at most 8, the experts of a layer"),
        (Parallel(pipeline=33), "at most the number of layers, 32"),
    ):
        with pytest.raises(PlacementError, match=said):
            memory_report(mixtral(), NDP_SYSTEM, parallel=parallel)
    with pytest.raises(PolicyError, match="around one GPU"):
        memory_report(mixtral(), NDP_SYSTEM, policy="monde", parallel=Parallel(expert=2))


# --- bad arguments


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"context": -1}, "context is -1"),
        ({"context": 4096.0}, "context is 4096.0"),
        ({"context": 10**10}, "context is 10000000000"),
        ({"batch": 0}, "batch is 0"),
        ({"batch": True}, "batch is True"),
        ({"batch": None}, "batch is None"),
        ({"kv_bits": 0}, "kv_bits is 0"),
        ({"kv_bits": math.nan}, "kv_bits is nan"),
        ({"kv_bits": "8"}, "kv_bits is '8'"),
        ({"kv_layout": "paged"}, "cache layout is 'paged'"),
        ({"mla_cache": "both"}, "mla_cache is 'both'"),
        ({"gpu_experts": 9}, "gpu_experts is 9; allowed: an integer from 0 to 8"),
        ({"gpu_experts": -1}, "gpu_experts is -1"),
        ({"gpu_experts": "4"}, "gpu_experts is '4'"),
        ({"replica_bits": "all"}, "replica_bits is 'all'"),
        ({"replica_bits": 4}, "replica_bits is 4"),
        ({"replica_bits": (1, 0)}, "replica_bits is 0"),
        ({"replica_bits": (1, 1)}, "each width once"),
        ({"parallel": 8}, "parallel is 8"),
        ({"kernel_supports": 3}, "kernel_supports is 3"),
        ({"kernel_supports": (3,)}, "kernel_supports is"),
        ({"activation_tokens": 0}, "activation_tokens is 0"),
        ({"reserve_bytes": -1}, "reserve_bytes is -1"),
        ({"reserve_bytes": math.inf}, "reserve_bytes is inf"),
        ({"policy": "nothing"}, "policy: found"),
        ({"policy": 3}, "policy: found 3"),
        ({"policy": "hobbit:cache_high=9"}, "cache_high: found 9"),
        ({"policy": "context-aware:gpu_experts=9"}, "gpu_experts: found 9"),
        ({"contexts": 3}, "found option 'contexts'"),
    ],
)
def test_bad_arguments(options, said) -> None:
    with pytest.raises(PerfModelError) as caught:
        memory_report(mixtral(), NDP_SYSTEM, **options)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_policy_needs_its_device() -> None:
    with pytest.raises(PolicyError, match="near-data device"):
        memory_report(mixtral(), HOST_SYSTEM, policy="context-aware")
