// SPDX-License-Identifier: MIT
#pragma once

// Attention over a paged cache: what a generated token needs of all tokens before it. The cache of
// a layer consists of blocks of kCacheBlock tokens, which stand anywhere; a table for each sequence
// says which block holds its tokens 0..63, 64..127 and so on. A token's entry has one of two forms:
//   latent   (MLA) the normalised latent and the rotated key part that all heads share; in FP8 the
//            latent is E4M3 codes with an f32 scale for each 128, and the key part stays bf16
//   heads    (GQA) keys, then values, of all heads of keys and values
// A place is block * kCacheBlock + offset. The host plans which workgroup reads which blocks
// (plan_paged_attention), because it alone knows the sequences' lengths; the recording reads the
// plan from the device, so that it serves every step of its number of rows. A row's bits depend on
// its query, the keys that it sees and PagedPlan::split_blocks alone: not on the other rows, on
// which blocks hold the keys, or on how many queries of the sequence are in the step. Attention of
// bf16 queries over entries of bf16 or FP8 goes by the numeric class of the device (GemmClass): on
// matrix units, where their sizes suit these, weights are rounded to the elements of matrices. The
// contract that all ops share stands in ops.hpp.

#include <bellows/engine/recording.hpp>
#include <bellows/engine/sizes.hpp>
#include <bellows/engine/tensor.hpp>

#include <cstdint>
#include <span>
#include <vector>

namespace bellows::ops {

/// Tokens of a block.
inline constexpr std::uint64_t kCacheBlock = 64;
/// A place that does not exist: what would stand there is not written.
inline constexpr std::uint32_t kNoPlace = 0xFFFFFFFF;

/// What a token's entry in one layer looks like. Sizes are multiples of 4.
struct CacheShape {
    enum class Form : std::uint8_t { Latent, Heads };
    Form form = Form::Latent;
    /// f32 or bf16; of Latent also F8E4M3, whose key part is bf16.
    DType dtype = DType::BF16;
    std::uint64_t latent = 0, rope = 0; ///< of Latent; with F8E4M3 latent is a multiple of 128
    std::uint64_t kv_heads = 0, qk_dim = 0, v_dim = 0; ///< of Heads

    bool operator==(const CacheShape&) const = default;
};

/// Bytes of a token's entry, a multiple of 16: 656 for a latent of 512 in F8E4M3 with a key part of
/// 64.
std::uint64_t cache_token_bytes(const CacheShape& shape);
/// Bytes of a layer's cache of so many blocks.
std::uint64_t cache_bytes(const CacheShape& shape, std::uint64_t blocks);

/// The cache of one layer. memory: cache_bytes(shape, blocks) at a multiple of 16 bytes.
struct PagedCache {
    CacheShape shape;
    std::uint64_t blocks = 0;
    BufferView memory;
};

/// Writes entries of a latent cache. latent: [rows, latent] act, strided; key: [rows, rope] act,
/// strided; places: [rows] u32, no two alike but kNoPlace (or another that the cache does not
/// have). Values are rounded to the cache's type to nearest even; FP8 scales are those of
/// fp8/recipe.hpp in f32: max(amax, 1e-4) / 448.
void cache_append_latent(Recording& recording, const PagedCache& cache, const TensorView& latent,
                         const TensorView& key, const TensorView& places);
/// Writes entries of a cache of heads. keys: [rows, kv_heads, qk_dim] act, values: [rows, kv_heads,
/// v_dim] act, both with free token and head strides.
void cache_append_heads(Recording& recording, const PagedCache& cache, const TensorView& keys,
                        const TensorView& values, const TensorView& places);

/// rmsnorm_forward of the latents, rope_at of the key parts and cache_append_latent in one
/// dispatch, with the same bits. kv: [rows, latent + rope] act, strided, as a projection leaves it;
/// gain: [latent] f32 or, where kv is, bf16; table: [positions, rope / 2, 2] f32 (rope_table());
/// positions: [rows] u32, below the table's.
void cache_append_normalised_latent(Recording& recording, const PagedCache& cache,
                                    const TensorView& kv, const TensorView& gain, float eps,
                                    const TensorView& table, const TensorView& positions,
                                    const TensorView& places);
/// rope_at of the keys and cache_append_heads in one dispatch, with the same bits; the tensor of
/// keys is not written. table: [positions, qk_dim / 2, 2] f32; positions: [rows] u32, below the
/// table's.
void cache_append_rotated_heads(Recording& recording, const PagedCache& cache,
                                const TensorView& keys, const TensorView& values,
                                const TensorView& table, const TensorView& positions,
                                const TensorView& places);

/// Reads entries of a latent cache back: what cache_append_latent takes. Rows of kNoPlace are
/// zeros.
void cache_gather_latent(Recording& recording, const PagedCache& cache, const TensorView& places,
                         const TensorView& latent, const TensorView& key);
void cache_gather_heads(Recording& recording, const PagedCache& cache, const TensorView& places,
                        const TensorView& keys, const TensorView& values);

/// Copies whole blocks of a cache: pairs is [count, 2] u32, from and to; from kNoPlace: nothing. No
/// block is both a source and a destination, or a destination twice.
void cache_copy_blocks(Recording& recording, const PagedCache& cache, const TensorView& pairs);

/// Rotates like rope_forward, each token by the angle of its own position. positions: [tokens] u32,
/// below the table's.
void rope_at(Recording& recording, const TensorView& x, const TensorView& table,
             const TensorView& positions, const TensorView& y);

// ---- The plan -------------------------------------------------------------------------------

/// Consecutive query rows of a step that belong to one sequence. The last of them sees `keys` keys,
/// each one before it one less.
struct PagedQueries {
    std::uint64_t rows = 0;
    std::uint64_t keys = 0;     ///< 0 (then rows see nothing), or at least `rows`
    std::uint32_t sequence = 0; ///< a row of the block tables
};

/// Who reads what, as words for the device.
struct PagedPlan {
    /// Words of an item: first row, rows, sequence, keys that the first row sees, first block, end
    /// of the blocks, first partial result, partial results from one row to the next.
    static constexpr std::uint64_t kItemWords = 8;
    /// Words of a row's parts: first partial result, number of them. A row of one part has none:
    /// its result is written at once.
    static constexpr std::uint64_t kRowWords = 2;

    std::uint64_t split_blocks = 1;
    std::uint64_t partials = 0; ///< results of parts: one for each row of each item
    /// [1 + items]: the number of items, then the items (kItemWords each), from word kItemWords on.
    std::vector<std::uint32_t> items;
    std::vector<std::uint32_t> rows; ///< [rows, kRowWords]

    std::uint64_t num_items() const noexcept { return items.size() / kItemWords - 1; }
};

/// queries: in the order of their rows. Each sequence's blocks are split after every split_blocks,
/// counted from its first, and its rows into groups of at most rows_per_item. Rows that see nothing
/// have no part: their result is zero. Pure. Throws Error{InvalidArgument}.
PagedPlan plan_paged_attention(std::span<const PagedQueries> queries, std::uint64_t split_blocks,
                               std::uint64_t rows_per_item);

/// The most items and partial results of steps with at most so many rows, sequences and blocks of
/// all sequences' keys together (each block counted once for each group of rows that reads it).
struct PagedCapacity {
    std::uint64_t rows = 0;
    std::uint64_t items = 0;
    std::uint64_t partials = 0;

    std::uint64_t item_words() const noexcept { return (items + 1) * PagedPlan::kItemWords; }
};
/// sequences: entries of plan_paged_attention's queries. Pure. Throws Error{InvalidArgument}.
PagedCapacity paged_capacity(std::uint64_t rows, std::uint64_t sequences, std::uint64_t blocks,
                             std::uint64_t split_blocks, std::uint64_t rows_per_item);

/// A plan on the device, with the block tables.
struct PagedWork {
    PagedCapacity capacity;
    TensorView items;  ///< [capacity.item_words()] u32
    TensorView rows;   ///< [rows, kRowWords] u32
    TensorView tables; ///< [sequences, blocks of a sequence] u32; what is not used may be anything
};

/// Rows that an item should have at most on this device with its numeric class, for `heads` query
/// heads to one of keys.
std::uint64_t paged_rows_per_item(const Device& device, const CacheShape& cache, DType queries,
                                  std::uint64_t heads);
std::uint64_t paged_attention_workspace_bytes(const PagedCapacity& capacity, std::uint64_t heads,
                                              std::uint64_t v_dim);

/// o[i] = sum over the keys that row i sees of softmax(scale * q[i] . k[j]) * v[j].
/// Of a latent cache, keys are (latent, key part) and values are the latent: q: [rows, heads,
/// latent
/// + rope], o: [rows, heads, latent]. Of heads: q: [rows, heads, qk_dim], o: [rows, heads, v_dim],
/// head h uses head h / (heads / kv_heads) of keys. q and o are act with free token and head
/// strides; lse (optional): [rows, heads] f32, the natural log of the sum of the exponentials, +inf
/// for rows that see nothing. workspace: paged_attention_workspace_bytes.
void paged_attention(Recording& recording, const TensorView& q, const PagedCache& cache,
                     const PagedWork& work, const TensorView& o, const TensorView& lse, float scale,
                     BufferView workspace);

/// Results of attention that are still in parts. They last as long as the plan and the workspace.
struct PagedParts {
    TensorView rows;        ///< PagedWork::rows
    TensorView sums;        ///< [partials, heads, v_dim] f32: each part's own result
    TensorView log_of_sums; ///< [partials, heads] f32, base 2
};

/// paged_attention without its last dispatch: rows of one part have their result in o, the others
/// theirs in what is returned, which fp8/few_rows.hpp reads.
PagedParts paged_attention_parts(Recording& recording, const TensorView& q, const PagedCache& cache,
                                 const PagedWork& work, const TensorView& o, float scale,
                                 BufferView workspace);

} // namespace bellows::ops
