// SPDX-License-Identifier: MIT
#pragma once

// One rank's device, exchange and tensors: the four legs, each waited for, and what is wrong with
// their results. All ranks make the same calls. The thread of main() owns it.

#include "expert_exchange/options.hpp"
#include "expert_exchange/routing.hpp"
#include "support/op_bench.hpp"

#include <bellows/comm/expert_exchange.hpp>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace bellows::bench {

class ExchangeRig {
public:
    /// Collective. world must outlive it.
    ExchangeRig(World& world, const ExchangeOptions& options);
    ~ExchangeRig();

    Device& device() { return *device_; }
    /// What the ranks' devices are linked by, or why by nothing.
    std::string device_link() const;
    /// The rank of an expert.
    int owner(std::uint64_t expert) const { return exchange_->owners(expert).front(); }
    /// Sent to other ranks so far; nothing may be under way.
    ExchangeStats stats() const { return exchange_->stats(); }
    void wait_idle();
    /// Of what `once` does. Rank 0 writes; collective. Throws Error{Io}.
    void write_trace(World& world, const std::string& path, const std::function<void()>& once);

    /// x to the experts' rows.
    void dispatch();
    /// The tokens' values as the results of their rows, where those are no rows themselves.
    void fill_results();
    /// The rows as they are back, summed to out.
    void combine();
    /// The same in halves, what `between` hands in between them.
    void dispatch_around(const std::function<TimePoint()>& between);
    void combine_around(const std::function<TimePoint()>& between);
    /// x to the gradients of the rows.
    void combine_backward();
    /// Those back, summed, with the rows' weights as the gradients of weights.
    void dispatch_backward();

    /// "" or the first wrong element after each leg. Large tensors are checked in samples that have
    /// the first and the last row of every expert.
    std::string wrong_dispatch() const;
    std::string wrong_combine() const;
    std::string wrong_combine_backward() const;
    std::string wrong_dispatch_backward() const;

private:
    std::vector<float> read(const TensorView& rows, std::uint64_t first, std::uint64_t count) const;
    std::vector<float> read_codes(std::uint64_t first, std::uint64_t count) const;
    float times_summed(std::uint64_t token) const;
    std::vector<float> row_weights() const;
    bool masked() const { return shape_.low_latency && !shape_.by_rank; }
    /// Of rows_ in tensors.
    std::vector<std::uint64_t> places() const;
    std::string wrong_layout() const;
    /// read: of a row's first and following rows.
    using Read = std::function<std::vector<float>(std::uint64_t first, std::uint64_t count)>;
    std::string wrong_rows(const Read& read, const std::vector<RowSource>& sources) const;
    std::string wrong_tensor(const TensorView& rows, const std::vector<RowSource>& sources) const;
    /// expected: of the rows at `places`, as many of each.
    std::string wrong_weights(const TensorView& weights, const std::vector<float>& expected,
                              const std::vector<std::uint64_t>& places) const;

    ExchangeShape shape_;
    int rank_;
    std::unique_ptr<Device> device_;
    std::unique_ptr<Transport> transport_;
    std::unique_ptr<HostThread> thread_;
    std::unique_ptr<ExpertExchange> exchange_;
    std::unique_ptr<ExchangeHandle> handle_;
    Routing routing_;
    std::vector<RowSource> rows_;   ///< that arrive
    std::vector<RowSource> tokens_; ///< of this rank
    std::unique_ptr<OpData> data_;
    TensorView x_, ids_, weights_, results_, out_, d_x_, d_weights_;
};

} // namespace bellows::bench
