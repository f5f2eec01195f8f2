// SPDX-License-Identifier: MIT
#pragma once

// What an exchange is tried with: a case, and what each rank hands in for it, worked out alike
// wherever it is asked for.

#include "verify/reference/compare.hpp"

#include <bellows/comm/expert_exchange.hpp>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

namespace bellows::testing {

struct ExchangeCase {
    ExchangeLayout layout = ExchangeLayout::ExpertMajor;
    DType dtype = DType::F32;
    bool codes = false; ///< tokens and gradients, on their way to the experts
    fp8::ScaleRule scales = fp8::ScaleRule::PowerOfTwo;
    std::uint64_t hidden = 64;
    bool staged = false;   ///< copied between device and host, in small pieces
    bool over_mpi = false; ///< and not through memory that ranks share
    bool linked = false;   ///< from device to device, where they can be linked
    bool low_latency = false;
    int ranks_per_node = 0; ///< 0: as they are
    std::uint64_t experts = 7, top_k = 3;
    std::uint32_t alignment = 4;
    std::uint64_t max_tokens = 130; ///< of a rank; each has half as many at least, rank 1 none
    std::uint64_t absent = 20;      ///< choices that are none, in percent
    std::uint64_t skew = 1;         ///< so many times as often as others is the first expert chosen
    std::uint64_t seed = 0;
    bool wide_sums = false;           ///< which travel as f32
    std::uint64_t piece_bytes = 4096; ///< where it is staged
    /// Sums along the tree over the experts, of values that are not whole.
    bool exact = false;
};

/// The same on all ranks and systems.
inline std::uint64_t mixed(std::uint64_t seed, std::uint64_t a, std::uint64_t b) {
    std::uint64_t bits = (seed * 0x9E3779B97F4A7C15u + a) * 0xBF58476D1CE4E5B9u + b;
    for (int round = 0; round < 2; ++round)
        bits = (bits ^ bits >> 29) * 0x94D049BB133111EBu;
    return bits ^ bits >> 32;
}

/// As a tensor of this type holds it.
inline float held(DType dtype, float value) {
    const std::uint32_t bits = std::uint32_t{reference::bf16_bits(value)} << 16;
    return dtype == DType::BF16 ? std::bit_cast<float>(bits) : value;
}

/// What a rank hands in, the same wherever it is worked out.
struct ExchangeInput {
    ExchangeInput(int rank, const ExchangeCase& c)
        : tokens(rank == 1 ? 0 : tokens_of(c, static_cast<std::uint64_t>(rank))) {
        const auto r = static_cast<std::uint64_t>(rank);
        // Small whole numbers: sums, of results times weights too, have the same bits in every
        // order, and in bf16.
        const std::uint64_t most = std::clamp<std::uint64_t>(
            256 / (2 * c.top_k * (c.low_latency ? kMostWeight : 1)), 1, 15);
        for (std::uint64_t i = 0; i < tokens * c.hidden; ++i)
            x.push_back(c.exact ? held(c.dtype, fraction(mixed(c.seed, r, i)) - 0.5f)
                                : static_cast<float>(mixed(c.seed, r, i) % (2 * most + 1)) -
                                      static_cast<float>(most));
        for (std::uint64_t t = 0; t < tokens; ++t) {
            const bool nowhere = t % 11 == 3;
            for (std::uint64_t k = 0; k < c.top_k; ++k) {
                const std::uint64_t slot = t * c.top_k + k;
                const bool absent = mixed(c.seed + 1, r, slot) % 100 < c.absent || nowhere;
                ids.push_back(absent ? -1 : chosen(c, mixed(c.seed + 2, r, t), k));
                // All different; or small and whole, as they are multiplied with.
                weights.push_back(c.exact         ? fraction(mixed(c.seed + 4, r, slot))
                                  : c.low_latency ? static_cast<float>(1 + slot % kMostWeight)
                                                  : static_cast<float>(slot) / 64);
            }
        }
    }

    static constexpr std::uint64_t kMostWeight = 4;
    /// 0 to 1, with all the bits that a float has.
    static float fraction(std::uint64_t bits) {
        return static_cast<float>(bits >> 40) / static_cast<float>(1 << 24);
    }
    static std::uint64_t tokens_of(const ExchangeCase& c, std::uint64_t rank) {
        return c.max_tokens / 2 +
               mixed(c.seed + 3, rank, 0) % (c.max_tokens - c.max_tokens / 2 + 1);
    }
    /// Different experts for a token's choices, where there are so many, but for those that are the
    /// first one for its skew's sake.
    static std::int32_t chosen(const ExchangeCase& c, std::uint64_t bits, std::uint64_t k) {
        const std::uint64_t expert = (bits + k) % (c.experts + c.skew - 1);
        return static_cast<std::int32_t>(expert < c.experts ? expert : 0);
    }

    std::uint64_t tokens;
    std::vector<float> x, weights;
    std::vector<std::int32_t> ids;
};

} // namespace bellows::testing
