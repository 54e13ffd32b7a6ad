"""Attention where the cache lies: a model process without keys and values, and others that keep and attend.

Rank 0 runs the model, whatever it is made of; the other ranks are cache nodes, which need neither the model
nor its libraries. For every layer of a token, q, the new keys and values and what to do travel in one message
down the tree along which the partials then come up to rank 0.
"""

from treeattn.cache_nodes.client import CacheNodes, connect
from treeattn.cache_nodes.node import serve
from treeattn.cache_nodes.remote_cache import RemoteCache

__all__ = ["CacheNodes", "RemoteCache", "connect", "serve"]
