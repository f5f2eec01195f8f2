// SPDX-License-Identifier: MIT
#pragma once

// A forward through some expert blocks (router, dispatch, experts, combine) and a backward through
// as many others on each rank, which share the experts: what is left of DualPipeV's pairs without
// attention. Run node by node, or interleaved.

#include "ranks/timing.hpp"

#include <bellows/comm/expert_exchange.hpp>
#include <bellows/comm/world.hpp>
#include <bellows/engine/device.hpp>
#include <bellows/engine/lane.hpp>
#include <bellows/model/layer_scratch.hpp>
#include <bellows/model/moe_ffn.hpp>
#include <bellows/model/parameter_store.hpp>
#include <bellows/schedule/pair.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace bellows::bench {

struct PairShape {
    std::uint64_t tokens = 4096; ///< of a rank and micro-batch
    std::uint64_t hidden = 2048, ffn = 1024, experts = 32, top_k = 8, layers = 4;
    bool fp8 = true;
    std::string device_link = "auto";
};

/// Seconds of this rank.
struct PairRun {
    double seconds = 0;         ///< from the first hand-in to the last end
    double least = 0, most = 0; ///< of the same in several runs
    double kernels = 0;         ///< those of compute nodes, added up
    double products = 0;        ///< matrix products among them, without what packs their operands
    double moves = 0;           ///< kernels that pack and unpack what dispatches and combines move
    double exchange = 0;        ///< node by node: what dispatches and combines took
    double bare = 0; ///< of the time in which tokens travel the share without compute nodes
};

class PairRig {
public:
    /// Collective, as are the others.
    PairRig(Device& device, Stopwatch& watch, const PairShape& shape);

    /// What the nodes took when they ran one by one.
    const PairNodes& nodes() const noexcept { return nodes_; }
    /// Each node when the one before has ended on this rank; takes the times of nodes().
    PairRun one_by_one();
    /// Compute nodes alone, in this order.
    PairRun compute_alone(const PairOrder& order);
    PairRun interleaved(const PairOrder& order);
    /// What kernels() calls the device's work of dispatches and combines.
    static constexpr const char* kExchange = "exchange";
    /// Of the last run: seconds and number of dispatches, by node and kernel.
    using Kernels = std::map<std::pair<std::string, std::string>, std::pair<double, int>>;
    const Kernels& kernels() const noexcept { return kernels_; }
    /// And all that it did.
    const std::vector<TraceEvent>& events() const noexcept { return events_; }
    /// Output, input gradients and weight gradients of one run, to be compared.
    std::vector<std::byte> results_of(const PairOrder& order);

private:
    /// Blocks one behind the other, and what stands between them.
    struct Chain {
        std::vector<std::unique_ptr<MoeFfn>> blocks;
        std::vector<Buffer> streams, gradients;
        std::vector<std::unique_ptr<LayerSlot>> slots;
        NodeLists nodes;
    };
    struct HandIn {
        const Node* node;
        PairNode* pair;
        OpKind kind;
    };
    /// In the trace under the name of its op.
    TimePoint submit(const HandIn& at);
    Chain make_chain(const ModelConfig& model, std::uint64_t first, const PairShape& shape);
    std::vector<HandIn> handed_in(const PairOrder& order);
    /// Forward of the backward's layers; then all ranks meet.
    void prepare();
    PairRun from_trace(double seconds);
    void upload(const Buffer& buffer, std::uint64_t seed);

    PairRun run(const std::vector<HandIn>& nodes);

    Device& device_;
    Stopwatch& watch_;
    std::unique_ptr<Transport> transport_;
    HostThread thread_;
    std::unique_ptr<ParameterStore> parameters_;
    std::unique_ptr<ExpertExchange> exchange_;
    WeightGradientScratch of_weight_gradients_;
    std::array<LayerScratch, 2> scratch_; ///< of each chain: they run beside each other
    Chain forward_, backward_;
    PairNodes nodes_;
    Kernels kernels_;
    std::vector<TraceEvent> events_;
};

} // namespace bellows::bench
