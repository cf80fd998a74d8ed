"""The flags are the functions' arguments, with the same defaults, and need no torch."""

import inspect
import subprocess
import sys
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from bilinearize.interpret import config
from bilinearize.interpret.digits_report import digits
from bilinearize.interpret.gallery import gallery
from bilinearize.interpret.measure import correlate_layers, symmetry
from bilinearize.interpret.run import attribution, spectrum

COMMANDS = {
    config.SpectrumConfig: spectrum,
    config.AttributeConfig: attribution,
    config.SymmetryConfig: symmetry,
    config.CorrelateConfig: correlate_layers,
    config.GalleryConfig: gallery,
    config.DigitsConfig: digits,
}


@pytest.mark.parametrize("kind", COMMANDS)
def test_flags_are_arguments(kind):
    parameters = dict(inspect.signature(COMMANDS[kind]).parameters)
    for name in ("model", "out"):
        parameters.pop(name, None)
    assert list(parameters) and set(parameters) == {field.name for field in fields(kind)}
    for field in fields(kind):
        default = parameters[field.name].default
        if field.default is not MISSING:
            assert default == field.default
        elif field.default_factory is MISSING:
            assert default is inspect.Parameter.empty


def test_the_flags_load_without_torch():
    path = Path(inspect.getfile(config))
    code = f"import runpy, sys; runpy.run_path({str(path)!r}); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
