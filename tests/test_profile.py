"""Frequency profiles: what they refuse, keep and say, and static placement by them."""

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import check_refusal, run
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.testing import assert_allclose, assert_array_equal
from strategies import NDP_SYSTEM, mixtral, plain_model, recording, small_trace

from perfmodel.errors import PerfModelError, PolicyError, TraceError
from perfmodel.routing import RoutingTrace
from perfmodel.routing.profile import PROFILE_KEYS, FrequencyProfile, load_use
from perfmodel.run import plan_run
from perfmodel.sweeps.api import sweep

METADATA = {"model": "made-up", "source": "from-counts"}
COUNTS = [[3.0, 0.0, 1.0], [2.0, 2.0, 4.0]]


def made(**changes: Any) -> FrequencyProfile:
    fields = {"counts": COUNTS, "layer_index": [1, 4], "metadata": METADATA, "top_k": 2, "scale": "counts"}
    return FrequencyProfile(**{**fields, **changes})


@st.composite
def profiles(draw: st.DrawFn) -> FrequencyProfile:
    shape = draw(st.tuples(st.integers(1, 5), st.integers(1, 6)))
    counts = draw(arrays.arrays(np.float64, shape, elements=st.floats(0, 1e300, allow_subnormal=True)))
    counts[~counts.any(axis=1), 0] = 1.0
    return FrequencyProfile(
        counts=counts,
        layer_index=np.cumsum(draw(st.lists(st.integers(1, 9), min_size=shape[0], max_size=shape[0]))),
        metadata={**METADATA, **draw(st.dictionaries(st.sampled_from(["a", "b"]), st.integers(0, 9)))},
        top_k=draw(st.none() | st.integers(1, shape[1])),
        scale=draw(st.sampled_from(["counts", "shares", "ranks"])),
    )


def test_what_a_profile_says() -> None:
    profile = made()
    assert_allclose(profile.shares(), [[0.75, 0, 0.25], [0.25, 0.25, 0.5]], rtol=1e-15, atol=0)
    assert_array_equal(profile.order(), [[0, 2, 1], [2, 0, 1]])
    assert (profile.num_layers, profile.num_experts, profile.top_k) == (2, 3, 2)
    assert repr(profile) == "FrequencyProfile(made-up, counts: 2 layers, top-2 of 3 experts)"
    assert repr(made(top_k=None, scale="ranks")) == "FrequencyProfile(made-up, ranks: 2 layers, 3 experts)"
    assert profile.with_metadata(note=1).metadata == {**METADATA, "note": 1}


@given(profiles())
def test_shares_and_order_are_those_of_plain_loops(profile: FrequencyProfile) -> None:
    for row, counts in enumerate(profile.counts.tolist()):
        assert profile.order()[row].tolist() == sorted(range(len(counts)), key=lambda e: (-counts[e], e))
    if profile.scale == "ranks":
        with pytest.raises(TraceError, match="which experts were used more often than others"):
            profile.shares()
        return
    shares = profile.shares()
    assert_allclose(shares.sum(axis=1), 1, rtol=1e-12, atol=0)
    for row, counts in zip(shares, profile.counts, strict=True):
        # Of no more than 6 numbers up to 1e300, so that the sum is finite.
        assert_allclose(row, counts / counts.sum(), rtol=1e-12, atol=1e-300)


def test_sums_beyond_floats_have_shares() -> None:
    assert_array_equal(
        made(counts=[[1.7e308, 1.7e308, 0], [5e-324, 0, 5e-324]]).shares(), [[0.5, 0.5, 0], [0.5, 0, 0.5]]
    )


@given(profile=profiles())
def test_saving_and_loading_keeps_everything(profile: FrequencyProfile, tmp_path_factory: Any) -> None:
    path = tmp_path_factory.mktemp("profile") / "p.npz"
    profile.save(path)
    for again in (FrequencyProfile.load(path), load_use(path), pickle.loads(pickle.dumps(profile))):
        assert isinstance(again, FrequencyProfile)
        assert again.content_hash() == profile.content_hash()
        assert_array_equal(again.counts, profile.counts)
        assert_array_equal(again.layer_index, profile.layer_index)
        assert (again.top_k, again.scale, again.metadata) == (profile.top_k, profile.scale, profile.metadata)
        assert not again.counts.flags.writeable


def test_every_part_changes_the_hash() -> None:
    changes: list[dict[str, Any]] = [
        {}, {"counts": np.array(COUNTS) + 1}, {"layer_index": [0, 4]}, {"metadata": {**METADATA, "how": "x"}},
        {"top_k": 1}, {"top_k": None}, {"scale": "shares"},
    ]  # fmt: skip
    assert len({made(**one).content_hash() for one in changes}) == len(changes)
    assert made(counts=[[3, -0.0, 1], [2, 2, 4]]).content_hash() == made().content_hash()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"counts": [1.0, 2.0]}, r"counts has shape \(2,\)"),
        ({"counts": np.zeros((0, 3))}, "at least one layer"),
        ({"counts": np.ones((2, 65536), np.uint8)}, "1 to 65535 experts"),
        ({"counts": [["1", "2"]]}, "expected numbers"),
        ({"counts": [[True]]}, "dtype bool"),
        ({"counts": [[1, 2], [3]]}, "counts is no array"),
        ({"counts": [[1, 0, -1], [1, 1, 1]]}, "layer row 0, expert 2 is -1, expected a finite number >= 0"),
        ({"counts": [[1, 0, 1], [1, np.nan, 1]]}, "layer row 1, expert 1 is nan"),
        ({"counts": [[1, 0, 1], [np.inf, 1, 1]]}, "expert 0 is inf"),
        ({"counts": [[1, 0, 1], [0, 0, 0]]}, "no expert of layer 4 was used"),
        ({"layer_index": [0]}, "layer_index has 1 entries, expected 2"),
        ({"layer_index": [4, 4]}, "increase"),
        ({"layer_index": [-1, 4]}, "increase"),
        ({"layer_index": [0.0, 1.0]}, "expected integers"),
        ({"top_k": 0}, r"top_k is 0, expected an integer in 1\.\.3"),
        ({"top_k": 4}, "top_k is 4"),
        ({"top_k": 2.0}, r"top_k is 2\.0"),
        ({"scale": "rank"}, "scale is 'rank', allowed are counts, shares, ranks"),
        ({"scale": ["counts"]}, "scale is"),
        ({"metadata": {"model": "m"}}, "lacks 'source'"),
        ({"metadata": {"model": "m", "source": "recorded"}}, "a frequency profile is 'from-counts'"),
        ({"metadata": {**METADATA, "format": "perfmodel-routing-trace/1"}}, "this version reads"),
        ({"metadata": {**METADATA, "x": float("nan")}}, "plain JSON"),
        ({"metadata": None}, "expected a table"),
    ],
)
def test_what_breaks_a_rule_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceError, match=message) as caught:
        made(**changes)
    assert "\n" not in str(caught.value)


# ---- files ----


def stored(folder: Path, **changes: Any) -> Path:
    made().save(folder / "good.npz")
    with np.load(folder / "good.npz") as good:
        fields = {**{key: good[key] for key in good}, **changes}
    np.savez(folder / "bad.npz", **{key: value for key, value in fields.items() if value is not None})
    return folder / "bad.npz"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"counts": None}, r"no frequency profile; holds .*; a frequency profile also needs counts"),
        ({"scale": None, "topk_ids": np.zeros(1)}, "is a routing trace; a frequency profile also needs scale"),
        ({"scale": None, "losses": np.zeros(1)}, "is a loss table"),
        ({"counts": np.array([[{}]], dtype=object)}, "pickled Python objects"),
        ({"counts": np.ones((2, 5_000_000))}, "at most 67108864 for a frequency profile"),
        ({"metadata": np.array("{")}, "metadata is no JSON text"),
        ({"metadata": np.array('{"model": "m", "source": "from-counts", "x": NaN}')}, "NaN, which is not JSON"),
        ({"metadata": np.array("[" * 100_000)}, "metadata is no JSON text"),
        ({"metadata": np.array(3)}, "expected one JSON text"),
        ({"scale": np.array(["counts"])}, "scale has dtype"),
        ({"scale": np.array("many")}, "scale is 'many'"),
        ({"top_k": np.array([2])}, "top_k has shape"),
        ({"top_k": np.array(2.5)}, r"top_k is .*2\.5"),
        ({"layer_index": np.array([4, 1])}, "increase"),
    ],
)
def test_bad_files_are_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceError, match=message) as caught:
        FrequencyProfile.load(stored(tmp_path, **changes))
    assert "bad.npz: " in str(caught.value)
    assert "\n" not in str(caught.value)


@given(cut=st.floats(0, 1), flip=st.integers(0, 255))
def test_damaged_files_are_refused_or_unchanged(cut: float, flip: int, tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.mktemp("damage")
    made().save(folder / "p.npz")
    data = bytearray((folder / "p.npz").read_bytes())
    place = int(cut * (len(data) - 1))
    data[place] ^= flip
    (folder / "q.npz").write_bytes(data)
    (folder / "short.npz").write_bytes(data[:place])
    for name in ("q.npz", "short.npz"):
        message = ""
        try:
            assert FrequencyProfile.load(folder / name).content_hash() == made().content_hash()
        except TraceError as error:
            message = str(error)
        assert "\n" not in message


def test_a_name_must_end_in_npz_and_an_old_file_stays(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"ends in \.npz"):
        made().save(tmp_path / "p.npy")
    (tmp_path / "folder.npz").mkdir()
    with pytest.raises(TraceError, match="cannot be written"):
        made().save(tmp_path / "folder.npz")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder.npz"]


def test_a_profile_is_no_trace_and_a_trace_no_profile(tmp_path: Path) -> None:
    made().save(tmp_path / "p.npz")
    with pytest.raises(TraceError, match=r"p\.npz: is a frequency profile.*static:profile=FILE"):
        RoutingTrace.load(tmp_path / "p.npz")
    recording().sequences([0]).save(tmp_path / "t.npz")
    with pytest.raises(TraceError, match=r"t\.npz: is a routing trace"):
        FrequencyProfile.load(tmp_path / "t.npz")
    assert isinstance(load_use(tmp_path / "t.npz"), RoutingTrace)
    assert isinstance(load_use("tiny-mixtral-32l-mini"), RoutingTrace)
    for missing in ("nowhere.npz", "no-such-name"):
        with pytest.raises(TraceError, match=r"no such file|no bundled trace"):
            load_use(missing)
    with zipfile.ZipFile(io.BytesIO((tmp_path / "p.npz").read_bytes())) as archive:
        assert {name.removesuffix(".npy") for name in archive.namelist()} == PROFILE_KEYS | {"top_k"}


# ---- static placement ----


def model_and_profile(**changes: Any) -> tuple[Any, Any, FrequencyProfile]:
    """A small model, a trace of it, and counts whose two most used experts differ from layer to layer."""
    model = plain_model()
    trace = small_trace(model, [(3, 4), (2, 5)])
    counts = np.array([[1, 9, 2, 8], [7, 1, 6, 2], [5, 5, 5, 5]])
    fields = {"counts": counts, "layer_index": range(3), "metadata": METADATA, **changes}
    return model, trace, FrequencyProfile(**fields)


@pytest.mark.parametrize("scale", ["counts", "shares", "ranks"])
@pytest.mark.parametrize("norm", ["sum", "min-max"])
def test_static_places_the_most_used_of_a_profile(tmp_path: Path, scale: str, norm: str) -> None:
    model, trace, profile = model_and_profile(scale=scale)
    profile.save(tmp_path / "p.npz")
    spec = f"static:profile={tmp_path / 'p.npz'},gpu_experts=2,selector=full,norm={norm}"
    plan = plan_run(model, NDP_SYSTEM, trace, spec).plan
    assert plan.hot is not None
    assert plan.hot.shape == (2, 3, 4)
    for sequence in plan.hot:
        assert [np.flatnonzero(layer).tolist() for layer in sequence] == [[1, 3], [0, 2], [0, 1]]
    assert plan.alpha == 1
    assert not plan.migrated_experts.any()
    notes = " ".join(plan.notes)
    assert "frequency profile of made-up" in notes
    assert "alpha forced from 0.5 to 1" in notes
    assert ("not how often" in notes) == (scale == "ranks")


def test_alpha_of_one_is_not_forced(tmp_path: Path) -> None:
    model, trace, profile = model_and_profile()
    profile.save(tmp_path / "p.npz")
    spec = f"static:profile={tmp_path / 'p.npz'},gpu_experts=2,selector=full,alpha=1"
    assert not any("forced" in note for note in plan_run(model, NDP_SYSTEM, trace, spec).plan.notes)


def test_counts_of_a_trace_place_as_the_trace_itself(tmp_path: Path) -> None:
    """With one sequence, and counts alone, a trace and its own table of counts say the same."""
    model, trace, _ = model_and_profile()
    other = small_trace(model, [(1, 40)], seed=5)
    other.save(tmp_path / "t.npz")
    counts = np.zeros((3, 4))
    for token in other.topk_ids[other.decode_slice(0)]:
        for layer, picks in enumerate(token.tolist()):
            for expert in picks:
                counts[layer, expert] += 1
    FrequencyProfile(counts=counts, layer_index=range(3), metadata=METADATA).save(tmp_path / "p.npz")
    plans = [
        plan_run(model, NDP_SYSTEM, trace, f"static:profile={tmp_path / name},alpha=1,gpu_experts=1").plan
        for name in ("t.npz", "p.npz")
    ]
    assert_array_equal(plans[0].picks, plans[1].picks)
    assert_array_equal(plans[0].hot, plans[1].hot)


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"counts": np.ones((2, 4)), "layer_index": [0, 1]}, "", "has 2 layers, plain has 3 MoE layers"),
        ({"counts": np.ones((3, 5))}, "", "is of 5 experts a layer, plain has top-2 of 4"),
        ({"top_k": 1}, "", "is of top-1 of 4 experts a layer"),
        ({"scale": "ranks"}, ",objective=use", "objective: found use, allowed plain"),
        ({"scale": "ranks"}, ",objective=importance", "objective: found importance, allowed plain"),
    ],
)
def test_profiles_that_do_not_fit_are_refused(
    tmp_path: Path, changes: dict[str, Any], options: str, message: str
) -> None:
    model, trace, profile = model_and_profile(**changes)
    profile.save(tmp_path / "p.npz")
    with pytest.raises(PerfModelError, match=message) as caught:
        plan_run(model, NDP_SYSTEM, trace, f"static:profile={tmp_path / 'p.npz'}{options}")
    assert "\n" not in str(caught.value)


def test_files_that_are_no_profile_are_named_with_the_option(tmp_path: Path) -> None:
    model, trace, _ = model_and_profile()
    np.savez(tmp_path / "raw.npz", picks=np.ones((3, 4)))
    np.save(tmp_path / "raw.npy", np.ones((3, 4)))
    for name, why in (("raw.npz", "no known trace layout"), ("raw.npy", "is no .npz file"), ("none.npz", "no such")):
        with pytest.raises(TraceError, match=f"option profile: {tmp_path / name}: .*{why}.*allowed: a trace, or a"):
            plan_run(model, NDP_SYSTEM, trace, f"static:profile={tmp_path / name}")


def test_a_sweep_knows_the_contents_of_a_profile(tmp_path: Path) -> None:
    path = tmp_path / "p.npz"
    counts = np.tile(np.arange(1.0, 9.0), (32, 1))
    times = []
    for table in (counts, np.roll(counts, 1, axis=1)):
        FrequencyProfile(counts=table, layer_index=range(32), metadata=METADATA, top_k=2).save(path)
        found = sweep(
            model="mixtral-8x7b", system="h100-cxl-ndp", trace="tiny-mixtral-32l-mini", prompt=4, output=4,
            policy=f"static:profile={path}", axes={"link.bandwidth_gb_per_s": [32, 64]}, metrics=["tpot_mean_s"],
        )  # fmt: skip
        times.append(found["tpot_mean_s"].to_numpy())
    assert (times[0] != times[1]).all()


def test_the_command_line_takes_and_refuses_profiles(tmp_path: Path) -> None:
    counts = np.tile(np.arange(1.0, 9.0), (32, 1))
    FrequencyProfile(counts=counts, layer_index=range(32), metadata=METADATA).save(tmp_path / "p.npz")
    words = ["compare", "--model", "mixtral-8x7b", "--system", "h100-cxl-ndp", "--prompt", "4", "--output", "4"]
    good = run(*words, "--policy", f"static:profile={tmp_path / 'p.npz'}", "--json")
    assert good.code == 0, good.err
    assert "frequency profile of made-up" in good.out
    check_refusal(run(*words, "--policy", "monde", "--trace", tmp_path / "p.npz"), "is a frequency profile")


def test_only_static_knows_profiles() -> None:
    with pytest.raises(PolicyError, match="unknown option 'profile'"):
        plan_run(mixtral(), NDP_SYSTEM, recording(), "context-aware:profile=p.npz")
