// SPDX-License-Identifier: MIT
#pragma once

// Control planes whose ranks are threads of one process.

#include <bellows/comm/control_plane.hpp>

#include <array>
#include <barrier>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace bellows::testing {

/// Stands in for MPI's all-gather among threads; tamper sees what a rank gets.
class ThreadGather {
public:
    static constexpr int kRanks = 3;
    using Tamper = std::function<void(int rank, std::vector<std::string>& cards)>;

    explicit ThreadGather(Tamper tamper = {}) : tamper_(std::move(tamper)) {}

    ControlPlane::AllGather of(int rank) {
        return [this, rank](const std::string& mine) {
            cards_[static_cast<std::size_t>(rank)] = mine;
            barrier_.arrive_and_wait();
            std::vector<std::string> result(cards_.begin(), cards_.end());
            barrier_.arrive_and_wait();
            if (tamper_)
                tamper_(rank, result);
            return result;
        };
    }

private:
    std::array<std::string, kRanks> cards_;
    std::barrier<> barrier_{kRanks};
    Tamper tamper_;
};

} // namespace bellows::testing
