"""Which modules may import which: kernels stay free of the package, and the layers name every module."""

import ast
import sys
import tomllib
from pathlib import Path

import pytest

import perfmodel

PACKAGE = Path(perfmodel.__file__).resolve().parent
KERNELS = sorted((PACKAGE / "kernels").glob("*.py"))
ALLOWED = ("numpy", "numba", "math", "perfmodel.kernels")


def _imported(source: str) -> list[str]:
    """Every module that a file imports anywhere, functions included, with the name for ``from`` imports."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            # A relative import would hide where it leads, and ``from perfmodel import x`` leads to perfmodel.x.
            base = "." * node.level + (node.module or "")
            found += [f"{base}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("__import__", "import_module"):
            found.append(f"call {ast.unparse(node)}")
    return found


def _refused(source: str, *, standard_library: bool = False) -> list[str]:
    def fine(name: str) -> bool:
        if standard_library and name.partition(".")[0] in sys.stdlib_module_names:
            return True
        return any(name == one or name.startswith(f"{one}.") for one in ALLOWED)

    return [name for name in _imported(source) if not fine(name)]


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.stem)
def test_kernels_import_numpy_numba_math_and_each_other(path: Path) -> None:
    assert _refused(path.read_text(encoding="utf-8"), standard_library=path.name == "_jit.py") == []


def test_the_kernels_are_there() -> None:
    assert {"_jit", "dram", "layer", "link", "roofline", "selector", "systolic"} <= {path.stem for path in KERNELS}


@pytest.mark.parametrize(
    "line",
    [
        "import os",
        "import scipy.special",
        "from perfmodel import errors",
        "from perfmodel.errors import PerfModelError",
        "from perfmodel.kernelsish import x",
        "from . import link",
        "from ..errors import PerfModelError",
        "import numpyx",
        "def f():\n    import perfmodel.model",
        "__import__('os')",
    ],
)
def test_other_imports_would_be_noticed(line: str) -> None:
    assert _refused(line) != []


def test_the_layers_name_every_module() -> None:
    settings = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    (layers,) = [contract for contract in settings["contracts"] if contract["type"] == "layers"]
    assert layers["containers"] == ["perfmodel"]
    assert layers["exhaustive"] is True
    named = [name.strip() for layer in layers["layers"] for name in layer.split("|")]
    named += layers.get("exhaustive_ignores", [])
    modules = {path.stem for path in PACKAGE.glob("*.py")}
    modules |= {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert sorted(named) == sorted(modules - {"__init__"})
