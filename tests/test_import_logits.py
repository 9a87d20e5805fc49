"""Router logits: the rule of every family against plain Python, the layouts of files, padding, and refusals."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.errors import TraceError
from perfmodel.routing.importers.base import ImportOptions
from perfmodel.routing.importers.probe import Probe
from perfmodel.routing.importers.router_logits import read, recognise
from perfmodel.routing.importers.rules import FAMILIES, routing_rule
from perfmodel.routing.trace import RoutingTrace

EXPERTS = 8

CONFIG: dict[str, Any] = {
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "router_jitter_noise": 0.25,
    "routed_scaling_factor": 1.5,
    "topk_method": "group_limited_greedy",
    "n_group": 4,
    "topk_group": 2,
    "expert_capacity": 2,
}
V3 = (
    *("deepseek_v3", "deepseek_v32", "dots1", "exaone_moe"),
    *("glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "solar_open"),
)
NO_BIAS = np.zeros(EXPERTS, np.float32)
#: Logits without ties, far enough apart that float32 and float64 agree on their order.
ROWS = st.lists(st.lists(st.integers(-60, 60), min_size=EXPERTS, max_size=EXPERTS, unique=True), min_size=1, max_size=5)


# ---- plain Python ----


def softmax(values: list[float]) -> list[float]:
    top = max(values)
    raised = [math.exp(value - top) for value in values]
    return [one / sum(raised) for one in raised]


def best(values: list[float], k: int) -> list[int]:
    return sorted(range(len(values)), key=lambda e: -values[e])[:k]


def expected(family: str, logits: list[float], bias: list[float]) -> dict[int, float]:
    """Weight of every picked expert, one token at a time."""
    k = CONFIG["num_experts_per_tok"]
    if family in ("gpt_oss", "granitemoe", "granitemoeshared", "granitemoehybrid"):
        ids = best(logits, k)
        return dict(zip(ids, softmax([logits[e] for e in ids]), strict=True))
    if family == "llama4_text":
        return {e: 1 / (1 + math.exp(-logits[e])) for e in best(logits, k)}
    if family == "switch_transformers":
        return {e: softmax(logits)[e] for e in best(logits, 1)}
    if family == "phimoe":
        weights, left = {}, dict(enumerate(logits))
        for _ in range(2):
            pick = max(left, key=lambda e: left[e])
            others = [one for e, one in left.items() if e != pick]
            scale = [max(abs(one), left[pick]) for one in others]
            close = [one for one, by in zip(others, scale, strict=True) if by and (left[pick] - one) / by <= 0.5]
            weights[pick] = softmax([left[pick], *close])[0]
            del left[pick]
        return weights
    if family in V3 or family == "minimax_m2":
        scores = [1 / (1 + math.exp(-one)) for one in logits]
        choice = [score + one for score, one in zip(scores, bias, strict=True)]
        groups = best([sum(sorted(choice[2 * g : 2 * g + 2])[-2:]) for g in range(4)], 2)
        limited = family in V3
        ids = best([choice[e] if e // 2 in groups or not limited else -math.inf for e in range(EXPERTS)], k)
        total = sum(scores[e] for e in ids) / (1.5 if limited else 1.0)
        return {e: scores[e] / total for e in ids}
    shares = softmax(logits)
    if family == "deepseek_v2":
        groups = best([max(shares[2 * g : 2 * g + 2]) for g in range(4)], 2)
        ids = best([shares[e] if e // 2 in groups else -1.0 for e in range(EXPERTS)], k)
        return {e: shares[e] * 1.5 for e in ids}
    ids = best(shares, k)
    total = 1.0 if family == "jamba" else sum(shares[e] for e in ids)
    return {e: shares[e] / total for e in ids}


@pytest.mark.parametrize("family", FAMILIES)
@given(rows=ROWS, bias=st.lists(st.integers(-8, 8), min_size=EXPERTS, max_size=EXPERTS))
def test_rules_equal_plain_python(family: str, rows: list[list[int]], bias: list[int]) -> None:
    config = {**CONFIG, **({"num_experts_per_tok": 2} if family == "phimoe" else {})}
    rule = routing_rule(family, config, None, EXPERTS, "file")
    logits = np.array(rows, np.float32) / np.float32(16)
    # Odd multiples of a small number that no difference of scores is near to.
    added = np.array(bias, np.float32) * np.float32(0.0371) + np.arange(EXPERTS, dtype=np.float32) * np.float32(1e-3)
    picks = rule.apply(logits, added)
    assert picks.ids.shape == (len(rows), rule.top_k)
    assert not picks.tied.any()
    for ids, weights, row in zip(picks.ids, picks.weights, logits, strict=True):
        found = dict(zip(ids.tolist(), weights.tolist(), strict=True))
        wanted = expected(family, [float(one) for one in row], [float(one) for one in added])
        assert found.keys() == wanted.keys()
        np.testing.assert_allclose([found[e] for e in wanted], list(wanted.values()), rtol=2e-5, atol=0)


@given(k=st.integers(1, EXPERTS), row=st.lists(st.integers(0, 3), min_size=EXPERTS, max_size=EXPERTS))
def test_ties_go_to_the_lower_expert_and_are_counted(k: int, row: list[int]) -> None:
    picks = routing_rule("mixtral", {}, k, EXPERTS, "file").apply(np.array([row], np.float32), NO_BIAS)
    order = sorted(range(EXPERTS), key=lambda e: (-row[e], e))
    assert picks.ids[0].tolist() == order[:k]
    assert picks.tied[0] == (k < EXPERTS and row[order[k - 1]] == row[order[k]])


def test_without_the_switch_weights_are_not_normalised() -> None:
    logits = np.array([[2, 1, 0, -1, 0.5, 3, 2.5, -2]], np.float32)
    for family in ("qwen2_moe", "qwen3_moe", "olmoe"):
        weights = routing_rule(family, {"num_experts_per_tok": 2}, None, 8, "file").apply(logits, logits).weights
        np.testing.assert_allclose(weights[0], [softmax(logits[0].tolist())[e] for e in (5, 6)], rtol=1e-6, atol=0)
    greedy = {"num_experts_per_tok": 2, "topk_method": "greedy", "routed_scaling_factor": 2.0}
    assert routing_rule("deepseek_v2", greedy, None, 8, "file").apply(logits, logits).ids.tolist() == [[5, 6]]


@pytest.mark.parametrize(
    ("family", "changes", "top_k", "message"),
    [
        ("mixtrl", {}, None, "family 'mixtrl' is not known; did you mean mixtral"),
        ("ernie4_5_moe", {}, None, "family 'ernie4_5_moe' is not known"),
        ("mixtral", {"num_experts_per_tok": None}, None, "num_experts_per_tok"),
        ("mixtral", {}, 2, "top_k is 2, but the config says 3"),
        ("mixtral", {"num_experts_per_tok": 9}, None, "top_k is 9, but the logits are of 8 experts"),
        ("qwen3_moe", {"norm_topk_prob": "yes"}, None, "norm_topk_prob.*true or false"),
        ("phimoe", {}, None, "top_k is 3, the rule of phimoe picks 2"),
        ("phimoe", {"num_experts_per_tok": 2, "router_jitter_noise": -1}, None, "router_jitter_noise"),
        ("deepseek_v2", {"topk_method": "best"}, None, "topk_method.*greedy"),
        ("deepseek_v2", {"n_group": 3}, None, "8 experts in n_group 3"),
        ("deepseek_v3", {"topk_group": 1}, None, "leave no 3 picks"),
        ("deepseek_v3", {"n_group": 8, "topk_group": 8}, None, "groups of one expert"),
        ("deepseek_v3", {"routed_scaling_factor": True}, None, "routed_scaling_factor"),
        ("switch_transformers", {}, 2, "top_k is 2, the rule of switch_transformers picks 1"),
        ("switch_transformers", {"expert_capacity": 0}, None, "expert_capacity"),
    ],
)
def test_rules_refuse(family: str, changes: dict[str, Any], top_k: int | None, message: str) -> None:
    with pytest.raises(TraceError, match=f"^file: .*{message}"):
        routing_rule(family, {**CONFIG, **changes}, top_k, EXPERTS, "file")


@pytest.mark.parametrize("family", ["qwen3_moe", "phimoe", "deepseek_v2", "deepseek_v3", "switch_transformers"])
def test_rules_that_need_a_config_say_so(family: str) -> None:
    with pytest.raises(TraceError, match=f"the rule of {family} depends on it, give the model's config.json"):
        routing_rule(family, {}, {"switch_transformers": 1}.get(family, 2), EXPERTS, "file")


# ---- files ----


def logits_of(layers: int = 2, batch: int = 3, length: int = 4, seed: int = 0) -> np.ndarray[Any, Any]:
    """[layers, batch, length, experts], without ties."""
    rng = np.random.default_rng(seed)
    return rng.permuted(np.arange(layers * batch * length * EXPERTS)).reshape(layers, batch, length, EXPERTS) / 64.0


def load(path: Path, **options: Any) -> RoutingTrace:
    said = {"family": "mixtral", "top_k": 2, "prompt_len": (2,), **options}
    result = read([path], ImportOptions(**{key: value for key, value in said.items() if value is not None})).result
    assert isinstance(result, RoutingTrace)
    return result


def layouts(logits: np.ndarray[Any, Any]) -> dict[str, dict[str, Any]]:
    """The same logits in every layout of arrays."""
    layers = len(logits)
    flat = logits.reshape(layers, -1, EXPERTS)
    return {
        "stacked": {"router_logits": flat},
        "stacked with a batch": {"router_logits": logits},
        "by layer": {f"router_logits.{i}": flat[i] for i in range(layers)},
        "by layer with a batch": {f"router_logits_{i}": logits[i] for i in range(layers)},
        "by call": {
            f"router_logits/{call}/{i}": logits[i, :, a:b].reshape(-1, EXPERTS)
            for i in range(layers)
            for call, (a, b) in enumerate([(0, 2), (2, 3), (3, 4)])
        },
    }


@pytest.mark.parametrize("layout", layouts(logits_of()))
def test_layouts_give_the_same_trace(tmp_path: Path, layout: str) -> None:
    logits = logits_of()
    arrays = layouts(logits)[layout]
    np.savez(tmp_path / "a.npz", **arrays)
    length = (4,) if layout in ("stacked", "by layer") else None
    trace = load(tmp_path / "a.npz", sequence_len=length, prompt_len=None if layout == "by call" else (2,))
    best_two = np.argsort(-logits, axis=-1)[..., :2].transpose(1, 2, 0, 3).reshape(12, 2, 2)
    np.testing.assert_array_equal(trace.topk_ids, best_two)
    assert trace.sequence_offsets.tolist() == [0, 4, 8, 12]
    assert trace.prompt_len.tolist() == [2, 2, 2]
    assert trace.layer_index.tolist() == [0, 1]
    assert trace.metadata["weight_rule"] == "softmax over all, top-k, renormalised"
    assert trace.metadata["family"] == "mixtral"
    assert recognise(Probe.of(tmp_path / "a.npz")) == f"holds {next(iter(arrays))}"


def test_json_gives_the_same_trace(tmp_path: Path) -> None:
    flat = logits_of().reshape(2, 12, EXPERTS)
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"router_logits": flat.tolist(), "prompt_len": [1, 2, 3]}))
    assert recognise(Probe.of(file)) == "holds router_logits.0"
    trace = load(file, sequence_len=(4,), prompt_len=None)
    np.testing.assert_array_equal(trace.topk_ids[:, 1], np.argsort(-flat[1], axis=-1)[:, :2])
    assert trace.prompt_len.tolist() == [1, 2, 3]
    file.write_text(json.dumps({"router_logits": logits_of().tolist()}))
    with pytest.raises(TraceError, match=r"a\.json: router_logits has four axes"):
        load(file)


def test_logits_in_memory() -> None:
    logits = logits_of()
    flat = logits.reshape(2, 12, EXPERTS)
    said: dict[str, Any] = {"family": "mixtral", "top_k": 2, "prompt_len": 2}
    trace = RoutingTrace.from_router_logits(tuple(flat), sequence_len=4, **said)
    np.testing.assert_array_equal(trace.topk_ids[:, 1], np.argsort(-flat[1], axis=-1)[:, :2])
    assert trace.metadata["how"] == "made from arrays in memory (router-logits)"
    table = {"router_logits": list(logits), "attention_mask": np.array([[1, 1, 1, 0]] * 3)}
    assert RoutingTrace.from_router_logits(table, **said).sequence_lengths.tolist() == [3, 3, 3]
    with pytest.raises(TraceError, match=r"router logits: router_logits\.0 has shape \(\), expected"):
        RoutingTrace.from_router_logits((3.5,), **said)


def test_logits_in_files_by_method(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", router_logits=logits_of())
    said: dict[str, Any] = {"family": "mixtral", "top_k": 2, "prompt_len": 2}
    trace = RoutingTrace.from_router_logits(tmp_path / "a.npz", **said)
    assert trace.num_sequences == 3
    assert RoutingTrace.from_router_logits([tmp_path / "a.npz", tmp_path / "a.npz"], **said).num_sequences == 6


def test_safetensors(tmp_path: Path) -> None:
    flat = logits_of().reshape(2, 12, EXPERTS).astype("<f4")
    header = {"router_logits": {"dtype": "F32", "shape": list(flat.shape), "data_offsets": [0, flat.nbytes]}}
    text = json.dumps(header).encode()
    (tmp_path / "a.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + flat.tobytes())
    assert recognise(Probe.of(tmp_path / "a.safetensors")) == "holds router_logits"
    assert load(tmp_path / "a.safetensors", sequence_len=(12,)).num_sequences == 1


@given(
    mask=st.lists(st.lists(st.booleans(), min_size=4, max_size=4).filter(any), min_size=1, max_size=4),
)
def test_padding_is_left_out(tmp_path_factory: pytest.TempPathFactory, mask: list[list[bool]]) -> None:
    folder = tmp_path_factory.mktemp("padding")
    logits = logits_of(batch=len(mask))
    np.savez(folder / "a.npz", router_logits=logits.reshape(2, -1, EXPERTS), attention_mask=np.array(mask, np.int64))
    imported = read([folder / "a.npz"], ImportOptions(family="mixtral", top_k=2, prompt_len=(0,)))
    trace = imported.result
    assert isinstance(trace, RoutingTrace)
    assert trace.sequence_lengths.tolist() == [sum(row) for row in mask]
    whole = np.argsort(-logits, axis=-1)[..., :2].transpose(1, 2, 0, 3)
    kept = [whole[s, t] for s, row in enumerate(mask) for t, real in enumerate(row) if real]
    np.testing.assert_array_equal(trace.topk_ids, np.array(kept))
    padding = sum(not real for row in mask for real in row)
    assert [(one.defect, one.mended) for one in imported.findings] == ([("padding", True)] if padding else [])


def test_padding_of_a_prompt_and_after_the_end(tmp_path: Path) -> None:
    arrays = layouts(logits_of())["by call"]
    mask = np.array([[0, 1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1]])
    np.savez(tmp_path / "whole.npz", attention_mask=mask, **arrays)
    trace = load(tmp_path / "whole.npz", prompt_len=None)
    assert trace.prompt_len.tolist() == [1, 2, 2]
    assert trace.sequence_lengths.tolist() == [3, 3, 4]
    np.savez(tmp_path / "prompt.npz", attention_mask=mask[:, :2], **arrays)
    assert load(tmp_path / "prompt.npz", prompt_len=None).sequence_lengths.tolist() == [3, 4, 4]


def test_files_are_batches(tmp_path: Path) -> None:
    for name, batch in (("a", 3), ("b", 1)):
        np.savez(tmp_path / f"{name}.npz", router_logits=logits_of(batch=batch))
    files = [tmp_path / "a.npz", tmp_path / "b.npz"]
    trace = read(files, ImportOptions(family="mixtral", top_k=2, prompt_len=(1, 2, 3, 4))).result
    assert isinstance(trace, RoutingTrace)
    assert trace.prompt_len.tolist() == [1, 2, 3, 4]
    assert trace.num_tokens == 16
    assert "a.npz, b.npz" in trace.metadata["how"]
    np.savez(tmp_path / "b.npz", router_logits=logits_of(layers=3))
    with pytest.raises(TraceError, match=r"b\.npz: has 3 layers of 8 experts, .*a\.npz has 2 of 8"):
        read(files, ImportOptions(family="mixtral", top_k=2, prompt_len=(1,)))


def test_an_encoder_is_all_prefill_and_experts_have_a_capacity(tmp_path: Path) -> None:
    logits = np.zeros((1, 2, 4, EXPERTS))
    logits[0, 0, :, 5] = 1  # four tokens of one sequence for one expert
    logits[0, 1, :2, 5] = logits[0, 1, 2:, 6] = 1
    logits *= 2
    np.savez(tmp_path / "a.npz", encoder_router_logits=logits)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "switch_transformers", "expert_capacity": 2}))
    with pytest.raises(TraceError, match=r"a\.npz: has 1 MoE layers; which of the model's they are says --layers"):
        load(tmp_path / "a.npz", family=None, top_k=None, prompt_len=None, config=tmp_path)
    trace = load(tmp_path / "a.npz", family=None, top_k=None, prompt_len=None, config=tmp_path, layers=(1,))
    assert trace.topk_ids.ravel().tolist() == [5, 5, 255, 255, 5, 5, 6, 6]
    assert trace.prompt_len.tolist() == [4, 4]
    assert trace.metadata["dropped_picks"] == 2
    assert trace.layer_index.tolist() == [1]


def test_the_config_numbers_the_layers(tmp_path: Path, shared: Path) -> None:
    np.savez(tmp_path / "a.npz", router_logits=np.zeros((26, 2, 64)) + np.arange(64))
    config = shared / "configs" / "deepseek-ai__DeepSeek-V2-Lite"
    options = {"family": None, "top_k": None, "sequence_len": (2,), "config": config}
    trace = load(tmp_path / "a.npz", **options)
    assert trace.layer_index.tolist() == list(range(1, 27))
    assert trace.top_k == 6
    np.savez(tmp_path / "a.npz", router_logits=np.zeros((27, 2, 64)))
    with pytest.raises(TraceError, match="has 27 MoE layers, by its config the model has 26"):
        load(tmp_path / "a.npz", **options)


@pytest.mark.parametrize(
    ("arrays", "options", "message"),
    [
        ({"logits": np.zeros((1, 2, 3))}, {}, "holds logits; expected router_logits"),
        ({"router_logits": np.zeros((2, 3))}, {}, r"router_logits has shape \(2, 3\)"),
        ({"router_logits": np.zeros((1, 0, 3))}, {}, r"router_logits has shape \(1, 0, 3\)"),
        ({"router_logits": np.zeros((1, 2, 8), np.int64)}, {}, "dtype int64, expected floating"),
        ({"router_logits": np.full((1, 2, 8), np.nan)}, {}, r"router_logits is nan at \(0, 0, 0\)"),
        ({"router_logits": np.full((1, 2, 8), 1e300)}, {}, "expected finite float32"),
        ({"router_logits": np.zeros((1, 4, 8))}, {}, r"--sequence-len says how many rows each has \(4 if"),
        ({"router_logits": np.zeros((1, 4, 8))}, {"sequence_len": (3,)}, "--sequence-len adds up to 3 rows"),
        ({"router_logits": np.zeros((1, 1, 4, 8))}, {"sequence_len": (2,)}, "has 4 rows a sequence"),
        ({"router_logits": np.zeros((1, 1, 4, 8))}, {"prompt_len": None}, "does not say which rows are prefill"),
        ({"router_logits": np.zeros((1, 1, 4, 8))}, {"prompt_len": (5,)}, "--prompt-len is 5 for sequence 0"),
        ({"router_logits": np.zeros((1, 1, 4, 8))}, {"num_experts": 9}, "has logits of 8 experts"),
        ({"router_logits": np.zeros((1, 1, 4, 8))}, {"family": None}, "--config or --family says it"),
        ({"router_logits": np.zeros((1, 1, 4, 8))}, {"top_k": None}, "nothing says how many experts"),
        ({"router_logits": np.zeros((1, 1, 4, 8))}, {"top_k": 9}, "top_k is 9, but the logits are of 8"),
        ({"router_logits": np.zeros((2, 1, 4, 8))}, {"layers": (1, 1)}, "--layers names 2 layers"),
        ({"router_logits.0": np.zeros((4, 8)), "router_logits.2": np.zeros((4, 8))}, {}, "every layer of every call"),
        ({"router_logits.0": np.zeros((4, 8)), "router_logits.00": np.zeros((4, 8))}, {}, "every layer of every call"),
        ({"router_logits.0": np.zeros((4, 8)), "router_logits.0.1": np.zeros((4, 8))}, {}, "both by layer and by call"),
        ({"router_logits": np.zeros((1, 4, 8)), "router_logits.0": np.zeros((4, 8))}, {}, "both as one array and"),
        ({"router_logits.0": np.zeros((4, 8)), "router_logits.1": np.zeros((3, 8))}, {}, r"router_logits\.1 has shape"),
        ({"router_logits.0.0": np.zeros((4, 8)), "router_logits.1.0": np.zeros((3, 8))}, {}, "calls have"),
        ({f"{side}_router_logits": np.zeros((1, 4, 8)) for side in ("encoder", "decoder")}, {}, "both encoder and"),
        ({"router_logits": np.zeros((1, 4, 8)), "attention_mask": np.ones((3, 1))}, {}, "attention_mask has shape"),
        ({"router_logits": np.zeros((1, 4, 8)), "attention_mask": np.ones((3, 1), int)}, {}, "is of 3 sequences"),
        ({"router_logits": np.zeros((1, 4, 8)), "attention_mask": np.ones((2, 3), int)}, {}, "4 rows of 2 sequences"),
        ({"router_logits": np.zeros((1, 4, 8)), "attention_mask": np.full((2, 2), 2)}, {}, "zeros and ones"),
        ({"router_logits": np.zeros((1, 4, 8)), "attention_mask": np.eye(2, 2, 1, int)}, {}, "sequence 1 is all"),
        ({"router_logits": np.zeros((1, 1, 4, 8)), "prompt_len": np.array([9])}, {"prompt_len": None}, "prompt_len of"),
        ({"router_logits": np.zeros((1, 1, 4, 8)), "prompt_len": np.array([1])}, {}, "--prompt-len says otherwise"),
        ({"router_logits": np.zeros((1, 1, 4, 8)), "prompt_len": np.zeros(2)}, {}, "prompt_len has dtype float64"),
    ],
)  # fmt: skip
def test_files_are_refused(tmp_path: Path, arrays: dict[str, Any], options: dict[str, Any], message: str) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(TraceError, match=rf"a\.npz: .*{message}") as caught:
        load(tmp_path / "a.npz", **options)
    assert "\n" not in str(caught.value)


def test_the_bias_of_every_layer_is_needed(tmp_path: Path) -> None:
    config = {**CONFIG, "model_type": "dots1", "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = {"family": None, "top_k": None, "config": tmp_path / "config.json"}
    logits = logits_of()
    bias = np.zeros((2, EXPERTS))
    bias[1, 3] = bias[1, 2] = 5
    np.savez(tmp_path / "a.npz", router_logits=logits, e_score_correction_bias=bias)
    trace = load(tmp_path / "a.npz", **options)
    assert {2, 3} <= set(trace.topk_ids[0, 1].tolist())
    np.savez(tmp_path / "b.npz", router_logits=logits, **{f"e_score_correction_bias.{i}": bias[i] for i in (0, 1)})
    assert np.array_equal(load(tmp_path / "b.npz", **options).topk_ids, trace.topk_ids)
    np.savez(tmp_path / "c.npz", router_logits=logits)
    with pytest.raises(TraceError, match="not in its logits alone; allowed: also an array e_score_correction_bias"):
        load(tmp_path / "c.npz", **options)
    np.savez(tmp_path / "d.npz", router_logits=logits, e_score_correction_bias=bias[:1])
    with pytest.raises(TraceError, match=r"e_score_correction_bias has shape \(1, 8\), expected \(2, 8\)"):
        load(tmp_path / "d.npz", **options)
    np.savez(tmp_path / "e.npz", router_logits=logits, **{"e_score_correction_bias.0": bias[0]})
    with pytest.raises(TraceError, match=r"e_score_correction_bias\.LAYER is missing"):
        load(tmp_path / "e.npz", **options)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ([], r"config\.json is \[\], expected an object"),
        ({}, r"config\.json: model_type is None, expected a family"),
        ({"model_type": "olmoe"}, "--family is 'mixtral', but the config is of 'olmoe'"),
        ({"model_type": "mixtral", "num_experts_per_tok": 3}, "top_k is 2, but the config says 3"),
        (
            {"model_type": "mixtral", "num_experts_per_tok": 2, "num_hidden_layers": 9},
            "has 2 MoE layers, by its config the model has 9",
        ),
    ],
)
def test_configs_are_refused(tmp_path: Path, config: Any, message: str) -> None:
    np.savez(tmp_path / "a.npz", router_logits=logits_of())
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(TraceError, match=message):
        load(tmp_path / "a.npz", config=tmp_path)


def test_the_text_part_of_a_model_that_also_sees(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", router_logits=logits_of())
    inner = {"model_type": "qwen3_vl_moe_text", "num_experts_per_tok": 2, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_vl_moe", "text_config": inner}))
    trace = load(tmp_path / "a.npz", family=None, top_k=None, config=tmp_path, model="a name")
    assert trace.metadata["family"] == "qwen3_vl_moe_text"
    assert trace.metadata["model"] == "a name"


def test_other_files_are_not_recognised(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", topk_ids=np.zeros((1, 1, 1), int), my_router_logits=np.zeros(3))
    (tmp_path / "b.json").write_text("[[1.0, 2.0]]")
    (tmp_path / "c.txt").write_text("router_logits\n")
    for name in ("a.npz", "b.json", "c.txt"):
        assert recognise(Probe.of(tmp_path / name)) is None


def test_probabilities_are_no_logits(tmp_path: Path) -> None:
    logits = np.random.default_rng(0).normal(size=(2, 6, EXPERTS)).astype(np.float32)
    shares = np.exp(logits) / np.exp(logits).sum(axis=2, keepdims=True)
    for dtype in (np.float32, np.float16):
        np.savez(tmp_path / "a.npz", router_logits=shares.astype(dtype))
        with pytest.raises(
            TraceError, match=r"MoE layer 0 holds probabilities .* expected logits; .* logarithms of these"
        ):
            load(tmp_path / "a.npz", sequence_len=(6,))
    np.savez(tmp_path / "a.npz", router_logits=logits)
    np.savez(tmp_path / "b.npz", router_logits=np.log(shares))
    first, second = (load(tmp_path / name, sequence_len=(6,)) for name in ("a.npz", "b.npz"))
    np.testing.assert_array_equal(first.topk_ids, second.topk_ids)
    assert first.topk_weights is not None
    assert second.topk_weights is not None
    np.testing.assert_allclose(first.topk_weights, second.topk_weights, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", ["layer_{}", "layer{}", "arr_{}"])
def test_arrays_that_are_only_numbered(tmp_path: Path, name: str) -> None:
    logits = np.random.default_rng(0).normal(size=(11, 6, EXPERTS)).astype(np.float32)
    np.savez(tmp_path / "a.npz", router_logits=logits)
    np.savez(tmp_path / "b.npz", **{name.format(i): one for i, one in enumerate(logits)}, prompt_len=[4])
    assert recognise(Probe.of(tmp_path / "b.npz")) == "holds router_logits.0"
    first, second = (load(tmp_path / file, sequence_len=(6,), prompt_len=(4,)) for file in ("a.npz", "b.npz"))
    np.testing.assert_array_equal(first.topk_ids, second.topk_ids)


@pytest.mark.parametrize(
    "arrays",
    [
        {"layer_0": np.zeros((6, 8)), "layer_2": np.zeros((6, 8))},  # a gap
        {"layer_0": np.zeros((6, 8)), "layer_1": np.zeros((6, 7))},
        {"layer_0": np.zeros((6, 8)), "weights": np.zeros((6, 8))},
        {"layer_0": np.zeros((6, 8), int)},
        {"layer_0": np.zeros((6, 5000))},  # hidden states
        {"layer_0": np.zeros(8)},
    ],
)
def test_numbered_arrays_that_may_be_anything(tmp_path: Path, arrays: dict[str, Any]) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    assert recognise(Probe.of(tmp_path / "a.npz")) is None
