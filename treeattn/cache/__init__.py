"""A KV cache that is sharded over ranks and grows: every token on the one rank that an owner map says.

`ShardedCache` is this rank's part of it, `placement` what every rank knows of all. `saved` writes
and reads the files of a cache that lasts.
"""

from treeattn.cache.sharded import ShardedCache

__all__ = ["ShardedCache"]
