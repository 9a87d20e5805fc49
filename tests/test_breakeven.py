"""From which batch on copying experts beats the CPU: against a plain sum, on recordings, and on reported cases."""

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import check_refusal, run
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from strategies import mixtral, plain_model, recording, spread_floats

from perfmodel import reference
from perfmodel.answers.breakeven import break_even
from perfmodel.answers.occupancy import Recorded, Uniform
from perfmodel.cli.breakeven import _text
from perfmodel.errors import ModelConfigError, PerfModelError, SpecError, TraceError
from perfmodel.hardware import System, load_system
from perfmodel.kernels.occupancy import window_occupancy
from perfmodel.memory import distinct_experts, memory_report
from perfmodel.model import MoEModel

LINKS = ("pcie-3.0-x8", "pcie-4.0-x16", "pcie-5.0-x16")
DESKTOP = load_system("rtx4090-pcie4-cpu")


def binomial(experts: int, top_k: int, tokens: int) -> list[float]:
    """Mean number of experts with 0, 1, ... tokens, by exact binomial coefficients."""
    p = top_k / experts
    return [experts * math.comb(tokens, m) * p**m * (1 - p) ** (tokens - m) for m in range(tokens + 1)]


def in_windows(tokens: int) -> list[float]:
    """The same of the bundled recording, window by window."""
    trace, found, cells = recording(), [0] * (tokens + 1), 0
    for first, last in itertools.pairwise(trace.sequence_offsets.tolist()):
        for start in range(first, last - tokens + 1, tokens):
            for layer in range(trace.num_layers):
                picks = trace.topk_ids[start : start + tokens, layer].reshape(-1).tolist()
                for expert in range(trace.num_experts):
                    found[picks.count(expert)] += 1
                cells += 1
    return [count / cells for count in found]


def sides(model: MoEModel, system: System, tokens: int, shares: list[float], pipelined: bool) -> tuple[float, float]:
    """Time of the GPU side and of the CPU side of a layer, one number of tokens after the other."""
    gpu, cpu, link, host = system.gpu, system.cpu, system.link, system.host
    assert cpu is not None
    trip, overhead = (0.0, 0.0) if host is None else (host.round_trip_s, host.copy_overhead_s)
    weights, matrices = model.expert_params * model.expert_bits / 8, len(model.expert_matrices)
    rate = link.effective_bandwidth_bytes_per_s
    copy = reference.transfer_time(weights, rate, link.latency_s + overhead, link.n_half_bytes)
    crossing = reference.transfer_time(tokens * model.hidden_size * 2, rate, link.latency_s, link.n_half_bytes)
    used = math.fsum(shares[1:])
    on_cpu = on_gpu = 0.0
    for m, experts in enumerate(shares):
        if m > 0:
            on_cpu += experts * reference.cpu_expert_time(
                m, model.expert_params, weights, model.hidden_size, cpu.effective_flops_per_s(),
                cpu.effective_vector_flops_per_s, cpu.tile_rows or 1, cpu.effective_dram_bandwidth_bytes_per_s,
                cpu.expert_overhead_s, cpu.effective_pack_bytes_per_s,
            )  # fmt: skip
            on_gpu += experts * reference.roofline_time(
                2 * m * model.expert_params, weights + 4 * m * model.hidden_size, gpu.effective_flops_per_s("fp16"),
                gpu.effective_memory_bandwidth_bytes_per_s, matrices * gpu.memory_n_half_bytes,
                matrices * gpu.launch_overhead_s,
            )  # fmt: skip
    both = max(used * copy + on_gpu / used, copy + on_gpu) if pipelined else used * copy + on_gpu
    return trip + both, trip + 2 * crossing + on_cpu


# --- experts by tokens ---


@given(st.integers(1, 40), st.data())
def test_uniform_shares_are_binomial(experts: int, data: st.DataObject) -> None:
    top_k, tokens = data.draw(st.integers(1, experts)), data.draw(st.integers(1, 300))
    found = Uniform(experts, top_k, 300).shares(tokens)
    whole = np.zeros(tokens + 1)
    whole[found.least : found.least + len(found.experts)] = found.experts
    expected = binomial(experts, top_k, tokens)
    assert_allclose(whole.sum(), experts, rtol=1e-9, atol=0)
    assert_allclose(whole @ np.arange(tokens + 1), top_k * tokens, rtol=1e-9, atol=0)
    assert_allclose(whole, expected, rtol=1e-9, atol=1e-20)
    assert found.used == distinct_experts(experts, top_k, tokens)
    assert_allclose(found.experts[1 if found.least == 0 else 0 :].sum(), found.used, rtol=1e-9, atol=0)


@pytest.mark.parametrize("tokens", [1, 2, 7, 30])
def test_recorded_shares_are_counted_window_by_window(tokens: int) -> None:
    found = Recorded(recording(), 100).shares(tokens)
    assert_allclose(found.experts, in_windows(tokens), rtol=1e-12, atol=0)
    assert_allclose(found.used, sum(in_windows(tokens)[1:]), rtol=1e-12, atol=0)
    assert found.used <= min(8, 2 * tokens)


def test_picks_that_are_none_are_not_counted() -> None:
    ids = np.array([[[0, 65535]], [[0, 1]], [[2, 0]]], np.uint16)
    totals = np.zeros(3, np.int64)
    window_occupancy(ids, np.array([0, 3]), 4, 2, totals)
    # One window of two rows: expert 0 twice, expert 1 once, two others never; the third row is left over.
    assert_array_equal(totals, [2, 1, 1])


# --- break-even ---


@given(
    st.sampled_from(["rtx4090-pcie4-cpu", "h100-pcie5-cpu", "t4-pcie3", "rtx4090-pcie4"]),
    spread_floats(2, 200),
    spread_floats(20, 2000),
    spread_floats(0.01, 10),
    st.sampled_from([{}, {"cpu.pack_gb_per_s": 2.0}, {"cpu.pack_gb_per_s": 50.0}]),
    st.booleans(),
)
def test_break_even_is_the_first_of_a_plain_search(
    name: str, link: float, ram: float, tflops: float, packing: dict[str, float], pipelined: bool
) -> None:
    dtype = next(iter(load_system(name).cpu.peak_tflop_per_s))  # type: ignore[union-attr]
    values = {"link.bandwidth_gb_per_s": link, "cpu.dram_bandwidth_gb_per_s": ram, **packing}
    system = load_system(name).with_values({**values, f"cpu.peak_tflop_per_s.{dtype}": tflops})
    model = plain_model(hidden_size=64, expert_size=96, num_experts=6, bits=16.0)
    found = break_even(model, system, pipelined=pipelined, most_batch=24)
    expected = None
    for tokens in range(1, 25):
        gpu_s, cpu_s = sides(model, system, tokens, binomial(6, 2, tokens), pipelined)
        if tokens in {row.tokens for row in found.rows}:
            row = next(row for row in found.rows if row.tokens == tokens)
            assert_allclose([row.gpu_side_s, row.cpu_side_s], [gpu_s, cpu_s], rtol=1e-9, atol=0)
        if expected is None and gpu_s <= cpu_s:
            expected = tokens
    assert found.batch == expected
    behind = [n for n in range(1, 25) if np.less(*reversed(sides(model, system, n, binomial(6, 2, n), pipelined)))]
    never = expected is None or behind[-1:] == [24]
    assert found.ahead_from == (None if never else max([expected or 0, *(n + 1 for n in behind)]))
    assert (found.at is None) == (expected is None)
    assert [row.tokens for row in found.rows] == [1, 2, 4, 8, 16]


def test_break_even_on_a_recording() -> None:
    system = load_system("rtx5070-7950x")
    found = break_even("mixtral-8x7b", system, trace="tiny-mixtral-32l-mini", pipelined=True)
    assert found.batch is not None
    assert found.at is not None
    model = mixtral()
    for tokens, faster in ((found.batch - 1, "cpu"), (found.batch, "gpu")):
        gpu_s, cpu_s = sides(model, system, tokens, in_windows(tokens), True)
        assert (gpu_s <= cpu_s) == (faster == "gpu")
    assert_allclose([found.at.gpu_side_s, found.at.cpu_side_s], [gpu_s, cpu_s], rtol=1e-9, atol=0)
    assert found.most_batch == recording().sequence_lengths.max()
    assert any("longest sequence" in note for note in found.notes)
    # A text visits fewer experts than uniform routing, and some of them more often.
    assert found.rows[3].used < break_even("mixtral-8x7b", system).rows[3].used


@given(
    st.sampled_from(["rtx4090-pcie4-cpu", "rtx5070-7950x", "h100-pcie5-cpu"]),
    st.sampled_from([4.5, 8.5, 16.0]),
    st.booleans(),
)
def test_faster_links_lower_it_and_faster_memory_raises_it(name: str, bits: float, pipelined: bool) -> None:
    found = break_even(
        "mixtral-8x7b", name, bits=bits, links=LINKS, ram_gb_per_s=[50, 100, 400], pipelined=pipelined, most_batch=4096
    )
    batches = np.array([math.inf if cell.batch is None else cell.batch for cell in found.cells]).reshape(3, 3)
    assert (batches[1:] <= batches[:-1]).all()
    assert (batches[:, 1:] >= batches[:, :-1]).all()
    if name == "rtx4090-pcie4-cpu":
        # The fastest link against the slowest memory: copying is as fast as reading, so from one token on.
        assert batches[2, 0] == 1
        assert batches[0, 0] > batches[2, 1] > 1
    own = break_even("mixtral-8x7b", name, bits=bits, pipelined=pipelined, most_batch=4096)
    assert found.batch == own.batch


def test_a_faster_link_raises_it_where_activations_outweigh_the_experts() -> None:
    model = plain_model(hidden_size=4096, expert_size=1, num_experts=2, top_k=1)
    found = break_even(model, DESKTOP, links=LINKS, ram_gb_per_s=[100], most_batch=64)
    batches = [cell.batch for cell in found.cells]
    assert None not in batches
    assert batches == sorted(set(batches))
    assert 4 * batches[0] * model.hidden_size > model.expert_bytes(16)


@pytest.mark.parametrize(
    ("ram", "most", "again", "ahead_from"),
    [
        (35, 64, True, 11),  # the CPU is faster again at 2 to 10 tokens
        (35, 8, True, None),
        (35, 1, False, 1),
        (5, 64, False, 1),
    ],
)
def test_the_first_crossing_need_not_be_the_last(ram: float, most: int, again: bool, ahead_from: int | None) -> None:
    # 8 of 256 experts of 44 million weights, as DeepSeek-V3 has them.
    model = plain_model(hidden_size=7168, expert_size=2048, num_experts=256, top_k=8)
    system = DESKTOP.with_values({"cpu.dram_bandwidth_gb_per_s": ram}, source="assumed", citation="a test")
    found = break_even(model, system, bits=4.5, most_batch=most)
    assert (found.batch, found.ahead_from) == (1, ahead_from)
    behind = [row.tokens for row in found.rows if row.gpu_side_s > row.cpu_side_s]
    assert behind == [2, 4, 8] * again
    said = _text(found)
    if not again:
        assert f"the GPU stays ahead at every larger batch up to {most}" in said
    elif ahead_from is None:
        assert f"at the largest one, {most}: the GPU does not stay ahead" in said
    else:
        assert f"again at some larger batches; the GPU stays ahead from {ahead_from} on, up to {most}" in said


def test_a_cell_is_the_system_with_that_link_and_memory() -> None:
    found = break_even("mixtral-8x7b", DESKTOP, bits=4.5, links=["pcie-5.0-x16"], ram_gb_per_s=[100])
    values = {"link.bandwidth_gb_per_s": 63.02, "link.efficiency": 0.8759, "cpu.dram_bandwidth_gb_per_s": 100}
    assert found.cells[0].batch == break_even("mixtral-8x7b", DESKTOP.with_values(values), bits=4.5).batch


def test_pipelined_copies_never_raise_it() -> None:
    for name in ("rtx4090-pcie4-cpu", "rtx5070-7950x", "t4-pcie3"):
        in_turn, piped = (break_even("mixtral-8x7b", name, bits=4.5, pipelined=one).batch for one in (False, True))
        assert in_turn is not None
        assert piped is not None
        assert piped <= in_turn


def test_never_is_an_answer() -> None:
    found = break_even("mixtral-8x7b", DESKTOP, most_batch=16)
    assert (found.batch, found.at, found.ahead_from, found.most_batch) == (None, None, None, 16)


# --- reported cases ---


@pytest.mark.parametrize(
    ("folder", "batch"),
    [
        ("deepseek-ai__DeepSeek-V3", 1024),
        ("Qwen__Qwen3-30B-A3B", 512),
        ("openai__gpt-oss-120b", 1024),
        ("mistralai__Mixtral-8x7B-v0.1", 128),
    ],
)
def test_the_rule_scales_with_experts_over_picks(folder: str, batch: int, shared: Path) -> None:
    config = shared / "configs" / folder
    model = MoEModel.from_config(config) if config.exists() else mixtral()
    assert break_even(model, DESKTOP, bits=4.5, most_batch=1).rule_batch == batch


def test_a_short_follow_up_belongs_on_the_cpu(shared: Path) -> None:
    # DeepSeek-V3 in 130 GiB on PCIe 3.0 x8: 34 tokens took 23 s by copies, and 3 s once the CPU ran them.
    model = MoEModel.from_config(shared / "configs" / "deepseek-ai__DeepSeek-V3")
    system = load_system("rtx3090-pcie4-cpu").with_values(
        {"link.bandwidth_gb_per_s": 7.88, "link.efficiency": 0.793}, source="assumed", citation="PCIe 3.0 x8"
    )
    found = break_even(model, system, bits=130 * 2**30 * 8 / model.total_params, most_batch=34)
    assert (found.batch, found.rule_batch) == (None, 1024)
    row = found.rows[-1]
    assert row.tokens == 32
    assert 12 < model.num_moe_layers * row.gpu_side_s < 25
    assert model.num_moe_layers * row.cpu_side_s < 5


def test_replicated_experts_take_the_memory_of_both_sockets() -> None:
    system = load_system("h100-pcie5-cpu")
    one = system.with_values({"cpu.numa": "one-socket"})
    used = [
        next(
            device for device in memory_report("mixtral-8x22b", machine, gpu_experts=0).devices if device.role == "host"
        )
        for machine in (one, system)
    ]
    assert_allclose(used[1].use_bytes, 2 * used[0].use_bytes, rtol=1e-15, atol=0)


# --- refusals ---


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"system": "h100-cxl-ndp"}, SpecError, ["h100-cxl-ndp has no cpu", "rtx4090-pcie4-cpu"]),
        ({"system": "a5000-pcie4"}, SpecError, ["no cpu"]),
        ({"system": 3}, SpecError, ["3"]),
        ({"model": "nope"}, ModelConfigError, ["nope"]),
        ({"bits": 0}, ModelConfigError, ["bits is 0", "above 0"]),
        ({"bits": math.nan}, ModelConfigError, ["bits is nan"]),
        ({"most_batch": 0}, PerfModelError, ["most_batch is 0", "1 to 65536"]),
        ({"most_batch": 2.0}, PerfModelError, ["most_batch is 2.0"]),
        ({"most_batch": True}, PerfModelError, ["most_batch is True"]),
        ({"pipelined": 1}, PerfModelError, ["pipelined is 1"]),
        ({"links": "pcie-4.0-x16", "ram_gb_per_s": [1]}, PerfModelError, ["links is 'pcie-4.0-x16'", "a list"]),
        ({"links": LINKS}, PerfModelError, ["ram_gb_per_s is empty"]),
        ({"ram_gb_per_s": [50]}, PerfModelError, ["links is empty"]),
        ({"links": ["h200"], "ram_gb_per_s": [50]}, SpecError, ["h200 is a gpu spec", "a link"]),
        ({"links": LINKS, "ram_gb_per_s": [1e9]}, SpecError, ["dram_bandwidth_gb_per_s", "20000"]),
        ({"links": LINKS, "ram_gb_per_s": ["x"]}, SpecError, ["dram_bandwidth_gb_per_s"]),
        ({"trace": "nope"}, TraceError, ["nope"]),
    ],
)
def test_refused_arguments(options: dict[str, Any], kind: type[PerfModelError], words: list[str]) -> None:
    with pytest.raises(kind) as error:
        break_even(**{"model": mixtral(), "system": DESKTOP, **options})
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_a_trace_of_other_experts_is_refused() -> None:
    with pytest.raises(TraceError, match=r"picks 2 of 8 experts; allowed: 2 of 4, as in model plain"):
        break_even(plain_model(), DESKTOP, trace=recording())


def test_a_dense_model_is_refused(shared: Path) -> None:
    with pytest.raises(ModelConfigError, match=r"breakeven: .*dense model"):
        break_even(str(shared / "configs" / "Qwen__Qwen3-8B"), DESKTOP)


# --- command ---


def test_the_command_says_what_the_function_says() -> None:
    asked = ("--model", "mixtral-8x7b", "--system", "rtx5070-7950x", "--dtype", "q4_k", "--most-batch", 512)
    more = ("--links", "pcie-4.0-x16, pcie-5.0-x16", "--ram", "50,100")
    document = run("breakeven", *asked, *more, "--json").document
    found = break_even(
        "mixtral-8x7b", "rtx5070-7950x", bits=4.5, most_batch=512,
        links=["pcie-4.0-x16", "pcie-5.0-x16"], ram_gb_per_s=[50, 100],
    )  # fmt: skip
    assert found.at is not None
    assert document["batch"] == found.batch
    assert document["at"] == found.at._asdict()
    assert document["rows"] == [row._asdict() for row in found.rows]
    assert [cell["batch"] for cell in document["cells"]] == [cell.batch for cell in found.cells]
    assert set(document) == {field.name for field in dataclasses.fields(found)}
    text = run("breakeven", *asked, *more).out
    for words in (
        f"break-even: a batch of {found.batch}",
        "from a batch of 128 on (32 E / k)",
        "(break-even)",
        "50 GB/s",
        "pcie-5.0-x16",
        "used experts",
        "CPU side [ms]",
        "note: every expert is as likely",
    ):
        assert words in text


def test_the_command_without_anything() -> None:
    answer = run("breakeven", "--most-batch", 64)
    assert answer.code == 0
    assert "never: the CPU is faster at every batch up to 64" in answer.out
    assert "too early here" in answer.out
    recorded = run("breakeven", "--trace", "tiny-mixtral-32l-mini", "--pipelined", "--most-batch", 4)
    assert "routing of tiny-mixtral-32l, each expert computed as its copy arrives" in recorded.out


def test_oversubscribed_threads_are_noted(tmp_path: Path) -> None:
    path = tmp_path / "many.toml"
    path.write_text(
        'kind = "system"\nname = "many"\ndescription = "too many threads"\nbase = "rtx5070-7950x"\n'
        '[overrides]\n"cpu.threads" = 32\n'
        '[override_sources]\n"cpu.threads" = { source = "assumed", citation = "a test" }\n'
    )
    answer = run("breakeven", "--system", path, "--most-batch", 4)
    assert "note: cpu.threads 32 is above the 16 physical cores" in answer.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--system", "h100-cxl-ndp"), ["has no cpu"]),
        (("--bits", "99"), ["bits is 99"]),
        (("--bits", "x"), ["--bits"]),
        (("--bits", "4", "--dtype", "q4_k"), ["not allowed with"]),
        (("--dtype", "q99"), ["q99"]),
        (("--most-batch", "0"), ["most_batch is 0"]),
        (("--links", "pcie-4.0-x16"), ["--links", "--ram"]),
        (("--ram", "5"), ["--ram", "--links"]),
        (("--links", "pcie-4.0-x16", "--ram", "5,x"), ["--ram", "'x'"]),
        (("--links", "pcie-4.0-x16", "--ram", "nan"), ["--ram", "'nan'"]),
        (("--links", "pcie", "--ram", "5"), ["'pcie'"]),
        (("--trace", "nope"), ["nope"]),
        (("--model", "nope"), ["nope"]),
    ],
)
def test_refused_commands(arguments: tuple[str, ...], words: list[str]) -> None:
    check_refusal(run("breakeven", *arguments), *words)
