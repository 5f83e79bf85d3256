"""The former place of names of blocks, which programs written by the documents of raypd 0.1 import."""

from actors.core.requests.block_hash import BlockHasher as BlockHasher
from actors.core.requests.block_hash import BlockHashKey as BlockHashKey
