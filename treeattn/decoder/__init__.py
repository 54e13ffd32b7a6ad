"""The verbs: local partial -> reduce over ranks -> finish.

`decode` is the verb once, `Decoder` the planned one for a loop; `merge` and `Merger` begin after the first
arrow, with partial results that other kernels made. `prefill` attends with the queries
of a whole prompt, whose tokens are sharded. `plan` turns the name of a scheme into what a step runs,
`device` is where it computes, `transport` how its records travel.
"""

from treeattn.decoder.captured_step import CapturedStep
from treeattn.decoder.decode import decode
from treeattn.decoder.decoder import Decoder
from treeattn.decoder.merge import Merger, merge
from treeattn.decoder.prefill import Prefill, prefill
from treeattn.decoder.request import Reduction

__all__ = [
    "CapturedStep", "Decoder", "Merger", "Prefill", "Reduction", "decode", "merge", "prefill",
]  # fmt: skip
