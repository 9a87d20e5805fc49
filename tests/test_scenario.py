"""Scenarios: what is priced, which axes it has, and that pricing in bulk gives the numbers of single evaluations."""

import json
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import NDP_SYSTEM, mixtral, recording, system_values

from perfmodel.bitwidth import LossTable
from perfmodel.errors import PerfModelError, PlacementError, PolicyError
from perfmodel.hardware import load_system
from perfmodel.policies import POLICIES, parse_policy
from perfmodel.routing import RoutingTrace
from perfmodel.run import evaluate, plan_run
from perfmodel.scenario import Scenario
from perfmodel.scenario.inputs import default_policies
from perfmodel.scenario.memo import Memo
from perfmodel.scenario.notes import gathered, labelled, merged

SHORT: dict[str, Any] = {"prompt": 8, "output": 8}
BALANCED = "monde:reading=balance"


def scenario(*policies: str, **changes: Any) -> Scenario:
    """The default inputs with a short workload."""
    return Scenario.of(policy=policies or None, **{**SHORT, **changes})


# ---- inputs and provenance ----


def test_names_paths_and_objects_give_the_same_scenario(tmp_path: Any) -> None:
    recording().save(tmp_path / "trace.npz")
    losses = LossTable.load("tiny-mixtral-32l-losses")
    named = Scenario.of(trace=str(tmp_path / "trace.npz"), losses="tiny-mixtral-32l-losses", **SHORT)
    built = Scenario.of(mixtral(), load_system("h100-cxl2-ndp"), recording(), losses=losses, **SHORT)
    assert named.content() == built.content()
    assert named.references["trace"] == str(tmp_path / "trace.npz")
    assert built.references == dict.fromkeys(("model", "system", "trace", "loss", "engine"))
    point = ("context-aware:mean_bits=2", {}, {}, ("tpot_mean_s",))
    assert named.prices(*point) == built.prices(*point)


def test_default_policies_are_the_published_ones() -> None:
    assert scenario().labels == ("monde", "hobbit", "context-aware:mean_bits=3", "context-aware:mean_bits=2")
    assert default_policies(NDP_SYSTEM, ["policy.mean_bits"]) == ("monde", "hobbit", "context-aware")
    assert default_policies(load_system("rtx4090-pcie4")) == ("hobbit",)


def test_policies_are_called_what_they_were_given_as() -> None:
    rule = parse_policy("context-aware:mean_bits=2")
    found = Scenario.of(policy=[" monde ", rule], **SHORT)
    assert found.labels == ("monde", rule.spec)
    assert found.policy("monde") == found.policy(0) == parse_policy("monde")
    assert found.policy("hobbit") == parse_policy("hobbit")
    assert Scenario.of(policy="monde", **SHORT).labels == ("monde",)


def test_plain_values_rebuild_the_scenario() -> None:
    first = scenario("monde", "static:alpha=1", layers="cycle", losses="tiny-mixtral-32l-losses")
    again = Scenario.from_dict(json.loads(json.dumps(first.to_dict())))
    assert again.to_dict() == first.to_dict()
    assert again.content() == first.content()
    assert again.policies == first.policies


def test_objects_are_named_by_their_hash_and_cannot_be_rebuilt() -> None:
    found = Scenario.of(trace=recording(), **SHORT)
    described = found.to_dict()
    assert described["trace"] == {"in_memory": recording().content_hash()}
    assert described["model"] == "mixtral-8x7b"
    with pytest.raises(PerfModelError, match="trace existed in memory only"):
        Scenario.from_dict(described)
    with pytest.raises(PerfModelError, match="scenario"):
        Scenario.from_dict({"model": "mixtral-8x7b"})


def test_hashes_follow_contents_not_names() -> None:
    base = scenario().content()
    renamed = Scenario.of(system=load_system("h100-cxl2-ndp").model_copy(update={"name": "other"}), **SHORT)
    assert renamed.content() == base
    faster = load_system("h100-cxl2-ndp").with_values({"link.latency_us": 9.0})
    for changes in ({"system": faster}, {"model": "mixtral-8x22b"}, {"losses": "tiny-mixtral-32l-losses"}):
        assert scenario(**changes).content() != base


def test_pickled_scenarios_price_the_same() -> None:
    first = scenario("context-aware:mean_bits=3")
    point = (0, {}, {"link.bandwidth_gb_per_s": [16.0, 64.0]}, ("tpot_mean_s", "ttft_s"))
    before = first.prices(*point)
    after = pickle.loads(pickle.dumps(first)).prices(*point)
    for name, values in before.items():
        assert np.array_equal(values, after[name])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "mixtral-8x7c"}, ["mixtral-8x7b"]),
        ({"model": 3}, ["model", "int"]),
        ({"system": None}, ["system", "NoneType"]),
        ({"trace": []}, ["trace", "list"]),
        ({"losses": 1}, ["loss"]),
        ({"policy": []}, ["policy", "none given"]),
        ({"policy": 3}, ["policy", "3"]),
        ({"policy": ["monde", None]}, ["policy", "None"]),
        ({"policy": ["monde", "monde:reading=one"]}, ["same policy"]),
        ({"policy": "hobbt"}, ["hobbit"]),
        ({"prompt": 0}, ["prompt", "from 1"]),
        ({"output": 2.5}, ["output", "2.5"]),
        ({"output": True}, ["output", "True"]),
        ({"layers": "repeat"}, ["layers", "cycle"]),
    ],
)
def test_refused_inputs(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(PerfModelError) as error:
        Scenario.of(**{**SHORT, **changes})
    for word in words:
        assert word in str(error.value)


# ---- axes ----


def test_every_axis_is_listed_and_found_by_its_name() -> None:
    one = scenario()
    listed = one.axes()
    names = [axis.name for axis in listed]
    assert len(set(names)) == len(names)
    assert set(one.system.numeric_keys()) <= set(names)
    assert {"policy", "model", "trace", "system", "loss", "workload.prompt", "policy.mean_bits"} <= set(names)
    for axis in listed:
        assert one.axis(axis.name) == axis
        assert axis.meaning
        assert axis.allowed


def test_hardware_axes_have_the_limits_of_their_keys() -> None:
    one = scenario()
    for key in one.system.numeric_keys():
        axis, limits = one.axis(key), one.system.limits_of(key)
        assert (axis.kind, axis.low, axis.high, axis.whole, axis.unit) == ("hardware", *limits)


@pytest.mark.parametrize(
    ("name", "low", "high", "allowed"),
    [
        ("mean_bits", 1, 4, "numbers from 1 to 4 bit"),
        ("alpha", 0, 1, "numbers from 0 to 1"),
        ("gpu_experts", 0, 8, "whole numbers from 0 to 8 | auto"),
        ("low_bits", 1, 16, "numbers from 1 to 16 bit"),
        ("resident", 0, 8, "whole numbers from 0 to 8"),
        ("t2", 0, 1, "numbers from 0 to 1"),
    ],
)
def test_options_have_the_limits_that_their_policies_check(name: str, low: float, high: float, allowed: str) -> None:
    one = scenario("monde", "hobbit", "context-aware")
    axis = one.axis(name)
    assert (axis.low, axis.high, axis.allowed) == (low, high, allowed)
    for value in (low, high):
        assert one.check(name, [value]) == (value,)
    with pytest.raises(PerfModelError, match=name):
        one.check(name, [low - 1])
    if name not in ("gpu_experts", "resident"):  # a model with more experts may be an axis too
        for beyond in ([high + 1], np.array([low, high + 0.5])):
            with pytest.raises(PerfModelError, match=name):
                one.check(name, beyond)


def test_an_option_that_a_label_spells_is_not_varied() -> None:
    one = scenario("context-aware:mean_bits=3", "hobbit")
    one.check_varied(["gpu_experts", "link.latency_us", "policy"])
    for name in ("mean_bits", "policy.mean_bits"):
        with pytest.raises(PerfModelError, match="sets mean_bits itself"):
            one.check_varied([name])
    Scenario.of(policy=parse_policy("context-aware:mean_bits=3")).check_varied(["mean_bits"])


def test_keys_that_the_system_does_not_give_are_axes_too() -> None:
    one = scenario()
    assert "gpu.layer_overhead_us" not in one.system.numeric_keys()
    assert one.axis("gpu.layer_overhead_us").unit == "us"


@pytest.mark.parametrize(
    ("short", "name"),
    [
        ("mean_bits", "policy.mean_bits"),
        ("prompt", "workload.prompt"),
        ("output", "workload.output"),
        ("t1", "policy.t1"),
    ],
)
def test_short_names(short: str, name: str) -> None:
    assert scenario().axis(short) == scenario().axis(name)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("link.bandwith_gb_per_s", ["'link.bandwidth_gb_per_s'", "--list-axes"]),
        ("mean_bit", ["'policy.mean_bits'", "--list-axes"]),
        ("policy.reading", ["hobbit", "option"]),
        ("cpu.memory_capacity_gb", ["cpu"]),
        ("gpu", ["axis 'gpu'"]),
        ("", ["axis ''"]),
        ("gpu.name", ["axis 'gpu.name'"]),
        ("ndp.dataflow", ["not a number"]),
        ("cpu.sockets", ["has no cpu"]),
        (3, ["axis 3"]),
        (None, ["axis None"]),
    ],
)
def test_unknown_axes(name: Any, words: list[str]) -> None:
    with pytest.raises(PerfModelError) as error:
        scenario("hobbit", "context-aware").axis(name)
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("name", "given_", "clean"),
    [
        ("ndp.arrays", [4, 8.0, np.int32(16)], (4, 8, 16)),
        ("ndp.arrays", 8, (8,)),
        ("link.latency_us", np.array([0.5, 1]), (0.5, 1.0)),
        ("mean_bits", [1, 2.5], (1.0, 2.5)),
        ("gpu_experts", ["auto", 4.0], ("auto", 4)),
        ("gpu_experts", [None, np.int64(4)], ("auto", 4)),
        ("overlap", ["max", "sum"], ("max", "sum")),
        ("output", range(1, 4), (1, 2, 3)),
        ("policy", ["monde ", parse_policy("monde:reading=balance")], ("monde", parse_policy(BALANCED).spec)),
        ("trace", ["tiny-mixtral-32l-mini"], ("tiny-mixtral-32l-mini",)),
        ("system", "h100-cxl-ndp", ("h100-cxl-ndp",)),
    ],
)
def test_clean_values(name: str, given_: Any, clean: tuple[Any, ...]) -> None:
    found = scenario().check(name, given_)
    assert found == clean
    assert [type(value) for value in found] == [type(value) for value in clean]


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("link.bandwidth_gb_per_s", [16, 12_500], ["value 2", "12500", "0.01 to 5000 GB/s"]),
        ("link.bandwidth_gb_per_s", [float("nan")], ["nan"]),
        ("link.bandwidth_gb_per_s", [True], ["True"]),
        ("link.bandwidth_gb_per_s", ["16"], ["'16'"]),
        ("link.bandwidth_gb_per_s", [], ["no values"]),
        ("link.bandwidth_gb_per_s", [10**400], ["beyond all limits"]),
        ("link.bandwidth_gb_per_s", {"a": 1}, ["'a'"]),
        ("link.bandwidth_gb_per_s", [16, 32, 16.0], ["16", "twice"]),
        ("ndp.arrays", [1.5], ["1.5", "whole"]),
        ("ndp.arrays", [0], ["whole numbers from 1"]),
        ("gpu_experts", [1.5], ["whole"]),
        ("gpu_experts", [-1], ["0 to E"]),
        ("gpu_experts", ["some"], ["'some'", "auto"]),
        ("gpu_experts", [10**400], ["axis policy.gpu_experts"]),
        ("mean_bits", [0.5], ["1 to 4"]),
        ("mean_bits", [[1]], ["list"]),
        ("overlap", ["max", "min"], ["'min'", "max | sum"]),
        ("output", [0], ["from 1 token"]),
        ("policy", ["monde", "hobbt"], ["hobbit"]),
        ("policy", ["monde", "monde:reading=one"], ["same policy"]),
        ("policy", [3], ["3"]),
        ("trace", ["nowhere"], ["nowhere"]),
        ("model", [""], ["''"]),
        ("system", ["h100"], ["h100-cxl"]),
        ("loss", ["none.npz"], ["none.npz"]),
    ],
)
def test_refused_values(name: str, values: Any, words: list[str]) -> None:
    with pytest.raises(PerfModelError) as error:
        scenario().check(name, values)
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_values_of_an_axis_alone_must_fit_the_other_values_of_their_spec() -> None:
    with pytest.raises(PerfModelError, match=r"axis ndp\.dram\.data_rate_mt_s: .*peak_gb_per_s is 12\.8"):
        scenario().check("ndp.dram.data_rate_mt_s", [6400, 8533])


# ---- runs and prices ----

METRICS = ("tpot_mean_s", "ttft_s", "tpot_p99_s", "hit_rate", "gpu_memory_bytes", "end_to_end_s")


def single(policy: str, system: Any, **workload: Any) -> dict[str, float]:
    """The same metrics from one evaluation."""
    found = evaluate(mixtral(), system, recording(), policy, **{**SHORT, **workload})
    values = {name: getattr(found, name) for name in ("tpot_mean_s", "ttft_s", "tpot_p99_s", "end_to_end_s")}
    own = found.hit_rate.own if found.hit_rate is not None else float("nan")
    return {**values, "hit_rate": own, "gpu_memory_bytes": found.memory_bytes["gpu"]["total"]}


@settings(max_examples=25)
@given(
    st.lists(system_values(), min_size=1, max_size=3),
    st.sampled_from(["monde", BALANCED, "hobbit", "context-aware:mean_bits=2", "static:prefill=balanced"]),
)
def test_bulk_prices_equal_single_evaluations(drawn: list[dict[str, Any]], policy: str) -> None:
    keys = [key for key in drawn[0] if all(not isinstance(values.get(key, ""), str) for values in drawn)]
    words = {key: value for key, value in drawn[0].items() if key not in keys and not key.startswith("ndp.native")}
    system = load_system("h100-cxl2-ndp").with_values(
        {"ndp.precision_scaling": "linear", **words} | ({"ndp.precision_scaling": "linear"})
    )
    keys = [key for key in keys if not key.startswith("ndp.native")]
    arrays = {key: np.array([values[key] for values in drawn], dtype=float) for key in keys}
    found = scenario(policy, system=system).prices(0, {}, arrays, METRICS)
    for i, values in enumerate(drawn):
        expected = single(policy, system.with_values({key: values[key] for key in keys}))
        for name in METRICS:
            np.testing.assert_array_equal(found[name][i], expected[name], err_msg=name)


def test_prices_belong_to_the_caller() -> None:
    reasons: dict[str, int] = {}
    one = scenario("context-aware:gpu_experts=4")
    for capacity in (20.0, 80.0):
        arrays = {"gpu.memory_capacity_gb": np.array([capacity]), "link.latency_us": np.array([1.0])}
        found = one.prices(0, {}, arrays, METRICS, infeasible=reasons)
        for i, values in enumerate(found.values()):
            values[...] = i
        assert [values.item() for values in found.values()] == list(range(len(METRICS)))


def test_options_files_and_workload_are_settings() -> None:
    one = scenario("context-aware", "hobbit")
    options = {"mean_bits": 2, "policy.gpu_experts": 3, "workload.output": 5, "system": "h100-cxl-ndp"}
    expected = evaluate(
        mixtral(), load_system("h100-cxl-ndp"), recording(), "context-aware:mean_bits=2,gpu_experts=3",
        prompt=8, output=5,
    )  # fmt: skip
    assert one.run(0, options).price() == expected
    assert one.run("hobbit", options).policy == parse_policy("hobbit"), "options that a policy lacks do not matter"
    assert one.run("hobbit", {"policy": "context-aware", **options}).price() == expected
    assert one.run(0, {"gpu_experts": "auto"}).plan.gpu_experts == one.run(0).plan.gpu_experts


def test_hardware_settings_reach_the_run_and_the_prices() -> None:
    one = scenario(BALANCED)
    values = {"link.bandwidth_gb_per_s": 20.0, "gpu.memory_capacity_gb": 90.0, "ndp.arrays": 3}
    expected = plan_run(mixtral(), one.system.with_values(values), recording(), BALANCED, **SHORT).price()
    assert one.run(0, values).price().tpot_mean_s == expected.tpot_mean_s
    assert float(one.prices(0, values, {}, ("tpot_mean_s",))["tpot_mean_s"]) == expected.tpot_mean_s


def test_plans_are_shared_where_hardware_cannot_change_them() -> None:
    one = scenario("monde", BALANCED)
    assert one.run(0, {"link.bandwidth_gb_per_s": 20.0}).plan is one.run(0).plan
    assert one.run(1, {"link.bandwidth_gb_per_s": 20.0}).plan is not one.run(1).plan
    assert one.run(0).replay is one.run(1).replay


@pytest.mark.parametrize("policy", ["context-aware", BALANCED])
def test_prices_take_any_shapes_that_broadcast(policy: str) -> None:
    one = scenario(policy)
    link = np.array([8.0, 16.0, 32.0])
    capacity = np.array([[40.0], [60.0]])
    rate = np.array([[[200.0, 400.0, 400.0]], [[200.0, 800.0, 100.0]]])
    arrays = {
        "link.bandwidth_gb_per_s": link, "gpu.memory_capacity_gb": capacity, "ndp.dram_bandwidth_gb_per_s": rate,
    }  # fmt: skip
    found = one.prices(0, {}, arrays, ("tpot_mean_s",))["tpot_mean_s"]
    assert found.shape == (2, 2, 3)
    for index in np.ndindex(found.shape):
        values = {key: float(np.broadcast_to(array, found.shape)[index]) for key, array in arrays.items()}
        assert found[index] == one.run(0, values).price().tpot_mean_s


def test_points_without_a_plan_are_counted_or_refused() -> None:
    one = scenario("context-aware:gpu_experts=4")
    arrays = {"gpu.memory_capacity_gb": np.array([[20.0], [80.0], [25.0]]), "link.latency_us": np.array([1.0, 2.0])}
    reasons: dict[str, int] = {}
    found = one.prices(0, {}, arrays, ("tpot_mean_s",), infeasible=reasons)["tpot_mean_s"]
    assert np.isnan(found).tolist() == [[True, True], [False, False], [True, True]]
    assert sorted(reasons.values()) == [2, 2]
    assert all("does not fit" in reason for reason in reasons)
    with pytest.raises(PlacementError, match="does not fit"):
        one.prices(0, {}, arrays, ("tpot_mean_s",))
    with pytest.raises(PlacementError, match="does not fit"):  # remembered, and raised again
        one.prices(0, {}, arrays, ("tpot_mean_s",))


def test_a_system_without_the_device_has_no_plan() -> None:
    with pytest.raises(PolicyError, match="near-data"):
        scenario("monde", "hobbit").run("monde", {"system": "rtx4090-pcie4"})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((5, {}, {}, ("tpot_mean_s",)), ["policy"]),
        ((True, {}, {}, ("tpot_mean_s",)), ["policy"]),
        (("nobody", {}, {}, ("tpot_mean_s",)), ["nobody"]),
        ((0, {"link.speed": 1}, {}, ("tpot_mean_s",)), ["link.speed"]),
        ((0, {}, {"mean_bits": [1.0]}, ("tpot_mean_s",)), ["policy.mean_bits", "hardware"]),
        ((0, {}, {}, ("tpot",)), ["tpot"]),
        ((0, {}, {"ndp.rows": [1, 2], "ndp.cols": [1, 2, 3]}, ("tpot_mean_s",)), ["broadcast"]),
        ((0, {}, {"ndp.rows": ["a"]}, ("tpot_mean_s",)), ["numbers"]),
        ((0, {"mean_bits": 9}, {}, ("tpot_mean_s",)), ["1 to 4"]),
    ],
)
def test_refused_prices(arguments: Any, words: list[str]) -> None:
    with pytest.raises(PerfModelError) as error:
        scenario("context-aware").prices(*arguments)
    for word in words:
        assert word in str(error.value)


def test_threads_plan_every_setting_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[float] = []
    kind = POLICIES["context-aware"]
    real = kind.plan

    def counting(self: Any, inputs: Any) -> Any:
        made.append(self.mean_bits)
        return real(self, inputs)

    monkeypatch.setattr(kind, "plan", counting)
    one = scenario("context-aware")
    bits = [1.0, 2.0, 3.0] * 8
    with ThreadPoolExecutor(8) as pool:
        runs = list(pool.map(lambda value: one.run(0, {"mean_bits": value}), bits))
    assert sorted(made) == [1.0, 2.0, 3.0]
    assert [run.policy.mean_bits for run in runs] == bits  # type: ignore[attr-defined]


# ---- remembered values ----


def test_remembered_values_stay_within_their_budget() -> None:
    made: list[int] = []
    memo: Memo[int] = Memo(10, float)
    for key in (4, 5, 4, 3, 4, 5):
        memo.get(key, lambda key=key: made.append(key) or key)  # type: ignore[misc]
    assert made == [4, 5, 3, 5], "5 was used least recently when 3 came"


def test_the_last_two_values_are_kept_whatever_they_weigh() -> None:
    made: list[int] = []
    memo: Memo[int] = Memo(1, float)
    for key in (40, 50, 40, 50, 60, 50):
        memo.get(key, lambda key=key: made.append(key) or key)  # type: ignore[misc]
    assert made == [40, 50, 60]


def test_refusals_are_remembered_and_other_errors_are_not() -> None:
    tries: list[str] = []
    memo: Memo[int] = Memo(10, float, (PlacementError,))

    def fail(kind: type[Exception]) -> int:
        tries.append(kind.__name__)
        raise kind("no")

    for kind in (PlacementError, KeyError):
        for _ in range(2):
            with pytest.raises(kind):
                memo.get(kind, lambda kind=kind: fail(kind))  # type: ignore[misc]
    assert tries == ["PlacementError", "KeyError", "KeyError"]


def test_one_thread_makes_a_value_and_the_others_wait() -> None:
    memo: Memo[int] = Memo(10, float)
    started, release = threading.Event(), threading.Event()
    made: list[int] = []

    def make() -> int:
        started.set()
        release.wait(10)
        made.append(1)
        return 1

    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(memo.get, "key", make) for _ in range(3)]
        assert started.wait(10)
        release.set()
        assert [one.result(10) for one in waiting] == [1, 1, 1]
    assert made == [1]


def test_traces_of_other_files_are_an_axis(tmp_path: Any) -> None:
    trace = recording().sequences([0, 1])
    trace.save(tmp_path / "two.npz")
    one = scenario("hobbit")
    expected = evaluate(mixtral(), one.system, trace, "hobbit", **SHORT).tpot_mean_s
    assert one.run(0, {"trace": str(tmp_path / "two.npz")}).price().tpot_mean_s == expected
    assert isinstance(one.file("trace", str(tmp_path / "two.npz")), RoutingTrace)


# ---- notes ----


@pytest.mark.parametrize(
    ("notes", "expected"),
    [
        (["4 of 8 experts", "4 of 8 experts"], ["4 of 8 experts"]),
        (["6 of 8 experts", "0 of 8 experts", "10 of 8 experts"], ["0 to 10 of 8 experts"]),
        (["key 61.87 is above 59.3 of cxl-2.0-x16", "key 450 is above 59.3 of cxl-2.0-x16"],
         ["key 61.87 to 450 is above 59.3 of cxl-2.0-x16"]),
        (["67.0 / 30.1 / 2.9 % of picks", "67.0 / 29.5 / 3.5 % of picks."],
         ["67.0 / 30.1 / 2.9 % of picks", "67.0 / 29.5 / 3.5 % of picks."]),
        (["67.0 / 30.1 % of picks", "67.0 / 29.5 % of picks"], ["67.0 / 29.5 to 30.1 % of picks"]),
        (["mixtral-8x7b", "mixtral-8x22b", "a", "b"], ["mixtral-8x7b", "mixtral-8x22b", "a", "b"]),
        (["1e-06 s", "2e+06 s"], ["1e-06 to 2e+06 s"]),
        ([], []),
    ],
)  # fmt: skip
def test_notes_that_differ_in_numbers_are_one(notes: list[str], expected: list[str]) -> None:
    assert merged(notes) == expected


def test_notes_name_the_policies_they_hold_for() -> None:
    notes = {"a": ["common", "2 experts", "3 experts"], "b": ["common", "only here"], "c": ["common", "only here"]}
    assert labelled(notes) == ["common", "a: 2 to 3 experts", "b, c: only here"]
    assert labelled({"a": ["alone"]}) == ["alone"]
    setup = scenario("monde", "context-aware")
    places = [("monde", {}), ("context-aware", {"gpu_experts": 1}), ("context-aware", {"gpu_experts": 3})]
    found = gathered(setup, [*places, ("context-aware", {"gpu_experts": 8})])  # eight do not fit, and say nothing
    assert "context-aware: 1 to 3 of 8 experts a layer on the GPU" in found
    assert any(note.startswith("monde: MoNDE reading=one") for note in found)
    assert "the routing is of tiny-mixtral-32l, not of mixtral-8x7b" in found
    fast = gathered(setup, [("monde", {"link.bandwidth_gb_per_s": rate}) for rate in (50.0, 100.0, 200.0)])
    assert any(note.startswith("link.bandwidth_gb_per_s 100 to 200 is above the stated peak") for note in fast)


# ---- options of other policies ----


@pytest.mark.parametrize("name", ["mean_bits", "policy.mean_bits"])
def test_an_option_that_none_of_the_policies_has(name: str) -> None:
    with pytest.raises(PerfModelError) as error:
        scenario("monde").axis(name)
    assert "(monde) has this option; context-aware, static and adaptive have it; `perf" in str(error.value)
    with pytest.raises(PerfModelError, match="hobbit has it"):
        scenario("monde").axis("cache_high")
    with pytest.raises(PerfModelError, match=r"did you mean 'policy\.mean_bits'"):
        scenario("context-aware").axis("mean_bit")
