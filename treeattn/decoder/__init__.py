"""The verbs: local partial -> reduce over ranks -> finish.

`decode` is the verb once, `Decoder` the planned one for a loop. `plan` turns the name of a scheme into what a
step runs, `device` is where it computes, `transport` how its records travel.
"""

from treeattn.decoder.decode import decode, schemes
from treeattn.decoder.decoder import CapturedStep, Decoder

__all__ = ["CapturedStep", "Decoder", "decode", "schemes"]
