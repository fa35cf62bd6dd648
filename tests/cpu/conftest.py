"""What tests of kernels share."""

from __future__ import annotations

import pytest

from headrace.kernels import ops


@pytest.fixture(params=["numba", "reference"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of the backend that runs."""
    name: str = request.param
    monkeypatch.setenv("HEADRACE_KERNELS", "reference" if name == "reference" else "auto")
    assert ops.backend_name("cpu") == name
    return name
