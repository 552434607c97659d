"""Tests run on one thread each, so that several can run side by side and results repeat to the bit."""

import atexit
import os
import shutil
import tempfile

# Where transformers copies the code of saved models to before it imports it.
os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp(prefix="hf_modules_")
atexit.register(shutil.rmtree, os.environ["HF_MODULES_CACHE"], ignore_errors=True)

import pytest  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def _quiet_and_single_threaded():
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
