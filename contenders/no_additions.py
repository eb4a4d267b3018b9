"""The model without the key offset, the convolution, the head's rows and the x0 scalars.

What is left is a plain transformer with rotary positions, normalized queries and keys, and ReLU^2.

Source: an ablation of `nanomuon/gpt.py`; each addition alone is in one of the files imported here.
"""

from contenders.no_convolution import NoConvolution
from contenders.no_head_rows import NoHeadRows
from contenders.no_key_offset import NoKeyOffset
from contenders.no_x0_scalars import NoX0Scalars


class NoAdditions(NoKeyOffset, NoConvolution, NoHeadRows, NoX0Scalars):
    pass


model = NoAdditions
