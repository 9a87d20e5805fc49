"""Rankings: every policy under the same memory, in the order of a metric, with bounds that hold."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import check_refusal, run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import perfmodel
from perfmodel import POLICIES, MoEModel, PerfModelError, RoutingTrace, evaluate, load_system, plan_run
from perfmodel.answers.cache_bound import belady_hit_rate, cache_size
from perfmodel.answers.ranking import MEMORY_KEY, Ranking, Refused, at_capacity, grouped, sort_metric
from perfmodel.cli.rank import ranking as ranking_text
from perfmodel.evaluation import METRICS
from perfmodel.policies import PlanInputs, parse_policy
from perfmodel.run import make_replay

MODEL, TRACE = "mixtral-8x7b", "tiny-mixtral-32l-mini"
SHORT = {"prompt": 24, "output": 24}
FEW = ("--prompt", 8, "--output", 8)
NEAR, DESKTOP, SERVER = "h100-cxl-ndp", "rtx4090-pcie4-cpu", "h100-pcie5-cpu"
CACHES = (
    "expert-cache",
    "expert-cache:rule=lfu,scope=global",
    "hobbit",
    "hobbit:warm=prompt",
    "hybrimoe",
    "hybrimoe:warm=empty",
    "llama-cpp:cache=lru",
    "llama-cpp:cache=static",
)


@pytest.fixture(scope="module")
def near() -> Ranking:
    return perfmodel.rank(MODEL, NEAR, TRACE, **SHORT)


@pytest.fixture(scope="module")
def server() -> Ranking:
    return perfmodel.rank(MODEL, SERVER, TRACE, **SHORT)


def inputs_of(system: str, **more: Any) -> PlanInputs:
    model = MoEModel.from_config(MODEL)
    replay = make_replay(model, RoutingTrace.load(TRACE), SHORT["prompt"], SHORT["output"])
    return PlanInputs(model, load_system(system).with_values(more), replay, None)


# What is ranked


@pytest.mark.parametrize("which", ["near", "server"])
def test_every_policy_is_ranked_or_refused_with_a_reason(which: str, request: pytest.FixtureRequest) -> None:
    found: Ranking = request.getfixturevalue(which)
    assert sorted([*(one.label for one in found.rows), *(one.label for one in found.refused)]) == sorted(POLICIES)
    assert all(one.reason and "\n" not in one.reason for one in found.refused)


def test_near_data_and_cpu_policies_need_those_parts(near: Ranking, server: Ranking) -> None:
    refused = {one.label: one.reason for one in server.refused}
    for name, kind in POLICIES.items():
        if kind.needs_ndp:
            assert "near-data" in refused[name]
        if kind.needs_cpu:
            assert name in {one.label for one in near.refused}


def test_rows_are_what_evaluate_says_of_the_filled_policy(server: Ranking) -> None:
    for one in server.rows:
        again = evaluate(MODEL, SERVER, TRACE, one.evaluation.policy, **SHORT)  # type: ignore[arg-type]
        assert again == one.evaluation
        assert one.value == again.tpot_mean_s
        assert one.link_bytes == again.bytes_per_token["link_weights"] + again.bytes_per_token["link_activations"]
        assert one.link_busy == again.busy_s["link"] / again.tpot_mean_s <= 1.0 + 1e-12
        assert one.gpu_memory_bytes == again.memory_bytes["gpu"]["total"]
        assert 0 < one.floor_share <= 1.0


@pytest.mark.parametrize("by", ["decode_tok_per_s", "ttft_s", "tpot_p99.5_s", "quant_loss", "gpu_memory_bytes"])
def test_rows_are_in_the_order_of_the_metric(by: str) -> None:
    found = perfmodel.rank(MODEL, SERVER, TRACE, by=by, **SHORT)  # type: ignore[arg-type]
    known = [one.value for one in found.rows if one.value is not None]
    assert known == sorted(known, reverse=by == "decode_tok_per_s")
    assert all(one.value is None for one in found.rows[len(known) :])
    if by in METRICS and by not in ("gpu_memory_bytes",):
        assert [getattr(one.evaluation, by) for one in found.rows] == [one.value for one in found.rows]


def test_the_hit_rate_does_not_decide(server: Ranking) -> None:
    """What is refused as a key, with a case that shows why: a higher hit rate and a slower token."""
    with pytest.raises(PerfModelError, match=r"hit_rate, which does not predict speed"):
        perfmodel.rank(MODEL, SERVER, TRACE, by="hit_rate", **SHORT)  # type: ignore[arg-type]
    rates = [one.evaluation.hit_rate.own for one in server.rows]
    assert rates != sorted(rates, reverse=True)


# Equal memory


@pytest.mark.parametrize("budget", [16.0, 40.0])
def test_nobody_uses_more_than_the_budget(budget: float) -> None:
    found = perfmodel.rank(MODEL, SERVER, TRACE, memory_budget_gb=budget, **SHORT)  # type: ignore[arg-type]
    assert found.memory_gb == budget
    assert all(one.gpu_memory_bytes <= budget * 1e9 for one in found.rows)
    same = perfmodel.rank(MODEL, SERVER, TRACE, values={MEMORY_KEY: budget}, **SHORT)  # type: ignore[arg-type]
    assert same.to_dict() == found.to_dict()


def test_memory_is_filled_unless_an_option_says_otherwise() -> None:
    inputs = inputs_of(SERVER)
    for text, high in (("hobbit", True), ("hobbit:fetch=pipelined", True), ("hobbit:cache_high=0", False)):
        filled = at_capacity(parse_policy(text), text, inputs)
        assert (filled.cache_high > 0) == high, text
    assert at_capacity(parse_policy("hobbit"), "hobbit", inputs) == parse_policy("hobbit").at_capacity(
        inputs.model, inputs.most_gpu_experts
    )
    rule = parse_policy("hobbit")
    assert at_capacity(rule, rule.spec, inputs) == rule  # an object spells out everything


def test_texts_beside_all() -> None:
    found = perfmodel.rank(MODEL, SERVER, TRACE, ["all", "expert-cache:rule=belady"], **SHORT)  # type: ignore[arg-type]
    assert len(found.rows) + len(found.refused) == len(POLICIES) + 1
    (own,) = [one for one in found.rows if one.label == "expert-cache:rule=belady"]
    assert own.belady_hit_rate == own.evaluation.hit_rate.own


# Belady's bound


@pytest.mark.parametrize("text", CACHES)
@pytest.mark.parametrize("budget", [20.0, 45.0])
def test_caches_on_demand_stay_below_belady(text: str, budget: float) -> None:
    found = perfmodel.rank(MODEL, SERVER, TRACE, text, memory_budget_gb=budget, **SHORT)  # type: ignore[arg-type]
    (one,) = found.rows
    assert one.belady_hit_rate is not None
    assert one.evaluation.hit_rate.own <= one.belady_hit_rate + 1e-12
    # A bound of 1 would always hold; with this little memory the best cache misses too.
    assert one.belady_hit_rate < 1.0


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(0, 8),
    st.sampled_from(["layer", "global"]),
    st.sampled_from(["prompt", "empty"]),
    st.sampled_from(["no", "yes"]),
)
def test_the_bound_is_the_hit_rate_of_a_belady_cache(slots: int, scope: str, warm: str, persistent: str) -> None:
    options = f"slots={slots},scope={scope},warm={warm},persistent={persistent}"
    inputs = inputs_of(SERVER, **{MEMORY_KEY: 160.0, "cpu.memory_capacity_gb": 1000.0})
    size = cache_size(parse_policy(f"expert-cache:{options}"), inputs)
    assert size is not None
    run = plan_run(inputs.model, inputs.system, inputs.replay, f"expert-cache:rule=belady,{options}")
    np.testing.assert_allclose(belady_hit_rate(size, inputs), run.hit_rates.own, rtol=1e-12, atol=0)


@pytest.mark.parametrize("text", ["monde", "context-aware", "llama-cpp", "all-cpu"])
def test_what_is_no_cache_has_no_bound(text: str) -> None:
    assert cache_size(parse_policy(text), inputs_of(SERVER)) is None


def test_layers_that_stay_on_the_gpu_count_as_hits() -> None:
    inputs = inputs_of(SERVER)
    size = cache_size(parse_policy("llama-cpp:cache=lru,slots=0,n_cpu_moe=8"), inputs)
    assert size is not None
    np.testing.assert_allclose(belady_hit_rate(size, inputs), 24 / 32, rtol=1e-12, atol=0)


# Refusals


def test_no_policy_applies() -> None:
    with pytest.raises(PerfModelError) as caught:
        perfmodel.rank(MODEL, "rtx4090-pcie4", TRACE, ["monde", "static", "all-resident"], **SHORT)  # type: ignore[arg-type]
    text = str(caught.value)
    assert "no policy applies" in text
    # Those of memory first, as more memory may help; nobody's default options are spelled.
    assert re.search(r"all-resident: .*does not fit.*monde, static: runs experts on a near-data device", text)
    assert "\n" not in text


def test_reasons_are_grouped() -> None:
    refused = [Refused("a:x=1", "policy a runs"), Refused("b", "other"), Refused("c", "policy c runs")]
    assert grouped(refused) == [(("a:x=1", "c"), "runs"), (("b",), "other")]
    same = [Refused("a", "a copies too much"), Refused("ab", "ab copies too much"), Refused("b", "a copies")]
    assert grouped(same) == [(("a", "ab"), "copies too much"), (("b",), "a copies")]


def test_reasons_of_all_take_a_line_each() -> None:
    texts = "monde;hobbit;context-aware;expert-cache;all-resident"
    answer = run("rank", "--model", MODEL, "--system", DESKTOP, "--memory-budget", 1, "--policies", texts, *FEW)
    lines = answer.err.splitlines()
    assert (answer.code, answer.out) == (2, "")
    assert lines[0] == f"perfmodel: error: rank: no policy applies to {MODEL} on {DESKTOP}"
    assert len(lines) > 2
    assert "does not fit" in lines[1]
    assert "near-data" in lines[-1]
    assert max(map(len, lines)) <= 310
    assert "slots=" not in answer.err


def test_reasons_do_not_spell_default_options() -> None:
    machine = load_system(SERVER).with_values({"host.pinned_memory_gb": 1.0})
    found = perfmodel.rank(MODEL, machine, TRACE, ["moe-lightning", "all-cpu"], **SHORT)  # type: ignore[arg-type]
    (refused,) = found.refused
    assert refused.memory
    assert "pinned" in refused.reason
    assert "=" not in refused.reason.partition("; ")[0]


def test_a_metric_that_nobody_has(shared: Path) -> None:
    arguments = (
        shared / "configs" / "openai__gpt-oss-20b" / "config.json",
        SERVER,
        shared / "traces" / "gpt-oss-20b" / "gptoss20b_decode.npz",
        ["expert-cache"],
    )
    with pytest.raises(PerfModelError, match=r"ttft_s, which is unknown for every policy"):
        perfmodel.rank(*arguments, by="ttft_s")
    assert perfmodel.rank(*arguments).rows[0].evaluation.ttft_s is None


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--by", "hit_rate"), ["hit_rate", "does not predict speed"]),
        (("--by", "tpot"), ["metric", "tpot_ms"]),
        (("--by", "tokps"), ["tok_per_s"]),
        (("--bits", "0.5"), ["bits", "1 to 32"]),
        (("--bits", "nan"), ["bits"]),
        (("--bits", "4", "--policies", "hobbit;expert-cache:bits=8"), ["bits", "sets its own width"]),
        (("--memory-budget", "1e9"), ["memory budget: found", "allowed: 0.1 to"]),
        (("--policies", "all;all"), ["all is given twice"]),
        (("--memory-budget", "0"), ["memory budget", "above 0"]),
        (("--memory-budget", "nan"), ["memory budget"]),
        (("--memory-budget", "x"), ["--memory-budget"]),
        (("--memory-budget", "20", "--set", f"{MEMORY_KEY}=30"), [MEMORY_KEY, "one of them"]),
        (
            ("--memory-budget", "1", "--policies", "hobbit;hobbit:fetch=pipelined"),
            ["no policy applies", "does not fit"],
        ),
        (("--set", "link.bandwidth"), ["--set", "KEY=VALUE"]),
        (("--set", "link.bandwidth=3"), ["bandwidth_gb_per_s"]),
        (("--set", "link.bandwidth_gb_per_s=x"), ["bandwidth_gb_per_s"]),
        (("--set", "link.latency_us=1", "--set", "link.latency_us=2"), ["twice"]),
        (("--policies", "hobbit;"), ["--policies", "semicolons"]),
        (("--policies", ""), ["--policies"]),
        (("--policies", "hobit"), ["hobit", "hobbit"]),
        (("--policies", "hobbit;hobbit"), ["same policy"]),
        (("--policies", "all;monde"), ["same policy"]),
        (("--policies", "monde"), ["no policy applies", "near-data"]),
        (("--policy", "monde"), ["--policy"]),
        (("--plot", ""), ["--plot"]),
        (("--plot", "/dev/null/x"), ["--plot"]),
        (("--losses", "gone.npz"), ["gone.npz"]),
        (("--output", "0"), ["output"]),
    ],
)
def test_bad_input_is_refused_in_one_line(more: tuple[str, ...], words: list[str]) -> None:
    check_refusal(run("rank", "--model", MODEL, "--system", DESKTOP, *more), *words)


@pytest.mark.parametrize("wrong", [5, "x", [("a", 1)], {"link.bandwidth": 3}, {1: 2}, {MEMORY_KEY: "much"}])
def test_wrong_values(wrong: Any) -> None:
    with pytest.raises(PerfModelError):
        perfmodel.rank(MODEL, SERVER, TRACE, "hobbit", values=wrong, **SHORT)  # type: ignore[arg-type]


def test_messages_about_metrics_are_short_and_allow_no_hit_rate() -> None:
    with pytest.raises(PerfModelError) as caught:
        sort_metric("nonsense")
    allowed = str(caught.value).partition("such as")[2]
    assert "hit_rate" not in allowed
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(
    ("by", "name"),
    [
        ("tpot_ms", "tpot_mean_s"), ("tok_per_s", "decode_tok_per_s"), ("ttft_ms", "ttft_s"), ("tpot_s", "tpot_mean_s"),
        ("gpu_memory_gb", "gpu_memory_bytes"), ("tpot_p95_ms", "tpot_p95_s"), ("tpot_p99.5_s", "tpot_p99.5_s"),
    ],
)  # fmt: skip
def test_metrics_in_other_units(by: str, name: str) -> None:
    assert sort_metric(by).name == name


# Widths


def test_mean_bits_are_those_of_the_picks_that_ran(server: Ranking) -> None:
    """Against a plain loop over the picks of the same plan."""
    bits = {one.label: one for one in server.rows}
    for label in ("hobbit", "pmpd", "fiddler"):
        one = bits[label]
        plan = plan_run(MODEL, SERVER, TRACE, one.evaluation.policy, **SHORT).plan  # type: ignore[arg-type]
        classes = [plan.classes[number] for number in plan.picks.ravel().tolist()]
        widths = [work.bits for work in classes if work.executor.name not in ("SKIP", "COPY")]
        assert one.bits == pytest.approx(np.mean(widths), rel=1e-12, abs=0)
    assert bits["fiddler"].bits == 16
    assert bits["moe-offloading"].bits == 4
    assert set(server.reduced) == {"hobbit", "pmpd", "moe-offloading"}


def test_one_width_goes_to_policies_that_leave_it_open() -> None:
    texts = ["fiddler", "moe-offloading:bits=8", "moe-offloading", "hobbit"]
    found = perfmodel.rank(MODEL, SERVER, TRACE, texts, bits=6, **SHORT)  # type: ignore[arg-type]
    assert found.given_bits == ("fiddler", "moe-offloading")
    bits = {one.label: one.bits for one in found.rows}
    assert (bits["fiddler"], bits["moe-offloading"], bits["moe-offloading:bits=8"]) == (6, 6, 8)
    assert found.to_dict()["bits"] == {"given": 6, "to": ["fiddler", "moe-offloading"]}
    spelled = perfmodel.rank(MODEL, SERVER, TRACE, "fiddler:bits=6", **SHORT)  # type: ignore[arg-type]
    assert spelled.rows[0].evaluation in [one.evaluation for one in found.rows]
    words = ranking_text(found)
    assert "--bits 6 is the width of" in words
    assert re.search(r"set by their text or rule: .*moe-offloading:bits=8", words)


# The command


def test_the_table(server: Ranking) -> None:
    answer = run("rank", "--model", MODEL, "--system", SERVER, "--prompt", 24, "--output", 24)
    assert (answer.code, answer.err) == (0, "")
    lines = answer.out.splitlines()
    assert "sorted by tpot_mean_s" in lines[1]
    start = next(i for i, line in enumerate(lines) if line.startswith("--")) + 1
    table = lines[start : lines.index("", start)]
    # Two policies of one rule that are priced alike share a row.
    named = [name.strip(",") for line in table for name in line.split()[1:3] if name.strip(",") in POLICIES]
    assert named == [one.label for one in server.rows]
    assert any("moe-lightning, moe-lens" in line for line in table)
    assert max(map(len, table)) <= 120
    for words in (
        "equal memory: every policy has 80 GB", "this system has the CPU xeon-gold-6454s and no near-data device",
        "loss table tiny-mixtral-32l-losses (measured)", "does not predict speed", "no schedule of the same traffic",
        "below the stored 16: ", "mean over sequences; the notes below count all picks",
        "Do not apply", "- context-aware, static, monde",
    ):  # fmt: skip
        assert words in answer.out, words


def test_what_was_set_is_shown() -> None:
    answer = run(
        "rank", "--model", MODEL, "--system", SERVER, *FEW, "--policies", "all-cpu", "--memory-budget", 96,
        "--set", "link.bandwidth_gb_per_s=40",
    )  # fmt: skip
    assert f"set: link.bandwidth_gb_per_s=40, {MEMORY_KEY}=96" in answer.out
    assert "h100-pcie has 80 GB; every policy was given 96 GB" in answer.out


def test_another_metric_gets_a_column() -> None:
    answer = run(
        "rank", "--model", MODEL, "--system", SERVER, "--policies", "hobbit;expert-cache", "--by", "tpot_p95_s"
    )
    assert "tpot_p95_s [s]" in answer.out


def test_the_document() -> None:
    found = run(
        "rank", "--model", MODEL, "--system", SERVER, "--policies", "hobbit:fetch=pipelined;ktransformers;monde",
        "--prompt", 24, "--output", 24, "--set", "link.bandwidth_gb_per_s=40", "--memory-budget", 30, "--json",
    ).document  # fmt: skip
    assert found["gpu_memory_gb"] == 30
    assert found["values"] == {"link.bandwidth_gb_per_s": 40, MEMORY_KEY: 30}
    assert {one["label"] for one in found["ranking"]} == {"hobbit:fetch=pipelined", "ktransformers"}
    assert [one["label"] for one in found["refused"]] == ["monde"]
    assert found["losses"]["name"] == "tiny-mixtral-32l-losses"
    assert found["ranking"][0]["value"] == found["ranking"][0]["evaluation"]["tpot_mean_s"]


def test_recordings_of_deepseek_v2_lite(shared: Path) -> None:
    found = perfmodel.rank(
        shared / "configs" / "deepseek-ai__DeepSeek-V2-Lite",
        DESKTOP,
        shared / "traces" / "deepseek-v2-lite" / "esft_translation.npz",
        memory_budget_gb=12,
    )
    assert len(found.rows) >= 10
    assert found.losses[0] != "tiny-mixtral-32l-losses"


def test_rankings_are_frozen(near: Ranking) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        near.rows = ()  # type: ignore[misc]
