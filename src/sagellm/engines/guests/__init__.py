"""What adapters for other engines share.

These are paths of block hashes, and caches in which no KV is stored.
"""

from sagellm.engines.guests.paths import DIGEST_BYTES, Digests, index_of_digests, path_of
from sagellm.engines.guests.shadow_cache import ReuseCount, ShadowCache

__all__ = ["DIGEST_BYTES", "Digests", "ReuseCount", "ShadowCache", "index_of_digests", "path_of"]
