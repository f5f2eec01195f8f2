// SPDX-License-Identifier: MIT
#pragma once

// Sequences in a paged cache on the device, written by the ops, with the same in f64: for the
// checks of attention over it and for the tests. A sequence's numbers depend on its name alone. One
// thread.

#include "verify/checks/op_rig.hpp"
#include "verify/reference/paged_attention.hpp"

#include <bellows/engine/paged_attention.hpp>

#include <cstdint>
#include <vector>

namespace bellows::checks {

/// Consecutive queries at the end of a sequence of so many tokens.
struct PagedSequence {
    std::uint64_t rows = 0, keys = 0;
    std::uint64_t name = 0; ///< what its numbers are drawn by
};

/// A latent cache, or one of heads, in its type.
ops::CacheShape latent_cache(DType dtype, std::uint64_t latent, std::uint64_t rope);
ops::CacheShape heads_cache(DType dtype, std::uint64_t kv_heads, std::uint64_t qk_dim,
                            std::uint64_t v_dim);

/// What an entry's part holds once it is stored: rows of `size` elements.
std::vector<float> as_stored(const std::vector<float>& rows, std::uint64_t size, DType dtype);

/// Sizes of an entry's two parts as rows.
struct EntryParts {
    std::uint64_t heads, a, b; ///< elements of a head of each
    explicit EntryParts(const ops::CacheShape& shape);
};

class PagedRig {
public:
    /// order: by what the numbers of the blocks are shuffled.
    PagedRig(const OpRig& rig, DType act, const ops::CacheShape& shape, std::uint64_t heads,
             std::vector<PagedSequence> sequences, std::uint64_t order);

    struct Result {
        std::vector<float> o, lse;
        std::vector<float> around; ///< what stands around o's elements
    };
    /// rows_per_item: 0 for what suits the device.
    Result run(std::uint64_t split_blocks, std::uint64_t rows_per_item = 0) const;
    reference::PagedResult expected() const;
    /// Of each element of o, the sum over the keys of weight * |value|: what errors of weights may
    /// come to.
    reference::Vector absolute_sums() const;

    std::uint64_t rows() const { return rows_; }
    std::uint64_t heads() const { return heads_; }
    std::uint64_t v_dim() const;

private:
    std::uint64_t qk_dim() const;
    float scale() const;
    void fill();
    reference::PagedResult attend(const reference::Vector& q, const reference::Vector& keys,
                                  const reference::Vector& values) const;

    OpRig rig_;
    DType act_;
    ops::CacheShape shape_;
    std::uint64_t heads_, rows_ = 0, table_blocks_ = 0, blocks_ = 0;
    std::vector<PagedSequence> sequences_;
    std::vector<std::uint32_t> tables_; ///< [sequences, table_blocks]
    std::vector<float> q_, a_, b_;      ///< a, b: of all places, as stored
    Buffer cache_;
};

} // namespace bellows::checks
