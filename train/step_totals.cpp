// SPDX-License-Identifier: MIT
#include "step_totals.hpp"

#include <array>
#include <cstring>
#include <span>
#include <utility>

namespace bellows {

std::vector<double> numbers_of(const HostCollectives::Bytes& part) {
    std::vector<double> values(part.size() / sizeof(double));
    if (!values.empty())
        std::memcpy(values.data(), part.data(), part.size());
    return values;
}

Traffic StepTotals::traffic() const {
    Traffic all{0, host_seconds_};
    for (const auto& connection : connections_)
        all += connection();
    return all;
}

StepTotals::Sums StepTotals::sum_with_bytes(double value) {
    const std::uint64_t bytes = traffic().bytes_sent;
    std::array<double, 2> sums{
        value, static_cast<double>(bytes - std::exchange(counted_.bytes_sent, bytes))};
    in_collective([&] { everyone_.all_reduce_sum(std::span<double>(sums)); });
    return {sums[0], static_cast<std::uint64_t>(sums[1])};
}

StepTotals::Losses StepTotals::sum_losses(StepAsks asks) {
    constexpr std::size_t kBehind = 3; // what this rank asks and waited stands behind the losses
    std::vector<double> mine;          // pairs: which micro-batch, its loss
    for (const auto& [micro_batch, loss] : losses_) {
        mine.push_back(static_cast<double>(micro_batch));
        mine.push_back(loss);
    }
    mine.push_back(asks.save ? 1 : 0);
    mine.push_back(asks.stop ? 1 : 0);
    const double waited = traffic().seconds_waited;
    mine.push_back(waited - std::exchange(counted_.seconds_waited, waited));
    std::vector<HostCollectives::Bytes> parts;
    in_collective([&] { parts = everyone_.all_gather(std::as_bytes(std::span(mine))); });
    std::map<double, double> all;
    Losses losses;
    for (const auto& part : parts) {
        const std::vector<double> values = numbers_of(part);
        losses.seconds_waited += values.back() / static_cast<double>(parts.size());
        losses.asked.stop |= values[values.size() - 2] != 0;
        losses.asked.save |= values[values.size() - kBehind] != 0;
        for (std::size_t i = 0; i + kBehind < values.size(); i += 2)
            all[values[i]] = values[i + 1];
    }
    for (const auto& [micro_batch, loss] : all)
        losses.sum += loss;
    return losses;
}

} // namespace bellows
