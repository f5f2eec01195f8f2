// SPDX-License-Identifier: MIT
#pragma once

// What a step of Forward consists of: where its input and output stand, its recordings, and the
// memory that they name. Used by forward.cpp, which runs steps, and forward_recording.cpp, which
// records them.

#include "forward.hpp"

#include <bit>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

namespace bellows {

inline constexpr std::uint64_t kWord = sizeof(std::uint32_t);
/// Rows of each expert that products are taken for in the exact mode.
inline constexpr std::uint64_t kExactExpertRows = 64;

/// Recordings are made for so many of what a step has `count` of.
inline std::uint64_t bucket_size(std::uint64_t count) {
    return count == 0 ? 0 : std::bit_ceil(count);
}

/// Where the parts of a step's input and output stand, in words.
struct Forward::Layout {
    /// choices: of each row, which the host is told.
    Layout(const Bucket& b, std::uint64_t table_blocks, std::uint64_t choices, bool drafts);

    struct Part {
        std::uint64_t first = 0, words = 0;
        BufferView of(const Buffer& buffer) const {
            return buffer.view().sub(first * kWord, words * kWord);
        }
    };
    Part count, tokens, positions, places, items, row_parts, tables, sampled_rows, settings,
        history, biases, next_tokens, draft_settings;
    std::uint64_t input_words = 0;
    Part out_log_probs, out_top, out_top_log_probs, out_drafts;
    Part out_choices; ///< [layers of experts, rows, top_k] i32
    std::uint64_t output_words = 0;
};

struct Forward::Step {
    Bucket bucket;
    Layout layout;
    /// Up to what goes to the ranks of a layer's experts, and what the shared experts make
    /// meanwhile; last, up to the sampled tokens.
    struct Part {
        std::unique_ptr<Recording> before, shared;
    };
    std::vector<Part> parts;
    std::vector<CachedExperts::Routed> routed; ///< of each part but the last
    std::vector<TensorView> streams;           ///< that the experts of each of these add to
    TensorView stream;                         ///< of the model, without the module
    std::uint64_t last_used = 0;               ///< a step's number

    BufferView choices_of(std::uint64_t layer, const Half& half) const;
};

/// Memory of the rows that are computed together, and the recordings that name it.
struct Forward::Half {
    explicit Half(Arena& scratch) : arena(scratch) {}

    Arena& arena;
    /// What the host writes, and its copy on the device.
    Buffer upload, input;
    Buffer drawn; ///< tokens, which the host reads, and the step behind this one
    Buffer output;
    const Half* before = nullptr; ///< of the step before, which may be running still
    TimePoint done;               ///< of the last step that was started with it
    std::map<Bucket, std::unique_ptr<Step>> recordings;
};

/// A half of a step that is computed; without rows it has no recordings.
struct Forward::Running {
    StepInput input;
    Half* half = nullptr;
    Step* step = nullptr;
    TimePoint done;

    std::uint64_t rows() const { return input.tokens.size(); }
};

} // namespace bellows
