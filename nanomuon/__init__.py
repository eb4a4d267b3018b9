"""nanomuon: `from nanomuon import MuonAdamW, DistMuonAdamW, build_param_groups`.

They are loaded lazily: `import nanomuon.gpt` loads no optimizer.
"""

import importlib

_MODULES = {
    "DistMuonAdamW": "nanomuon.optim",
    "MuonAdamW": "nanomuon.optim",
    "build_param_groups": "nanomuon.optim_groups",
}
__all__ = ["DistMuonAdamW", "MuonAdamW", "build_param_groups"]


def __getattr__(name):
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__():
    return sorted([*globals(), *__all__])
