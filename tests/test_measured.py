"""Measured runs as data: the form of a row, hostile files, the rule that decides what counts, and the simulators."""

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from numpy.testing import assert_allclose

from perfmodel.errors import SpecError
from perfmodel.evidence.measured import MeasuredRun, counting, load_measured, missing_field
from perfmodel.evidence.simulators import STREAMS, compare_ramulator, compare_scalesim, dram_timings, share_of_peak
from perfmodel.hardware import CpuSpec, GpuSpec, list_specs, load_spec
from perfmodel.model import MoEModel, bundled_models

RUNS = load_measured()
BY_ID = {run.id: run for run in RUNS}

#: A row of its own with everything that the rule asks for.
ROW: dict[str, Any] = {
    "id": "mine-1",
    "source": "me/my-notes",
    "citation": "notebook 3",
    "confidence": "high",
    "model": "mixtral-8x7b",
    "expert_bits": 4.5,
    "other_bits": 4.5,
    "gpu": "rtx-4090",
    "cpu": "ryzen-7950x",
    "link": "pcie-4.0-x16",
    "batch": 1,
    "prompt_tokens": 512,
    "gpu_experts": 0.5,
    "elsewhere": "cpu",
    "decode_tok_per_s": 12.5,
    "prefill_tok_per_s": 300.0,
}


def written(folder: Path, *rows: dict[str, Any]) -> Path:
    lines = []
    for row in rows:
        lines += ["[[run]]", *(f"{key} = {json.dumps(value)}" for key, value in row.items())]
    path = folder / "mine.toml"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def refusal(path: object) -> str:
    with pytest.raises(SpecError) as caught:
        load_measured(path)  # type: ignore[arg-type]
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 2000
    return message


# --- the bundled rows


def test_all_runs_are_there_sorted_and_in_few_words() -> None:
    assert len(RUNS) == len(BY_ID) == 346
    assert [run.id for run in RUNS] == sorted(BY_ID)
    assert all(len(run.note or "") <= 200 for run in RUNS)


def test_enough_rows_count_and_from_many_sources() -> None:
    decode, prefill = counting(RUNS, "decode"), counting(RUNS, "prefill")
    assert len(decode) == 229
    assert len(prefill) == 69
    assert len({run.source for run in decode}) == 16
    # No source hides the others: half the rows are those of two machines that are documented completely.
    assert max(Counter(run.source for run in decode).values()) == 96


def test_the_fields_that_are_missing() -> None:
    def missing(quantity: Any) -> dict[str | None, int]:
        return dict(Counter(missing_field(run, quantity) for run in RUNS))

    assert missing("decode") == {
        None: 229,
        "decode_tok_per_s": 40,
        "excluded_because": 25,
        "expert_bits": 13,
        "gpu_experts": 11,
        "model": 10,
        "gpu": 8,
        "cpu": 3,
        "decode_excluded_because": 3,
        "split": 3,
        "other_bits": 1,
    }
    assert missing("prefill")["prefill_excluded_because"] == 11


def test_rows_excluded_for_a_reason_are_few() -> None:
    else_counting = [run.id for run in RUNS if run.excluded_because and missing_field(plain(run), "decode") is None]
    assert else_counting == [
        "N007", "N008", "N034", "N035", "N301", "N303", "N357", "N359", "N361", "N363", "N365", "N367",
    ]  # fmt: skip


def plain(run: MeasuredRun) -> MeasuredRun:
    return dataclasses.replace(run, excluded_because=None)


def test_counting_rows_name_what_comes_with_the_package() -> None:
    specs = list_specs()
    known = {kind: {one.name for one in specs if one.kind == kind} for kind in ("gpu", "cpu", "link")}
    for run in (*counting(RUNS, "decode"), *counting(RUNS, "prefill")):
        assert run.model in bundled_models(), run.id
        assert run.gpu in known["gpu"], run.id
        assert run.cpu is None or run.cpu in known["cpu"], run.id
        assert run.link is None or run.link in known["link"], run.id
        assert run.engine is not None, run.id


def test_a_row_and_the_spec_it_names_have_as_many_sockets() -> None:
    for run in RUNS:
        if run.cpu is not None and run.sockets is not None:
            spec = load_spec(run.cpu)
            assert isinstance(spec, CpuSpec)
            assert spec.sockets == run.sockets, run.id


def test_what_is_kept_on_the_gpu_fits_there() -> None:
    for run in counting(RUNS, "decode"):
        model, gpu = MoEModel.from_config(str(run.model)), load_spec(str(run.gpu))
        assert isinstance(gpu, GpuSpec)
        assert run.expert_bits is not None
        assert run.gpu_experts is not None
        kept = run.gpu_experts * model.routed_expert_params * run.expert_bits / 8
        assert kept < run.devices * gpu.memory_capacity_gb * 1e9, run.id


def test_the_two_complete_machines() -> None:
    batched = [run for run in RUNS if run.source == "aojsd/GPU_Offloading"]
    assert len(batched) == 96
    for run in batched:
        assert missing_field(run, "decode") is None
        assert run.step_ms is not None
        assert run.loads_per_step is not None
        assert run.prefetches_per_step is not None
        # A cache over all layers cannot fetch more than the experts that a step uses, over 32 layers.
        assert run.distinct_experts is not None
        assert 0 < run.loads_per_step < 32 * run.distinct_experts
        assert (run.prefetch == "none") <= (run.prefetches_per_step == 0)
        assert (run.prefetch == "oracle") <= (run.prefetches_per_step == run.loads_per_step)
    cached = [run for run in RUNS if run.source == "everett6/moe-prefetch" and run.slots_per_layer is not None]
    assert len(cached) == 39
    for run in cached:
        assert_allclose(run.gpu_experts, run.slots_per_layer / 128, rtol=1e-5, atol=0, err_msg=run.id)
        assert run.elsewhere == "cpu"


def test_rows_equal_the_facts_they_come_from(shared: Path) -> None:
    records = json.loads((shared / "facts" / "measured.json").read_text())
    records = {one["id"]: one for one in records if one["record_type"] == "inference"}
    assert records.keys() == {run.id for run in RUNS if "-" not in run.id}
    for name, record in records.items():
        run = BY_ID[name]
        assert run.decode_tok_per_s == record["decode_tok_s"], name
        assert run.step_ms == (record["tpot_ms"] if record["decode_tok_s"] is None else None), name
        if record["prefill_tok_s"] is None:
            assert run.prefill_tok_per_s is None, name
        else:
            assert_allclose(run.prefill_tok_per_s, record["prefill_tok_s"], rtol=1e-6, atol=0, err_msg=name)
        assert run.citation == record["source"], name
        assert run.confidence == record["confidence"], name
        assert record["batch"] in (run.batch, run.prefill_micro_batch), name
        stated = {key for key in ("expert_bits", "gpu_experts") if key not in run.inferred}
        if "expert_bits" in stated:
            assert run.expert_bits == record["bits"], name
        if "gpu_experts" in stated and record["gpu_expert_fraction"] is not None:
            assert_allclose(run.gpu_experts, record["gpu_expert_fraction"], rtol=1e-5, atol=0, err_msg=name)
        # Own words: no note of the record is taken over.
        assert not (run.note and record["notes"] and run.note in record["notes"] and len(run.note) > 40), name


def test_prompts_of_a_run_are_rows_of_their_own(shared: Path) -> None:
    records = {one["id"]: one for one in json.loads((shared / "facts" / "measured.json").read_text())}
    prompts = [run for run in RUNS if "-" in run.id]
    assert len(prompts) == 23
    for run in prompts:
        name, _, tokens = run.id.partition("-")
        derived = records[name]["derived"]
        times = derived.get("prefill_ms_by_prompt_len") or {"2695": derived["prefill_ms_2695_tokens"]}
        assert run.prompt_tokens == int(tokens)
        assert run.prefill_tok_per_s is not None
        assert_allclose(run.prefill_tok_per_s, 1e3 * int(tokens) / times[tokens], rtol=1e-5, atol=0)


# --- shapes


@pytest.mark.parametrize(
    ("shape", "folder"),
    [
        ("qwen3-30b-a3b", "Qwen__Qwen3-30B-A3B"),
        ("qwen3-30b-a3b", "Qwen__Qwen3-VL-30B-A3B-Instruct"),
        ("gemma-4-26b-a4b", "google__gemma-4-26B-A4B"),
        ("gpt-oss-20b", "openai__gpt-oss-20b"),
        ("gpt-oss-120b", "openai__gpt-oss-120b"),
        ("ernie-4.5-21b-a3b", "baidu__ERNIE-4.5-21B-A3B-PT"),
        ("qwen3.5-122b-a10b", "Qwen__Qwen3.5-122B-A10B"),
        ("qwen3.5-35b-a3b", "Qwen__Qwen3.5-35B-A3B"),
        ("qwen3.5-35b-a3b", "nvidia__Qwen3.6-35B-A3B-NVFP4"),
        ("qwen3-next-80b-a3b", "Qwen__Qwen3-Next-80B-A3B-Instruct"),
        ("deepseek-v3", "deepseek-ai__DeepSeek-V3"),
        ("deepseek-v3", "deepseek-ai__DeepSeek-R1"),
        ("deepseek-v2", "deepseek-ai__DeepSeek-V2"),
        ("deepseek-v2-lite", "deepseek-ai__DeepSeek-V2-Lite"),
        ("deepseek-v4-flash", "deepseek-ai__DeepSeek-V4-Flash"),
        ("kimi-k2", "moonshotai__Kimi-K2-Instruct"),
        ("glm-4.5-air", "zai-org__GLM-4.5-Air"),
        ("llama-4-scout", "meta-llama__Llama-4-Scout-17B-16E-Instruct"),
        ("nemotron-3-nano-30b-a3b", "nvidia__NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"),
        ("nemotron-3-nano-30b-a3b", "nvidia__NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4"),
    ],
)
def test_shapes_equal_the_published_configs(shape: str, folder: str, shared: Path) -> None:
    ours, published = MoEModel.from_config(shape), MoEModel.from_config(shared / "configs" / folder)
    assert ours.params_by_class() == published.params_by_class()
    assert ours.active_params == published.active_params
    assert ours.attention == published.attention
    assert (ours.num_experts, ours.top_k) == (published.num_experts, published.top_k)


@pytest.mark.parametrize(
    ("shape", "total", "active"),
    [("glm-4.7-flash", 30, None), ("kimi-linear-48b-a3b", 48, 3), ("granite-4.0-h-small", 32, 9)],
)
def test_recalled_shapes_have_the_size_of_their_names(shape: str, total: float, active: float | None) -> None:
    model = MoEModel.from_config(shape)
    assert_allclose(model.total_params / 1e9, total, rtol=0.06, atol=0)
    if active is not None:
        assert_allclose(model.active_params_without_input_embedding / 1e9, active, rtol=0.06, atol=0)
    path = Path(__file__).parent.parent / "perfmodel" / "shapes" / f"{shape}.json"
    assert "recalled, not re-read" in json.loads(path.read_text())["source"]


@pytest.mark.parametrize(
    ("shape", "total", "active"),
    [
        ("lfm2-8b-a1b", 8.34, None),
        ("lfm2.5-8b-a1b", 8.47, None),
        ("lfm2-24b-a2b", 23.84, 2.3),
        ("trinity-mini", 26.1, 3.05),
    ],
)
def test_quoted_shapes_have_the_published_size(shape: str, total: float, active: float | None) -> None:
    model = MoEModel.from_config(shape)
    assert_allclose(model.total_params / 1e9, total, rtol=1e-3, atol=0)
    if active is not None:
        assert_allclose(model.active_params_without_input_embedding / 1e9, active, rtol=0.02, atol=0)
    path = Path(__file__).parent.parent / "perfmodel" / "shapes" / f"{shape}.json"
    assert "not re-read from the publisher" in json.loads(path.read_text())["source"]


# --- files of one's own


def test_a_file_of_ones_own_names_specs_by_path(tmp_path: Path) -> None:
    path = written(tmp_path, ROW | {"gpu": "parts/mine.toml", "model": "config.json", "inferred": ["gpu_experts"]})
    (run,) = load_measured(path)
    assert run.gpu == str(tmp_path / "parts/mine.toml")
    assert run.model == str(tmp_path / "config.json")
    assert (run.cpu, run.inferred, run.devices, run.batch_of) == ("ryzen-7950x", ("gpu_experts",), 1, "sequences")
    assert missing_field(run, "decode") is missing_field(run, "prefill") is None
    assert load_measured(str(path)) == (run,)


@pytest.mark.parametrize(
    ("changes", "decode", "prefill"),
    [
        ({}, None, None),
        ({"model": None}, "model", "model"),
        ({"model": "mixtral-9x9b"}, "model", "model"),
        ({"expert_bits": None}, "expert_bits", "expert_bits"),
        ({"other_bits": None}, "other_bits", "other_bits"),
        ({"gpu": None}, "gpu", "gpu"),
        ({"devices": 2}, "split", "split"),
        ({"devices": 2, "split": "layer"}, None, None),
        ({"batch": None}, "batch", None),
        ({"prompt_tokens": None}, None, "prompt_tokens"),
        ({"gpu_experts": None}, "gpu_experts", "gpu_experts"),
        ({"elsewhere": None}, "elsewhere", "elsewhere"),
        ({"cpu": None}, "cpu", "cpu"),
        ({"elsewhere": "fetch", "cpu": None}, None, None),
        ({"elsewhere": "fetch", "link": None}, "link", "link"),
        ({"gpu_experts": 1.0, "elsewhere": None, "cpu": None, "link": None}, None, None),
        ({"decode_tok_per_s": None}, "decode_tok_per_s", None),
        ({"decode_tok_per_s": None, "step_ms": 80.0}, None, None),
        ({"prefill_tok_per_s": None}, None, "prefill_tok_per_s"),
        ({"excluded_because": "a fan had failed"}, "excluded_because", "excluded_because"),
        ({"prefill_excluded_because": "a mixture of lengths"}, None, "prefill_excluded_because"),
    ],
    ids=str,
)
def test_the_rule(changes: dict[str, Any], decode: str | None, prefill: str | None) -> None:
    run = dataclasses.replace(MeasuredRun(**ROW), **changes)
    assert missing_field(run, "decode") == decode
    assert missing_field(run, "prefill") == prefill
    assert counting([run], "decode") == ((run,) if decode is None else ())


def test_a_quantity_that_there_is_not() -> None:
    with pytest.raises(SpecError, match="energy"):
        missing_field(RUNS[0], "energy")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"confidence": "sure"}, ["confidence", "'sure'", "high, medium, low"]),
        ({"confidence": 3}, ["confidence", "3", "high, medium, low"]),
        ({"expert_bit": 4}, ["unknown key 'expert_bit'", "did you mean 'expert_bits'"]),
        ({"expert_bits": 0}, ["expert_bits", "0", "0.5 to 64"]),
        ({"expert_bits": "4"}, ["expert_bits", "'4'", "a number"]),
        ({"expert_bits": True}, ["expert_bits", "True"]),
        ({"expert_bits": 10**400}, ["expert_bits", "an integer of"]),
        ({"devices": 1.5}, ["devices", "1.5", "a whole number"]),
        ({"devices": 0}, ["devices", "allowed"]),
        ({"batch": -1}, ["batch", "-1"]),
        ({"gpu_experts": 1.2}, ["gpu_experts", "1.2", "from 0 to 1"]),
        ({"gpu_experts": 1}, ["elsewhere", "gpu_experts is 1"]),
        ({"elsewhere": "disk"}, ["elsewhere", "'disk'", "cpu, fetch"]),
        ({"decode_tok_per_s": 0}, ["decode_tok_per_s", "0"]),
        ({"step_ms": 80}, ["decode_tok_per_s", "step_ms", "one of them"]),
        ({"split": "expert"}, ["split", "tensor, layer"]),
        ({"prefetches_per_step": 2}, ["prefetches_per_step", "2", "at most loads_per_step"]),
        ({"id": ""}, ["id", "allowed"]),
        ({"id": "a" * 1000}, ["id", "characters"]),
        ({"source": "two\nlines"}, ["source", "one line"]),
        ({"note": ["a"]}, ["note", "a list of 1 entries"]),
        ({"inferred": "gpu"}, ["inferred", "'gpu'", "a list"]),
        ({"inferred": ["gpus"]}, ["inferred", "'gpus'", "did you mean 'gpu'"]),
        ({"inferred": ["split"]}, ["inferred", "'split'", "keys that the row has"]),
        ({"inferred": [3]}, ["inferred", "3"]),
        ({"gpu": "\u0000/x.toml"}, ["gpu", "one line"]),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_a_bad_row_is_refused_in_one_line(changes: dict[str, Any], said: list[str], tmp_path: Path) -> None:
    message = refusal(written(tmp_path, ROW | changes))
    assert all(part in message for part in ("mine.toml: run 1", *said)), message


@pytest.mark.parametrize("key", ["id", "source", "citation", "confidence"])
def test_a_row_says_where_it_comes_from(key: str, tmp_path: Path) -> None:
    row = {other: value for other, value in ROW.items() if other != key}
    assert f"key '{key}' is missing" in refusal(written(tmp_path, row))


@pytest.mark.parametrize(
    ("drop", "add", "said"),
    [
        ("cpu", {"sockets": 2}, ["sockets", "'cpu'"]),
        ("gpu", {"split": "layer"}, ["split", "'gpu'"]),
        ("prefill_tok_per_s", {"prefill_micro_batch": 512}, ["prefill_micro_batch", "'prefill_tok_per_s'"]),
    ],
)
def test_a_key_that_needs_another(drop: str, add: dict[str, Any], said: list[str], tmp_path: Path) -> None:
    row = {key: value for key, value in ROW.items() if key != drop} | add
    message = refusal(written(tmp_path, row))
    assert all(part in message for part in said)


def test_an_id_comes_once(tmp_path: Path) -> None:
    message = refusal(written(tmp_path, ROW, ROW | {"id": "other"}, ROW))
    assert "run 3" in message
    assert "'mine-1' for the second time" in message


def _write(content: bytes) -> Callable[[Path], object]:
    def write(folder: Path) -> Path:
        path = folder / "mine.toml"
        path.write_bytes(content)
        return path

    return write


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (_write(b""), "no run"),
        (_write(b"run = 3"), "key 'run' is 3"),
        (_write(b"run = []"), "one or more"),
        (_write(b"run = [1]"), "run 1: found 1"),
        (_write(b"[run]\nid = 'a'"), "a table of 1 entries"),
        (_write(b"rows = 1\n"), "unknown key 'rows'"),
        (_write(b"[[run]]\nid = 1979-05-27\n"), "is missing"),
        (_write(b"[[run]"), "not valid TOML"),
        (_write(b"\xff\xfe"), "not UTF-8"),
        (_write(b'[[run]]\n"a\\u0000b" = 1\n'), "unknown key"),
        (_write(b"x = " + b"[" * 5000), "mine.toml"),
        (_write(b"#" * (2 << 20)), "larger than"),
        (_write(b"[[run]]\nid='a'\nsource='a'\ncitation='a'\nconfidence='low'\nbatch=nan\n"), "key 'batch' is nan"),
        (_write(b"[[run]]\nid='a'\nsource='a'\ncitation='a'\nconfidence='low'\nbatch=inf\n"), "key 'batch' is inf"),
        (lambda folder: folder, "not a regular file"),
        (lambda folder: folder / "none.toml", "does not exist"),
        (lambda folder: "a\0b", "a\\x00b"),
        (lambda folder: 3, "found 3"),
    ],
)
def test_hostile_files(make: Callable[[Path], object], said: str, tmp_path: Path) -> None:
    assert said in refusal(make(tmp_path))


# --- simulators


def test_every_scalesim_run_is_exact() -> None:
    rows = compare_scalesim()
    assert len(rows) == 858
    assert all(row.error == 0 for row in rows)
    assert {row.kind for row in rows} == {"os", "ws", "is"}


def test_ramulator_streams_are_met_within_three_percent() -> None:
    rows = compare_ramulator()
    streams = [row for row in rows if row.kind in STREAMS]
    assert (len(rows), len(streams)) == (156, 108)
    assert 0 < max(abs(row.error) for row in streams) < 0.03
    assert max(abs(row.error) for row in rows) < 0.035
    assert all(math.isfinite(row.error) for row in rows)


def test_a_form_that_there_is_not() -> None:
    with pytest.raises(SpecError, match="diagonal"):
        share_of_peak("diagonal", dram_timings()["DDR5-4800"], 32, True)
