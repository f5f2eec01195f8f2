// SPDX-License-Identifier: MIT
#include "step_totals.hpp"

#include <algorithm>
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

namespace {

/// What a rank tells the others behind a step, as one row of numbers: micro-batches, each with how
/// many losses it has and these; layers, each with what was kept, or -1, how many loads it has and
/// these; how many numbers the layers take; visible keys; whether to save, whether to stop; seconds
/// waited.
constexpr std::size_t kBehindLoads = 5;

void append(std::vector<double>& row, const LayerLoads& layer) {
    row.push_back(static_cast<double>(layer.layer));
    row.push_back(layer.kept ? static_cast<double>(*layer.kept) : -1);
    row.push_back(static_cast<double>(layer.loads.size()));
    row.insert(row.end(), layer.loads.begin(), layer.loads.end());
}

/// Of the layers' part of a row.
void read_loads(std::span<const double> row, std::vector<LayerLoads>& layers) {
    while (!row.empty()) {
        LayerLoads& layer = layers.emplace_back(static_cast<std::uint64_t>(row[0]));
        if (row[1] >= 0)
            layer.kept = static_cast<std::uint64_t>(row[1]);
        const auto loads = row.subspan(3, static_cast<std::size_t>(row[2]));
        for (const double load : loads)
            layer.loads.push_back(static_cast<std::uint64_t>(load));
        row = row.subspan(3 + loads.size());
    }
}

} // namespace

StepTotals::Losses StepTotals::sum_losses(StepAsks asks, const std::vector<LayerLoads>& loads) {
    std::vector<double> mine;
    for (const auto& [micro_batch, loss] : losses_) {
        mine.push_back(static_cast<double>(micro_batch));
        mine.push_back(static_cast<double>(1 + loss.of_modules.size()));
        mine.push_back(loss.sum);
        mine.insert(mine.end(), loss.of_modules.begin(), loss.of_modules.end());
    }
    const std::size_t of_losses = mine.size();
    for (const LayerLoads& layer : loads)
        append(mine, layer);
    mine.push_back(static_cast<double>(mine.size() - of_losses));
    mine.push_back(std::exchange(visible_keys_, 0));
    mine.push_back(asks.save ? 1 : 0);
    mine.push_back(asks.stop ? 1 : 0);
    const double waited = traffic().seconds_waited;
    mine.push_back(waited - std::exchange(counted_.seconds_waited, waited));
    std::vector<HostCollectives::Bytes> parts;
    in_collective([&] { parts = everyone_.all_gather(std::as_bytes(std::span(mine))); });
    std::map<double, std::vector<double>> all;
    Losses losses;
    for (const auto& part : parts) {
        const std::vector<double> values = numbers_of(part);
        const std::span row(values);
        losses.seconds_waited += row.back() / static_cast<double>(parts.size());
        losses.asked.stop |= row[row.size() - 2] != 0;
        losses.asked.save |= row[row.size() - 3] != 0;
        losses.visible_keys += row[row.size() - 4];
        const auto numbers = static_cast<std::size_t>(row[row.size() - kBehindLoads]);
        const std::size_t first = row.size() - kBehindLoads - numbers;
        for (std::size_t i = 0; i < first;) {
            const auto of_one = row.subspan(i + 2, static_cast<std::size_t>(row[i + 1]));
            all[row[i]].assign(of_one.begin(), of_one.end());
            i += 2 + of_one.size();
        }
        read_loads(row.subspan(first, numbers), losses.expert_loads);
    }
    for (const auto& [micro_batch, of_one] : all) {
        losses.sum += of_one.front();
        losses.of_modules.resize(of_one.size() - 1);
        for (std::size_t i = 1; i < of_one.size(); ++i)
            losses.of_modules[i - 1] += of_one[i];
    }
    std::ranges::sort(losses.expert_loads, {}, &LayerLoads::layer);
    return losses;
}

} // namespace bellows
