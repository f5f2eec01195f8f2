// SPDX-License-Identifier: MIT
#include <bellows/comm/chunked_exchange.hpp>

#include "exchange_impl.hpp"
#include "world/fail_together.hpp"

#include <algorithm>
#include <optional>

namespace bellows {

ChunkedExchange::ChunkedExchange(ExpertExchange& exchange, const std::string& name)
    : exchange_(exchange), name_(name) {
    require(exchange.config().mode == ExchangeMode::LowLatency, name,
            "chunks are for low-latency mode: high throughput's max_tokens costs nothing until "
            "tokens come");
    for (std::size_t half = 0; half < handles_.size(); ++half)
        handles_[half] = exchange.create_handle(name + " half " + std::to_string(half));
}

std::uint64_t ChunkedExchange::num_chunks(std::uint64_t tokens) const noexcept {
    const std::uint64_t most = exchange_.config().max_tokens;
    return std::max<std::uint64_t>((tokens + most - 1) / most, 1);
}

TensorView ChunkedExchange::part(const TensorView& tensor, std::uint64_t chunk) const {
    if (!tensor.buffer) // a bias that is none
        return tensor;
    const std::uint64_t most = exchange_.config().max_tokens, tokens = tensor.extent[0];
    const std::uint64_t first = std::min(chunk * most, tokens);
    return tensor.rows(first, std::min(most, tokens - first));
}

void ChunkedExchange::check(const TensorView& x, std::initializer_list<TensorView> others,
                            std::uint64_t chunks) const {
    const std::uint64_t tokens = x.extent[0];
    require(chunks > 0 && num_chunks(tokens) <= chunks, name_,
            std::to_string(tokens) + " tokens are more than " + std::to_string(chunks) +
                " chunks of " + std::to_string(exchange_.config().max_tokens) +
                " hold: hand in the most chunks of any rank, on every rank");
    for (const TensorView& other : others)
        require(!other.buffer || other.extent[0] == tokens, name_,
                "x has " + std::to_string(tokens) + " tokens, another tensor " +
                    std::to_string(other.extent[0]));
}

/// Whatever they throw is an Error, of which everybody hears.
TensorView ChunkedExchange::call(const Experts& experts, ExchangeHandle& handle) const {
    try {
        return experts(handle);
    } catch (const Error&) {
        throw;
    } catch (const std::exception& other) {
        throw Error(ErrorCode::Internal, name_ + ": the experts failed: " + other.what());
    }
}

ExchangeHook ChunkedExchange::send(std::uint64_t chunk, const TensorView& x,
                                   const TensorView& topk_ids, const TensorView& topk_weights) {
    return exchange_.dispatch_send(handle(chunk), part(x, chunk), part(topk_ids, chunk),
                                   part(topk_weights, chunk));
}

TimePoint ChunkedExchange::run(const TensorView& x, const TensorView& topk_ids,
                               const TensorView& topk_weights, const TensorView& out,
                               std::uint64_t chunks, const Experts& experts,
                               const CombineOptions& options) {
    const ExpertExchange::Impl& exchange = *exchange_.impl_;
    // What the experts refuse, too, everybody hears of.
    return fail_together(exchange.world.control(), exchange.group_size(), [&] {
        require(!topk_ids.row_count, name_,
                "topk_ids has a row_count, but the extents say how many tokens there are");
        check(x, {topk_ids, topk_weights, out, options.bias, options.second_bias}, chunks);
        std::optional<ExchangeHook> arriving = send(0, x, topk_ids, topk_weights);
        TimePoint last;
        for (std::uint64_t chunk = 0; chunk < chunks; ++chunk) {
            (*arriving)();
            arriving.reset();
            if (chunk + 1 < chunks)
                arriving = send(chunk + 1, x, topk_ids, topk_weights);
            const TensorView results = call(experts, handle(chunk));
            handle(chunk).impl_->sum_after = last;
            CombineOptions of_chunk = options;
            of_chunk.bias = part(options.bias, chunk);
            of_chunk.second_bias = part(options.second_bias, chunk);
            last = exchange_.combine(handle(chunk), results, part(out, chunk), of_chunk);
        }
        return last;
    });
}

} // namespace bellows
