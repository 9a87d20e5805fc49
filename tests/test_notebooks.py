"""Every notebook runs from a clean kernel, is in step with its script, and ends with a finding that its code checks."""

import base64
import re
from pathlib import Path
from typing import Any

import jupytext
import nbformat
import pytest
from run_notebooks import FOLDER, execute

NAMES = (
    "first_steps",
    "reproduce_the_paper",
    "bring_your_own_trace",
    "link_and_ndp_bandwidth",
    "bits_under_a_latency_target",
    "does_prefill_predict_decode",
    "which_experts_get_the_bits",
    "know_your_trace",
)
UPDATE = "python tests/run_notebooks.py brings the notebooks up to date"
#: A number in running text, not part of a name such as 8x7B or H100.
NUMBER = re.compile(r"(?<![\w.,-])\d[\d,]*(?:\.\d+)?(?![\w-])")


def read(name: str) -> Any:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def sources(notebook: Any) -> list[tuple[str, str]]:
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def outputs(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells for output in cell.get("outputs", ())]


def printed(notebook: Any) -> str:
    """Everything on standard output, without the spacing, which pandas may change."""
    texts = [one.text for one in outputs(notebook) if one.output_type == "stream" and one.name == "stdout"]
    return " ".join(" ".join(texts).split())


def figures(notebook: Any) -> list[bytes]:
    return [base64.b64decode(one.data["image/png"]) for one in outputs(notebook) if "image/png" in one.get("data", {})]


def numbers(text: str) -> set[float]:
    return {float(found.replace(",", "")) for found in NUMBER.findall(text)}


def test_these_are_all() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == {path.stem for path in FOLDER.glob("*.ipynb")} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_runs_from_a_clean_kernel(name: str, tmp_path: Path) -> None:
    target = tmp_path / "executed.ipynb"
    execute(FOLDER / f"{name}.py", target, tmp_path)
    notebook = nbformat.read(target, as_version=4)
    assert len(figures(notebook)) == len(figures(read(name))) > 0
    assert printed(notebook) == printed(read(name)), UPDATE


@pytest.mark.parametrize("name", NAMES)
def test_notebook_is_its_script(name: str) -> None:
    notebook = read(name)
    assert sources(notebook) == sources(jupytext.read(FOLDER / f"{name}.py")), UPDATE
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), UPDATE
    for output in outputs(notebook):
        assert output.output_type != "error"
        assert output.get("name") != "stderr"  # no warnings
    assert all(len(picture) < 100_000 for picture in figures(notebook))


@pytest.mark.parametrize("name", NAMES)
def test_nothing_of_the_machine_is_kept(name: str) -> None:
    notebook = read(name)
    assert set(notebook.metadata) == {"jupytext", "kernelspec", "language_info"}
    assert not any(cell.metadata for cell in notebook.cells)
    text = (FOLDER / f"{name}.ipynb").read_text(encoding="utf-8")
    assert not re.search(r"/(home|root|tmp|Users)/", text)


@pytest.mark.parametrize("name", NAMES)
def test_ends_with_a_finding_that_its_code_checks(name: str) -> None:
    check, last = read(name).cells[-2:]
    assert last.cell_type == "markdown"
    text = " ".join(last.source.split())
    assert text.startswith("**Finding.** ")
    assert text.endswith(".")
    assert ". " not in text.removeprefix("**Finding.** ")  # one sentence
    assert check.cell_type == "code"
    assert "assert " in check.source
    found = numbers(text)
    assert found
    code = re.sub(r"#.*", "", check.source)
    checked = {float(number) for number in re.findall(r"\d+(?:\.\d+)?", code)}
    assert found <= checked, "a number of the finding is not in the cell before it"
