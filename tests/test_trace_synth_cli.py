"""`perfmodel trace synth`: what it writes, what it says, and what it refuses."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import check_refusal, run

from perfmodel.cli import trace_synth
from perfmodel.routing import RoutingTrace
from perfmodel.routing.presets import PRESETS
from perfmodel.routing.profile import FrequencyProfile
from perfmodel.routing.statistics import selection_counts
from perfmodel.routing.synthetic import MIXTRAL_SKEW, generate


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small recording with layers 1, 2 and 5 and two labels."""
    made = generate(
        12, [4, 6] * 6, [8, 10] * 6, 3, 4, 2, alpha=4.0, sequence_concentration=20.0, labels=["x", "y"] * 6, seed=1
    )
    path = tmp_path_factory.mktemp("recording") / "small.npz"
    made.map_layers([0, 1, 2], [1, 2, 5]).with_metadata(source="recorded", model="small").save(path)
    return path


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A frequency profile of two layers."""
    table = np.array([[8.0, 4.0, 2.0, 2.0], [1.0, 1.0, 1.0, 5.0]])
    path = tmp_path_factory.mktemp("counts") / "counts.npz"
    FrequencyProfile(table, np.array([3, 4]), {"model": "counted", "source": "from-counts"}).save(path)
    return path


def test_like_a_recording(recording: Path, tmp_path: Path) -> None:
    out = tmp_path / "made.npz"
    answer = run("trace", "synth", "--like", recording, "-o", out, "--seed", 3)
    assert answer.code == 0, answer.err
    assert answer.err == f"wrote {out}\n"
    lines = answer.out.splitlines()
    assert lines[0] == (
        "SYNTHETIC routing of small: 12 sequences, 60 prefill and 108 decode rows, 3 layers, top-2 of 4 experts"
    )
    assert lines[1].startswith("parameters: fitted to 8 of 12 sequences of small (trace ")
    assert any("held-out ones beside generated ones of the same lengths" in line for line in lines)
    assert any(line.startswith("hit rate, own prefill, K = 2 ") for line in lines)
    largest = next(line for line in lines if line.startswith("hit rate, LRU cache, K = 3 ")).split()
    misses = 100 * float(largest[9]) / (float(largest[7]) - 1)
    said = "misses of the largest LRU cache, relative to the recorded: "
    assert lines[-1].startswith(said)
    np.testing.assert_allclose(float(lines[-1].removeprefix(said).removesuffix("%")), misses, rtol=0, atol=2)
    trace, source = RoutingTrace.load(out), RoutingTrace.load(recording)
    assert trace.metadata["source"] == "synthetic"
    assert trace.metadata["model"] == "small"
    assert trace.labels == source.labels
    for name in ("prompt_len", "sequence_offsets", "layer_index"):
        np.testing.assert_array_equal(getattr(trace, name), getattr(source, name))
    held = trace.metadata["fit"]
    assert len(held["held_out"]) == 4
    assert held["good"] == all(check["within"] for check in held["checks"])


def test_like_a_recording_of_other_lengths(recording: Path, tmp_path: Path) -> None:
    out = tmp_path / "made.npz"
    options = ["--sequences", 14, "--prompt", 3, "--output", 5, "--layers", 3, "--experts", 4, "--top-k", 2]
    document = run("trace", "synth", "--like", recording, "-o", out, "--json", *options).document
    trace = RoutingTrace.load(out)
    assert document["content_hash"] == trace.content_hash()
    assert (document["sequences"], document["tokens"], document["prefill_tokens"]) == (14, 14 * 8, 14 * 3)
    assert trace.labels == ("x", "y") * 7
    assert document["metadata"] == trace.metadata
    assert (document["decode_tokens"], document["layers"], document["num_experts"]) == (14 * 5, 3, 4)
    assert document["metadata"]["fit"]["tolerance"] == 0.03
    some = document["metadata"]["fit"]["checks"][0]
    assert some.keys() == {"name", "recorded", "generated", "error", "difference", "within"}
    again = tmp_path / "again.npz"
    assert run("trace", "synth", "--like", recording, "-o", again, *options).code == 0
    assert RoutingTrace.load(again).content_hash() == trace.content_hash()


def test_presets(tmp_path: Path) -> None:
    assert tuple(PRESETS) == trace_synth._PRESETS
    out = tmp_path / "made.npz"
    answer = run("trace", "synth", "--profile", "deepseek-v2-lite", "-o", out, "--sequences", 2, "--output", 4)
    assert answer.code == 0, answer.err
    assert "top-6 of 64 experts" in answer.out
    assert "(measured: " in answer.out
    assert "(published: " in answer.out
    assert "(fitted: " in answer.out
    trace = RoutingTrace.load(out)
    np.testing.assert_array_equal(trace.layer_index, np.arange(1, 27))
    assert trace.metadata["model"] == "deepseek-v2-lite"
    np.testing.assert_array_equal(trace.prompt_len, [128, 128])


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_are_printed_as_set_takes_them(name: str, tmp_path: Path) -> None:
    answer = run(
        "trace", "synth", "--profile", name, "-o", tmp_path / "a.npz", "--sequences", 1, "--prompt", 1, "--output", 1
    )
    assert "_" not in "".join(line for line in answer.out.splitlines() if line.startswith(("parameters", "SYNTHETIC")))
    assert "1 sequence, " in answer.out
    assert "memory:" not in answer.out


def test_a_preset_in_another_shape(tmp_path: Path) -> None:
    out = tmp_path / "made.npz"
    options = [
        "--layers",
        2,
        "--experts",
        16,
        "--top-k",
        3,
        "--sequences",
        1,
        "--prompt",
        0,
        "--output",
        5,
        "--seed",
        9,
    ]
    changed = "stickiness=0,sequence-concentration=inf"
    document = run(
        "trace", "synth", "--profile", "mixtral-8x7b", "-o", out, "--json", "--set", changed, *options
    ).document
    assert document["notes"] == ["the parameters are those of top-2 of 8 experts, used for top-3 of 16"]
    assert document["numbers"][0]["kind"] == "published"
    assert "chosen by the caller: stickiness 0, sequence-concentration inf" in document["metadata"]["parameter_source"]
    skew = MIXTRAL_SKEW._replace(stickiness=0.0, sequence_concentration=math.inf)
    wanted = generate(1, 0, 5, 2, 16, 3, seed=9, **skew._asdict())
    np.testing.assert_array_equal(RoutingTrace.load(out).topk_ids, wanted.topk_ids)


def test_counts_drive_the_skew_of_layers(counts: Path, tmp_path: Path) -> None:
    out = tmp_path / "made.npz"
    options = ["--top-k", 1, "--sequences", 2, "--prompt", 0, "--output", 8000]
    answer = run("trace", "synth", "--profile", counts, "-o", out, *options)
    assert answer.code == 0, answer.err
    assert "counts say nothing of sequences and tokens" in answer.out
    trace = RoutingTrace.load(out)
    np.testing.assert_array_equal(trace.layer_index, [3, 4])
    share = selection_counts(trace, "decode").sum(0) / 16000
    np.testing.assert_allclose(share, [[0.5, 0.25, 0.125, 0.125], [0.125, 0.125, 0.125, 0.625]], rtol=0.1, atol=0)
    assert trace.metadata["model"] == "counted"
    assert "layers' skew from counts of counted" in trace.metadata["parameter_source"]


def test_shares_of_several_picks_come_out(tmp_path: Path) -> None:
    share = np.array([[0.2, 0.2, 0.15, 0.15, 0.1, 0.1, 0.05, 0.05]])
    given, out = tmp_path / "shares.npz", tmp_path / "made.npz"
    metadata = {"model": "counted", "source": "from-counts"}
    FrequencyProfile(share, np.array([0]), metadata, top_k=3, scale="shares").save(given)
    options = ["--sequences", 1, "--prompt", 0, "--output", 8000, "--set", "stickiness=0"]
    assert run("trace", "synth", "--profile", given, "-o", out, *options).code == 0
    found = selection_counts(RoutingTrace.load(out), "decode").sum(0) / 24000
    np.testing.assert_allclose(found, share, rtol=0.1, atol=0)


def ranks(folder: Path) -> Path:
    path = folder / "ranks.npz"
    metadata = {"model": "counted", "source": "from-counts"}
    FrequencyProfile(np.ones((1, 4)), np.array([0]), metadata, top_k=1, scale="ranks").save(path)
    return path


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], ["--like", "--profile"]),
        (["--like", "RECORDING", "--profile", "mixtral-8x7b"], ["not allowed with"]),
        (["--like", "RECORDING", "--layers", "4"], ["--layers: found 4, allowed 3, which the recording has"]),
        (["--like", "RECORDING", "--top-k", "1"], ["--top-k: found 1, allowed 2"]),
        (["--like", "RECORDING", "--set", "alpha=2"], ["--set: found with --like"]),
        (["--like", "RECORDING", "--prompt", "0", "--output", "0"], ["--prompt and --output are both 0"]),
        (["--like", "RECORDING", "--sequences", "8000000", "--output", "100000"], ["too large for memory"]),
        (["--like", "COUNTS"], ["counts.npz", "frequency profile"]),
        (["--like", "nothing"], ["no bundled trace is called 'nothing'"]),
        (["--like", "missing.npz"], ["missing.npz"]),
        (["--profile", "COUNTS"], ["--top-k: not given", "counts.npz"]),
        (["--profile", "COUNTS", "--top-k", "1", "--experts", "5"], ["--experts: found 5, allowed 4"]),
        (["--profile", "COUNTS", "--top-k", "1", "--set", "alpha=2"], ["alpha is found with counts"]),
        (["--profile", "COUNTS", "--top-k", "5"], ["--top-k is 5, expected an integer in 1..4"]),
        (["--profile", "RECORDING"], ["small.npz", "routing trace"]),
        (["--profile", "RANKS"], ["counted", "no shares"]),
        (["--profile", "mixtral"], ["found 'mixtral'", "deepseek-v2-lite", "did you mean mixtral-8x7b?"]),
        (["--profile", "mixtral-8x7b", "--sequences", "0"], ["--sequences is 0"]),
        (["--profile", "mixtral-8x7b", "--prompt", "-1"], ["--prompt is -1"]),
        (["--profile", "mixtral-8x7b", "--seed", "-1"], ["--seed is -1"]),
        (["--profile", "mixtral-8x7b", "--seed", "x"], ["--seed", "invalid int"]),
        (["--profile", "mixtral-8x7b", "--layers", "0"], ["--layers is 0"]),
        (["--profile", "mixtral-8x7b", "--experts", "1"], ["--top-k is 2, expected an integer in 1..1"]),
        (["--profile", "mixtral-8x7b", "--output", "9" * 30], ["too large for memory"]),
        (["--profile", "mixtral-8x7b", "--prompt", "0", "--output", "0"], ["--prompt and --output are both 0"]),
        (["--profile", "mixtral-8x7b", "--set", "sticky=1"], ["found 'sticky=1'", "did you mean stickiness?"]),
        (["--profile", "mixtral-8x7b", "--set", "stickiness"], ["allowed NAME=X"]),
        (["--profile", "mixtral-8x7b", "--set", ""], ["allowed NAME=X"]),
        (["--profile", "mixtral-8x7b", "--set", "stickiness=1,stickiness=2"], ["given twice"]),
        (["--profile", "mixtral-8x7b", "--set", "stickiness=much"], ["'much', expected a number"]),
        (["--profile", "mixtral-8x7b", "--set", "stickiness=nan"], ["--set: stickiness is nan"]),
        (["--profile", "mixtral-8x7b", "--set", "next-layer=2"], ["--set: next-layer is 2.0, expected 0 to 1"]),
        (["--profile", "mixtral-8x7b", "--set", "repeats=-1"], ["--set: repeats is -1.0, expected 0 to 1"]),
        (["--profile", "mixtral-8x7b", "--set", "alpha=0"], ["--set: alpha is 0.0, expected a number > 0"]),
        (["--profile", "mixtral-8x7b", "--layers", "70000"], ["--layers is 70000"]),
        (["--profile", "mixtral-8x7b", "--experts", "70000"], ["--experts is 70000"]),
    ],
)
def test_what_is_refused(
    options: list[str], words: list[str], recording: Path, counts: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    def no_fit(*_: Any, **__: Any) -> None:
        raise AssertionError("bad input is refused before the fit")

    monkeypatch.setattr("perfmodel.routing.fitting.Trials", no_fit)
    files = {"RECORDING": recording, "COUNTS": counts, "RANKS": ranks(tmp_path)}
    out = tmp_path / "made.npz"
    check_refusal(run("trace", "synth", "-o", out, *(files.get(one, one) for one in options)), *words)
    assert not out.exists()


def test_outputs_that_are_refused(recording: Path, tmp_path: Path) -> None:
    options = ["trace", "synth", "--profile", "mixtral-8x7b", "--sequences", "1", "--layers", "1", "--output", "2"]
    check_refusal(run(*options, "-o", tmp_path / "made.txt"), "made.txt", ".npz")
    check_refusal(run(*options), "-o/--out")
    out = tmp_path / "made.npz"
    assert run(*options, "-o", out).code == 0
    first = out.read_bytes()
    check_refusal(run(*options, "-o", out), "made.npz", "--overwrite")
    assert out.read_bytes() == first
    assert run(*options, "-o", out, "--seed", "1", "--overwrite").code == 0
    assert out.read_bytes() != first
    before = recording.read_bytes()
    check_refusal(run("trace", "synth", "--like", recording, "-o", recording, "--overwrite"), "the recording itself")
    assert recording.read_bytes() == before


def test_a_trace_that_is_synthetic_itself_is_no_recording(tmp_path: Path) -> None:
    made = tmp_path / "made.npz"
    generate(8, 2, 2, 1, 4, 1).save(made)
    check_refusal(run("trace", "synth", "--like", made, "-o", tmp_path / "x.npz"), "synthetic, expected a recording")
