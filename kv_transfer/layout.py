"""What a block is, byte for byte, and which bytes go where."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVCacheLayout:
    """The shape of one rank's KV cache tensor, and the fingerprint that both ends of a link must share.

    The tensor is [num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim]: a block is one contiguous run of
    bytes for all layers, and so is any range of heads of a block.

    dtype: the torch dtype's name, such as "float32"
    model_fingerprint: digest of the model's config and weights; KV of another model is never accepted
    """

    num_blocks: int
    num_kv_heads: int
    num_layers: int
    block_size: int
    head_dim: int
    dtype: str
    dtype_size_bytes: int
    model_fingerprint: str

    @property
    def block_size_bytes(self) -> int:
        """Bytes of one block, all layers and heads of this rank."""
        return self.num_kv_heads * self.num_layers * 2 * self.block_size * self.head_dim * self.dtype_size_bytes

    @property
    def shape(self) -> tuple[int, int, int, int, int, int]:
        """The tensor's shape."""
        return (self.num_blocks, self.num_kv_heads, self.num_layers, 2, self.block_size, self.head_dim)
