"""What every test file shares."""

import torch

# Test tensors are small: a second thread costs more than it brings, most of all on a busy machine
torch.set_num_threads(1)
