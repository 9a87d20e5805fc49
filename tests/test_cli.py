"""The command line: what each command prints and writes, and that it agrees with the library."""

import argparse
import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import Answer, check_refusal, run

import perfmodel
from perfmodel.cli import build_parser
from perfmodel.errors import SpecError
from perfmodel.evidence.uncertainty import interval_for
from perfmodel.hardware import NdpSpec, Source, System, list_specs, load_spec, load_system, write_overlay
from perfmodel.model import MoEModel
from perfmodel.point import dram_efficiency, ndp_bytes_per_s
from perfmodel.policies import POLICIES
from perfmodel.reports import HIT_RATE_LABELS
from perfmodel.routing import RoutingTrace
from perfmodel.run import PARTS, evaluate

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = (
    (),
    ("reproduce",),
    ("compare",),
    ("policies",),
    ("specs",),
    ("specs", "list"),
    ("specs", "show"),
    ("specs", "validate"),
    ("specs", "schema"),
)
SMALL = ("--prompt", "8", "--output", "4")


def process(
    *arguments: str, cwd: Path, code: str | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """One command, or one piece of code, in a process of its own, with warnings as errors."""
    start = ["-m", "perfmodel"] if code is None else ["-c", code]
    folder = Path(perfmodel.__file__).resolve().parent.parent
    return subprocess.run(
        [sys.executable, "-W", "error", *start, *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(folder), "PYTHONIOENCODING": "utf-8", **environment},
        check=False,
    )


# Help, version, and what they load


def commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """A parser and those of its commands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from commands(inner)


def test_an_option_is_repeatable_or_refused_when_given_twice() -> None:
    seen = 0
    for parser in commands(build_parser()):
        for action in parser._actions:
            if not action.option_strings or isinstance(action, argparse._HelpAction | argparse._VersionAction):
                continue
            option = action.option_strings[-1]
            value = [] if action.nargs == 0 else [next(iter(action.choices or ("1",)))]
            words = parser.prog.split()[1:]
            answer = run(*words, option, *value, action.option_strings[0], *value)
            if isinstance(action, argparse._AppendAction):
                assert "given twice" not in answer.err.replace("--policy", ""), (parser.prog, option)
            else:
                check_refusal(answer, action.option_strings[0], "given twice, allowed: once")
                seen += 1
    assert seen > 60


def test_loss_tables_by_both_names() -> None:
    arguments = ("compare", "--model", "mixtral-8x7b", "--policy", "monde")
    for option in ("--loss", "--losses"):
        check_refusal(run(*arguments, option, "/nowhere.npz"), "/nowhere.npz")


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_of_every_command(command: tuple[str, ...]) -> None:
    answer = run(*command, "--help")
    assert answer.code == 0
    assert answer.err == ""
    assert answer.out.startswith(f"usage: {' '.join(('perfmodel', *command))} ")
    assert all(name in answer.out for name in {"reproduce", "compare", "policies", "specs"} if not command)


def test_help_loads_nothing_heavy(tmp_path: Path) -> None:
    done = process(
        cwd=tmp_path,
        code=(
            "import sys\n"
            "from perfmodel.cli import main\n"
            f"for command in {COMMANDS!r}:\n"
            "    try:\n"
            "        main([*command, '--help'])\n"
            "    except SystemExit as stop:\n"
            "        assert stop.code == 0\n"
            "heavy = {'numba', 'pydantic', 'matplotlib', 'scipy', 'numpy', 'llvmlite'}\n"
            "print('loaded:', sorted(heavy & set(sys.modules)))\n"
        ),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded: []"


def test_mistakes_load_nothing_heavy_either(tmp_path: Path) -> None:
    done = process(
        cwd=tmp_path,
        code=(
            "import sys\n"
            "from perfmodel.cli import main\n"
            "for command in (['compare'], ['no-such'], ['compare', '--model', 'x', '--prompt', 'x']):\n"
            "    try:\n"
            "        main(command)\n"
            "    except SystemExit as stop:\n"
            "        assert stop.code == 2\n"
            "print('loaded:', sorted({'numba', 'pydantic', 'matplotlib', 'scipy'} & set(sys.modules)))\n"
        ),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "loaded: []\n"
    assert done.stderr.count("\n") == 3


def test_specs_are_checked_without_a_compiler(tmp_path: Path) -> None:
    done = process(
        cwd=tmp_path,
        code=(
            "import sys\n"
            "from perfmodel.cli import main\n"
            "assert main(['specs', 'validate', 'h100-cxl2-ndp']) == 0\n"
            "assert main(['specs', 'schema', 'gpu']) == 0\n"
            "print('loaded:', sorted({'numba', 'matplotlib', 'scipy'} & set(sys.modules)))\n"
        ),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded: []"


def test_version(tmp_path: Path) -> None:
    assert run("--version") == (0, f"perfmodel {perfmodel.__version__}\n", "")
    done = process("--version", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"perfmodel {perfmodel.__version__}\n", "")


# Policies


def test_policies_are_listed_with_their_options() -> None:
    text, data = run("policies"), run("policies", "--json").document
    assert text.code == 0
    assert text.err == ""
    assert [entry["name"] for entry in data] == list(POLICIES)
    for entry in data:
        assert f"{entry['name']}: " in text.out
        assert entry["summary"] in text.out
        assert isinstance(entry["needs_ndp"], bool)
        for option in entry["options"]:
            assert set(option) == {"name", "default", "allowed", "meaning"}
            assert option["allowed"]
            assert option["meaning"] in text.out


# Specs


def test_specs_list() -> None:
    text, data = run("specs", "list"), run("specs", "list", "--json").document
    assert text.code == 0
    entries = list_specs()
    assert data == [{"kind": e.kind, "name": e.name, "description": e.description} for e in entries]
    assert len(entries) >= 25
    for entry in entries:
        line = next(line for line in text.out.splitlines() if line.split()[:2] == [entry.kind, entry.name])
        assert line.endswith(entry.description)


@pytest.mark.parametrize(
    "name", ["h100-sxm", "cxl-2.0-x16", "monde-ndp", "ryzen-9950x", "lpddr5-6400", "h100-cxl2-ndp"]
)
def test_specs_show_every_number_with_its_source(name: str) -> None:
    text, data = run("specs", "show", name), run("specs", "show", name, "--json").document
    assert text.code == 0
    assert data["name"] == name
    constants = load_spec(name).constants()
    assert data["constants"] == [json.loads(json.dumps(c._asdict())) for c in constants]
    lines = text.out.splitlines()
    for constant in constants:
        cells = next(line.split() for line in lines if line.startswith(f"{constant.key} "))
        assert float(cells[1]) == pytest.approx(constant.value, rel=1e-5)
        assert cells[2:4] == [constant.unit, constant.source]
        assert f"{cells[-1]} {constant.citation}" in lines


@pytest.mark.parametrize("name", ["cxl-2.0-x16", "monde-ndp", "h100-sxm", "h100-cxl2-ndp", "rtx4090-pcie4"])
def test_specs_show_every_choice_below_the_numbers(name: str) -> None:
    text, data = run("specs", "show", name), run("specs", "show", name, "--json").document
    choices = load_spec(name).choices()
    assert data["choices"] == [dict(c._asdict()) for c in choices]
    lines = text.out.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith("choice ")), len(lines))
    assert (start < len(lines)) is bool(choices)
    assert any(line.startswith("key ") for line in lines[:start])
    for choice in choices:
        cells = next(line.split() for line in lines[start:] if line.startswith(f"{choice.key} "))
        assert cells[1] == choice.value
        assert cells[2:3] == ([choice.source] if choice.source else [])
        if choice.citation:
            assert f"{cells[-1]} {choice.citation}" in lines


@pytest.mark.parametrize("name", ["monde-ndp", "monde-ndp-interleaved", "h100-cxl2-ndp"])
def test_specs_show_the_derived_dram_rate(name: str) -> None:
    text, data = run("specs", "show", name), run("specs", "show", name, "--json").document
    spec = load_spec(name)
    ndp = spec.ndp if isinstance(spec, System) else spec
    assert isinstance(ndp, NdpSpec)
    derived = data["derived"]
    assert derived["dram_efficiency"] == dram_efficiency(ndp)
    system = load_system("h100-cxl2-ndp")._copy(ndp=ndp)
    np.testing.assert_allclose(
        derived["effective_dram_bandwidth_gb_per_s"] * 1e9, ndp_bytes_per_s(system), rtol=1e-12, atol=0
    )
    (line,) = [line for line in text.out.splitlines() if line.startswith("derived from ")]
    assert f"lpddr5-6400 and mapping {ndp.mapping}" in line
    shown = [float(value) for value in re.findall(r"(?:efficiency|rate) ([\d.]+)", line)]
    expected = (derived["dram_efficiency"], derived["effective_dram_bandwidth_gb_per_s"])
    np.testing.assert_allclose(shown, expected, rtol=1e-3, atol=0)


def test_specs_show_no_derived_rate_where_none_is(tmp_path: Path) -> None:
    for name in ("h100-sxm", "rtx4090-pcie4"):
        assert run("specs", "show", name, "--json").document["derived"] is None
        assert "derived from" not in run("specs", "show", name).out
    path = tmp_path / "given.toml"
    source = Source(source="calibrated", citation="a fit")
    write_overlay(path, "h100-cxl2-ndp", {"ndp.dram_efficiency": 0.4}, {"ndp.dram_efficiency": source})
    assert run("specs", "show", path, "--json").document["derived"] is None
    # A combination without a known rate is shown all the same, and said to have none.
    values = {"ndp.dram": "hbm3-6400", "ndp.mapping": "bank-group-limited"}
    path = tmp_path / "unknown.toml"
    write_overlay(path, "h100-cxl2-ndp", values, dict.fromkeys(values, source))
    assert "pseudo-channel" in run("specs", "show", path, "--json").document["derived"]["problem"]
    assert "no DRAM rate follows from hbm3-6400 and mapping bank-group-limited" in run("specs", "show", path).out


def test_specs_validate_every_bundled_file() -> None:
    paths = [entry.path for entry in list_specs()]
    answer = run("specs", "validate", *paths)
    assert answer.code == 0
    assert answer.err == ""
    assert answer.out.splitlines() == [f"{e.path}: ok ({e.kind} {e.name})" for e in list_specs()]


def test_specs_validate_names_each_bad_file_and_checks_the_others(tmp_path: Path) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_text('kind = "gpu"\n', encoding="utf-8")
    answer = run("specs", "validate", "h100-sxm", bad, tmp_path / "none.toml", "monde-ndp")
    assert answer.code == 2
    assert answer.out.splitlines() == ["h100-sxm: ok (gpu h100-sxm)", "monde-ndp: ok (ndp monde-ndp)"]
    lines = answer.err.splitlines()
    assert len(lines) == 2
    assert str(bad) in lines[0]
    assert "none.toml" in lines[1]


@pytest.mark.parametrize("kind", ["gpu", "link", "ndp", "cpu", "host", "engine", "dram", "system"])
def test_specs_schema(kind: str) -> None:
    schema = run("specs", "schema", kind).document
    assert schema["title"] == f"perfmodel {kind} spec"
    assert "kind" in schema["required"]
    keys = set(schema["properties"])
    entry = next(entry for entry in list_specs() if entry.kind == kind)
    used = {
        line.partition("=")[0].strip()
        for line in entry.path.read_text("utf-8").split("\n[")[0].splitlines()
        if "=" in line
    }
    assert used <= keys


# Compare


def test_compare_agrees_with_the_library() -> None:
    policies = ("monde", "hobbit", "context-aware:mean_bits=3", "static:mean_bits=2")
    options = [word for policy in policies for word in ("--policy", policy)]
    document = run("compare", "--model", "mixtral-8x7b", *options, *SMALL, "--json").document
    trace = RoutingTrace.load("tiny-mixtral-32l-mini")
    model = MoEModel.from_config("mixtral-8x7b")
    assert document["trace_hash"] == trace.content_hash()
    assert document["trace_source"] == "recorded"
    assert (document["model"], document["system"]) == ("mixtral-8x7b", "h100-cxl2-ndp")
    assert document["system_hash"] == load_system("h100-cxl2-ndp").content_hash()
    assert document["perfmodel"] == perfmodel.__version__
    for policy, found in zip(policies, document["evaluations"], strict=True):
        one = evaluate(model, "h100-cxl2-ndp", trace, policy, prompt=8, output=4)
        assert found.pop("interval") == interval_for(one, load_system("h100-cxl2-ndp")).to_dict(one)
        assert found == json.loads(json.dumps(one.to_dict()))
        np.testing.assert_allclose(
            sum(found["breakdown_s"][part] for part in PARTS), found["tpot_mean_s"], rtol=1e-12, atol=0
        )
        np.testing.assert_allclose(found["decode_tok_per_s"] * found["tpot_mean_s"], 1, rtol=1e-12, atol=0)
        whole = found["ttft_s"] + found["migration_s"] + found["decode_s"]
        np.testing.assert_allclose(found["end_to_end_s"], whole, rtol=1e-12, atol=0)
        assert found["bandwidth_floor_s"] <= found["tpot_mean_s"]
        assert found["tpot_p50_s"] <= found["tpot_p95_s"] <= found["tpot_p99_s"] <= found["tpot_max_s"]


def test_the_first_policy_is_the_baseline() -> None:
    for first, second in (("monde", "context-aware:mean_bits=2"), ("context-aware:mean_bits=2", "monde")):
        document = run(
            "compare", "--model", "mixtral-8x7b", "--policy", first, "--policy", second, *SMALL, "--json"
        ).document
        base, other = document["evaluations"]
        assert base["policy"].startswith(first.partition(":")[0])
        assert document["baseline"] == base["policy"]
        one, two = document["speedups"]
        assert (one["decode"], one["end_to_end"], one["time_to_first_token"]) == (1, 1, 1)
        assert two["policy"] == other["policy"]
        for key, time in (
            ("decode", "tpot_mean_s"),
            ("end_to_end", "end_to_end_s"),
            ("time_to_first_token", "ttft_s"),
        ):
            np.testing.assert_allclose(two[key], base[time] / other[time], rtol=1e-12, atol=0)
        assert (two["decode"] > 1) is (first == "monde")


def test_compare_by_default_sets_the_published_systems_side_by_side() -> None:
    document = run("compare", "--model", "mixtral-8x7b", "--json").document
    names = [one["policy"].partition(":")[0] for one in document["evaluations"]]
    assert names == ["monde", "hobbit", "context-aware", "context-aware"]
    rates = [one["decode_tok_per_s"] for one in document["evaluations"]]
    assert rates[1] < rates[0] < rates[2] < rates[3]


def test_compare_by_default_leaves_out_what_the_system_cannot_run() -> None:
    answer = run("compare", "--model", "mixtral-8x7b", "--system", "rtx4090-pcie4", *SMALL, "--json")
    assert [one["policy"].partition(":")[0] for one in answer.document["evaluations"]] == ["hobbit"]
    assert "rtx4090-pcie4 has no near-data device; policies by default: hobbit" in answer.err
    asked = run("compare", "--model", "mixtral-8x7b", "--system", "rtx4090-pcie4", "--policy", "monde", *SMALL)
    check_refusal(asked, "monde", "near-data")


@pytest.mark.parametrize(
    "arguments",
    [
        ("compare", "--mod", "mixtral-8x7b"),
        ("compare", "--model", "mixtral-8x7b", "--pol", "hobbit"),
        ("policies", "--js"),
        ("specs", "list", "--js"),
        ("--vers",),
    ],
    ids=" ".join,
)
def test_options_are_written_in_full(arguments: tuple[str, ...]) -> None:
    check_refusal(run(*arguments), "--help")


def test_compare_prints_units_notes_and_hit_rates() -> None:
    answer = run("compare", "--model", "mixtral-8x7b", *SMALL)
    document = run("compare", "--model", "mixtral-8x7b", *SMALL, "--json").document
    assert answer.code == 0
    assert answer.err == ""
    lines = answer.out.splitlines()
    assert "mixtral-8x7b on h100-cxl2-ndp" in lines[0]
    assert "(recorded)" in lines[0]
    for number, one in enumerate(document["evaluations"], 1):
        assert f"[{number}] {one['policy']}" in lines
        assert all(f"- {note}" in lines for note in one["notes"])
    line = next(line for line in lines if line.startswith("decode rate")).split()
    assert line[2] == "tok/s"
    shown = [float(cell) for cell in line[3:]]
    np.testing.assert_allclose(shown, [e["decode_tok_per_s"] for e in document["evaluations"]], rtol=1e-3, atol=0)
    gains = next(line for line in lines if line.startswith("decode speed-up over [1]")).split()[-4:]
    np.testing.assert_allclose(
        [float(cell) for cell in gains], [gain["decode"] for gain in document["speedups"]], rtol=1e-3, atol=0
    )
    for label in HIT_RATE_LABELS.values():
        assert any(line.startswith(f"hit rate: {label}") for line in lines)
    assert any("weakest source" in line for line in lines)


def test_another_number_of_layers_is_cycled_only_when_asked() -> None:
    check_refusal(run("compare", "--model", "mixtral-8x22b", *SMALL), "32", "56", "--layers cycle")
    for more in ((), ("--json",)):
        answer = run("compare", "--model", "mixtral-8x22b", "--layers", "cycle", *SMALL, *more)
        assert answer.code == 0
        assert "model layers 0-55 replay recorded layers 0-31 cycled" in answer.out


def test_check_repeats_every_sum_by_the_plain_loop() -> None:
    command = ("compare", "--model", "mixtral-8x7b", "--prompt", "4", "--output", "3", "--check")
    document = run(*command, "--json").document
    assert len(document["check"]) == 4
    assert max(document["check"]) < 1e-9
    text = run(*command)
    assert text.code == 0
    line = next(line for line in text.out.splitlines() if line.startswith("largest difference from the per-pick loop"))
    shown = [float(cell) for cell in line.split()[-4:]]
    assert max(shown) < 1e-9
    assert "per-pick loop" not in run(*command[:-1]).out


def test_a_loss_table_of_ones_own_is_used(tmp_path: Path) -> None:
    losses = np.tile(np.array([8.0, 4.0, 2.0, 1.0]), (32, 8, 1))
    # The last expert of every layer suffers most from few bits, so the search must keep it at four.
    losses[:, 7] *= 1e6
    path = tmp_path / "own.npz"
    np.savez(path, losses=losses)
    command = ("compare", "--model", "mixtral-8x7b", "--policy", "context-aware:mean_bits=2", *SMALL, "--json")
    bundled, own = run(*command).document, run(*command, "--loss", path).document
    assert any("losses: own (origin not stated)" in note for note in own["evaluations"][0]["notes"])
    assert own["evaluations"][0]["bytes_per_token"] != bundled["evaluations"][0]["bytes_per_token"]
    named = run(*command, "--loss", "tiny-mixtral-32l-losses").document
    assert named == bundled


def test_a_loss_table_of_other_experts_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.npz"
    np.savez(path, losses=np.ones((32, 16, 4)))
    check_refusal(
        run("compare", "--model", "mixtral-8x7b", "--policy", "context-aware", *SMALL, "--loss", path), "16", "8"
    )


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_compare_draws(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / "new" / f"figure.{suffix}"
    answer = run("compare", "--model", "mixtral-8x7b", *SMALL, "--json", "--plot", path)
    assert len(answer.document["evaluations"]) == 4  # and standard output is still one document
    assert answer.err == f"wrote {path}\n"
    starts = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF-"}
    assert path.read_bytes().startswith(starts[suffix])
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_a_system_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "faster.toml"
    path.write_text(
        'kind = "system"\nname = "faster"\ndescription = "twice the link"\nbase = "h100-cxl2-ndp"\n'
        '[overrides]\n"link.bandwidth_gb_per_s" = 118.58\n[override_sources]\n'
        '"link.bandwidth_gb_per_s" = { source = "assumed", citation = "what if" }\n',
        encoding="utf-8",
    )
    command = ("compare", "--model", "mixtral-8x7b", "--policy", "hobbit", *SMALL, "--json")
    plain, faster = run(*command).document, run(*command, "--system", path).document
    assert faster["system"] == "faster"
    assert faster["system_hash"] != plain["system_hash"]
    links = [document["evaluations"][0]["breakdown_s"]["link"] for document in (plain, faster)]
    np.testing.assert_allclose(links[0] / links[1], 2, rtol=0.02, atol=0)


# Compare on third-party models and recordings


def test_deepseek_v2_lite(shared: Path) -> None:
    files = (
        "--model", shared / "configs" / "deepseek-ai__DeepSeek-V2-Lite" / "config.json",
        "--trace", shared / "traces" / "deepseek-v2-lite" / "esft_law.npz",
    )  # fmt: skip
    document = run("compare", *files, "--json").document
    assert len(document["evaluations"]) == 4
    rates = [one["decode_tok_per_s"] for one in document["evaluations"]]
    assert rates[1] < rates[0] < rates[2] <= rates[3]
    for one in document["evaluations"]:
        assert one["ttft_s"] > 0
        assert one["end_to_end_s"] > one["decode_s"] > 0
        assert one["breakdown_s"]["dense"] > 0
    text = run("compare", *files)
    assert text.code == 0
    assert "DeepSeek-V2-Lite" in text.out
    checked = run("compare", *files, "--prompt", "3", "--output", "2", "--check", "--json").document
    assert max(checked["check"]) < 1e-9


def test_a_recording_without_prefill_prices_what_it_can(shared: Path, tmp_path: Path) -> None:
    files = (
        "--model", shared / "configs" / "openai__gpt-oss-20b" / "config.json",
        "--trace", shared / "traces" / "gpt-oss-20b" / "gptoss20b_decode.npz",
    )  # fmt: skip
    for policy in ("context-aware", "context-aware:mean_bits=2,gpu_experts=4"):
        check_refusal(run("compare", *files, "--policy", policy), "context-aware", "no prefill", "static")
    policies = ("--policy", "monde", "--policy", "static", "--policy", "hobbit")
    for length in ((), ("--prompt", "64", "--output", "16")):
        document = run("compare", *files, *policies, *length, "--json").document
        assert [one["policy"].partition(":")[0] for one in document["evaluations"]] == ["monde", "static", "hobbit"]
        for one, gain in zip(document["evaluations"], document["speedups"], strict=True):
            assert one["ttft_s"] is None
            assert one["end_to_end_s"] is None
            assert gain["end_to_end"] is None
            assert gain["time_to_first_token"] is None
            assert one["decode_tok_per_s"] > 0
            assert any("no recorded prompt" in note for note in one["notes"])
    text = run("compare", *files, *policies, "--plot", tmp_path / "figure.png")
    assert text.code == 0
    first = next(line for line in text.out.splitlines() if line.startswith("time to first token"))
    assert first.split()[-3:] == ["-", "-", "-"]


def test_a_recording_of_another_model_is_refused(shared: Path) -> None:
    trace = shared / "traces" / "deepseek-v2-lite" / "esft_law.npz"
    check_refusal(run("compare", "--model", "mixtral-8x7b", "--trace", trace), "6 picks", "2")


# Real processes


def test_a_real_process_compares(tmp_path: Path) -> None:
    done = process("compare", "--model", "mixtral-8x7b", *SMALL, "--json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == run("compare", "--model", "mixtral-8x7b", *SMALL, "--json").out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("backend", ["module://matplotlib_inline.backend_inline", "bogus"])
def test_figures_need_no_backend_of_the_shell(tmp_path: Path, backend: str) -> None:
    arguments = ("compare", "--model", "mixtral-8x7b", "--policy", "hobbit", *SMALL, "--json", "--plot", "figure.png")
    done = process(*arguments, cwd=tmp_path, MPLBACKEND=backend)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(done.stdout)["evaluations"]


def test_a_matplotlib_that_is_loaded_already_keeps_its_backend(tmp_path: Path) -> None:
    done = process(
        cwd=tmp_path,
        code=(
            "import os\n"
            "import matplotlib\n"
            "from perfmodel.cli import main\n"
            f"assert main(['compare', '--model', 'mixtral-8x7b', '--policy', 'hobbit', *{SMALL!r},"
            " '--json', '--plot', 'figure.png']) == 0\n"
            "assert os.environ['MPLBACKEND'] == 'svg', os.environ['MPLBACKEND']\n"
        ),
        MPLBACKEND="svg",
    )
    assert done.returncode == 0, done.stderr


def test_outputs_are_ignored_and_sources_are_not() -> None:
    lines = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert {"/comparison.*", "/reproduction/"} <= set(lines)
    assert "comparison.*" not in lines  # would hide perfmodel/plots/comparison.py from every build


@pytest.mark.parametrize(
    "arguments",
    [
        ("compare", "--model", "no-such-model"),
        ("compare", "--model", "mixtral-8x7b", "--output", "1000000000000"),
        ("reproduce", "--system", "no-such-system"),
        ("no-such-command",),
    ],
    ids=" ".join,
)
def test_a_real_process_refuses_in_one_line(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = process(*arguments, cwd=tmp_path)
    check_refusal(Answer(done.returncode, done.stdout, done.stderr))
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    folder = Path(perfmodel.__file__).resolve().parent.parent
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "perfmodel", "specs", "schema", "system"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(folder)},
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.close()
        errors = child.stderr.read()
        assert child.wait(timeout=120) == 0
    assert errors == b""


INTERRUPTED = """
import os, signal, sys, threading, warnings
from perfmodel.cli import main

# An import that is interrupted leaves its file open, which no user is told.
warnings.simplefilter("ignore", ResourceWarning)
signal.signal(signal.SIGINT, signal.default_int_handler)  # what starts in the background ignores it
stop = threading.Timer(float(sys.argv[1]), os.kill, (os.getpid(), signal.SIGINT))
stop.daemon = True
stop.start()
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.skipif(os.name == "nt", reason="signals")
@pytest.mark.parametrize("seconds", ["0.2", "0.5", "0.8"])
def test_an_interrupt_is_one_line(seconds: str, tmp_path: Path) -> None:
    machine = ("--model", "mixtral-8x7b", "--system", "rtx4090-pcie4-cpu")
    done = process(seconds, "rank", *machine, cwd=tmp_path, code=INTERRUPTED)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "perfmodel: interrupted\n")


CAUGHT_IN_A_RESULT = """
import signal, sys
from perfmodel.cli import commands, main
from perfmodel.kernels._jit import Kernel

signal.signal(signal.SIGINT, signal.default_int_handler)  # what starts in the background ignores it
calls = []

def compiled():  # as compiled code that calls back while it makes its result
    signal.raise_signal(signal.SIGINT)
    calls.append("made")

def command(options):
    Kernel(compiled, lambda: compiled)()
    calls.append("called")
    __import__("time").sleep(5)
    calls.append("slept")

class Parser:
    def parse_args(self, arguments):
        return type("Options", (), {"run": staticmethod(command)})

commands.build_parser = Parser
code = main([])
print(code, calls[0], calls[-1])
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
"""


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_an_interrupt_waits_for_a_result_in_the_making(tmp_path: Path) -> None:
    done = process(cwd=tmp_path, code=CAUGHT_IN_A_RESULT)
    assert done.stderr == "perfmodel: interrupted\n"
    assert done.stdout.split()[:2] == ["130", "made"]
    assert "slept" not in done.stdout


IMPORT = """
import signal, sys
from perfmodel.cli import commands, main

signal.signal(signal.SIGINT, signal.default_int_handler)  # what starts in the background ignores it

def command(options):
    try:
        signal.raise_signal(signal.SIGINT)
    except BaseException:
        raise ImportError("as some libraries say then")

class Parser:
    def parse_args(self, arguments):
        return type("Options", (), {"run": staticmethod(command)})

commands.build_parser = Parser
sys.exit(main([]))
"""


def test_an_error_made_of_an_interrupt_is_one(tmp_path: Path) -> None:
    done = process(cwd=tmp_path, code=IMPORT)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "perfmodel: interrupted\n")


# The library's own front door


def test_the_public_names_are_there() -> None:
    for name in perfmodel.__all__:
        assert getattr(perfmodel, name) is not None
        assert name in dir(perfmodel)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = perfmodel.no_such_name
    assert issubclass(SpecError, perfmodel.PerfModelError)
    assert issubclass(perfmodel.PerfModelError, ValueError)


# The README


def _blocks(*languages: str) -> list[str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(rf"^```(?:{'|'.join(languages)})[ \t]*\n(.*?)^```[ \t]*$", text, flags=re.MULTILINE | re.DOTALL)


def test_python_in_the_readme_runs(tmp_path: Path) -> None:
    blocks = _blocks("python")
    assert blocks
    for number, block in enumerate(blocks):
        folder = tmp_path / str(number)
        folder.mkdir()
        done = process(cwd=folder, code=block)
        assert done.returncode == 0, f"{block}\n{done.stderr}"


def test_commands_in_the_readme_exist() -> None:
    lines = "\n".join(_blocks("console", "bash", "sh", "shell")).replace("\\\n", " ").splitlines()
    commands = [match[1] for line in lines if (match := re.match(r"(?:\$ )?perfmodel (.*)", line))]
    assert commands
    for command in commands:
        words = shlex.split(re.split(r" [|>] ", command)[0], comments=True)
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            build_parser().parse_args(words)
            continue
        assert out.getvalue(), command  # only help and version print and leave


def _commands(parser: argparse.ArgumentParser, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command with its parser."""
    groups = [one for one in parser._actions if isinstance(one, argparse._SubParsersAction)]
    if not groups:
        yield words, parser
    for group in groups:
        for name, inner in group.choices.items():
            yield from _commands(inner, (*words, name))


OPTIONS = [
    (words, action.option_strings[-1])
    for words, parser in _commands(build_parser())
    for action in parser._actions
    if action.option_strings and action.nargs != 0
]


@pytest.mark.parametrize(("words", "option"), OPTIONS, ids=lambda value: "-".join(value).strip("-"))
def test_two_dashes_are_no_value_of_any_option(words: tuple[str, ...], option: str) -> None:
    check_refusal(run(*words, f"{option}=--"), option, "found '--'")


LONG = "x" * 5000


@pytest.mark.parametrize(
    "arguments",
    [
        ("sweep", "--axis", LONG), ("sweep", "--axis", f"link.latency_us={'9' * 5000}"),
        ("sweep", "--threads", LONG), ("sweep", f"--{LONG}"), (LONG,),
        ("sweep", "--metric", LONG), ("sweep", "--policy", LONG), ("sweep", "--policy", f"monde:{LONG}"),
        ("sweep", "--policy", f"monde:resident={LONG}"), ("sweep", "--sample", LONG),
        ("sweep", "--zip", LONG), ("sweep", "--model", LONG), ("sweep", "--system", LONG),
        ("sweep", "--trace", LONG), ("sweep", "--loss", LONG), ("sweep", "--dtype", "x y " * 2000),
        ("solve", "--for", "ndp.arrays", "--target", LONG), ("solve", "--for", LONG, "--target", "tpot_ms=5"),
        ("solve", "--for", "ndp.arrays", "--target", f"tpot_ms={LONG}"),
        ("sensitivity", "--range", LONG), ("sensitivity", "--range", f"mean_bits={LONG}"),
        ("break-even", "--axis", f"mean_bits={LONG}"), ("break-even", "--axis", "ndp.rows", "--along", LONG),
        ("break-even", "--axis", "ndp.rows", "--along", f"mean_bits={LONG}"),
        ("compare", "--model", "mixtral-8x7b", "--policy", LONG),
    ],
    ids=lambda value: "-".join(value)[:40],
)  # fmt: skip
def test_long_arguments_are_not_repeated(arguments: tuple[str, ...]) -> None:
    answer = run(*arguments)
    check_refusal(answer)
    assert "x" * 700 not in answer.err
    assert len(answer.err) < 1300
