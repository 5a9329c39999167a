"""`__all__` of the core's packages has what users need, and nothing by accident."""

from __future__ import annotations

from importlib import import_module

import pytest

NAMES = {
    "commlib": """
        CommlibError Communicator Mesh MismatchError PeerError Plan Preemption ShutdownError StallError Stats
        TransportError UsageError Work __version__ init is_initialized mark_step metrics recorded shutdown
        start_recording statistics stop_recording timeline world
    """,
    "commlib.observe": "Count Event Phase Stats",
    "commlib.compress": """
        CODECS DGC QSGD SCHEMES AllGather AllToAll Auto Blocks Cast Codec Float8 PowerSGD RandomK Scheme Sign TopK
        activations codec_of scheme_of
    """,
    "commlib.data_parallel": "Statistics StepReport",
    "commlib.expert": "Experts",
}


@pytest.mark.parametrize("package", NAMES)
def test_exported_names(package: str) -> None:
    module = import_module(package)
    assert len(module.__all__) == len(set(module.__all__))
    assert set(module.__all__) == set(NAMES[package].split())
    assert all(hasattr(module, name) for name in module.__all__)
