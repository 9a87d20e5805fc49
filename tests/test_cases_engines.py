"""Cases that users reported, predicted under engines: several cards, dense against sparse, kernels, servers."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose
from strategies import small_trace

from perfmodel.evidence.constants import make_problem
from perfmodel.evidence.fit import fit
from perfmodel.evidence.measured import MeasuredRun, counting, load_measured
from perfmodel.evidence.predict import Predicted, predicted
from perfmodel.evidence.validation import CONSTANTS, problem_of
from perfmodel.hardware import EngineSpec, GpuSpec, LinkSpec, System, load_spec, load_system
from perfmodel.kernels import point as place
from perfmodel.model import MoEModel
from perfmodel.point import Points, hardware_point, hardware_points
from perfmodel.policies import Executor
from perfmodel.run import plan_run
from perfmodel.steps import Experts, Layers, PricedStep, Step, mean_tokens
from perfmodel.storage import Format, Storage

#: Sizes of Llama-3-70B, as its makers state them.
DENSE_70B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def machine(gpu: str, link: str = "pcie-4.0-x16", **values: float | str) -> System:
    card, wire = load_spec(gpu), load_spec(link)
    assert isinstance(card, GpuSpec)
    assert isinstance(wire, LinkSpec)
    system = System(name=gpu, description="a card", gpu=card, link=wire)
    return system.with_values({f"gpu.{key}": value for key, value in values.items()})


def stored(model: MoEModel, expert: float, other: float, head: float) -> MoEModel:
    """A model at so many bits a weight."""
    rest = Storage.uniform(other)
    forms = {"expert": Format("stored", expert), "head": Format("stored", head)}
    return dataclasses.replace(model, storage=dataclasses.replace(rest, **forms))


def decode_step(model: MoEModel, batch: float = 1.0, context: float = 512.0, distinct: float | None = None) -> Step:
    """A step of so many sequences with all experts on the GPU; of a dense model one without experts."""
    if not model.num_moe_layers:
        return Step(batch, batch, context, ())
    number = model.top_k if distinct is None else distinct
    experts = Experts(Executor.GPU, number, mean_tokens(batch, model.top_k, number), model.expert_bits)
    return Step(batch, batch, context, (Layers(model.num_moe_layers, (experts,)),))


def rate(model: MoEModel, system: System, **of: Any) -> float:
    """Tokens per second of one sequence [token/s]."""
    return 1.0 / float(PricedStep(model, decode_step(model, **of)).times(Points.one(hardware_point(system)))[0])


@functools.cache
def dense_70b(folder: Path) -> MoEModel:
    """Llama-3-70B in NVFP4, 4.5 bits with its scales, and a head of 16 bits."""
    file = folder / "config.json"
    file.write_text(json.dumps(DENSE_70B))
    return stored(MoEModel.from_config(file), 4.5, 4.5, 16.0)


# ---- one parameter set for several cards ----


def on_card(gpu: str, tok_per_s: float, **of: Any) -> MeasuredRun:
    values: dict[str, Any] = {"model": "qwen3-30b-a3b", "expert_bits": 4.85, "other_bits": 4.85, "head_bits": 6.56}
    return MeasuredRun(
        id=gpu,
        source="reported",
        citation="reported",
        confidence="medium",
        gpu=gpu,
        engine="llama-cpp-cuda",
        batch=1,
        gpu_experts=1.0,
        decode_tok_per_s=tok_per_s,
        **{**values, **of},
    )


CARDS = {
    "rtx-4090": on_card("rtx-4090", 205.9, expert_bits=4.5, other_bits=4.5, context_tokens=2048),
    "rtx-5090": on_card("rtx-5090", 311.24, context_tokens=640),
    "radeon-rx-7900-xt": on_card("radeon-rx-7900-xt", 151.77, context_tokens=250),
    # Gate and up at 2.63, down at 3.44 bits, and about 6 bits for the others: how such files are made, not stated.
    "radeon-rx-6900-xt": on_card(
        "radeon-rx-6900-xt", 77.6, model="qwen3.5-35b-a3b", expert_bits=2.9, other_bits=6.56, context_tokens=250
    ),
}


@pytest.mark.parametrize("profile", ["llama-cpp-cuda", "llama-cpp-cuda-2025"])
def test_one_parameter_set_for_four_cards(profile: str) -> None:
    """Three cards lie within 20 %; the RX 6900 XT does not, it is predicted 30 to 41 % too fast.

    With the profile of llama.cpp the RTX 4090 is 13 % slow, the RTX 5090, which ran an engine tuned for it, 15 % slow,
    and the RX 7900 XT exact. The RX 6900 XT has no matrix units, and its hybrid model ran kernels that were new then;
    neither is in the parameter set. Active bytes over bandwidth are 3.4 times what was measured there.
    """
    engine = load_spec(profile)
    assert isinstance(engine, EngineSpec)
    off = {}
    for name, run in CARDS.items():
        one = predicted([run], "decode")[0]
        off[name] = one._replace(system=one.system.with_engine(engine)).rate() / one.measured
    close = {name for name, ratio in off.items() if abs(ratio - 1.0) < 0.20}
    assert close == {"rtx-4090", "rtx-5090", "radeon-rx-7900-xt"}
    assert 1.2 < off["radeon-rx-6900-xt"] < 1.6


# ---- dense against sparse ----


def test_a_dense_70b_against_a_sparse_120b_on_one_machine(tmp_path: Path) -> None:
    """Measured: 4.0 to 4.2 tok/s, 60 to 62 % of the bound, and 33 to 56 tok/s (59.5 at best).

    The dense model is predicted at 77 % of its bound, 5.2 tok/s, a quarter above what was measured: its kernels are so
    large that the profile gives them nearly the whole of its share of bandwidth, 80 %, which a GB10 reaches in a plain
    read (85 %) and not in this format. Nothing is tuned to it. What was left of the sparse model at 16 bits spans its
    range: 35 tok/s, and 56 with everything at 4.25 bits.
    """
    dense, sparse = dense_70b(tmp_path), MoEModel.from_config("gpt-oss-120b")
    read = dense.weight_bytes - dense.bytes_by_class()["embedding"]
    assert read == pytest.approx(40.61e9, rel=1e-3)
    peak = np.array([273.0, 273.0 / 2.0, 273.0 * 2.0])
    system = machine("gb10", "unified").with_engine("vllm")
    points = hardware_points(system, {"gpu.memory_bandwidth_gb_per_s": peak})
    models = [dense, *(stored(sparse, 4.25, other, other) for other in (16.0, 8.5, 4.25))]
    rates = np.array([1.0 / PricedStep(model, decode_step(model)).times(points) for model in models])
    bound = peak * 1e9 / read
    assert bound[0] == pytest.approx(6.72, abs=0.01)
    assert 0.60 <= rates[0, 0] / bound[0] <= 0.80
    assert (rates[0] < bound).all()
    assert (rates[1:, 0] > 33.0).all()
    assert (rates[1:3, 0] < 56.0).all()
    assert rates[3, 0] < 59.5
    assert rates[1, 0] < 44.0  # measured at 16 bits: 33.5 and 43.9
    # Fixed times weigh on the sparse model: twice the bandwidth speeds it up by less.
    gain = rates[:, 2] / rates[:, 0]
    assert 2.0 > gain[0] > gain[1:].max()


# ---- kernels ----


def shares(engine: str, gpu: str = "rtx-5090") -> tuple[Any, Any]:
    """Share of the peak bandwidth of the kernel of one matrix, inputs by outputs: of ``experts`` at once, or dense."""
    system = machine(gpu).with_engine(engine)
    at, spec = hardware_point(system), system.engine
    assert spec is not None
    peak = system.gpu.memory_bandwidth_bytes_per_s

    def grouped(inputs: int, outputs: int, experts: int, bits: float = 4.5) -> float:
        size = experts * inputs * outputs * bits / 8
        time = size / at[place.EXPERT_BANDWIDTH] + at[place.MATRIX_FIXED] + spec.kernel_s
        return float(size / peak / time)

    def dense(inputs: int, outputs: int, bits: float = 4.5) -> float:
        size = inputs * outputs * bits / 8
        time = (size + at[place.GPU_N_HALF]) / at[place.GPU_BANDWIDTH] + spec.kernel_s
        return float(size / peak / time)

    return grouped, dense


@pytest.mark.parametrize("engine", ["llama-cpp-cuda", "llama-cpp-cuda-2025", "vllm", "sglang"])
def test_expert_kernels_reach_less_of_the_bandwidth_than_dense_ones(engine: str) -> None:
    """Measured on an RTX 5090 at batch 1: 41 % (gate and up), 21 % (down), 30 % together; dense layers 59 to 65 %.

    The curve is one of bytes, not of the inner size, so it gives both expert kernels the same; a dense matrix of
    5120 x 5120 alone, 14.7 MB, reaches 53 %, and a feed-forward network of that width 73 %.
    """
    grouped, dense = shares(engine)
    # Qwen3-30B-A3B and Qwen3.5-35B-A3B: 8 experts of hidden size 2048, gate or up and then down.
    for inputs, outputs in ((2048, 768), (768, 2048), (2048, 512), (512, 2048)):
        assert 0.25 < grouped(inputs, outputs, 8) < 0.45
    for inputs, outputs in ((5120, 25600), (25600, 5120), (8192, 8192), (8192, 28672), (28672, 8192)):
        assert 0.55 < dense(inputs, outputs) < 0.80
    # More bytes, a larger share.
    assert grouped(2048, 512, 8) < grouped(2048, 768, 8) < grouped(2048, 1408, 8) < grouped(4096, 1536, 8)


def test_a_resident_sparse_step_reaches_little_of_the_bandwidth() -> None:
    # 27 to 41 % over whole steps at batch 1 (RTX 4090, 5090, 3090), with a flat share of 0.8 for large kernels.
    model = stored(MoEModel.from_config("qwen3-30b-a3b"), 4.5, 4.5, 6.56)
    read = model.active_params * 4.5 / 8
    for gpu in ("rtx-3090", "rtx-4090", "rtx-5090"):
        system = machine(gpu).with_engine("llama-cpp-cuda")
        share = read * rate(model, system) / system.gpu.memory_bandwidth_bytes_per_s
        assert 0.20 < share < 0.50


# ---- experts on the CPU ----


@pytest.mark.parametrize("engine", ["llama-cpp-cuda", "ktransformers"])
def test_attention_on_the_gpu_beats_everything_on_the_cpu_under_an_engine(engine: str) -> None:
    # Reported on an RTX 5080 for a model of this shape: 14.6 and 36.5 tokens/s, a factor of 2.5.
    model = stored(MoEModel.from_config("qwen3.5-35b-a3b"), 4.85, 4.85, 6.56)
    system = load_system("rtx4090-pcie4-cpu").model_copy(update={"gpu": load_spec("rtx-5080")}).with_engine(engine)
    trace = small_trace(model, [(16, 4), (16, 4)])
    cpu, split = (plan_run(model, system, trace, text).price() for text in ("all-cpu", "llama-cpp:n_cpu_moe=40"))
    assert 2.0 < cpu.tpot_mean_s / split.tpot_mean_s < 3.0
    assert split.memory_bytes["gpu"]["total"] < 2.9e9


# ---- a server on two GPUs ----


def test_four_batches_of_mixtral_on_two_gpus() -> None:
    """Milliseconds of a step, context 1024: within 25 % of a tool of measured tables, and never below the floor."""
    model = MoEModel.from_config("mixtral-8x7b")
    batches = np.array([1.0, 4.0, 16.0, 64.0])
    distinct = 8.0 * (1.0 - 0.75**batches)
    assert_allclose(distinct, [2.0, 5.47, 7.92, 8.0], atol=0.005)
    pair = machine("h100-sxm", "pcie-5.0-x16", devices=2)

    def steps_ms(engine: str) -> np.ndarray:
        at = Points.one(hardware_point(pair.with_engine(engine)))
        told = zip(batches.tolist(), distinct.tolist(), strict=True)
        return np.array([1e3 * PricedStep(model, decode_step(model, b, 1024.0, d)).times(at)[0] for b, d in told])

    assert_allclose(steps_ms("vllm"), [6.26, 11.83, 17.65, 24.11], rtol=0.25)
    # The floor: weights that are read, and keys and values of every sequence, over twice 3.35 TB/s.
    weights = model.non_expert_bytes - model.bytes_by_class()["embedding"] - model.bytes_by_class()["norm"]
    read = weights + distinct * model.num_moe_layers * model.expert_bytes() + batches * model.kv_read_bytes(1024)
    floor = 1e3 * read / (2 * 3350e9)
    ideal = steps_ms("ideal")
    assert (ideal >= floor).all()
    assert_allclose(ideal, floor, rtol=0.01)
    assert (np.round(ideal, 2) >= [3.83, 9.72, 14.09, 15.18]).all()
    assert (steps_ms("vllm") > ideal).all()


# ---- a sweep of batches ----


@functools.cache
def batch_rows() -> tuple[Predicted, ...]:
    """Qwen3-30B-A3B Q4_0 on an RTX 4090, 1 to 64 tokens a step (ggml-org/llama.cpp PR 15631)."""
    runs = [run for run in counting(load_measured(), "decode") if run.engine == "llama-cpp-cuda-2025"]
    rows = predicted(runs, "decode")
    assert [row.tokens for row in rows] == [1, 2, 4, 8, 16, 32, 64]
    return rows


def test_the_batch_sweep_is_met_with_its_switch_of_kernels() -> None:
    engine = load_spec("llama-cpp-cuda-2025")
    assert isinstance(engine, EngineSpec)
    rates = [row._replace(system=row.system.with_engine(engine)).rate() for row in batch_rows()]
    assert_allclose(rates, [row.measured for row in batch_rows()], rtol=0.10)
    # Two tokens at once are hardly faster than one: without the switch they would be.
    assert rates[1] / rates[0] < 1.1
    plain = engine.with_values({"batched_layer_us": 0.0}, {"batched_layer_us": engine.source_of("kernel_us")})
    without = [row._replace(system=row.system.with_engine(plain)).rate() for row in batch_rows()[:2]]
    assert without[1] / without[0] > 1.3


def test_the_batch_sweep_is_met_by_a_fit_that_has_not_seen_it() -> None:
    rows = batch_rows()
    source = rows[0].run.source
    _, problem = problem_of([run for run in load_measured() if run.source != source])
    found = fit(problem)
    names = [constant.name for constant in found.constants]
    assert set(names) <= set(CONSTANTS)
    held_out = np.exp(make_problem(rows, names).predict(found.logs[None])[0])
    ratio = held_out / [row.measured for row in rows]
    assert (np.abs(np.log(ratio[2:])) < np.log(1.5)).all()
    # The shared profile has no switch, so it takes two tokens at once for faster than they are.
    assert 1.2 < ratio[1] < 1.8
