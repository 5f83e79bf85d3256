"""The former module of the block hashes, which programs written against raypd 0.1 import."""

from actors.core.requests.block_hash import BlockHasher as BlockHasher
from actors.core.requests.block_hash import BlockHashKey as BlockHashKey
