// SPDX-License-Identifier: MIT
#pragma once

// What MPI alone would do: the same tokens in bf16, a row for each of their experts, through
// MPI_Alltoallv in host memory, whose pages have all been touched. Collective; the thread of main()
// owns it.

#include "expert_exchange/options.hpp"
#include "expert_exchange/routing.hpp"

#include <bellows/comm/world.hpp>

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

namespace bellows::bench {

class RawExchange {
public:
    /// Needs MPI. world must outlive it.
    RawExchange(World& world, const ExchangeShape& shape, const Owner& owner);
    ~RawExchange();

    void there();
    void back();
    /// All bytes that this rank sends to the others and itself, by one memcpy.
    void copy();
    /// "" or which row of both ways has not come where it should; runs them.
    std::string wrong();

    std::uint64_t bytes_sent() const { return sent_rows_ * row_bytes_; } ///< there
    std::uint64_t bytes_to_others() const;                               ///< likewise

private:
    struct RowType;
    struct Side {
        std::vector<int> counts, displacements; ///< of rows
        std::unique_ptr<std::byte[]> rows;
    };
    static std::uint64_t lay_out(Side& side);
    void exchange(const Side& from, Side& to);

    World& world_;
    std::uint64_t row_bytes_;
    std::unique_ptr<RowType> type_;
    Side sent_, received_;
    std::uint64_t sent_rows_ = 0, received_rows_ = 0;
};

} // namespace bellows::bench
