// SPDX-License-Identifier: MIT
#include <bellows/train/sequence_source.hpp>

#include <bellows/base/error.hpp>
#include <bellows/base/mix.hpp>

#include <algorithm>
#include <limits>
#include <string>

namespace bellows {

namespace {

/// A keyed permutation of [0, count): a four-round Feistel network over the next even number of
/// bits, walked along its cycle until the value lies inside. The domain is below 4 × count, so the
/// walk is short, and it always ends, because `value` itself lies on the cycle.
std::uint64_t permuted(std::uint64_t value, std::uint64_t count, std::uint64_t key) noexcept {
    unsigned half = 1;
    while (half < 32 && (std::uint64_t{1} << (2 * half)) < count) {
        ++half;
    }
    const std::uint64_t mask = (std::uint64_t{1} << half) - 1;
    do {
        std::uint64_t left = value >> half;
        std::uint64_t right = value & mask;
        for (std::uint64_t round = 0; round < 4; ++round) {
            const std::uint64_t next = left ^ (mix(key ^ mix(right + (round << 32))) & mask);
            left = right;
            right = next;
        }
        value = left << half | right;
    } while (value >= count);
    return value;
}

} // namespace

ShuffledSequences::ShuffledSequences(const Corpus& corpus, TokenRange range,
                                     const SequenceOrder& order)
    : corpus_(&corpus), range_(range), order_(order) {
    if (range.first > corpus.num_tokens() || range.count > corpus.num_tokens() - range.first) {
        throw Error(ErrorCode::InvalidArgument, "the token range leaves the corpus");
    }
    if (order.sequences_per_step == 0 || order.sequence_length == 0) {
        throw Error(ErrorCode::InvalidArgument, "batch size and sequence length must be positive");
    }
    if (range.count <= order.sequence_length) {
        throw Error(ErrorCode::InvalidArgument, "the data holds " + std::to_string(range.count) +
                                                    " tokens, fewer than one sequence of " +
                                                    std::to_string(order.sequence_length) +
                                                    " + 1; give more text or a smaller --seq");
    }
    // One chunk is given up so that the cuts can shift by any number of tokens.
    const std::uint64_t whole = (range.count - 1) / order.sequence_length;
    num_chunks_ = std::max<std::uint64_t>(1, whole - 1);
    num_phases_ = range.count - num_chunks_ * order.sequence_length;
}

std::uint64_t ShuffledSequences::sequence_start(std::uint64_t step, std::uint64_t index) const {
    const bool ramped = order_.ramp.start > 0;
    const std::uint64_t per_step = ramped ? order_.ramp.batch(step) : order_.sequences_per_step;
    if (index >= per_step || step > std::numeric_limits<std::uint64_t>::max() / per_step - 1) {
        throw Error(ErrorCode::InvalidArgument, "sequence " + std::to_string(index) + " of step " +
                                                    std::to_string(step) + ": a step has " +
                                                    std::to_string(per_step) + " sequences");
    }
    const std::uint64_t number = (ramped ? order_.ramp.before(step) : step * per_step) + index;
    const std::uint64_t epoch = number / num_chunks_;
    const std::uint64_t key = mix(mix(order_.seed) ^ epoch);
    const std::uint64_t chunk = permuted(number % num_chunks_, num_chunks_, key);
    return range_.first + mix(key + 1) % num_phases_ + chunk * order_.sequence_length;
}

void ShuffledSequences::operator()(std::uint64_t step, std::uint64_t index,
                                   std::span<std::uint32_t> out) const {
    if (out.size() != order_.sequence_length + 1) {
        throw Error(ErrorCode::InvalidArgument, "a sequence needs room for " +
                                                    std::to_string(order_.sequence_length + 1) +
                                                    " tokens, not " + std::to_string(out.size()));
    }
    corpus_->copy(sequence_start(step, index), out);
}

} // namespace bellows
