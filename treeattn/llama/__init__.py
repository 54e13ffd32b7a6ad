"""Llama models over a sharded KV cache: the paper's end-to-end experiment (section 6.4, appendix C.3)."""

from treeattn.llama.config import Config, Rope, read_config
from treeattn.llama.model import Llama
from treeattn.llama.session import Session

__all__ = ["Config", "Llama", "Rope", "Session", "read_config"]
