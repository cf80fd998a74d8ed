"""Guards of the layout: the package list equals the tree, and no bare folder name is importable."""

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
MAPPED = SETTINGS["setuptools"]["package-dir"]


def test_package_list_equals_the_tree():
    found = set()
    for package, folder in MAPPED.items():
        for file in (ROOT / folder).rglob("*.py"):
            parts = file.parent.relative_to(ROOT / folder).parts
            found.add(".".join((package, *parts)))
    assert found == set(SETTINGS["setuptools"]["packages"])


def test_no_folder_is_imported_by_its_bare_name():
    for package in SETTINGS["setuptools"]["packages"]:
        importlib.import_module(package)
    bare = {Path(folder).name for folder in MAPPED.values()} - {"bilinearize"} | {"configs"}
    assert not bare & set(sys.modules)


def test_stages_import_one_way():
    allowed = {"convert": {"model"}, "finetune": {"model"}, "eval": {"model"}, "model": set()}
    allowed |= {"interpret": {"model"}, "publish": {"model"}}
    for folder, others in allowed.items():
        for file in (ROOT / folder).rglob("*.py"):
            text = file.read_text()
            for stage in set(allowed) - others - {folder}:
                assert f"bilinearize.{stage}" not in text, f"{file} names bilinearize.{stage}"


@pytest.mark.parametrize("command", [["-m", "bilinearize"], ["-m", "bilinearize", "convert"]])
def test_help_is_printed(command):
    result = subprocess.run(
        [sys.executable, "-P", *command, "--help"], capture_output=True, text=True
    )
    assert result.returncode == 0 and "usage: bilinearize" in result.stdout
    assert result.stderr == ""
