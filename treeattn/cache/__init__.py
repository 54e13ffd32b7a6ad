"""A KV cache that is sharded over ranks and grows: every token on the one rank that an owner map says."""

from treeattn.cache.sharded import ShardedCache

__all__ = ["ShardedCache"]
