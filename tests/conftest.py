"""Tests run on one thread each, so that several can run side by side and results repeat to the bit."""

import pytest
import torch
import transformers


@pytest.fixture(scope="session", autouse=True)
def _quiet_and_single_threaded():
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
