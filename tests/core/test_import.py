"""`import leyline` is light, and its names are there."""

from __future__ import annotations

import subprocess
import sys

import pytest

import leyline


def _modules_after(code: str) -> set[str]:
    code += "\nimport sys; print(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_import_pulls_in_neither_torch_nor_numpy() -> None:
    modules = _modules_after("import leyline; leyline.__version__; dir(leyline)")
    assert "leyline" in modules
    assert not modules & {"torch", "numpy", "transformers", "triton"}


def test_core_pulls_in_no_torch() -> None:
    modules = _modules_after("from leyline import *; import leyline.lineage")
    assert {"numpy", "leyline.diff", "leyline.plan", "leyline.lineage"} <= modules
    assert not modules & {"torch", "transformers", "triton"}


def test_all_names_resolve_and_an_unknown_one_does_not() -> None:
    for name in leyline.__all__:
        assert getattr(leyline, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        leyline.nothing  # noqa: B018
