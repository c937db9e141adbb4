from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Tiny tensors: a second thread would only wait for the first."""
    torch.set_num_threads(1)
