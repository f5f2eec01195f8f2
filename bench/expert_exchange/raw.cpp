// SPDX-License-Identifier: MIT
#include "expert_exchange/raw.hpp"

#include <bellows/base/error.hpp>
#include <bellows/comm/mpi_interop.hpp>

#include <algorithm>
#include <cstring>
#include <limits>

namespace bellows::bench {

namespace {

/// At the head of a row: its source, and which it is of all that go from there to one rank.
struct Stamp {
    std::int32_t from, index;
    bool operator==(const Stamp&) const = default;
};

void require(int status, const char* call) {
    if (status != MPI_SUCCESS)
        throw Error(ErrorCode::Mpi, std::string(call) + " failed", -1, status);
}

} // namespace

/// Counts are of rows: they stay within an int, whatever the bytes.
struct RawExchange::RowType {
    explicit RowType(std::uint64_t bytes) {
        require(MPI_Type_contiguous(static_cast<int>(bytes), MPI_BYTE, &type),
                "MPI_Type_contiguous");
        require(MPI_Type_commit(&type), "MPI_Type_commit");
    }
    ~RowType() { MPI_Type_free(&type); }
    RowType(const RowType&) = delete;
    RowType& operator=(const RowType&) = delete;
    MPI_Datatype type = MPI_DATATYPE_NULL;
};

std::uint64_t RawExchange::lay_out(Side& side) {
    std::uint64_t rows = 0;
    for (const int count : side.counts) {
        side.displacements.push_back(static_cast<int>(rows));
        rows += static_cast<std::uint64_t>(count);
    }
    return rows;
}

RawExchange::RawExchange(World& world, const ExchangeShape& shape, const Owner& owner)
    : world_(world), row_bytes_(shape.hidden * size_of(DType::BF16)) {
    if (shape.ranks * shape.slots() > std::numeric_limits<int>::max())
        throw Error(ErrorCode::InvalidArgument, "MPI_Alltoallv cannot count " +
                                                    std::to_string(shape.ranks * shape.slots()) +
                                                    " rows");
    for (int rank = 0; rank < world.size(); ++rank) {
        const Traffic traffic = traffic_of(shape, rank, owner);
        received_.counts.push_back(
            static_cast<int>(traffic.slots[static_cast<std::size_t>(world.rank())]));
        if (rank == world.rank())
            sent_.counts.assign(traffic.slots.begin(), traffic.slots.end());
    }
    sent_rows_ = lay_out(sent_);
    received_rows_ = lay_out(received_);
    sent_.rows = std::make_unique<std::byte[]>(sent_rows_ * row_bytes_);
    received_.rows =
        std::make_unique<std::byte[]>(std::max(sent_rows_, received_rows_) * row_bytes_);
    const auto lock = lock_mpi(world_);
    type_ = std::make_unique<RowType>(row_bytes_);
}

RawExchange::~RawExchange() {
    const auto lock = lock_mpi(world_);
    type_.reset();
}

void RawExchange::exchange(const Side& from, Side& to) {
    const auto lock = lock_mpi(world_);
    require(MPI_Alltoallv(from.rows.get(), from.counts.data(), from.displacements.data(),
                          type_->type, to.rows.get(), to.counts.data(), to.displacements.data(),
                          type_->type, MPI_COMM_WORLD),
            "MPI_Alltoallv");
}

void RawExchange::there() {
    exchange(sent_, received_);
}

void RawExchange::back() {
    exchange(received_, sent_);
}

void RawExchange::copy() {
    std::memcpy(received_.rows.get(), sent_.rows.get(), sent_rows_ * row_bytes_);
}

std::uint64_t RawExchange::bytes_to_others() const {
    const auto mine = static_cast<std::size_t>(world_.rank());
    return (sent_rows_ - static_cast<std::uint64_t>(sent_.counts[mine])) * row_bytes_;
}

std::string RawExchange::wrong() {
    const auto at = [&](const Side& side, std::size_t rank, int index) {
        return side.rows.get() +
               static_cast<std::uint64_t>(side.displacements[rank] + index) * row_bytes_;
    };
    const auto stamps = [&](const Side& side, const char* way, auto&& from_of) -> std::string {
        for (std::size_t rank = 0; rank < side.counts.size(); ++rank)
            for (int i = 0; i < side.counts[rank]; ++i) {
                Stamp stamp{};
                std::memcpy(&stamp, at(side, rank, i), sizeof stamp);
                if (stamp != Stamp{from_of(rank), i})
                    return "MPI_Alltoallv " + std::string(way) + ": row " + std::to_string(i) +
                           " of rank " + std::to_string(rank) + " is row " +
                           std::to_string(stamp.index) + " of rank " + std::to_string(stamp.from);
            }
        return "";
    };
    for (std::size_t rank = 0; rank < sent_.counts.size(); ++rank)
        for (int i = 0; i < sent_.counts[rank]; ++i) {
            const Stamp stamp{world_.rank(), i};
            std::memcpy(at(sent_, rank, i), &stamp, sizeof stamp);
        }
    there();
    const std::string one_way = stamps(
        received_, "there", [](std::size_t rank) { return static_cast<std::int32_t>(rank); });
    std::memset(sent_.rows.get(), 0xff, sent_rows_ * row_bytes_);
    back();
    return !one_way.empty() ? one_way
                            : stamps(sent_, "back", [&](std::size_t) { return world_.rank(); });
}

} // namespace bellows::bench
