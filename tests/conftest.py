"""Tests run on one thread each, so that several can run side by side and results repeat to the bit."""

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from processes import recipe_environ

# Where transformers copies the code of saved models to before it imports it.
os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp(prefix="hf_modules_")
atexit.register(shutil.rmtree, os.environ["HF_MODULES_CACHE"], ignore_errors=True)

import pytest  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session", autouse=True)
def _quiet_and_single_threaded():
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


class Recipes:
    """Runs of recipes/train.py in one folder, by way of recipe_server.py."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server = subprocess.Popen(
            [sys.executable, ROOT / "tests" / "recipe_server.py"],
            cwd=folder,
            env=recipe_environ(folder),
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def start(self, *options: object, **job: object) -> dict:
        """Run train.py; gives the exit status of each process, and what they printed."""
        job = {key: str(value) if isinstance(value, Path) else value for key, value in job.items()}
        self.server.stdin.write(json.dumps({"argv": [str(option) for option in options], **job}) + "\n")
        self.server.stdin.flush()
        return json.loads(self.server.stdout.readline())

    def run(self, *options: object, **job: object) -> str:
        """Run train.py, which must succeed; gives what it printed."""
        done = self.start(*options, **job)
        assert set(done["statuses"]) == {0}, done["output"]
        return done["output"]


@pytest.fixture(scope="module")
def recipes(tmp_path_factory):
    runs = Recipes(tmp_path_factory.mktemp("recipes"))
    yield runs
    runs.server.stdin.close()
    runs.server.wait()
