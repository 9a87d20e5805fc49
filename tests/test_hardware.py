"""Hardware specs: bundled files, units, sources, overrides, overlays, and every kind of bad input."""

import copy
import json
import pickle
import tomllib
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.errors import PerfModelError, SpecError
from perfmodel.hardware import (
    KINDS,
    SOURCE_KINDS,
    Choice,
    Constant,
    CpuSpec,
    DramSpec,
    GpuSpec,
    LinkSpec,
    NdpSpec,
    Source,
    System,
    json_schema,
    list_specs,
    load_spec,
    load_system,
    write_overlay,
)

NAMES = {
    "gpu": {"h100-sxm", "h100-pcie", "a100-80gb", "h200", "t4", "rtx-a5000", "rtx-a6000", "l20", "l40", "l40s"}
    | {f"rtx-{number}" for number in (2080, 3060, 3070, 3090, 4070, 4080, 4090, 5070, 5080, 5090)}
    | {"rtx-3090-ti", "rtx-4090d", "rtx-5060-ti", "rtx-5880-ada", "quadro-rtx-5000", "quadro-rtx-6000"}
    | {"gh200", "gb10", "radeon-rx-6900-xt", "radeon-rx-7900-xt", "radeon-8060s"}
    | {"apple-m4-pro", "apple-m5-pro", "apple-m5-max"},
    "link": {f"pcie-{gen}.0-x{lanes}" for gen in (3, 4, 5) for lanes in (8, 16)}
    | {"pcie-4.0-x4", "cxl-2.0-x8", "cxl-2.0-x16", "nvlink-c2c", "unified"},
    "ndp": {"monde-ndp", "monde-ndp-interleaved"},
    "cpu": {"xeon-gold-6454s", "xeon-gold-6330", "xeon-cloud-24", "epyc-9654", "epyc-9374f"}
    | {"threadripper-5975wx", "ryzen-7950x", "ryzen-9950x"}
    | {"xeon-gold-6454s-1s", "xeon-platinum-8352y", "xeon-skylake-48c", "xeon-e5-2650-v4", "xeon-6-mrdimm"}
    | {"epyc-9355", "epyc-9654-2s", "epyc-9v45", "threadripper-5995wx", "threadripper-7960x", "ampereone-a192-32x"}
    | {f"ryzen-{number}" for number in ("5600x", "7800x3d", "7900x", "9700x", "9950x3d")}
    | {"core-i9-10900x", "core-i9-13900hk", "grace"},
    "host": {"measured"},
    "engine": {
        "fiddler",
        "gpu-offloading",
        "ideal",
        "ktransformers",
        "ktransformers-amx",
        "llama-cpp-cuda",
        "llama-cpp-cuda-2025",
        "llama-cpp-expert-cache",
        "moe-infinity",
        "ndp-simulator",
        "sglang",
        "vllm",
    },
    "dram": {"ddr4-3200", "ddr5-4800", "ddr5-6400", "lpddr5-6400", "hbm2-2000", "hbm3-6400"},
    "system": {"h100-cxl-ndp", "h100-cxl2-ndp", "a100-cxl-ndp", "rtx4090-pcie4", "a5000-pcie4", "t4-pcie3"}
    | {"rtx3090-pcie4-cpu", "rtx4090-pcie4-cpu", "rtx5090-pcie5-cpu", "rtx5070-7950x", "h100-pcie5-cpu"}
    | {"gh200-c2c", "gb10-unified"},
}

GPU = """
kind = "gpu"
name = "toy-gpu"
description = "a GPU with round numbers"
memory_capacity_gb = 10
memory_bandwidth_gb_per_s = 1000
memory_efficiency = 0.5
memory_n_half_kb = 100
peak_tflop_per_s = { fp16 = 100, fp8 = 200 }
compute_efficiency = 0.25
launch_overhead_us = 5

[sources]
memory_capacity_gb = { source = "datasheet", citation = "toy datasheet" }
memory_bandwidth_gb_per_s = { source = "datasheet", citation = "toy datasheet" }
memory_efficiency = { source = "measured", citation = "toy measurement" }
memory_n_half_kb = { source = "measured", citation = "toy measurement" }
peak_tflop_per_s = { source = "datasheet", citation = "toy datasheet" }
compute_efficiency = { source = "assumed", citation = "a guess" }
launch_overhead_us = { source = "measured", citation = "toy measurement" }
"""


def fit(citation: str = "fit to a table") -> dict[str, str]:
    return {"source": "calibrated", "citation": citation}


def gpu_data(**changes: object) -> dict[str, object]:
    return {**tomllib.loads(GPU), **changes}


def refuse(call: object, *words: str) -> str:
    """Run ``call``; it must raise a one-line `SpecError` that holds all ``words``."""
    with pytest.raises(SpecError) as caught:
        call()  # type: ignore[operator]
    message = str(caught.value)
    assert "\n" not in message
    assert "Traceback" not in message
    assert len(message) < 3000
    for word in words:
        assert word in message
    return message


def outcome(call: object) -> tuple[object, str]:
    """Result of ``call`` and "", or ``None`` and the message of the package's own error."""
    try:
        return call(), ""  # type: ignore[operator]
    except PerfModelError as error:
        return None, str(error)


@pytest.fixture(scope="module")
def system() -> System:
    return load_system("h100-cxl2-ndp")


@pytest.fixture
def toml(tmp_path: Path):
    def write(text: str | bytes, name: str = "file.toml") -> Path:
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


# --- bundled files ---------------------------------------------------------------------------------


def test_every_bundled_spec_loads_under_its_own_name():
    entries = list_specs()
    assert {kind: {entry.name for entry in entries if entry.kind == kind} for kind in KINDS} == NAMES
    assert len({entry.name for entry in entries}) == len(entries)
    for entry in entries:
        spec = load_spec(entry.name)
        assert spec.name == entry.name == entry.path.stem
        assert spec.description == entry.description != ""
        assert load_spec(entry.path) == spec
        assert load_spec(str(entry.path)) == spec


def test_bundled_files_use_no_default_in_silence():
    for entry in list_specs():
        if entry.kind != "system":
            spec = load_spec(entry.name)
            default = "default of the spec format"
            silent = {key for key in spec.numeric_keys() if spec.source_of(key).citation.startswith(default)}
            assert silent <= {"compute_efficiency", "devices"}


def test_dram_files_equal_the_reference_presets(shared):
    presets = json.loads((shared / "reference" / "ramulator2_presets.json").read_text())
    for name, preset in presets.items():
        spec = load_spec(name.lower())
        assert isinstance(spec, DramSpec)
        timing = preset["timing_CK"]
        first = {**timing, "nRCD": timing.get("nRCD", timing.get("nRCDRD"))}
        first |= {
            "nRTP": timing.get("nRTP", timing.get("nRTPL")),
            "nBL": timing.get("nBL", timing.get("nBL_min")),
        }
        for ours, theirs in {
            "n_bl": "nBL", "n_ccd_s": "nCCDS", "n_ccd_l": "nCCDL", "n_rcd": "nRCD", "n_rp": "nRP",
            "n_rtp": "nRTP", "n_rfc": "nRFC", "n_refi": "nREFI", "n_rc": "nRC", "n_faw": "nFAW",
            "n_rrd_s": "nRRDS", "data_rate_mt_s": "rate",
        }.items():  # fmt: skip
            assert getattr(spec, ours) == first[theirs], (name, ours)
        assert spec.lines_per_row == preset["lines_per_row"]
        assert spec.bank_groups == preset["organisation"]["bankgroup"]
        banks = spec.bank_groups * spec.banks_per_group * spec.pseudo_channels * preset["organisation"].get("sid", 1)
        assert banks == preset["banks_total"]
        np.testing.assert_allclose(spec.tck_s, timing["tCK_ps"] * 1e-12, rtol=1e-12, atol=0)
        burst = spec.line_bytes * spec.pseudo_channels / (spec.n_bl * spec.tck_s)
        np.testing.assert_allclose(spec.peak_bytes_per_s, burst, rtol=1e-5, atol=0)


def test_links_follow_from_line_rate_and_code():
    for gen, rate in ((3, 8), (4, 16), (5, 32)):
        for lanes in (8, 16):
            link = load_spec(f"pcie-{gen}.0-x{lanes}")
            expected = float(Fraction(rate * lanes, 8) * Fraction(128, 130))
            np.testing.assert_allclose(link.bandwidth_gb_per_s, expected, rtol=1e-3, atol=0)
            assert 0.75 < link.efficiency < 0.9
            assert link.latency_us == 1.0
    flit = float(Fraction(64, 68) * Fraction(32 * 16, 8) * Fraction(128, 130))
    cxl = load_spec("cxl-2.0-x16")
    np.testing.assert_allclose(cxl.bandwidth_gb_per_s, flit, rtol=1e-3, atol=0)
    assert (cxl.efficiency, cxl.source_of("efficiency").source, cxl.latency_us) == (1.0, "assumed", 0.25)
    assert "no x16 device has a published measurement" in cxl.source_of("efficiency").citation
    for lanes in (8, 16):
        latency = load_spec(f"cxl-2.0-x{lanes}").source_of("latency_us")
        assert latency.source == "assumed"
        assert "inside the 140 to 410 ns measured" in latency.citation
    np.testing.assert_allclose(load_spec("pcie-4.0-x16").effective_bandwidth_bytes_per_s, 25.5e9, rtol=1e-4, atol=0)


#: GPUs whose memory_efficiency is one of whole decode steps, kernel launches and all.
WHOLE_STEP = {"h100-sxm", "h100-pcie", "a100-80gb", "h200", "t4", "rtx-a5000"} | {
    f"rtx-{number}" for number in (3060, 3090, 4090, 5070, 5080, 5090)
}
WITHOUT_BF16 = {"t4", "rtx-2080", "quadro-rtx-5000", "quadro-rtx-6000"}


def test_whole_step_memory_efficiencies_are_measured_or_derived_from_their_median():
    own = {"rtx-3090": 0.27, "rtx-4090": 0.41, "rtx-5090": 0.32}
    for name in WHOLE_STEP:
        gpu = load_spec(name)
        assert gpu.memory_efficiency == own.get(name, sorted(own.values())[1])
        assert gpu.source_of("memory_efficiency").source == ("measured" if name in own else "derived")
        assert ("not measured on this GPU" in gpu.source_of("memory_efficiency").citation) == (name not in own)
        assert gpu.launch_overhead_s == 0


def test_the_other_gpus_have_the_rate_of_a_saturating_read_and_pay_for_launches():
    for name in NAMES["gpu"] - WHOLE_STEP:
        gpu = load_spec(name)
        source = gpu.source_of("memory_efficiency")
        read = (0.85, "measured") if name == "gb10" else (0.9, "assumed")
        assert (gpu.memory_efficiency, source.source) == read
        assert "saturating read" in source.citation
        assert "tokens" not in source.citation
        assert gpu.launch_overhead_us == 5


def test_gpus_have_the_peaks_of_their_generation():
    for name in NAMES["gpu"]:
        gpu = load_spec(name)
        assert gpu.layer_overhead_s is None
        assert gpu.peak_flops_per_s("fp16") > 0
        assert ("bf16" in gpu.peak_tflop_per_s) == (name not in WITHOUT_BF16)
        if name not in WITHOUT_BF16:
            assert gpu.peak_flops_per_s("fp16") == gpu.peak_flops_per_s("bf16")


def test_cpu_rates_are_those_measured_where_one_was():
    for name, rate in {"core-i9-10900x": 102, "epyc-9v45": 186, "ryzen-9950x3d": 32.3}.items():
        np.testing.assert_allclose(load_spec(name).effective_dram_bandwidth_bytes_per_s, rate * 1e9, rtol=2e-3, atol=0)
    one, two = load_spec("xeon-gold-6454s-1s"), load_spec("xeon-gold-6454s")
    assert (one.sockets, one.cores_per_socket, one.tile_rows) == (1, two.cores_per_socket, two.tile_rows)
    assert 2 * one.dram_bandwidth_gb_per_s == two.dram_bandwidth_gb_per_s
    assert 2 * one.peak_flops_per_s("bf16") == two.peak_flops_per_s("bf16")


def test_machines_of_one_package():
    gh200 = load_system("gh200-c2c")
    assert (gh200.gpu.name, gh200.link.name, gh200.cpu.name) == ("gh200", "nvlink-c2c", "grace")
    np.testing.assert_allclose(gh200.link.effective_bandwidth_bytes_per_s, 309e9, rtol=1e-3, atol=0)
    gb10 = load_system("gb10-unified")
    assert (gb10.gpu.name, gb10.link.name, gb10.cpu, gb10.ndp) == ("gb10", "unified", None, None)
    assert gb10.link.effective_bandwidth_bytes_per_s > 10 * gb10.gpu.memory_bandwidth_bytes_per_s
    assert gb10.link.latency_s == 0


def test_near_data_device_is_the_published_one():
    ndp = load_spec("monde-ndp")
    assert isinstance(ndp, NdpSpec)
    assert (ndp.capacity_bytes, ndp.dram_bandwidth_bytes_per_s, ndp.clock_hz) == (512e9, 512e9, 1e9)
    assert (ndp.arrays, ndp.rows, ndp.cols, ndp.dataflow) == (64, 4, 4, "os")
    np.testing.assert_allclose(ndp.peak_flops_per_s, 2.048e12, rtol=1e-15, atol=0)
    assert ndp.dram_efficiency is None
    assert ndp.dram_spec == load_spec("lpddr5-6400")
    other = load_spec("monde-ndp-interleaved")
    assert (ndp.mapping, other.mapping) == ("row-by-row", "bank-group-interleaved")
    for one in (ndp, other):
        mapping = one.source_of("mapping")
        assert mapping.source == "assumed"
        assert "chosen" in mapping.citation
        assert "reproduces" in mapping.citation
        assert "derived from DRAM timings alone" in mapping.citation


def test_the_host_of_monde_is_the_pcie_card():
    system = load_system("a100-cxl-ndp")
    assert system.get("gpu.memory_bandwidth_gb_per_s") == 1935
    assert system.source_of("gpu.memory_bandwidth_gb_per_s").source == "published"
    assert "A100 PCIe 80 GB" in system.source_of("gpu.memory_bandwidth_gb_per_s").citation
    assert "A100 PCIe 80 GB" in system.description
    assert "1935" in system.description
    assert system.at_peak().get("gpu.memory_bandwidth_gb_per_s") == 1935
    assert load_spec("a100-80gb").memory_bandwidth_gb_per_s == 2039


# --- units and single devices ----------------------------------------------------------------------


def test_gpu_si_values(toml):
    gpu = load_spec(toml(GPU))
    assert isinstance(gpu, GpuSpec)
    assert gpu.memory_capacity_bytes == 10e9
    assert gpu.memory_bandwidth_bytes_per_s == 1e12
    assert gpu.effective_memory_bandwidth_bytes_per_s == 0.5e12
    assert gpu.memory_n_half_bytes == 100e3
    assert gpu.peak_flops_per_s() == gpu.peak_flops_per_s("fp16") == 100e12
    assert gpu.effective_flops_per_s("fp8") == 50e12
    np.testing.assert_allclose(gpu.launch_overhead_s, 5e-6, rtol=1e-15, atol=0)
    refuse(lambda: gpu.peak_flops_per_s("int8"), "toy-gpu", "int8", "fp16, fp8")
    refuse(lambda: gpu.peak_flops_per_s(["fp16"]), "toy-gpu")  # type: ignore[arg-type]


def test_cpu_and_link_si_values():
    cpu = load_spec("xeon-gold-6454s")
    assert isinstance(cpu, CpuSpec)
    assert cpu.dram_bandwidth_bytes_per_s == 614.4e9
    np.testing.assert_allclose(cpu.effective_dram_bandwidth_bytes_per_s, 614.4e9 * 0.35 * 0.70, rtol=1e-15, atol=0)
    np.testing.assert_allclose(cpu.effective_flops_per_s("bf16"), 144.2e12 * 0.29, rtol=1e-15, atol=0)
    assert cpu.memory_capacity_bytes == 1e12
    assert load_spec("ryzen-9950x").memory_capacity_bytes is None
    link = load_spec("cxl-2.0-x8")
    assert isinstance(link, LinkSpec)
    np.testing.assert_allclose(link.latency_s, 250e-9, rtol=1e-15, atol=0)
    assert link.n_half_bytes == 0


@given(bits=st.floats(0.5, 32))
def test_array_rate_by_precision_scaling(bits):
    linear = load_spec("monde-ndp")
    np.testing.assert_allclose(linear.array_rate(bits), 16 / bits, rtol=1e-15, atol=0)
    system = load_system("h100-cxl-ndp")
    assert system.with_values({"ndp.precision_scaling": "none"}).ndp.array_rate(bits) == 1
    table = {
        "ndp.precision_scaling": "native",
        "ndp.native_rate_by_bits.4": 3.0,
        "ndp.native_rate_by_bits.8": 2.0,
    }
    native = system.with_values(table).ndp
    assert native.array_rate(bits) == (3 if bits <= 4 else 2 if bits <= 8 else 1)
    back = native.with_values({"precision_scaling": "linear"}, {"precision_scaling": Source(**fit())})
    assert back.native_rate_by_bits is None


def test_array_rate_refuses_impossible_bits():
    ndp = load_spec("monde-ndp")
    for bits in (0, -1, 33, float("nan"), float("inf")):
        refuse(lambda bits=bits: ndp.array_rate(bits), "bits", "up to 32")


def test_specs_are_frozen_hashable_and_picklable(system):
    for entry in list_specs():
        spec = load_spec(entry.name)
        assert pickle.loads(pickle.dumps(spec)) == spec
        assert copy.deepcopy(spec) == spec
        assert hash(spec) == hash(load_spec(entry.name))
    with pytest.raises(ValueError, match="frozen"):
        system.gpu.memory_efficiency = 0.1
    for change in (
        lambda table: table.update(fp16=1),
        lambda table: table.__setitem__("fp16", 1),
        lambda table: table.pop("fp16"),
        lambda table: table.clear(),
    ):
        with pytest.raises(TypeError, match="read-only"):
            change(system.gpu.peak_tflop_per_s)


# --- sources ---------------------------------------------------------------------------------------


def test_every_number_needs_a_source_and_every_source_a_number():
    sources = dict(gpu_data()["sources"])
    for key in list(sources):
        fewer = {other: entry for other, entry in sources.items() if other != key}
        refuse(lambda fewer=fewer: GpuSpec(**gpu_data(sources=fewer)), "[sources]", key)
    more = {**sources, "layer_overhead_us": fit()}
    refuse(lambda: GpuSpec(**gpu_data(sources=more)), "layer_overhead_us", "does not give")
    more = {**sources, "memory_eficiency": fit()}
    refuse(lambda: GpuSpec(**gpu_data(sources=more)), "memory_eficiency", "memory_efficiency")
    refuse(lambda: GpuSpec(**gpu_data(sources={})), "[sources]")


def test_table_sources_may_be_given_per_entry(toml):
    whole = 'peak_tflop_per_s = { source = "datasheet", citation = "toy datasheet" }'
    one = '{ source = "derived", citation = "half of fp8" }'
    two = '{ source = "published", citation = "a review" }'
    dotted = f'"peak_tflop_per_s.fp16" = {one}\n"peak_tflop_per_s.fp8" = {two}'
    for text in (dotted, dotted.replace('"peak_tflop_per_s.fp16"', "peak_tflop_per_s.fp16").replace('"peak_tflop_per_s.fp8"', "peak_tflop_per_s.fp8")):  # fmt: skip # noqa: E501
        gpu = load_spec(toml(GPU.replace(whole, text)))
        assert gpu.source_of("peak_tflop_per_s.fp16").source == "derived"
        assert gpu.source_of("peak_tflop_per_s.fp8").citation == "a review"
    refuse(
        lambda: load_spec(toml(GPU.replace(whole, f'"peak_tflop_per_s.fp16" = {one}'))),
        "peak_tflop_per_s.fp8",
    )


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"source": "rumour", "citation": "someone"}, ("rumour", "datasheet", "assumed")),
        ({"source": "measured"}, ("citation", "missing")),
        ({"source": "measured", "citation": ""}, ("citation",)),
        ({"source": "measured", "citation": "here", "page": 3}, ("page", "citation")),
        ({"source": "measured", "citation": 3}, ("citation",)),
        ("measured", ("memory_efficiency",)),
        (None, ("memory_efficiency",)),
    ],
)
def test_bad_source_entries(entry, words):
    sources = {**dict(gpu_data()["sources"]), "memory_efficiency": entry}
    refuse(lambda: GpuSpec(**gpu_data(sources=sources)), "memory_efficiency", *words)


def test_errors_of_direct_construction():
    refuse(lambda: Source(source="rumour", citation="someone"), "rumour", "calibrated")
    refuse(lambda: Source(source="measured"), "citation", "missing")
    refuse(lambda: GpuSpec(**gpu_data(sources="none")), "sources", "allowed: a table")
    refuse(lambda: GpuSpec(**gpu_data(description=3)), "description", "allowed: text")
    refuse(lambda: GpuSpec(), "gpu spec", "name", "missing")
    gpu, link = load_spec("h200"), load_spec("pcie-5.0-x16")
    refuse(lambda: System(name="mine", description="", gpu=link, link=link), "mine", "gpu")
    refuse(lambda: System(name="mine", description="", gpu={"name": "x"}, link=link), "gpu", "missing")
    refuse(lambda: System(name="mine", description="", gpu=gpu), "link", "missing")
    assert System(name="mine", description="", gpu=gpu, link=link).flags == ()
    refuse(lambda: gpu.with_values({"memory_efficiency": 0.5}, {}), "memory_efficiency", "source")
    deep: dict[str, object] = {}
    for _ in range(5000):
        deep = {"a": deep}
    refuse(lambda: GpuSpec(**gpu_data(sources=deep)), "sources")
    refuse(lambda: GpuSpec(**gpu_data(sources={"memory_efficiency": deep})), "sources.memory_efficiency")


def test_constants_carry_unit_and_source(system):
    constants = {constant.key: constant for constant in system.constants()}
    assert set(constants) == set(system.numeric_keys())
    bandwidth = constants["link.bandwidth_gb_per_s"]
    assert isinstance(bandwidth, Constant)
    assert bandwidth[:4] == ("link.bandwidth_gb_per_s", 59.29, "GB/s", "derived")
    assert constants["gpu.peak_tflop_per_s.fp16"].unit == "TFLOP/s"
    assert constants["ndp.dram.n_rfc"][1:4] == (224.0, "tCK", "published")
    assert constants["ndp.arrays"].unit == "1"
    assert all(constant.citation for constant in constants.values())


def test_choices_are_the_words_and_part_names(system):
    choices = {choice.key: choice for choice in system.choices()}
    assert len(choices) == len(system.choices())
    assert all(isinstance(choice, Choice) for choice in choices.values())
    assert {key: choice.value for key, choice in choices.items()} == {
        "gpu": "h100-sxm", "link": "cxl-2.0-x16", "ndp": "monde-ndp",
        "gpu.split": "tensor", "link.duplex": "full",
        "ndp.mapping": "row-by-row", "ndp.dataflow": "os", "ndp.precision_scaling": "linear", "ndp.dram": "lpddr5-6400",
    }  # fmt: skip
    assert choices["gpu"][2:] == choices["link.duplex"][2:] == ("", "")
    assert choices["ndp.mapping"].source == "assumed"
    assert choices["ndp.dataflow"][2:] == ("published", system.ndp.sources["dataflow"].citation)
    # Every key is a number, a word or a part, and none is two of them.
    assert not set(choices) & set(system.numeric_keys())
    for spec in (load_spec("monde-ndp"), load_spec("cxl-2.0-x16"), load_spec("h100-sxm"), load_spec("lpddr5-6400")):
        words = {key for key, value in spec.items() if isinstance(value, str)}
        assert {choice.key for choice in spec.choices()} == words | ({"dram"} if spec.kind == "ndp" else set())
    changed = system.with_values({"ndp.dataflow": "ws"}, **fit())
    assert [c for c in changed.choices() if c.key == "ndp.dataflow"] == [
        Choice("ndp.dataflow", "ws", "calibrated", "fit to a table")
    ]
    given_one = {choice.key for choice in system.with_values({"ndp.dram_efficiency": 0.4}).choices()}
    assert set(choices) - given_one == {"ndp.dram", "ndp.mapping"}


def test_weakest_source(system):
    assert SOURCE_KINDS == ("datasheet", "published", "measured", "derived", "calibrated", "assumed")
    assert system.weakest_source() == "assumed"
    assert system.weakest_source(["gpu.memory_bandwidth_gb_per_s"]) == "published"
    assert system.weakest_source(["gpu.memory_efficiency", "gpu.memory_bandwidth_gb_per_s"]) == "derived"
    assert system.weakest_source(["gpu.memory_efficiency", "link.efficiency"]) == "assumed"
    fitted = system.with_values({"gpu.memory_efficiency": 0.5}, **fit())
    assert fitted.weakest_source(["gpu.memory_efficiency", "gpu.memory_bandwidth_gb_per_s"]) == "calibrated"
    refuse(lambda: system.weakest_source(["gpu.memory_eficiency"]), "memory_efficiency")


# --- changing values -------------------------------------------------------------------------------


@given(
    efficiency=st.floats(1e-6, 1),
    bandwidth=st.floats(0.01, 5000),
    arrays=st.integers(1, 1_000_000),
    latency=st.floats(0, 1e5),
)
def test_with_values_changes_only_what_it_names(system, efficiency, bandwidth, arrays, latency):
    values = {
        "gpu.memory_efficiency": efficiency,
        "link.bandwidth_gb_per_s": bandwidth,
        "link.latency_us": latency,
        "ndp.arrays": arrays,
    }
    other = system.with_values(values, **fit())
    for key in system.numeric_keys():
        assert other.get(key) == values.get(key, system.get(key))
        assert (other.source_of(key) == Source(**fit())) == (key in values)
    assert (other.content_hash() == system.content_hash()) == all(
        system.get(key) == value for key, value in values.items()
    )
    assert (other.flags != ()) == (bandwidth > 59.29)
    # Every number can be read and set back, and the original did not change.
    again = other.with_values({key: system.get(key) for key in values}, source="assumed")
    assert again.content_hash() == system.content_hash() == load_system(system.name).content_hash()


def test_every_numeric_key_can_be_set_to_its_own_value(system):
    same = system.with_values({key: system.get(key) for key in system.numeric_keys()}, **fit())
    assert same.content_hash() == system.content_hash()
    assert {constant.source for constant in same.constants()} == {"calibrated"}


def test_number_types_of_a_sweep(system):
    for value in (128, 128.0, np.int64(128), np.float64(128), np.float32(128), Fraction(128)):
        assert system.with_values({"ndp.arrays": value}).ndp.arrays == 128
        assert type(system.with_values({"ndp.arrays": value}).ndp.arrays) is int
        assert system.with_values({"link.bandwidth_gb_per_s": value}).get("link.bandwidth_gb_per_s") == 128
    for bad in (
        True, np.True_, None, [128], "128", 128.5, np.array([128]), 1 << 20_000, 1j, b"128", object(),
        Fraction(10) ** 400, float("nan"), float("inf"), -128, 0,
    ):  # fmt: skip
        refuse(lambda bad=bad: system.with_values({"ndp.arrays": bad}), "ndp", "arrays")


def test_calibrated_peak_above_the_stated_one_is_flagged_and_undone_at_peak(system):
    fitted = system.with_values({"link.bandwidth_gb_per_s": 61.9}, **fit())
    assert fitted.flags == ("link.bandwidth_gb_per_s 61.9 is above the stated peak 59.29 of cxl-2.0-x16 (calibrated)",)
    twice = fitted.with_values({"link.bandwidth_gb_per_s": 63, "gpu.peak_tflop_per_s.fp16": 1000}, **fit())
    assert len(twice.flags) == 2
    assert "63 is above the stated peak 59.29" in twice.flags[0]
    assert "1000 is above the stated peak 989.4 of h100-sxm" in twice.flags[1]
    assert twice.at_peak().get("link.bandwidth_gb_per_s") == 59.29
    assert twice.at_peak().source_of("link.bandwidth_gb_per_s").source == "derived"
    assert twice.at_peak().flags == ()
    what_if = system.with_values({"link.bandwidth_gb_per_s": 120}, source="assumed", citation="what if")
    assert what_if.at_peak().get("link.bandwidth_gb_per_s") == 120
    assert system.with_values({"link.bandwidth_gb_per_s": 20}, **fit()).flags == ()
    refuse(lambda: system.with_values({"link.efficiency": 1.01}, **fit()), "efficiency", "1.01", "to 1")


@pytest.mark.parametrize("name", sorted(NAMES["system"]))
def test_at_peak_is_the_datasheet_column(name):
    system = load_system(name)
    peak = system.at_peak()
    for key in peak.numeric_keys():
        leaf = key.rpartition(".")[2]
        if leaf.endswith(("efficiency", "scaling")):
            assert peak.get(key) == 1
        elif "overhead" in leaf or "n_half" in leaf or leaf in ("latency_us", "round_trip_us"):
            assert peak.get(key) == 0
        else:
            assert peak.get(key) == system.get(key)
    assert peak.gpu.effective_memory_bandwidth_bytes_per_s == system.gpu.memory_bandwidth_bytes_per_s
    if peak.ndp is not None:
        assert (peak.ndp.dram_efficiency, peak.ndp.dram_spec, peak.ndp.mapping) == (1, None, None)
    assert peak.at_peak().content_hash() == peak.content_hash()
    assert peak.name == system.name


def test_layer_overhead_can_be_set_although_the_file_has_none(system):
    assert system.gpu.layer_overhead_s is None
    refuse(lambda: system.get("gpu.layer_overhead_us"), "gpu.layer_overhead_us", "not given")
    fitted = system.with_values({"gpu.layer_overhead_us": 250}, **fit())
    np.testing.assert_allclose(fitted.gpu.layer_overhead_s, 250e-6, rtol=1e-15, atol=0)
    assert fitted.at_peak().gpu.layer_overhead_s == 0


def test_given_and_derived_dram_efficiency_replace_each_other(system):
    refuse(lambda: system.get("ndp.dram_efficiency"), "ndp.dram", "ndp.mapping")
    given_one = system.with_values({"ndp.dram_efficiency": 0.4}, **fit())
    assert (given_one.ndp.dram_efficiency, given_one.ndp.dram, given_one.ndp.mapping) == (0.4, None, None)
    refuse(lambda: given_one.with_values({"ndp.mapping": "row-by-row"}), "dram_efficiency", "exclude")
    derived = given_one.with_values({"ndp.dram": "hbm3-6400", "ndp.mapping": "bank-group-limited"})
    assert derived.ndp.dram == load_spec("hbm3-6400")
    assert derived.ndp.dram_efficiency is None
    window = derived.with_values({"ndp.read_buffer": 64, "ndp.dram.n_rfc": 600})
    assert (window.ndp.read_buffer, window.ndp.dram.n_rfc) == (64, 600)
    assert system.ndp.dram.n_rfc == 224


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("gpu.memory_eficiency", ("did you mean 'memory_efficiency'", "compute_efficiency")),
        ("gpux.memory_efficiency", ("gpu.memory_efficiency", "link.*")),
        ("gpu", ("gpu.*",)),
        ("gpu.", ("gpu.*",)),
        ("", ("gpu.*",)),
        ("gpu.name", ("memory_efficiency",)),
        ("gpu.kind", ("memory_efficiency",)),
        ("gpu.sources", ("memory_efficiency",)),
        ("gpu.memory_efficiency.fp16", ("memory_efficiency",)),
        ("gpu.peak_tflop_per_s", ("peak_tflop_per_s.fp16",)),
        ("gpu.peak_tflop_per_s.fp17", ("fp17", "fp16")),
        ("ndp.dram.n_rfcs", ("n_rfc",)),
        ("cpu.sockets", ("has no cpu",)),
        ("gpu.memory\nefficiency", ("memory_efficiency",)),
        (3, ("gpu.*",)),
        (None, ("gpu.*",)),
    ],
)
def test_unknown_dotted_keys(system, key, words):
    refuse(lambda: system.with_values({key: 1}), *words)
    refuse(lambda: system.get(key))


def test_words_are_not_numbers(system):
    refuse(lambda: system.get("ndp.dataflow"), "ndp.dataflow", "not a number")
    assert system.with_values({"ndp.dataflow": "ws"}).ndp.dataflow == "ws"
    refuse(lambda: system.with_values({"ndp.dataflow": "rs"}), "dataflow", "'os', 'ws' or 'is'")
    refuse(lambda: system.with_values({"ndp.dataflow": 3}), "dataflow")
    refuse(lambda: system.with_values({"gpu.memory_efficiency": "0.4"}), "memory_efficiency")
    refuse(lambda: system.with_values([("gpu.memory_efficiency", 0.4)]), "table")  # type: ignore[arg-type]
    refuse(lambda: system.with_values({"gpu.memory_efficiency": 0.4}, source="guess"), "guess", "calibrated")
    refuse(lambda: system.with_values({"gpu.memory_efficiency": 0.4}, source="assumed", citation=""), "citation")


# --- system files and overlays ---------------------------------------------------------------------

PARTS = 'kind = "system"\nname = "mine"\ndescription = "my system"\ngpu = "h100-sxm"\nlink = "pcie-4.0-x16"\n'


def test_parts_by_name_path_and_table(toml):
    toml(GPU, "toy.toml")
    inline = GPU.replace('kind = "gpu"\n', "").replace("[sources]", "[gpu.sources]").strip()
    by_path = load_system(toml(PARTS.replace('"h100-sxm"', '"toy.toml"'), "a.toml"))
    by_table = load_system(toml(PARTS.replace('gpu = "h100-sxm"\n', "") + "[gpu]\n" + inline, "b.toml"))
    assert by_path.gpu == by_table.gpu
    assert by_path.gpu.name == "toy-gpu"
    assert by_path.ndp is None
    assert by_path.cpu is None


def test_relative_paths_start_at_the_file(tmp_path, monkeypatch):
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "toy.toml").write_text(GPU)
    path = tmp_path / "system.toml"
    path.write_text(PARTS.replace('"h100-sxm"', '"parts/toy.toml"'))
    monkeypatch.chdir("/")
    assert load_system(path).gpu.name == "toy-gpu"
    monkeypatch.chdir(tmp_path)
    assert load_system("system.toml").gpu.name == "toy-gpu"


def test_near_data_device_with_inline_dram_and_native_table(toml):
    text = Path(next(entry.path for entry in list_specs() if entry.name == "monde-ndp")).read_text()
    dram = Path(next(entry.path for entry in list_specs() if entry.name == "lpddr5-6400")).read_text()
    toml(dram, "mem.toml")
    assert load_spec(toml(text.replace('"lpddr5-6400"', '"mem.toml"'), "n.toml")) == load_spec("monde-ndp")
    refuse(lambda: load_spec(toml(text.replace('"lpddr5-6400"', '"h100-sxm"'))), "dram", "gpu")
    refuse(lambda: load_spec(toml(text.replace('"lpddr5-6400"', '"lpddr5"'))), "lpddr5-6400")
    refuse(lambda: load_spec(toml(text.replace('"lpddr5-6400"', "6400"))), "dram", "6400")
    refuse(lambda: load_spec(toml(text.replace('"lpddr5-6400"', "{ name = 'x' }"))), "dram", "missing")
    refuse(lambda: load_spec(toml(text.replace('"linear"', '"native"'))), "native_rate_by_bits")
    native = text.replace('"linear"', '"native"').replace(
        "dataflow =", "native_rate_by_bits = { 4 = 4.0 }\ndataflow =", 1
    )
    native += 'native_rate_by_bits = { source = "assumed", citation = "a guess" }\n'
    assert load_spec(toml(native)).array_rate(3) == 4
    refuse(lambda: load_spec(toml(native.replace("{ 4 = 4.0 }", "{ four = 4.0 }"))), "four", "bits")
    refuse(lambda: load_spec(toml(native.replace("{ 4 = 4.0 }", "{ 4 = -4.0 }"))), "native_rate_by_bits.4")
    refuse(lambda: load_spec(toml(native.replace("{ 4 = 4.0 }", "{ }"))), "native_rate_by_bits")


def test_overrides_in_a_file(toml):
    source = '{ source = "calibrated", citation = "fit" }'
    quoted = '[overrides]\n"gpu.memory_efficiency" = 0.4\n[override_sources]\n"gpu.memory_efficiency" = '
    quoted += source + "\n"
    nested = f"[overrides.gpu]\nmemory_efficiency = 0.4\n[override_sources]\ngpu.memory_efficiency = {source}\n"
    for text in (quoted, nested):
        system = load_system(toml(PARTS + text))
        assert system.get("gpu.memory_efficiency") == 0.4
        assert system.source_of("gpu.memory_efficiency") == Source(source="calibrated", citation="fit")
    both = quoted.replace("[override_sources]", "gpu.memory_efficiency = 0.5\n[override_sources]")
    refuse(lambda: load_system(toml(PARTS + both)), "gpu.memory_efficiency", "twice")
    refuse(lambda: load_system(toml(PARTS + quoted.partition("[override_s")[0])), "override_sources")
    refuse(lambda: load_system(toml(PARTS + "[override_s" + quoted.partition("[override_s")[2])), "override")
    refuse(lambda: load_system(toml(PARTS + quoted.replace("0.4", "4"))), "file.toml", "memory_efficiency", "4")
    refuse(lambda: load_system(toml(PARTS + quoted.replace("0.4", "true"))), "memory_efficiency")
    refuse(lambda: load_system(toml(PARTS + quoted.replace("0.4", "nan"))), "memory_efficiency")
    refuse(lambda: load_system(toml(PARTS + quoted.replace("efficiency", "speed"))), "memory_speed")
    refuse(lambda: load_system(toml(PARTS + "overrides = 3")), "overrides")


def test_base_systems(toml):
    head = 'kind = "system"\nname = "mine"\ndescription = "my system"\n'
    base = load_system(toml(head + 'base = "h100-cxl-ndp"'))
    assert base.name == "mine"
    assert base.content_hash() == load_system("h100-cxl-ndp").content_hash()
    refuse(lambda: load_system(toml(head + 'base = "h100-sxm"')), "base", "gpu spec")
    refuse(lambda: load_system(toml(head + "base = 3")), "base")
    refuse(lambda: load_system(toml(head)), "gpu", "missing")
    toml(head + 'base = "two.toml"', "one.toml")
    loop = toml(head + 'base = "one.toml"', "two.toml")
    refuse(lambda: load_system(loop), "base", "one.toml", "same file")
    refuse(lambda: load_system(toml(head + 'base = "self.toml"', "self.toml")), "self.toml", "same file")


def test_parts_beside_a_base_replace_its_own(toml):
    head = 'kind = "system"\nname = "mine"\ndescription = "my system"\n'
    source = '{ source = "calibrated", citation = "fit" }'
    fitted = (
        'base = "h100-cxl-ndp"\n'
        'overrides = { "gpu.memory_efficiency" = 0.5, "link.bandwidth_gb_per_s" = 500, "ndp.arrays" = 7 }\n'
        f'[override_sources]\n"gpu.memory_efficiency" = {source}\n"link.bandwidth_gb_per_s" = {source}\n'
        f'"ndp.arrays" = {source}\n'
    )
    base = load_system(toml(head + fitted, "base.toml"))
    assert list(base.stated_peaks) == ["link.bandwidth_gb_per_s"]
    swap = head + 'base = "base.toml"\ngpu = "h200"\nlink = "pcie-5.0-x16"\nhost = "measured"\n'
    swapped = load_system(toml(swap))
    # New parts come as their own files state them, without the overrides of the base; the others stay as they were.
    assert (swapped.gpu, swapped.link, swapped.host) == tuple(map(load_spec, ("h200", "pcie-5.0-x16", "measured")))
    assert (swapped.ndp, swapped.cpu) == (base.ndp, base.cpu)
    assert swapped.get("ndp.arrays") == 7
    assert swapped.stated_peaks == {}
    over = (
        swap
        + f'overrides = {{ "link.bandwidth_gb_per_s" = 70 }}\n[override_sources]\n"link.bandwidth_gb_per_s" = {source}'
    )
    last = load_system(toml(over))
    assert last.get("link.bandwidth_gb_per_s") == 70
    assert last.stated_peaks["link.bandwidth_gb_per_s"].value == load_spec("pcie-5.0-x16").bandwidth_gb_per_s
    refuse(lambda: load_system(toml(swap.replace('"h200"', '"h201"'))), "file.toml", "gpu", "h201")
    refuse(lambda: load_system(toml(swap.replace('"h200"', "3"))), "file.toml", "gpu", "3")
    refuse(lambda: load_system(toml(swap.replace('"h200"', '{ kind = "gpu" }'))), "file.toml", "gpu", "missing")
    refuse(lambda: load_system(toml(swap.replace('"measured"', '"h200"'))), "file.toml", "host", "gpu spec")


words = st.text(st.characters(exclude_categories=["Cs"]), min_size=3, max_size=60)


@given(
    efficiency=st.floats(1e-6, 1),
    bandwidth=st.floats(0.01, 5000),
    arrays=st.integers(1, 1_000_000),
    citation=words,
    description=words,
)
def test_overlay_round_trip(tmp_path_factory, efficiency, bandwidth, arrays, citation, description):
    values = {"gpu.memory_efficiency": efficiency, "link.bandwidth_gb_per_s": bandwidth, "ndp.arrays": arrays}
    path = tmp_path_factory.getbasetemp() / "overlay" / "fitted.toml"
    sources = {
        **dict.fromkeys(values, fit(citation)),
        "ndp.arrays": Source(source="assumed", citation=citation),
    }
    assert write_overlay(path, "h100-cxl-ndp", values, sources, description=description) == path
    system = load_system(path)
    expected = load_system("h100-cxl-ndp").with_values(values, **fit(citation))
    assert system.content_hash() == expected.content_hash()
    assert system.flags == expected.flags
    assert (system.name, system.description) == ("fitted", description)
    assert system.source_of("gpu.memory_efficiency").citation == citation
    assert system.source_of("ndp.arrays").source == "assumed"
    assert [entry.name for entry in path.parent.iterdir()] == ["fitted.toml"]


def test_overlay_of_a_file_and_of_an_overlay(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_overlay("one.toml", "h100-cxl-ndp", {"link.bandwidth_gb_per_s": 40}, {"link.bandwidth_gb_per_s": fit()})
    write_overlay(
        "deep/two.toml", "one.toml", {"ndp.mapping": "bank-group-limited"}, {"ndp.mapping": fit()}, name="two"
    )
    two = load_system(tmp_path / "deep" / "two.toml")
    assert two.get("link.bandwidth_gb_per_s") == 40
    assert two.ndp.mapping == "bank-group-limited"
    assert two.flags == ("link.bandwidth_gb_per_s 40 is above the stated peak 31.51 of pcie-4.0-x16 (calibrated)",)
    assert two.at_peak().get("link.bandwidth_gb_per_s") == 31.51


def test_a_refused_overlay_leaves_the_old_file(tmp_path):
    path = tmp_path / "fit.toml"
    good = {"gpu.memory_efficiency": 0.4}
    write_overlay(path, "h100-cxl-ndp", good, {"gpu.memory_efficiency": fit()})
    before = path.read_bytes()
    source = {"gpu.memory_efficiency": fit()}
    for values, sources, base in (
        ({"gpu.memory_efficiency": 4}, source, "h100-cxl-ndp"),
        ({"gpu.memory_efficiency": float("nan")}, source, "h100-cxl-ndp"),
        ({"gpu.memory_efficiency": 1 << 20_000}, source, "h100-cxl-ndp"),
        ({"gpu.memory_efficiency": None}, source, "h100-cxl-ndp"),
        ({"gpu.memory_efficiency": True}, source, "h100-cxl-ndp"),
        (good, {}, "h100-cxl-ndp"),
        (good, {"gpu.memory_efficiency": "measured"}, "h100-cxl-ndp"),
        (good, {"gpu.memory_efficiency": {"source": "measured"}}, "h100-cxl-ndp"),
        (
            good,
            {"gpu.memory_efficiency": {"source": "measured", "citation": "\ud800\ud800\ud800"}},
            "h100-cxl-ndp",
        ),
        (good, {"gpu.memory_efficiency": {3: "measured", "citation": "here"}}, "h100-cxl-ndp"),
        (good, source, "h100"),
        (good, source, "nowhere/base.toml"),
        (good, source, 3),
        (3, source, "h100-cxl-ndp"),
        (good, None, "h100-cxl-ndp"),
    ):
        refuse(lambda v=values, s=sources, b=base: write_overlay(path, b, v, s))
        assert path.read_bytes() == before
        assert list(tmp_path.iterdir()) == [path]
    refuse(lambda: write_overlay(tmp_path / "fit.json", "h100-cxl-ndp", good, source), ".toml")
    refuse(lambda: write_overlay(path / "below.toml", "h100-cxl-ndp", good, source), "below.toml")
    refuse(lambda: write_overlay(None, "h100-cxl-ndp", good, source))  # type: ignore[arg-type]


# --- bad input -------------------------------------------------------------------------------------


def test_unknown_names_get_close_matches():
    refuse(lambda: load_spec("h100"), "h100-sxm", "perfmodel specs list")
    refuse(lambda: load_system("h100-cxl-npd"), "h100-cxl-ndp")
    refuse(lambda: load_system("H100-CXL-NDP"), "h100-cxl-ndp")
    refuse(lambda: load_system("h100-sxm"), "gpu spec", "system")
    refuse(lambda: load_spec("no such thing at all"), "perfmodel specs list")
    for name in ("", " ", ".", "..", "x" * 10_000, "\0", "\n", "h100-sxm\n", "\ud800"):
        refuse(lambda name=name: load_spec(name))
    for name in (None, 3, True, [], {}, b"h100-sxm", object()):
        refuse(lambda name=name: load_spec(name), "allowed")
        refuse(lambda name=name: load_system(name), "allowed")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ("kind", "missing", "gpu", "system")),
        (b"\x00\x01\x02\xff\xfe", ("UTF-8",)),
        (b"PK\x03\x04 not a zip", ("TOML",)),
        (GPU.encode("utf-16"), ("UTF-8",)),
        (b"kind = ", ("TOML", "Invalid value")),
        (b'kind = "gpu"\nkind = "gpu"', ("TOML",)),
        (b"kind = 3", ("kind", "3", "gpu")),
        (b'kind = "tpu"', ("kind", "tpu", "gpu")),
        (b'kind = ["gpu"]', ("kind", "gpu")),
        (b"a = " + b"[" * 5000, ("file.toml",)),
        (b"a = " + b"9" * 6000, ("file.toml",)),
        (b"#" * (1 << 21), ("larger",)),
        (GPU[: len(GPU) // 2].encode(), ("file.toml",)),
    ],
)
def test_files_that_are_not_specs(toml, content, words):
    path = toml(content)
    refuse(lambda: load_spec(path), "file.toml", *words)
    refuse(lambda: load_system(path), "file.toml")


def test_paths_that_are_not_files(tmp_path):
    refuse(lambda: load_spec(tmp_path / "missing.toml"), "missing.toml", "does not exist")
    refuse(lambda: load_spec(tmp_path), "not a regular file")
    refuse(lambda: load_spec("/dev/zero"), "not a regular file")
    refuse(lambda: load_spec(str(tmp_path / "a\nb.toml")), "does not exist")
    refuse(lambda: load_spec("a\0b.toml"), "does not exist")
    refuse(lambda: load_spec("x" * 5000 + ".toml"), "cannot be read")
    (tmp_path / "loop.toml").symlink_to(tmp_path / "loop.toml")
    refuse(lambda: load_spec(tmp_path / "loop.toml"), "loop.toml")


def test_byte_order_mark_and_windows_line_ends_are_fine(toml):
    assert load_spec(toml(b"\xef\xbb\xbf" + GPU.replace("\n", "\r\n").encode())) == load_spec(toml(GPU))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("memory_efficiency = 0.5", "memory_efficiency = 1.5", ("memory_efficiency", "1.5", "to 1")),
        ("memory_efficiency = 0.5", "memory_efficiency = 0", ("memory_efficiency", "0")),
        ("memory_efficiency = 0.5", "memory_efficiency = -0.5", ("memory_efficiency", "-0.5")),
        ("memory_efficiency = 0.5", "memory_efficiency = nan", ("memory_efficiency", "nan")),
        ("memory_efficiency = 0.5", "memory_efficiency = inf", ("memory_efficiency", "inf")),
        ("memory_efficiency = 0.5", "memory_efficiency = true", ("memory_efficiency", "True")),
        ("memory_efficiency = 0.5", 'memory_efficiency = "0.5"', ("memory_efficiency", "'0.5'")),
        ("memory_efficiency = 0.5", "memory_efficiency = [0.5]", ("memory_efficiency", "list")),
        ("memory_efficiency = 0.5", "memory_efficiency = 2020-01-01", ("memory_efficiency", "date")),
        ("memory_efficiency = 0.5", f"memory_efficiency = {'9' * 400}", ("memory_efficiency", "bits")),
        ("memory_efficiency = 0.5", f"memory_efficiency = 0x{'f' * 9000}", ("memory_efficiency", "bits")),
        ("memory_efficiency = 0.5", "", ("memory_efficiency", "missing")),
        ("memory_efficiency = 0.5", "memory_eficiency = 0.5", ("'memory_efficiency'", "allowed keys")),
        ("per_s = 1000", "per_s = 50001", ("memory_bandwidth_gb_per_s", "plausible", "50000 GB/s")),
        ("fp16 = 100, ", "", ("peak_tflop_per_s", "fp16")),
        ("fp16 = 100", "fp16 = 100, fp7 = 1", ("fp7", "fp8")),
        ("fp16 = 100", 'fp16 = "100"', ("peak_tflop_per_s.fp16",)),
        ("fp16 = 100", "fp16 = 1e9", ("peak_tflop_per_s.fp16", "plausible", "TFLOP/s")),
        ("{ fp16 = 100, fp8 = 200 }", "100", ("peak_tflop_per_s",)),
        ("launch_overhead_us = 5", "launch_overhead_us = -5", ("launch_overhead_us", "0 to")),
        ('"toy-gpu"', '""', ("name",)),
        ('"toy-gpu"', '"two\\nlines"', ("name",)),
        ('"toy-gpu"', "3", ("name",)),
        ('description = "a GPU with round numbers"', "", ("description", "missing")),
        ("[sources]", "[source]", ("source", "sources")),
        ("[sources]", "self = 3\n[sources]", ("self",)),
        ("[sources]", '"" = 3\n[sources]', ("allowed keys",)),
        ("[sources]", '"a\\nb" = 3\n[sources]', ("allowed keys",)),
    ],
)  # fmt: skip
def test_bad_values_in_a_file(toml, old, new, words):
    assert old in GPU
    path = toml(GPU.replace(old, new, 1))
    refuse(lambda: load_spec(path), str(path), *words)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("peak_gb_per_s = 12.8", "peak_gb_per_s = 25.6", ("peak_gb_per_s", "12.8")),
        ("tck_ns = 1.25", "tck_ns = 1.5", ("peak_gb_per_s", "tck_ns")),
        ("row_bytes = 2048", "row_bytes = 2000", ("row_bytes", "line_bytes")),
        ("n_ccd_l = 4", "n_ccd_l = 1", ("n_ccd_l", "n_ccd_s")),
        ("n_refi = 3125", "n_refi = 200", ("n_refi", "n_rfc")),
        ("n_rp = 15", "n_rp = 15.0", ("n_rp", "whole number")),
        ("n_rp = 15", "n_rp = true", ("n_rp", "whole number")),
        ("bank_groups = 4", "bank_groups = 0", ("bank_groups", "1 to")),
    ],
)
def test_inconsistent_dram(toml, old, new, words):
    text = next(entry.path for entry in list_specs() if entry.name == "lpddr5-6400").read_text()
    assert old in text
    refuse(lambda: load_spec(toml(text.replace(old, new, 1))), *words)


def test_near_data_device_needs_exactly_one_derate():
    ndp = load_spec("monde-ndp")
    data = {key: getattr(ndp, key) for key in ndp.model_fields_set}
    sources = dict(ndp.sources)
    both = {**data, "dram_efficiency": 0.5, "sources": {**sources, "dram_efficiency": fit()}}
    refuse(lambda: NdpSpec(**both), "dram_efficiency", "dram", "exclude")
    for missing in ("dram", "mapping"):
        less = {key: value for key, value in data.items() if key != missing}
        less["sources"] = {key: value for key, value in sources.items() if key != missing}
        refuse(lambda less=less: NdpSpec(**less), "dram_efficiency", "mapping")


def test_impossible_links_are_out_of_range(system):
    refuse(lambda: system.with_values({"link.bandwidth_gb_per_s": 12_500}), "12500", "plausible", "5000 GB/s")
    refuse(lambda: system.with_values({"gpu.memory_bandwidth_gb_per_s": 60_000}), "plausible", "50000 GB/s")


junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.just(1 << 4000)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@given(key=st.sampled_from([*gpu_data(), "extra"]), value=junk)
def test_any_junk_is_either_a_valid_value_or_a_spec_error(key, value):
    spec, message = outcome(lambda: GpuSpec(**gpu_data(**{key: value})))
    if spec is None:
        assert "\n" not in message
        assert key in message
    else:
        assert getattr(spec, key) == value
        assert key in {"name", "description"} or isinstance(value, (int, float))
        assert not isinstance(value, bool)


@given(
    key=st.text(max_size=12) | st.sampled_from(["gpu.memory_efficiency", "ndp.dram", "ndp.dram.n_rp"]),
    value=junk,
)
def test_any_junk_override_is_either_valid_or_a_spec_error(system, key, value):
    changed, message = outcome(lambda: system.with_values({key: value}))
    assert "\n" not in message
    assert (changed is None) == (message != "")
    assert changed is None or changed.get(key) == value


@given(content=st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "replace")))
def test_random_files_are_refused(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "junk.toml"
    path.write_bytes(content)
    refuse(lambda: load_spec(path), "junk.toml")


@given(start=st.integers(0, len(GPU) - 1), length=st.integers(1, 40), new=st.text(max_size=5))
def test_damaged_spec_files_are_refused_or_still_a_gpu(tmp_path_factory, start, length, new):
    path = tmp_path_factory.getbasetemp() / "damaged.toml"
    path.write_bytes((GPU[:start] + new + GPU[start + length :]).encode("utf-8", "replace"))
    spec, message = outcome(lambda: load_spec(path))
    assert isinstance(spec, GpuSpec) or "damaged.toml" in message
    assert "\n" not in message


# --- JSON schema -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_json_schema_names_every_key_with_unit_and_range(kind):
    schema = json_schema(kind)
    assert json.loads(json.dumps(schema)) == schema
    assert schema["additionalProperties"] is False
    assert {"kind", "name", "description"} <= set(schema["required"])
    assert schema["properties"]["kind"]["const"] == kind
    for entry in list_specs():
        if entry.kind == kind:
            assert set(tomllib.loads(entry.path.read_text())) <= set(schema["properties"])
    if kind == "link":
        bandwidth = schema["properties"]["bandwidth_gb_per_s"]
        assert (bandwidth["unit"], bandwidth["maximum"], bandwidth["type"]) == ("GB/s", 5000, "number")
    if kind == "ndp":
        assert {"type": "string"} in schema["properties"]["dram"]["anyOf"]


def test_json_schema_of_an_unknown_kind():
    for kind in ("tpu", "", None, 3, ["gpu"]):
        refuse(lambda kind=kind: json_schema(kind), "gpu", "system")
