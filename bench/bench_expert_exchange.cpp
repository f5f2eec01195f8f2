// SPDX-License-Identifier: MIT
// The expert exchange among ranks: checks what arrives and what comes back on each of them, then
// times dispatch, combine and their backward passes beside MPI_Alltoallv, a memory copy and copies
// between device and host of the same run. `--help` lists the options.

#include "expert_exchange/beside.hpp"
#include "expert_exchange/host_link.hpp"
#include "expert_exchange/options.hpp"
#include "expert_exchange/raw.hpp"
#include "expert_exchange/results.hpp"
#include "expert_exchange/rig.hpp"
#include "ranks/ranks.hpp"
#include "ranks/timing.hpp"
#include "support/peaks.hpp"

#include <bellows/base/error.hpp>
#include <bellows/comm/mpi_interop.hpp>

#include <algorithm>
#include <fstream>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace bellows::bench {
namespace {

/// What the ranks' traffic adds up to.
struct Totals {
    Totals(const ExchangeShape& shape, const Owner& owner) {
        std::vector<std::uint64_t> from_others(shape.ranks);
        for (std::uint64_t rank = 0; rank < shape.ranks; ++rank) {
            const std::vector<std::uint64_t> of_rank =
                shape.low_latency ? std::vector(shape.ranks, shape.tokens)
                                  : traffic_of(shape, static_cast<int>(rank), owner).records;
            records = std::accumulate(of_rank.begin(), of_rank.end(), records);
            for (std::uint64_t to = 0; to < shape.ranks; ++to)
                from_others[to] += to == rank ? 0 : of_rank[to];
        }
        most_from_others = *std::ranges::max_element(from_others) * shape.row_bytes();
        const auto ranks = static_cast<double>(shape.ranks);
        bytes = static_cast<double>(records * shape.row_bytes()) / ranks;
        token_bytes = static_cast<double>(records * shape.token_bytes()) / ranks;
        dedup = 1 - static_cast<double>(records) /
                        static_cast<double>(shape.slots() * shape.num_senders());
    }
    std::uint64_t records = 0; ///< of all ranks: a token counts once per rank that it goes to
    double bytes = 0;          ///< that a rank receives in the mean
    double token_bytes = 0;    ///< the same of dispatch
    double dedup = 0;
    std::uint64_t most_from_others = 0; ///< bytes that other ranks send to one, at most
};

class Measurement {
public:
    Measurement(World& world, const ExchangeOptions& options)
        : world_(world), options_(options), rig_(world, options),
          owner_([this](std::uint64_t expert) { return rig_.owner(expert); }),
          totals_(options.shape, owner_), host_link_(rig_.device(), totals_.most_from_others),
          watch_(world) {
        if (communicator(world) != MPI_COMM_NULL)
            raw_ = std::make_unique<RawExchange>(world, options.shape, owner_);
        std::int64_t warm_up_ms = rig_.device().info().is_cpu ? 0 : 100;
        watch_.host().all_reduce_max(std::span(&warm_up_ms, 1));
        timing_ = {options.repeats, options.seconds, 1e-3 * static_cast<double>(warm_up_ms)};
    }

    /// "" or what is wrong on which rank, the same on all.
    std::string verify() {
        const auto agreed = [&](const char* phase, const std::string& wrong) -> std::string {
            std::optional<Error> mine;
            if (!wrong.empty())
                mine.emplace(ErrorCode::Internal, "wrong result: rank " +
                                                      std::to_string(world_.rank()) + ": " + phase +
                                                      ": " + wrong);
            const auto worst = world_.control().agree(mine, kTimeLimit, phase);
            return worst ? worst->message() : "";
        };
        struct Leg {
            const char* name;
            void (ExchangeRig::*run)();
            std::string (ExchangeRig::*wrong)() const;
        };
        for (const Leg& leg :
             {Leg{"dispatch", &ExchangeRig::dispatch, &ExchangeRig::wrong_dispatch},
              Leg{"combine", &ExchangeRig::combine, &ExchangeRig::wrong_combine},
              Leg{"combine_backward", &ExchangeRig::combine_backward,
                  &ExchangeRig::wrong_combine_backward},
              Leg{"dispatch_backward", &ExchangeRig::dispatch_backward,
                  &ExchangeRig::wrong_dispatch_backward}}) {
            if (leg.run == &ExchangeRig::combine)
                rig_.fill_results();
            if (options_.shape.low_latency && leg.run == &ExchangeRig::combine_backward)
                break; // forward only
            (rig_.*leg.run)();
            if (std::string wrong = agreed(leg.name, (rig_.*leg.wrong)()); !wrong.empty())
                return wrong;
        }
        if (std::string wrong = agreed("host link", host_link_.wrong()); !wrong.empty())
            return wrong;
        return raw_ ? agreed("alltoallv", raw_->wrong()) : "";
    }

    std::vector<PhaseResult> run() {
        std::optional<double> there, back, both;
        std::vector<PhaseResult> raw;
        if (raw_) {
            raw = time_raw();
            there = raw[0].seconds;
            back = raw[1].seconds;
            both = raw[2].seconds;
        }
        std::vector<PhaseResult> results;
        const auto time = [&](const char* name, double bytes, std::optional<double> raw_seconds,
                              const std::function<void()>& once) {
            if (wants(name))
                results.push_back(time_legs(name, bytes, raw_seconds, once));
        };
        time("dispatch", totals_.token_bytes, there, [&] { rig_.dispatch(); });
        time("combine", totals_.bytes, back, [&] { rig_.combine(); });
        if (!options_.shape.low_latency) {
            time("combine_backward", totals_.bytes, there, [&] { rig_.combine_backward(); });
            time("dispatch_backward", totals_.bytes, back, [&] { rig_.dispatch_backward(); });
        }
        time("dispatch+combine", totals_.token_bytes + totals_.bytes, both, [&] {
            rig_.dispatch();
            rig_.combine();
        });
        for (const auto& more : {raw, time_host_link()})
            for (const PhaseResult& result : more)
                if (wants(result.name))
                    results.push_back(result);
        if (options_.trace && !options_.beside)
            rig_.write_trace(world_, *options_.trace, [&] {
                rig_.dispatch();
                rig_.combine();
            });
        return results;
    }

    /// Beside products; nothing without --beside.
    std::vector<BesideResult> run_beside() {
        if (!options_.beside)
            return {};
        return time_beside(rig_, watch_, options_, timing_);
    }

    Context context() {
        const DeviceInfo& device = rig_.device().info();
        return {{"device", device.name},
                {"driver", device.driver},
                {"vulkan", device.api_version},
                {"ranks", std::to_string(world_.size())},
                {"nodes", std::to_string(world_.num_nodes())},
                {"device link", rig_.device_link()},
                {"mode", options_.shape.low_latency ? "ll" : "ht"}};
    }

private:
    bool wants(const std::string& phase) const {
        return options_.filter.wants(phase + "/" + name_of(options_.shape));
    }

    PhaseResult time_legs(const char* name, double bytes, std::optional<double> raw_seconds,
                          const std::function<void()>& once) {
        raise_clock(rig_.device()); // an exchange alone leaves a GPU's units nearly idle
        ExchangeStats before;
        const Timing timing = watch_.time(once, timing_, [&] {
            rig_.wait_idle();
            before = rig_.stats();
        });
        rig_.wait_idle();
        const ExchangeStats after = rig_.stats();
        const auto of_repeat = [&](std::uint64_t total) {
            return watch_.host().all_reduce_sum(static_cast<double>(total) /
                                                static_cast<double>(timing.repeats));
        };
        PhaseResult result;
        result.name = name;
        result.seconds = timing.seconds.median;
        result.spread = timing.seconds;
        if (options_.shape.low_latency)
            result.p99 = timing.p99;
        result.cpu_seconds = timing.cpu_seconds;
        result.bytes = bytes;
        result.repeats = timing.repeats;
        result.sent = of_repeat(after.bytes_sent - before.bytes_sent);
        const double moving =
            watch_.host().all_reduce_sum(after.seconds_moving - before.seconds_moving);
        if (moving > 0)
            result.wire = watch_.host().all_reduce_sum(
                              static_cast<double>(after.bytes_received - before.bytes_received)) /
                          moving;
        const double to_nodes = of_repeat(after.bytes_sent_to_nodes - before.bytes_sent_to_nodes);
        if (world_.num_nodes() > 1)
            result.sent_to_nodes = to_nodes;
        if (!options_.shape.low_latency)
            result.dedup = totals_.dedup;
        if (options_.shape.codes && bytes == totals_.token_bytes)
            result.fp8 = 1 - totals_.token_bytes / totals_.bytes;
        result.raw_seconds = raw_seconds;
        return result;
    }

    /// What does nothing but move bytes. bytes: of a rank.
    PhaseResult time_bytes(const char* name, double bytes, const std::function<void()>& once) {
        const Timing timing = watch_.time(once, timing_);
        PhaseResult result;
        result.name = name;
        result.seconds = timing.seconds.median;
        result.spread = timing.seconds;
        result.cpu_seconds = timing.cpu_seconds;
        result.bytes = bytes;
        result.repeats = timing.repeats;
        return result;
    }

    std::vector<PhaseResult> time_host_link() {
        const auto bytes = static_cast<double>(host_link_.bytes());
        return {time_bytes("to_host", bytes, [&] { host_link_.out(); }),
                time_bytes("from_host", bytes, [&] { host_link_.in(); }),
                time_bytes("to_and_from_host", bytes, [&] { host_link_.both(); })};
    }

    std::vector<PhaseResult> time_raw() {
        const auto sum = [&](double mine) { return watch_.host().all_reduce_sum(mine); };
        const auto ranks = static_cast<double>(world_.size());
        const double all = sum(static_cast<double>(raw_->bytes_sent()));
        const double sent = sum(static_cast<double>(raw_->bytes_to_others()));
        const auto time = [&](const char* name, int ways, const std::function<void()>& once) {
            PhaseResult result = time_bytes(name, std::max(ways, 1) * all / ranks, once);
            if (ways > 0)
                result.sent = ways * sent;
            return result;
        };
        return {time("alltoallv", 1, [&] { raw_->there(); }),
                time("alltoallv_back", 1, [&] { raw_->back(); }),
                time("alltoallv_both", 2,
                     [&] {
                         raw_->there();
                         raw_->back();
                     }),
                time("memcpy", 0, [&] { raw_->copy(); })};
    }

    World& world_;
    const ExchangeOptions& options_;
    ExchangeRig rig_;
    Owner owner_;
    Totals totals_;
    HostLink host_link_;
    Stopwatch watch_;
    std::unique_ptr<RawExchange> raw_;
    TimingOptions timing_;
};

/// On each rank. "" or what is wrong.
std::string measure(World& world, const ExchangeOptions& options) {
    const bool first = world.rank() == 0;
    for (const auto& [option, path] :
         {std::pair("--json ", options.json), {"--trace ", options.trace}})
        if (first && path && !std::ofstream(*path))
            throw Error(ErrorCode::Io, option + *path + " cannot be written");
    std::vector<ShapeResults> all;
    Context context;
    for (const std::uint64_t tokens : options.sweep) {
        ExchangeOptions of_shape = options;
        of_shape.shape.tokens = tokens;
        Measurement measurement(world, of_shape);
        if (std::string wrong = measurement.verify(); !wrong.empty())
            return wrong;
        context = measurement.context();
        const std::vector<PhaseResult> phases = measurement.run();
        all.push_back({of_shape.shape, phases, measurement.run_beside()});
    }
    const bool none = std::ranges::all_of(
        all, [](const ShapeResults& results) { return results.phases.empty(); });
    if (none)
        throw Error(ErrorCode::InvalidArgument, "--filter matches no phase");
    if (first)
        write_results(options, context, all);
    return "";
}

} // namespace
} // namespace bellows::bench

int main(int argc, char** argv) {
    using namespace bellows::bench;
    return run_ranks(
        "bench_expert_exchange", kExchangeHelp, argc, argv, [](int count, char** words) {
            Arguments arguments(count, words);
            const ExchangeOptions options = take_exchange_options(arguments);
            return RanksToRun{options.shape.ranks, options.ranks_per_node,
                              [options](bellows::World& world) { return measure(world, options); }};
        });
}
