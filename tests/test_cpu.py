"""The CPU that runs experts: its rate, its kernel, its spec, and the points that hold them."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

import perfmodel
from perfmodel import oracle, reference
from perfmodel.errors import SpecError
from perfmodel.hardware import CpuSpec, HostSpec, Source, System, load_spec, load_system
from perfmodel.kernels import cpu as kernel
from perfmodel.kernels import point as place
from perfmodel.point import hardware_point, hardware_points
from perfmodel.run import plan_run
from perfmodel.scenario.axis import all_axes

GB = 1e9
MIB = 2**20

tokens = st.integers(0, 300)
amounts = st.floats(1.0, 1e10)
rates = st.floats(1e6, 1e16)
vector_rates = st.one_of(st.just(0.0), rates)
tiles = st.integers(1, 64)
times = st.floats(0.0, 1e-2)
packing = st.one_of(st.just(0.0), rates)
experts = st.tuples(tokens, amounts, amounts, st.integers(1, 20_000), rates, vector_rates, tiles, rates, times, packing)


def desktop(**changes: object) -> CpuSpec:
    """The measured desktop with other values."""
    source = Source(source="assumed", citation="a test")
    found = load_spec("ryzen-7950x")
    assert isinstance(found, CpuSpec)
    return found.with_values(changes, dict.fromkeys(changes, source))


def server(**changes: object) -> CpuSpec:
    """The measured server of two sockets with other values."""
    source = Source(source="assumed", citation="a test")
    found = load_spec("xeon-gold-6454s")
    assert isinstance(found, CpuSpec)
    return found.with_values(changes, dict.fromkeys(changes, source))


def rate(spec: CpuSpec) -> float:
    """Rate at which experts are read [GB/s]."""
    return spec.effective_dram_bandwidth_bytes_per_s / GB


# --- kernel ---


@given(experts)
def test_expert_time_equals_reference(args: Any) -> None:
    assert_allclose(kernel.cpu_expert_time(*args), reference.cpu_expert_time(*args), rtol=5e-15, atol=0)


@given(experts, st.floats(1.0, 100.0))
def test_an_expert_is_never_slower_with_more(args: Any, x: float) -> None:
    before = kernel.cpu_expert_time(*args)
    for place_of_rate in (4, 5, 7, 9):
        faster = [one * x if i == place_of_rate else one for i, one in enumerate(args)]
        assert kernel.cpu_expert_time(*faster) <= before
    assert kernel.cpu_expert_time(*args[:9], 0.0) <= before  # nothing is repacked
    assert kernel.cpu_expert_time(args[0] + 1, *args[1:]) >= before


@given(experts)
def test_without_packing_no_bit_of_the_older_form_changes(args: Any) -> None:
    m, params, weights, hidden, flops, vector, tile, bytes_per_s, overhead = (np.float64(one) for one in args[:9])
    with np.errstate(divide="ignore"):
        s_per_flop, s_per_vector_flop, s_per_byte = 1.0 / flops, 1.0 / vector, 1.0 / bytes_per_s
    with np.errstate(invalid="ignore"):
        on_vector_units = 2.0 * m * params * s_per_vector_flop
    arithmetic = np.minimum(on_vector_units, 2.0 * (np.ceil(m / tile) * tile) * params * s_per_flop)
    moved = weights + 2.0 * m * hidden * 2.0
    expected = 0.0 if m == 0 else np.maximum(moved * s_per_byte, arithmetic) + overhead
    assert kernel.cpu_expert_time(*args[:9], 0.0) == expected


@given(experts)
def test_packing_takes_at_most_its_own_time_and_never_slows_vector_units_down(args: Any) -> None:
    m, params, weights, _, _, vector, *_, pack = args
    before, after = kernel.cpu_expert_time(*args[:9], 0.0), kernel.cpu_expert_time(*args)
    most = weights / pack if pack and m else 0.0
    assert before <= after <= (before + most) * (1 + 1e-14)
    if vector:
        assert after <= max(before, 2.0 * m * params / vector + args[8]) * (1 + 1e-14)


@pytest.mark.parametrize("position", range(10))
def test_expert_time_hands_nan_on(position: int) -> None:
    for args in ([3.0, 1e9, 1.0, 1.0, 1e12, 1e11, 16.0, 1e15, 0.0], [3.0, 1.0, 1e9, 1.0, 1e15, 1e15, 16.0, 1e9, 0.0]):
        args.append(1e10)
        args[position] = math.nan
        with np.errstate(invalid="ignore"):
            assert math.isnan(kernel.cpu_expert_time(*args))


def test_vector_units_run_few_tokens_and_matrix_units_run_many() -> None:
    def seconds(m: int, vector: float) -> float:
        return float(kernel.cpu_expert_time(m, 1e6, 0.0, 0.0, 16e12, vector, 16, math.inf, 0.0, 0.0))

    # Tiles of 16 rows: as long for one token as for sixteen, then twice as long.
    assert [seconds(m, 0.0) for m in (1, 16, 17, 32)] == pytest.approx([2e-6, 2e-6, 4e-6, 4e-6], rel=1e-14)
    # Vector units of a quarter of the rate are faster below four tokens.
    assert [seconds(m, 4e12) for m in (1, 2, 4, 5, 16)] == pytest.approx([0.5e-6, 1e-6, 2e-6, 2e-6, 2e-6], rel=1e-14)


def test_packing_adds_to_the_arithmetic_and_not_to_products_with_one_token() -> None:
    def seconds(m: int) -> float:
        return 1e6 * float(kernel.cpu_expert_time(m, 1e6, 4e6, 0.0, 1e12, 0.1e12, 1, 40e9, 0.0, 20e9))

    # Reading takes 100 us, repacking 200 us, a token 2 us on matrix units and 20 us on vector units.
    assert [seconds(m) for m in (1, 5, 8, 11, 12, 50, 100)] == pytest.approx(
        [100, 100, 160, 220, 224, 300, 400], rel=1e-14
    )


# --- rate of the memory ---


@pytest.mark.parametrize(
    ("threads", "measured_us"),
    [(1, 110.3), (2, 61.7), (4, 53.3), (6, 48.3), (8, 46.9), (12, 47.3), (16, 49.0)],
)
def test_expert_reads_saturate_as_measured(threads: int, measured_us: float) -> None:
    spec = desktop(threads=threads)
    seconds = kernel.cpu_expert_time(
        1,
        4.7e6,
        2.725 * MIB,
        2048,
        spec.effective_flops_per_s(),
        0.0,
        1,
        spec.effective_dram_bandwidth_bytes_per_s,
        0.0,
        0.0,
    )
    # Two and four threads share a little less than the two limits of the model allow.
    assert_allclose(1e6 * seconds, measured_us, rtol=0.13, atol=0)
    assert (rate(spec) < 60.9) == (threads < 3)


def test_more_threads_than_cores_gain_nothing_and_are_warned_about() -> None:
    for threads in (16, 17, 32, 1000):
        spec = desktop(threads=threads)
        assert rate(spec) == rate(desktop())
        assert spec.effective_flops_per_s() == desktop().effective_flops_per_s()
        assert (spec.warnings == ()) == (threads <= 16)
    system = load_system("rtx5070-7950x")
    assert system.flags == system.with_values({"cpu.threads": 16}).flags == ()
    (flag,) = system.with_values({"cpu.threads": 32}).flags
    assert flag.startswith("cpu.threads 32 is above the 16 physical cores of ryzen-7950x")
    assert "\n" not in flag


def test_fewer_threads_do_less_arithmetic() -> None:
    assert desktop(threads=4).effective_flops_per_s() == desktop().effective_flops_per_s() / 4
    assert server(threads=16).effective_vector_flops_per_s == server().effective_vector_flops_per_s / 4
    whole, quarter = server(pack_gb_per_s=80), server(pack_gb_per_s=80, threads=16)
    assert (whole.effective_pack_bytes_per_s, quarter.effective_pack_bytes_per_s) == (80e9, 20e9)
    assert server().effective_pack_bytes_per_s == 0


def test_a_copy_per_socket_doubles_memory_and_gives_the_measured_speed_up() -> None:
    replicated, one = server(), server(numa="one-socket")
    assert (replicated.expert_copies, one.expert_copies) == (2, 1)
    assert_allclose(rate(replicated), 151, rtol=0.01, atol=0)
    assert_allclose(rate(one), 108, rtol=0.01, atol=0)
    assert 1.3 < rate(replicated) / rate(one) < 1.5
    # Pages spread over both sockets: 4 against 7 tokens/s.
    spread = server(numa="interleaved")
    assert spread.expert_copies == 1
    assert_allclose(rate(spread) / rate(replicated), 4 / 7, rtol=0.01, atol=0)
    older = load_spec("xeon-gold-6330")
    assert isinstance(older, CpuSpec)
    assert_allclose(rate(older), 7 * 12.39, rtol=0.01, atol=0)


def test_one_socket_has_the_cores_and_the_arithmetic_of_one() -> None:
    one = server(numa="one-socket")
    assert (one.cores, server().cores) == (32, 64)
    assert one.effective_flops_per_s() == server().effective_flops_per_s() / 2
    assert "above the 32 physical cores" in server(numa="one-socket", threads=64).warnings[0]


def test_sockets_scale_only_where_there_are_several_and_where_the_file_says_how() -> None:
    assert rate(desktop(numa="replicated")) == rate(desktop())
    assert rate(desktop(sockets=2)) == rate(desktop())
    with pytest.raises(SpecError, match="numa is 'replicated' on 2 sockets, which needs replicated_scaling") as error:
        desktop(sockets=2, numa="replicated")
    assert "\n" not in str(error.value)


@given(st.integers(1, 12))
def test_rate_is_proportional_to_populated_channels(populated: int) -> None:
    system = load_system("h100-pcie5-cpu")._copy(cpu=load_spec("epyc-9654"))
    some = system.with_values({"cpu.populated_channels": populated}).cpu
    assert some is not None
    assert_allclose(rate(some), 460.8 * 0.38 * populated / 12, rtol=1e-14, atol=0)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"populated_channels": 3}, ["populated_channels is 3", "at most memory_channels (2)"]),
        ({"threads": 0}, ["threads", "1 to 65536"]),
        ({"threads": 1.5}, ["threads"]),
        ({"numa": "local"}, ["numa", "'local'", "replicated"]),
        ({"tile_rows": 0}, ["tile_rows", "1 to 4096"]),
        ({"pack_gb_per_s": 0}, ["pack_gb_per_s", "0.01 to 20000"]),
        ({"pack_gb_per_s": "fast"}, ["pack_gb_per_s"]),
        ({"thread_bandwidth_gb_per_s": -1}, ["thread_bandwidth_gb_per_s"]),
        ({"expert_overhead_us": math.nan}, ["expert_overhead_us"]),
    ],
)
def test_refused_values(values: dict[str, object], words: list[str]) -> None:
    with pytest.raises(SpecError) as error:
        desktop(**values)
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_populated_channels_need_the_number_of_channels() -> None:
    cloud = load_system("t4-pcie3")
    with pytest.raises(SpecError, match="populated_channels needs memory_channels"):
        cloud.with_values({"cpu.populated_channels": 1})


def test_channels_that_do_not_count_as_one_may_think_are_flagged() -> None:
    cloud = load_system("t4-pcie3")
    assert cloud.flags == ()
    more = cloud.with_values({"cpu.memory_channels": 4})
    assert more.cpu is not None
    assert cloud.cpu is not None
    assert rate(more.cpu) == rate(cloud.cpu)
    (flag,) = more.flags
    assert flag.startswith("cpu.memory_channels 4 of xeon-cloud-24 changes nothing without cpu.populated_channels")
    assert more.with_values({"cpu.populated_channels": 4}).flags == ()
    desk = load_system("rtx4090-pcie4-cpu")
    assert desk.flags == ()
    wider = desk.with_values({"cpu.memory_channels": 4})
    assert wider.cpu is not None
    assert desk.cpu is not None
    assert rate(wider.cpu) == rate(desk.cpu) / 2
    (flag,) = wider.flags
    assert flag.startswith(
        "cpu.populated_channels 2 of 4 of ryzen-9950x: 2/4 of cpu.dram_bandwidth_gb_per_s is counted"
    )


# --- points ---


def test_places_of_a_point() -> None:
    system = load_system("h100-pcie5-cpu")
    point = hardware_point(system)
    assert_allclose(point[place.CPU_FLOPS], 144.2e12 * 0.29, rtol=1e-15, atol=0)
    assert_allclose(point[place.CPU_VECTOR_FLOPS], 9.0e12 * 0.29, rtol=1e-15, atol=0)
    assert point[place.CPU_TILE] == 16
    assert_allclose(point[place.CPU_BANDWIDTH], 614.4e9 * 0.35 * 0.70, rtol=1e-15, atol=0)
    assert_allclose(point[[place.ROUND_TRIP, place.COPY_OVERHEAD]], [35e-6, 10e-6], rtol=1e-15, atol=0)
    assert point[place.CPU_OVERHEAD] == 0
    bare = hardware_point(load_system("h100-cxl-ndp"))
    assert_array_equal(bare[place.CPU_FLOPS : place.EXPERT_BANDWIDTH], 0)
    # Without matrix units there is one kind of units and no tile.
    plain = hardware_point(load_system("rtx4090-pcie4-cpu"))
    assert_allclose(plain[place.CPU_FLOPS], 4.4e12, rtol=1e-15, atol=0)
    assert (plain[place.CPU_VECTOR_FLOPS], plain[place.CPU_TILE]) == (0, 1)


def test_peak_for_experts_is_the_first_of_known_types() -> None:
    for peaks, first in (
        ({"fp32": 1.0, "bf16": 2.0}, 2.0),
        ({"fp32": 1.0, "fp16": 3.0}, 3.0),
        ({"int8": 7.0, "fp32": 1.0}, 1.0),
        ({"int8": 7.0}, 7.0),
    ):
        data: dict[str, Any] = {
            "name": "toy",
            "description": "",
            "sockets": 1,
            "cores_per_socket": 2,
            "peak_tflop_per_s": peaks,
        }
        data |= {"dram_bandwidth_gb_per_s": 10, "dram_efficiency": 1}
        source = Source(source="assumed", citation="a test")
        numbers = {key: source for key in data if key not in ("name", "description")}
        assert CpuSpec(**data, sources=numbers).effective_flops_per_s() == first * 1e12


SWEPT: dict[str, list[float]] = {
    "cpu.sockets": [1, 2, 4],
    "cpu.cores_per_socket": [8, 48, 64],
    "cpu.threads": [3, 48, 128],
    "cpu.replicated_scaling": [0.6, 0.75, 0.9],
    "cpu.dram_bandwidth_gb_per_s": [100, 300, 614.4],
    "cpu.dram_efficiency": [0.2, 0.5, 0.9],
    "cpu.memory_channels": [16, 17, 24],
    "cpu.populated_channels": [3, 7, 16],
    "cpu.thread_bandwidth_gb_per_s": [1.5, 3, 25.9],
    "cpu.peak_tflop_per_s.bf16": [10, 70, 144],
    "cpu.vector_tflop_per_s": [1, 4, 18],
    "cpu.tile_rows": [1, 8, 16],
    "cpu.pack_gb_per_s": [5, 50, 300],
    "cpu.compute_efficiency": [0.1, 0.5, 1],
    "cpu.expert_overhead_us": [0, 5, 10],
    "host.round_trip_us": [0, 35, 100],
    "host.copy_overhead_us": [0, 10, 57],
}


@given(st.data())
def test_points_of_a_sweep_equal_those_of_each_system(data: st.DataObject) -> None:
    system = load_system("h100-pcie5-cpu").with_values(
        {"cpu.numa": data.draw(st.sampled_from(["replicated", "interleaved", "one-socket"]))}
    )
    keys = data.draw(st.lists(st.sampled_from(sorted(SWEPT)), min_size=1, max_size=4, unique=True))
    values = {key: data.draw(st.permutations(SWEPT[key])) for key in keys}
    points = hardware_points(system, values).dense()
    for i in range(3):
        one = system.with_values({key: column[i] for key, column in values.items()})
        assert_array_equal(points[i], hardware_point(one))


def test_every_new_number_is_an_axis() -> None:
    names = {axis.name for axis in all_axes(load_system("h100-pcie5-cpu"), (), 8)}
    assert set(SWEPT) | {"host.pinned_memory_gb", "cpu.interleaved_scaling"} <= names
    assert "cpu.numa" not in names


def test_more_populated_channels_than_there_are_is_refused_point_by_point() -> None:
    system = load_system("h100-pcie5-cpu")
    with pytest.raises(SpecError, match=r"xeon-gold-6454s: populated_channels is above memory_channels"):
        hardware_points(system, {"cpu.memory_channels": [16, 8], "cpu.populated_channels": [16, 9]})


def test_a_sweep_leaves_such_points_out_and_says_what_hurts() -> None:
    axes: dict[str, Any] = {
        "cpu.threads": [8, 128],
        "cpu.memory_channels": [16, 8],
        "cpu.populated_channels": [8, 16],
    }
    found = perfmodel.sweep(
        "mixtral-8x7b", "h100-pcie5-cpu", "tiny-mixtral-32l-mini", "hobbit", axes=axes, prompt=8, output=2
    )
    assert_array_equal(np.isnan(found.tpot_mean_s.values).reshape(-1, 2, 2), [[[False, False], [False, True]]] * 2)
    assert "populated_channels is above memory_channels" in str(found.attrs)
    assert "cpu.threads 128 is above the 64 physical cores" in found.attrs["notes"]


@pytest.mark.parametrize("policy", ["fiddler:bits=4", "llama-cpp:bits=4", "hybrimoe:bits=4"])
@pytest.mark.parametrize("under", [None, "ktransformers-amx", "llama-cpp-cuda"])
def test_packing_is_priced_as_by_the_plain_loop(policy: str, under: str | None) -> None:
    packs = load_system("h100-pcie5-cpu").with_values({"cpu.pack_gb_per_s": 1000, "gpu.memory_capacity_gb": 24})
    run = plan_run("mixtral-8x7b", packs.with_engine(under), "tiny-mixtral-32l-mini", policy, prompt=24, output=2)
    priced = run.price()
    assert oracle.largest_difference(priced, oracle.per_pick(run)) <= 1e-12
    # Prompts have several tokens an expert.
    slow, same = run.metrics(("ttft_s",), hardware_points(run.system, {"cpu.pack_gb_per_s": [1, 1000]}))["ttft_s"]
    assert same == priced.ttft_s
    assert (slow > same) == (under != "llama-cpp-cuda")


def test_engines_on_vector_units_repack_nothing() -> None:
    plain = load_system("h100-pcie5-cpu")
    packs = plain.with_values({"cpu.pack_gb_per_s": 40})
    assert hardware_point(packs)[place.CPU_PACK] == 40e9
    assert hardware_point(plain)[place.CPU_PACK] == 0
    assert hardware_point(packs.with_engine("ktransformers-amx"))[place.CPU_PACK] == 40e9
    on_vector_units = packs.with_engine("llama-cpp-cuda")
    assert_array_equal(hardware_point(on_vector_units), hardware_point(plain.with_engine("llama-cpp-cuda")))
    assert packs.at_peak() == plain.at_peak()


# --- host ---


def test_costs_of_the_host() -> None:
    host = load_spec("measured")
    assert isinstance(host, HostSpec)
    assert_allclose([host.round_trip_s, host.copy_overhead_s], [35e-6, 10e-6], rtol=1e-15, atol=0)
    assert host.pinned_memory_bytes is None
    limited = load_system("rtx5070-7950x").with_values({"host.pinned_memory_gb": 15})
    assert isinstance(limited, System)
    assert limited.host is not None
    assert limited.host.pinned_memory_bytes == 15e9
    peak = limited.at_peak()
    assert peak.host is not None
    assert (peak.host.round_trip_s, peak.host.copy_overhead_s, peak.host.pinned_memory_bytes) == (0, 0, 15e9)
    with pytest.raises(SpecError, match="has no host"):
        load_system("h100-cxl-ndp").get("host.round_trip_us")


def test_datasheet_column_of_a_cpu() -> None:
    peak = load_system("h100-pcie5-cpu").at_peak().cpu
    assert peak is not None
    assert rate(peak) == 614.4
    assert peak.effective_flops_per_s() == 144.2e12
