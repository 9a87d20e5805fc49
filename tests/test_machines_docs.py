"""docs/machines.md is true: its machines load and are priced, its commands run, and its keys are those of the specs."""

import re
import shlex
from pathlib import Path

import pytest
from commands import run

from perfmodel.hardware import SOURCE_KINDS, CpuSpec, GpuSpec, HostSpec, System, list_specs, load_spec, load_system

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "machines.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The machines of the page as files."""
    place = tmp_path_factory.mktemp("machines")
    for language, text in BLOCKS:
        if language == "toml":
            (name,) = re.findall(r"^# (\S+\.toml)$", text, flags=re.MULTILINE)
            (place / name).write_text(text, encoding="utf-8")
    return place


@pytest.fixture(scope="module")
def machines(folder: Path) -> dict[str, System]:
    return {path.stem: load_system(path) for path in sorted(folder.iterdir())}


def test_the_machines_are_what_the_page_says(machines: dict[str, System]) -> None:
    assert list(machines) == ["desktop", "faster_memory", "other_gpu", "two_gpus"]
    desktop, faster, other, two = machines.values()
    assert two.gpu.memory_capacity_bytes == 2 * load_system("rtx4090-pcie4-cpu").gpu.memory_capacity_bytes
    assert desktop.cpu is not None
    assert desktop.host is not None
    assert desktop.flags == ()
    key = "cpu.dram_bandwidth_gb_per_s"
    assert (faster.get(key), desktop.get(key)) == (102.4, 89.6)
    assert faster.with_values({key: 89.6}).content_hash() == desktop.content_hash()
    bundled = load_system("rtx4090-pcie4-cpu")
    assert other.gpu == load_spec("rtx-5090")
    assert (other.link, other.cpu, other.host) == (bundled.link, bundled.cpu, bundled.host)


def test_every_command_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert {language for language, _ in BLOCKS} == {"toml", "sh"}
    assert TEXT.count("```") == 2 * len(BLOCKS)
    printed = {}
    for language, text in BLOCKS:
        for line in text.splitlines() if language == "sh" else ():
            program, *arguments = shlex.split(line)
            assert program == "perfmodel"
            answer = run(*arguments)
            assert answer.code == 0, f"{line}\n{answer.err}{answer.out}"
            printed[arguments[0]] = answer.out
    rows = re.findall(r"^(fiddler|llama-cpp)\S* +(\S+) +[0-9.]+$", printed["sweep"], flags=re.MULTILINE)
    assert len(rows) == 6
    assert len(set(rows)) == 6


def test_every_key_of_cpu_and_host_is_explained() -> None:
    rows = [line.split(" | ")[0] for line in TEXT.splitlines() if line.startswith(("| `cpu.", "| `host."))]
    named = [key for row in rows for key in re.findall(r"`([\w.]+)`", row)]
    parts: dict[str, type[CpuSpec] | type[HostSpec]] = {"cpu": CpuSpec, "host": HostSpec}
    keys = [f"{part}.{key}" for part, spec in parts.items() for key in spec.model_fields]
    assert sorted(named) == sorted(
        key for key in keys if key.partition(".")[2] not in ("kind", "name", "description", "sources")
    )
    assert ", ".join(f"`{kind}`" for kind in SOURCE_KINDS) in TEXT


def test_the_two_kinds_of_gpus_are_as_told() -> None:
    told = TEXT.partition("its source says which. For ")[2].partition(" it is the share")[0]
    gpus = [spec for entry in list_specs() if isinstance(spec := load_spec(entry.name), GpuSpec)]
    steps = [gpu for gpu in gpus if gpu.launch_overhead_us == 0]
    assert sorted(re.findall(r"`([\w-]+)`", told)) == sorted(gpu.name for gpu in steps)
    assert all(0.27 <= gpu.memory_efficiency <= 0.41 for gpu in steps)
    others = [gpu for gpu in gpus if gpu not in steps]
    assert all(0.85 <= gpu.memory_efficiency <= 0.9 and gpu.launch_overhead_us == 5 for gpu in others)
