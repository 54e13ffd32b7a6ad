"""The other tree attention: draft tokens of speculative decoding as a prefix tree, verified in one pass.

Beams of draft tokens share prefixes; `pack` keeps each prefix once, with a mask by which a token sees its
ancestors alone. `TokenTree` is such a tree from beams, parents or paths. After "Recurrent Drafter for Fast
Speculative Decoding in Large Language Models" (arXiv 2403.09919), tree attention.
"""

from treeattn.token_tree.accept import Accepted, accept_greedy, accept_speculative
from treeattn.token_tree.pack import Packed, pack, prefix_tree, unpack
from treeattn.token_tree.tree import TokenTree
from treeattn.token_tree.verify import Verifier, verify

__all__ = [
    "Accepted",
    "Packed",
    "TokenTree",
    "Verifier",
    "accept_greedy",
    "accept_speculative",
    "pack",
    "prefix_tree",
    "unpack",
    "verify",
]
