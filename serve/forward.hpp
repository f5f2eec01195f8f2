// SPDX-License-Identifier: MIT
#pragma once

// A whole model's forward pass over the token rows of a step, on one rank: embedding, layers with a
// paged cache, head and sampling in one recording. A recording serves all steps of its sizes, which
// are rounded up to powers of two, and is made when a step first needs it; those that have not been
// used for longest give way to new ones. One thread at a time; used by this room's .cpp files.

#include <bellows/engine/arena.hpp>
#include <bellows/engine/sampling.hpp>
#include <bellows/model/cached_layer.hpp>

#include <chrono>
#include <compare>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

namespace bellows {

struct ForwardConfig {
    std::uint64_t max_context = 0; ///< tokens of the longest sequence
    std::uint64_t blocks = 0;      ///< of each layer's cache
    DType cache = DType::BF16;
    /// A row's bits depend on its own sequence alone.
    bool exact = true;
    std::vector<std::uint32_t> forbidden; ///< tokens that are never drawn
    std::chrono::milliseconds timeout = TimePoint::kDefaultTimeout;
};

/// What a step computes.
struct StepInput {
    std::vector<std::uint32_t> tokens, positions,
        places; ///< of the rows, those of a sequence together
    /// In the order of the rows; PagedQueries::sequence is an index of `tables`.
    std::vector<ops::PagedQueries> queries;
    std::vector<std::span<const std::uint32_t>> tables; ///< blocks of each sequence
    std::vector<std::uint32_t> sampled_rows;            ///< whose next token is drawn
    std::vector<ops::SampleSettings> settings;          ///< of each of these
    std::vector<ops::SampleHistory> history;
    std::vector<ops::SampleBias> biases;
    std::uint32_t top_log_probs = 0; ///< the most that a row asks for
};

/// What it gives, for each sampled row.
struct StepOutput {
    std::vector<std::uint32_t> tokens; ///< ops::kNoToken: the row's logits are not finite
    std::vector<float> log_probs;
    std::vector<std::uint32_t> top_tokens; ///< [rows, StepInput::top_log_probs]
    std::vector<float> top_log_probs;
};

class Forward {
public:
    /// All must outlive it. Throws Error{OutOfMemory}, Error{InvalidArgument}.
    Forward(const ModelConfig& config, ParameterStore& parameters, const ForwardConfig& forward);
    ~Forward();

    /// Waits for the device. Throws Error{Timeout} and what the device throws.
    StepOutput run(const StepInput& input);

    std::uint64_t num_recordings() const noexcept { return recordings_.size(); }

private:
    /// Sizes that a recording is made for.
    struct Bucket {
        std::uint64_t rows = 0, sequences = 0, sampled = 0, items = 0, partials = 0, history = 0,
                      biases = 0, top = 0;
        auto operator<=>(const Bucket&) const = default;
    };
    struct Layout;
    struct Step;

    Bucket bucket_of(const StepInput& input, const ops::PagedPlan& plan) const;
    std::uint64_t split_blocks(const StepInput& input) const;
    void write(const StepInput& input, const ops::PagedPlan& plan, const Layout& layout);
    Step& recorded(const Bucket& bucket);
    std::unique_ptr<Step> record(const Bucket& bucket);
    void record_head(Recording& r, Arena::Frame& scratch, const Step& step,
                     const TensorView& stream);
    void reserve(const Layout& layout);

    const ModelConfig config_;
    ParameterStore& parameters_;
    ForwardConfig forward_;
    std::uint64_t table_blocks_, rows_per_item_;
    RopeTable positions_;
    std::vector<Buffer> caches_;
    std::vector<ops::PagedCache> paged_;
    std::vector<std::unique_ptr<CachedLayer>> layers_;
    Buffer allowed_;
    Arena arena_;
    /// What the host writes, and its copy on the device.
    Buffer upload_, input_;
    Buffer output_;
    std::map<Bucket, std::unique_ptr<Step>> recordings_;
    std::uint64_t steps_ = 0;
};

} // namespace bellows
