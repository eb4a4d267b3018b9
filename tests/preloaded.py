"""What the fork server imports once, for all runs and worlds of the tests."""

# ruff: noqa: F401
import gc

import pydantic
import torch._dynamo

import scripts.base_train

gc.freeze()  # or a fork's collections would go through all this, and copy it
