"""Run code in a fresh Python process."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

# What a machine without resswap is like, wherever it may be installed here.
WITHOUT_RESSWAP = """
import sys

class _NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "resswap":
            raise ModuleNotFoundError("No module named 'resswap'", name="resswap")

sys.meta_path.insert(0, _NotInstalled())
"""


def run_python(code: str, *arguments: object, without_resswap: bool = False, **environment: str) -> dict:
    """What the code prints as JSON on its last line. Its own failure is an AssertionError with its stderr."""
    result = subprocess.run(
        [sys.executable, "-c", command(code, without_resswap), *map(str, arguments)],
        env=environ(**environment),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


def command(code: str, without_resswap: bool = False) -> str:
    tests = str(Path(__file__).parent)
    setup = "import torch\ntorch.set_num_threads(1)\n"
    path = "" if without_resswap else f"import sys\nsys.path.insert(0, {tests!r})\n"
    return (WITHOUT_RESSWAP if without_resswap else "") + path + setup + textwrap.dedent(code)


def recipe_environ(folder: Path, **environment: str) -> dict[str, str]:
    """What recipes are run in: on the CPU, without the Hub, with all caches in the folder."""
    root = Path(__file__).parents[1]
    return environ(
        ACCELERATE_USE_CPU="true",
        HF_DATASETS_DISABLE_PROGRESS_BARS="1",
        HF_HOME=str(folder / "cache"),
        HF_HUB_OFFLINE="1",
        MPLCONFIGDIR=str(folder / "matplotlib"),
        PYTHONPATH=os.pathsep.join([str(root), str(root / "recipes")]),
        **environment,
    )


def environ(**environment: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", **environment}
