// SPDX-License-Identifier: MIT
#pragma once

// Low latency for more tokens than a handle has room for: they travel in chunks of the exchange's
// max_tokens, through two handles in turn, so that the tokens of a chunk are on their way while the
// experts compute the one before. How large a chunk may be for memory's sake says
// max_exchange_tokens().

#include <bellows/comm/expert_exchange.hpp>

#include <array>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <string>

namespace bellows {

class ChunkedExchange {
public:
    /// Makes the two handles. The exchange must outlive it. Throws Error{InvalidArgument} unless
    /// it is one of ExchangeMode::LowLatency.
    ChunkedExchange(ExpertExchange& exchange, const std::string& name);

    /// A chunk at the experts. Hands in what they compute of the handle's rows() and returns the
    /// results, as ExpertExchange::combine takes them: memory that the chunk after next may write
    /// to again. Work of the same chunk is ordered behind its arrival.
    using Experts = std::function<TensorView(ExchangeHandle& handle)>;

    /// How many chunks there are of so many tokens; one of none, too.
    std::uint64_t num_chunks(std::uint64_t tokens) const noexcept;

    /// x, topk_ids, topk_weights, out and the biases as ExpertExchange::dispatch and combine take
    /// them, but of any number of tokens. chunks: the most num_chunks() of any rank, the same on
    /// every rank, which know it from the most tokens that a step may have. Calls `experts` so many
    /// times, on ranks without tokens, too; what that throws all ranks get. Returns the time point
    /// of all of out; handing in a chunk may wait for the one before the last. Throws
    /// Error{InvalidArgument}, on every rank, if this rank's tokens are more than `chunks` hold.
    /// Collective.
    TimePoint run(const TensorView& x, const TensorView& topk_ids, const TensorView& topk_weights,
                  const TensorView& out, std::uint64_t chunks, const Experts& experts,
                  const CombineOptions& options = {});

private:
    void check(const TensorView& x, std::initializer_list<TensorView> others,
               std::uint64_t chunks) const;
    TensorView call(const Experts& experts, ExchangeHandle& handle) const;
    ExchangeHook send(std::uint64_t chunk, const TensorView& x, const TensorView& topk_ids,
                      const TensorView& topk_weights);
    /// Of a tensor with a row per token.
    TensorView part(const TensorView& tensor, std::uint64_t chunk) const;
    ExchangeHandle& handle(std::uint64_t chunk) const noexcept { return *handles_[chunk % 2]; }

    ExpertExchange& exchange_;
    std::string name_;
    std::array<std::unique_ptr<ExchangeHandle>, 2> handles_;
};

} // namespace bellows
