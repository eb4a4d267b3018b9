"""nanomuon: `from nanomuon import MuonAdamW, DistMuonAdamW, build_param_groups`."""

from nanomuon.optim import DistMuonAdamW, MuonAdamW
from nanomuon.optim_groups import build_param_groups

__all__ = ["DistMuonAdamW", "MuonAdamW", "build_param_groups"]
