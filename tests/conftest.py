"""Shared fixtures: Hypothesis without deadlines, the optional folder of reference data, and the validation."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from perfmodel.cli.validate import Findings

ROOT = Path(__file__).resolve().parent.parent

settings.register_profile("default", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def _reference_folder() -> Path:
    return Path(os.environ.get("PERFMODEL_REFERENCE_DATA", ROOT.parent / "shared"))


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder of third-party configs and traces that are not bundled; tests that need it skip without it."""
    folder = _reference_folder()
    if not folder.is_dir():
        pytest.skip("the folder of third-party reference data is not here")
    return folder


@pytest.fixture(scope="session")
def findings() -> "Findings":
    """Everything that the validation finds; it takes some seconds, so that all files share it."""
    from perfmodel.cli.validate import find

    return find()
