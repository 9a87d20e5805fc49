"""Run the notebooks, each from a clean kernel of this interpreter.

``python tests/run_notebooks.py`` brings every .ipynb in notebooks/ up to date with its script; paths of scripts limit
it to those. What changes from run to run is left out: times, machine paths, random cell ids.
"""

import base64
import io
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "notebooks"
#: Seconds that a notebook may take, start of the kernel included.
LIMIT_S = 60


def execute(script: Path, target: Path, home: Path) -> None:
    """Run a script in the percent format from a clean kernel and write the notebook with its outputs.

    This happens in a process of its own, whose home, and so everything that Jupyter and IPython write, is ``home``.
    Files that the notebook writes by relative names land there too.

    Raises
    ------
    AssertionError : with the error of the cell that failed. subprocess.TimeoutExpired : after ``LIMIT_S``.
    """
    done = subprocess.run(
        [sys.executable, __file__, "--execute", script, target], cwd=home, env=_environment(home),
        capture_output=True, text=True, check=False, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]


def _environment(home: Path) -> dict[str, str]:
    """Variables for a process that uses this interpreter's kernel and writes below ``home`` only.

    Compiled kernels and fonts are taken from where they always are; making them anew takes longer than a notebook.
    """
    kernel = home / "data" / "kernels" / "python3"
    kernel.mkdir(parents=True)
    start = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": start, "display_name": "Python 3", "language": "python"}
    (kernel / "kernel.json").write_text(json.dumps(spec), encoding="utf-8")
    names = {"IPYTHONDIR": "ipython", "JUPYTER_CONFIG_DIR": "config", "JUPYTER_DATA_DIR": "data"}
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("JUPYTER_", "PYTHONWARNINGS"))},
        **{name: str(home / folder) for name, folder in names.items()},
        "JUPYTER_RUNTIME_DIR": str(home / "run"),
        "JUPYTER_PLATFORM_DIRS": "1",
        "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache")),
        "HOME": str(home),
        "PYTHONPATH": str(ROOT),
    }


def _execute(script: Path, target: Path) -> None:
    """What the process of `execute` does."""
    import jupytext
    import nbformat
    from nbclient import NotebookClient

    notebook = jupytext.read(script)
    NotebookClient(notebook, timeout=LIMIT_S, kernel_name="python3", record_timing=False).execute()
    nbformat.write(_without_traces(notebook), target)


def _without_traces(notebook: Any) -> Any:
    """The notebook without what differs from run to run."""
    notebook.metadata = {
        "jupytext": {"formats": "ipynb,py:percent"},
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for i, cell in enumerate(notebook.cells):
        cell.id = f"cell-{i}"
        cell.metadata = {}
        for output in cell.get("outputs", ()):
            if "metadata" in output:
                output.metadata = {}
            if "image/png" in output.get("data", {}):
                output.data["image/png"] = _small(output.data["image/png"])
    return notebook


def _small(png: str) -> str:
    """The same picture in 128 colours, which takes a third of the bytes; base64 in and out."""
    from PIL import Image

    buffer = io.BytesIO()
    picture = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
    picture.quantize(128, dither=Image.Dither.NONE).save(buffer, "png", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()


def main(arguments: list[str]) -> None:
    """Update the notebooks of the scripts that are named, by default of all."""
    if arguments[:1] == ["--execute"]:
        _execute(Path(arguments[1]), Path(arguments[2]))
        return
    for script in [Path(one).resolve() for one in arguments] or sorted(FOLDER.glob("*.py")):
        with tempfile.TemporaryDirectory() as home:
            execute(script, script.with_suffix(".ipynb"), Path(home))


if __name__ == "__main__":
    main(sys.argv[1:])
