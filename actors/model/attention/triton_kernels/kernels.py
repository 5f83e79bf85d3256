"""The kernels: Triton compiles these functions for a GPU, and its interpreter runs them on a CPU in the tests.

The keys of one block, head and layer are one tile of the KV cache, [block_size, key_size], and the values are the tile
behind it, [block_size, value_size]. The kernels get the distance from block to block and from head to head, and where
the layer's first tile begins in a block; so layers whose heads or sizes differ are in one cache.

Queries are computed in tiles of `rows` rows. A tile belongs to one request and one KV head; row r is token r // group
and query head r % group of that KV head, so each key is read once for all query heads that share it. Softmax is
computed as the keys come (online softmax, arXiv:1805.02867), to the base of 2, since GPUs have an instruction for that.

Invariant: no kernel reads a slot that its own request has not written. So what other requests left in a block, be it a
NaN, is multiplied by nothing.

Names in capitals are known to the compiler. GROUP: query heads of a KV head. KEY_SIZE_PADDED, VALUE_SIZE_PADDED: the
power of two that is at least KEY_SIZE or VALUE_SIZE, and at least 16. UPCAST: True in Triton's interpreter, which
multiplies matrices of bfloat16 wrongly.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_tokens"])
def write_kernel(
    key,
    value,
    kv_cache,
    slots,
    num_tokens,
    key_head_stride,
    key_token_stride,
    value_head_stride,
    value_token_stride,
    block_stride,
    head_stride,
    layer_start,
    KEY_SIZE: tl.constexpr,
    KEY_SIZE_PADDED: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_SIZE_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Write the keys and values of TOKENS tokens of one KV head into their slots. Grid: (token tiles, KV heads).

    slots: [num_tokens], block * BLOCK_SIZE + offset in the block; a token with a negative slot is not written
    """
    head = tl.program_id(1)
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    dims = tl.arange(0, KEY_SIZE_PADDED)
    value_dims = tl.arange(0, VALUE_SIZE_PADDED)
    slot = tl.load(slots + tokens, mask=tokens < num_tokens, other=-1)
    is_key = (slot >= 0)[:, None] & (dims < KEY_SIZE)[None, :]
    is_value = (slot >= 0)[:, None] & (value_dims < VALUE_SIZE)[None, :]
    slot = tl.maximum(slot, 0)
    rows = (slot // BLOCK_SIZE).to(tl.int64) * block_stride + layer_start + head * head_stride
    key_offsets = (rows + slot % BLOCK_SIZE * KEY_SIZE)[:, None] + dims[None, :]
    value_offsets = (rows + BLOCK_SIZE * KEY_SIZE + slot % BLOCK_SIZE * VALUE_SIZE)[:, None] + value_dims[None, :]
    token = tokens.to(tl.int64)[:, None]
    keys = tl.load(key + head * key_head_stride + token * key_token_stride + dims[None, :], mask=is_key)
    values = tl.load(value + head * value_head_stride + token * value_token_stride + value_dims[None, :], mask=is_value)
    tl.store(kv_cache + key_offsets, keys, mask=is_key)
    tl.store(kv_cache + value_offsets, values, mask=is_value)


@triton.jit(do_not_specialize=["table_stride"])
def attend_kernel(
    query,
    kv_cache,
    output,
    part_values,
    part_maxima,
    part_sums,
    sinks,
    tile_requests,
    tile_tokens,
    query_starts,
    seq_lens,
    block_tables,
    score_scale,
    softcap,
    window,
    chunk,
    query_head_stride,
    query_token_stride,
    output_token_stride,
    block_stride,
    head_stride,
    layer_start,
    table_stride,
    GROUP: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    KEY_SIZE_PADDED: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_SIZE_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CHUNK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Attend with one tile of queries to one part of its request's keys. Grid: (tiles, KV heads, parts).

    score_scale: the layer's scaling; where scores are not capped, times log2(e)
    part_values, part_maxima, part_sums: with IS_SPLIT, what combine_kernel puts together; otherwise not touched
    chunk: with HAS_CHUNK, a token sees only keys with the same position // chunk
    sinks: with HAS_SINKS, the score of each query head's sink, which only the first part counts; otherwise not touched
    """
    tile, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    request = tl.load(tile_requests + tile)
    first_token = tl.load(tile_tokens + tile)
    query_end = tl.load(query_starts + request + 1)
    seq_len = tl.load(seq_lens + request)
    tile_end = tl.minimum(first_token + ROWS // GROUP, query_end)
    row = tl.arange(0, ROWS)
    token = first_token + row // GROUP
    is_row = (token < tile_end) & (row < ROWS // GROUP * GROUP)
    head = kv_head * GROUP + row % GROUP
    position = seq_len - query_end + token
    dims = tl.arange(0, KEY_SIZE_PADDED)
    is_dim = dims < KEY_SIZE
    value_dims = tl.arange(0, VALUE_SIZE_PADDED)
    is_value_dim = value_dims < VALUE_SIZE

    query_offsets = head.to(tl.int64) * query_head_stride + token.to(tl.int64) * query_token_stride
    q = tl.load(query + query_offsets[:, None] + dims[None, :], mask=is_row[:, None] & is_dim[None, :], other=0.0)
    if UPCAST:
        q = q.to(tl.float32)

    first_key = 0
    if HAS_WINDOW:
        first_key = tl.maximum(seq_len - query_end + first_token - window + 1, 0) // KEYS * KEYS
    if HAS_CHUNK:
        # The chunk of the tile's first token; later tokens may be of later chunks.
        first_key = tl.maximum(first_key, (seq_len - query_end + first_token) // chunk * chunk // KEYS * KEYS)
    end_key = seq_len
    if IS_CAUSAL:
        end_key = tl.minimum(seq_len, seq_len - query_end + tile_end)
    if IS_SPLIT:
        tiles_each = tl.cdiv(tl.cdiv(end_key - first_key, KEYS), tl.num_programs(2))
        first_key += part * tiles_each * KEYS
        end_key = tl.minimum(end_key, first_key + tiles_each * KEYS)

    maximum = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if HAS_SINKS:
        # A sink is a key that comes before all others, with a value of zeros. Each row sees it, or it would be -inf.
        sink = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32) * 1.4426950408889634
        if IS_SPLIT:
            sink = tl.where(part == 0, sink, float("-inf"))
        maximum = sink
        total = tl.where(sink == float("-inf"), 0.0, 1.0)
    values = tl.zeros((ROWS, VALUE_SIZE_PADDED), tl.float32)
    table = block_tables + request.to(tl.int64) * table_stride
    tiles = kv_cache + layer_start + kv_head * head_stride
    for start in range(first_key, end_key, KEYS):
        keys = start + tl.arange(0, KEYS)
        is_key = keys < end_key
        block = tl.load(table + keys // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        offsets = block * block_stride + keys % BLOCK_SIZE * KEY_SIZE
        k = tl.load(tiles + offsets[None, :] + dims[:, None], mask=is_dim[:, None] & is_key[None, :], other=0.0)
        if UPCAST:
            k = k.to(tl.float32)
        scores = tl.dot(q, k, input_precision="ieee") * score_scale
        if HAS_SOFTCAP:
            # tanh(x) = 1 - 2 / (exp(2x) + 1), which neither overflows nor needs a library.
            scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * 1.4426950408889634) / softcap) + 1.0))
            scores *= 1.4426950408889634
        is_seen = is_key[None, :]
        if IS_CAUSAL:
            is_seen = is_seen & (keys[None, :] <= position[:, None])
        if HAS_WINDOW:
            is_seen = is_seen & (keys[None, :] > position[:, None] - window)
        if HAS_CHUNK:
            is_seen = is_seen & (keys[None, :] // chunk == position[:, None] // chunk)
        scores = tl.where(is_seen, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        # A row that has not seen a key yet has a maximum of -inf, and -inf minus -inf is no number.
        base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(maximum - base)
        value_offsets = block * block_stride + BLOCK_SIZE * KEY_SIZE + keys % BLOCK_SIZE * VALUE_SIZE
        v = tl.load(
            tiles + value_offsets[:, None] + value_dims[None, :],
            mask=is_key[:, None] & is_value_dim[None, :],
            other=0.0,
        )
        total = total * decay + tl.sum(weights, 1)
        weights = weights.to(v.dtype)
        if UPCAST:
            weights = weights.to(tl.float32)
            v = v.to(tl.float32)
        values = values * decay[:, None] + tl.dot(weights, v, input_precision="ieee")
        maximum = new_maximum

    if IS_SPLIT:
        part_row = ((tile.to(tl.int64) * tl.num_programs(1) + kv_head) * tl.num_programs(2) + part) * ROWS + row
        tl.store(part_maxima + part_row, maximum, mask=is_row)
        tl.store(part_sums + part_row, total, mask=is_row)
        part_offsets = part_row[:, None] * VALUE_SIZE_PADDED + value_dims[None, :]
        tl.store(part_values + part_offsets, values, mask=is_row[:, None])
    else:
        # A request without keys fills up a batch of fixed size; its result is zero.
        values = values / tl.where(total == 0.0, 1.0, total)[:, None]
        output_offsets = token.to(tl.int64) * output_token_stride + head * VALUE_SIZE
        tl.store(
            output + output_offsets[:, None] + value_dims[None, :],
            values.to(output.dtype.element_ty),
            mask=is_row[:, None] & is_value_dim[None, :],
        )


@triton.jit(do_not_specialize=["num_parts"])
def combine_kernel(
    part_values,
    part_maxima,
    part_sums,
    output,
    tile_requests,
    tile_tokens,
    query_starts,
    num_parts,
    output_token_stride,
    GROUP: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_SIZE_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    MAX_PARTS: tl.constexpr,
):
    """Put the parts of one row together. Grid: (tiles, KV heads, rows of a tile that can hold a token).

    part_values: [tiles, KV heads, num_parts, ROWS, VALUE_SIZE_PADDED], sums of values by weight, float32
    part_maxima, part_sums: [tiles, KV heads, num_parts, ROWS], the largest score and the sum of weights, float32
    """
    tile, kv_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token = tl.load(tile_tokens + tile) + row // GROUP
    if token < tl.load(query_starts + tl.load(tile_requests + tile) + 1):
        parts = tl.arange(0, MAX_PARTS)
        dims = tl.arange(0, VALUE_SIZE_PADDED)
        is_part = parts < num_parts
        part_row = ((tile.to(tl.int64) * tl.num_programs(1) + kv_head) * num_parts + parts) * ROWS + row
        maxima = tl.load(part_maxima + part_row, mask=is_part, other=float("-inf"))
        sums = tl.load(part_sums + part_row, mask=is_part, other=0.0)
        largest = tl.max(maxima, 0)
        factors = tl.exp2(maxima - tl.where(largest == float("-inf"), 0.0, largest))
        total = tl.sum(sums * factors, 0)
        offsets = part_row[:, None] * VALUE_SIZE_PADDED + dims[None, :]
        values = tl.load(part_values + offsets, mask=is_part[:, None], other=0.0)
        result = tl.sum(values * factors[:, None], 0) / tl.where(total == 0.0, 1.0, total)
        output_offset = token.to(tl.int64) * output_token_stride + (kv_head * GROUP + row % GROUP) * VALUE_SIZE
        tl.store(output + output_offset + dims, result.to(output.dtype.element_ty), mask=dims < VALUE_SIZE)
