// SPDX-License-Identifier: MIT
#pragma once

// What a step comes to on all ranks together: the losses of its micro-batches, the bytes that were
// sent and how long ranks waited for each other. Owned by the trainer.

#include <bellows/comm/host_collectives.hpp>
#include <bellows/train/trainer.hpp>

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <utility>
#include <vector>

namespace bellows {

/// Of a connection of this rank, from its start on.
struct Traffic {
    std::uint64_t bytes_sent = 0;
    double seconds_waited = 0;

    Traffic& operator+=(const Traffic& other) noexcept {
        bytes_sent += other.bytes_sent;
        seconds_waited += other.seconds_waited;
        return *this;
    }
};

/// The numbers that a rank has sent in a gathering; it may have sent none.
std::vector<double> numbers_of(const HostCollectives::Bytes& part);

class StepTotals {
public:
    /// everyone: all ranks, which must outlive it.
    explicit StepTotals(HostCollectives& everyone) : everyone_(everyone) {}

    /// Called whenever the connection's traffic is asked for.
    void watch(std::function<Traffic()> connection) {
        connections_.push_back(std::move(connection));
    }
    /// Of a micro-batch of the global batch, the model's and those of its MTP modules: each summed
    /// over the tokens. Not while sum_losses() runs.
    void note_loss(std::uint64_t micro_batch, double loss, std::vector<double> of_modules = {}) {
        losses_[micro_batch] = {loss, std::move(of_modules)};
    }

    /// This rank will have other micro-batches.
    void forget_losses() noexcept { losses_.clear(); }
    /// Of a micro-batch: summed over its tokens, where attention stays within documents. Each
    /// micro-batch is noted by one rank. Not while sum_losses() runs.
    void note_visible_keys(std::uint64_t keys) { visible_keys_ += static_cast<double>(keys); }

    /// Whoever comes early to a collective of the host waits in it.
    template <class Call>
    void in_collective(Call call) {
        const auto start = std::chrono::steady_clock::now();
        call();
        if (everyone_.group().size() > 1)
            host_seconds_ +=
                std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    }
    /// What is sent and waited for meanwhile is no step's.
    template <class Call>
    void leave_out(Call call) {
        const Traffic before = traffic();
        call();
        const Traffic after = traffic();
        counted_.bytes_sent += after.bytes_sent - before.bytes_sent;
        counted_.seconds_waited += after.seconds_waited - before.seconds_waited;
    }

    /// Collective: this and what all ranks have sent since the last call, summed over them.
    struct Sums {
        double value = 0;
        std::uint64_t bytes = 0;
    };
    Sums sum_with_bytes(double value);
    /// Collective: the losses noted, each micro-batch once, summed in the order of the global
    /// batch, the mean over the ranks of what they waited since the last call, what any of them
    /// asks, and the loads that they bring, each layer's from one rank, by layer.
    struct Losses {
        double sum = 0, seconds_waited = 0;
        std::vector<double> of_modules;
        double visible_keys = 0; ///< over the batch; 0: nobody noted any
        StepAsks asked;
        std::vector<LayerLoads> expert_loads;
    };
    Losses sum_losses(StepAsks mine = {}, const std::vector<LayerLoads>& loads = {});

private:
    Traffic traffic() const;

    HostCollectives& everyone_;
    std::vector<std::function<Traffic()>> connections_;
    struct Loss {
        double sum = 0;
        std::vector<double> of_modules;
    };
    std::map<std::uint64_t, Loss> losses_; ///< of this rank's micro-batches
    double visible_keys_ = 0;              ///< of this rank's micro-batches
    double host_seconds_ = 0;              ///< waited in collectives of the host
    Traffic counted_;                      ///< in steps before, or left out
};

} // namespace bellows
