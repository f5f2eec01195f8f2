// SPDX-License-Identifier: MIT
// What an overlapped pair hides: a forward and a backward of MoE layers whose experts are spread
// over the ranks, node by node and interleaved. `--help` lists the options.

#include "app/trace_file.hpp"
#include "app/units.hpp"
#include "overlap/pair_rig.hpp"
#include "ranks/ranks.hpp"
#include "ranks/timing.hpp"
#include "support/common_options.hpp"
#include "support/program.hpp"
#include "train/pair_orders.hpp"

#include <bellows/base/error.hpp>
#include <bellows/base/files.hpp>
#include <bellows/comm/launch.hpp>
#include <bellows/engine/device_choice.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace bellows::bench {
namespace {

const char* const kHelp =
    R"(bench_overlap: the forward of one micro-batch beside the backward of another through expert blocks (router, dispatch,
experts spread over all ranks, combine), through the program's own mpirun or among the ranks of the mpirun or srun that
started it.

  --ranks N              that share the experts (default 2)
  --tokens T             of a rank's micro-batch (default 4096)
  --layers L             blocks of the forward, and of the backward (default 4)
  --hidden H             a multiple of 128 (default 2048)
  --experts E, --top-k K (default 32 and 8)
  --ratio R,...          compute : exchange, both alone, for which the experts' width is chosen (default 1)
  --ffn F                their width instead, a multiple of 128
  --dtype fp8|bf16       of the linear layers (default fp8); activations are bf16
  --device-link auto|off from device to device where a driver can, or through memory that ranks share (default auto)
  --order PATTERN        how nodes interleave, as `bellows schedule --pair` prints it (default: as measured)
  --kernels              also what compute alone, the nodes one by one, and the pair are made of: each node's kernels, those of
                         the exchange, ms and how often
  --trace FILE           of all ranks in the last pair that was timed, for Perfetto

Rows are named ratioR, or ffnF with --ffn. --repeats counts runs of each way behind one that is not timed (default 5).

compute, exchange      ms alone: all that the layers compute, in the pair's order, both directions on queues of their own where a
                       device has them; and, node by node, dispatches and combines from hand-in to end
kernels                ms of them in which the device packs and unpacks
min-max                ms of the pair: the least and the largest
one by one, pair       ms from the first hand-in to the last end, each node behind the one before, and interleaved
simulated              ms of the pair, from what its nodes usually take alone, if one computes at a time or, on a device with
                       queues for both directions and weight gradients, if these make each other slower as in compute alone
covered                of the time in which tokens of the pair travel, waits for the other ranks among it: while kernels of its
                       nodes run (those that pack and unpack do not count)
hidden                 of the exchange: 1 - (pair - compute) / exchange
travel                 as hidden, of what is left of the exchange without its kernels:
                       1 - (pair - compute - kernels) / (exchange - kernels)
slower                 how much longer the pair's compute took beside the exchange: all of its kernels, the matrix products
Medians of the repeats, of the rank that takes longest. A run is checked: output, input gradients and weight gradients of the
pair interleaved are those of the pair one by one, bit for bit.
Exit codes: 0 all right, 1 a wrong result, 2 bad usage, 3 no device or MPI that serves, 4 a lost rank.
)";

struct Options {
    std::uint64_t ranks = 2, repeats = 5;
    PairShape shape;
    bool fixed_width = false, kernels = false;
    std::vector<double> ratios;
    std::optional<PairPattern> order;
    CommonOptions common;
    std::optional<std::string> trace;
};

double ratio_of(const std::string& text) {
    char* end = nullptr;
    const double ratio = std::strtod(text.c_str(), &end);
    if (text.empty() || *end != '\0' || !(ratio > 0) || ratio > 1e3)
        throw Error(ErrorCode::InvalidArgument,
                    "--ratio takes numbers above 0, at most 1000, not '" + text + "'");
    return ratio;
}

Options take_options(int argc, char** argv) {
    Arguments arguments(argc, argv);
    Options options;
    PairShape& shape = options.shape;
    const std::uint64_t launched = is_launched() ? static_cast<std::uint64_t>(launched_size()) : 0;
    options.ranks = arguments.number("--ranks", launched > 0 ? launched : options.ranks, 1, 4096);
    options.common = take_common_options(arguments);
    options.repeats = options.common.repeats.value_or(options.repeats);
    shape.tokens = arguments.number("--tokens", shape.tokens, 1, 1 << 20);
    shape.layers = arguments.number("--layers", shape.layers, 1, 64);
    shape.hidden = arguments.number("--hidden", shape.hidden, 128, 1 << 16);
    shape.experts = arguments.number("--experts", shape.experts, 1, 1 << 12);
    shape.top_k = arguments.number("--top-k", shape.top_k, 1, 64);
    shape.ffn = arguments.number("--ffn", 0, 0, 1 << 16);
    options.fixed_width = shape.ffn > 0;
    const auto ratios = arguments.value("--ratio");
    for (const std::string& ratio : Arguments::split(ratios.value_or("1")))
        options.ratios.push_back(ratio_of(ratio));
    const std::string dtype = arguments.value("--dtype").value_or("fp8");
    shape.fp8 = dtype == "fp8";
    shape.device_link = arguments.value("--device-link").value_or("auto");
    if (const auto order = arguments.value("--order"))
        options.order = parse_pattern(*order);
    options.kernels = arguments.flag("--kernels");
    options.trace = arguments.value("--trace");
    const auto require = [](bool holds, const std::string& rule) {
        if (!holds)
            throw Error(ErrorCode::InvalidArgument, rule);
    };
    require(arguments.rest().size() <= 1,
            arguments.rest().size() > 1
                ? "there is no option " + arguments.rest()[1] + "; see --help"
                : "");
    require(shape.fp8 || dtype == "bf16", "--dtype takes fp8 or bf16, not " + dtype);
    require(shape.hidden % 128 == 0 && shape.ffn % 128 == 0,
            "--hidden and --ffn must be multiples of 128");
    require(!ratios || !options.fixed_width, "--ffn is a width, --ratio asks for one: take either");
    require(shape.top_k <= shape.experts, "--top-k must not be above --experts");
    (void)device_link_kind(shape.device_link);
    return options;
}

/// Medians of runs, and of ranks the longest.
struct Measured {
    PairRun one_by_one, compute, pair;
    double simulated = 0;
    PairPattern pattern;
    std::uint64_t ffn = 0;
};

PairRun medians_of(Stopwatch& watch, const std::vector<PairRun>& runs) {
    constexpr std::array kWhat = {&PairRun::seconds, &PairRun::kernels,  &PairRun::products,
                                  &PairRun::moves,   &PairRun::exchange, &PairRun::bare};
    std::array<std::int64_t, kWhat.size()> longest{};
    for (std::size_t i = 0; i < kWhat.size(); ++i)
        longest[i] = std::llround(1e9 * median_of(runs, kWhat[i]));
    const Spread seconds = spread_of(runs, &PairRun::seconds);
    std::array<std::int64_t, 2> ends = {std::llround(1e9 * seconds.least),
                                        std::llround(1e9 * seconds.most)};
    watch.host().all_reduce_max(std::span<std::int64_t>(ends));
    watch.host().all_reduce_max(std::span<std::int64_t>(longest));
    PairRun all;
    for (std::size_t i = 0; i < kWhat.size(); ++i)
        all.*kWhat[i] = 1e-9 * static_cast<double>(longest[i]);
    all.least = 1e-9 * static_cast<double>(ends[0]);
    all.most = 1e-9 * static_cast<double>(ends[1]);
    return all;
}

/// The nodes with what those of a name take in any layer of any run, the median of a rank and the
/// mean of ranks.
PairNodes usual_nodes(Stopwatch& watch, const std::vector<PairNodes>& runs) {
    std::map<std::string, std::vector<double>> of_names; // the same on all ranks
    PairNodes nodes = runs.front();
    const auto each = [](auto& of, const auto& use) {
        for (auto* part : {&of.forward, &of.input_gradient, &of.weight_gradient})
            for (auto& node : *part)
                use(node);
    };
    for (const PairNodes& run : runs)
        each(run, [&](const PairNode& node) { of_names[node.name].push_back(node.seconds); });
    std::vector<double> medians;
    for (const auto& [name, seconds] : of_names)
        medians.push_back(median_of(seconds));
    watch.host().all_reduce_sum(std::span<double>(medians));
    each(nodes, [&](PairNode& node) {
        const auto at = std::distance(of_names.begin(), of_names.find(node.name));
        node.seconds =
            medians[static_cast<std::size_t>(at)] / static_cast<double>(watch.world().size());
    });
    return nodes;
}

/// Of the runs after the first; `see` is called behind each of them.
template <class Run, class See = decltype([] {})>
PairRun repeated(Stopwatch& watch, std::uint64_t repeats, Run run, See see = {}) {
    run();
    std::vector<PairRun> runs;
    for (std::uint64_t repeat = 0; repeat < repeats; ++repeat) {
        runs.push_back(run());
        see();
    }
    return medians_of(watch, runs);
}

void print_kernels(const char* run, const PairRig::Kernels& kernels) {
    std::printf("%s\n", run);
    std::vector<std::pair<double, std::string>> lines;
    for (const auto& [name, cost] : kernels) {
        std::array<char, 160> line{};
        std::snprintf(line.data(), line.size(), "  %-12s %-36s %9.3f ms %5d x", name.first.c_str(),
                      name.second.c_str(), 1e3 * cost.first, cost.second);
        lines.emplace_back(-cost.first, line.data());
    }
    std::ranges::sort(lines);
    for (const auto& [seconds, line] : lines)
        std::printf("%s\n", line.c_str());
}

Measured measure(Stopwatch& watch, Device& device, const Options& options, const PairShape& shape) {
    PairRig rig(device, watch, shape);
    Measured measured;
    measured.ffn = shape.ffn;
    std::vector<PairNodes> runs;
    measured.one_by_one = repeated(
        watch, options.repeats, [&] { return rig.one_by_one(); },
        [&] { runs.push_back(rig.nodes()); });
    if (options.kernels && watch.world().rank() == 0)
        print_kernels("one by one", rig.kernels());
    const PairNodes nodes = usual_nodes(watch, runs);
    measured.pattern = options.order.value_or(PairPattern{});
    if (!options.order)
        measured.pattern = choose_pattern(layer_with_experts(nodes), shape.layers);
    const PairOrder order = interleave(nodes, measured.pattern);
    measured.compute = repeated(watch, options.repeats, [&] { return rig.compute_alone(order); });
    measured.simulated =
        device.distinct_queues(QueueRole::Compute, QueueRole::ComputeDeferred)
            ? simulate_pair(nodes, order, crowding_of(nodes, order, measured.compute.seconds)).time
            : simulate_pair(nodes, order).time;
    if (options.kernels && watch.world().rank() == 0)
        print_kernels("compute", rig.kernels());
    measured.pair = repeated(watch, options.repeats, [&] { return rig.interleaved(order); });
    if (options.kernels && watch.world().rank() == 0)
        print_kernels("pair", rig.kernels());
    if (options.trace)
        write_trace(*options.trace, rig.events(), watch.world());
    const auto expected = rig.results_of(one_after_the_other(nodes));
    std::int64_t wrong = rig.results_of(order) == expected ? 0 : 1;
    watch.host().all_reduce_max(std::span(&wrong, 1));
    if (wrong != 0)
        throw Error(ErrorCode::Internal, "the pair has other results interleaved than one by one");
    return measured;
}

/// From two widths: compute grows by as much with each column.
std::uint64_t width_for(Stopwatch& watch, Device& device, const Options& options, double ratio) {
    constexpr std::uint64_t kFrom = 512, kTo = 1024, kMost = 8192;
    std::array<double, 2> compute{};
    double exchange = 0;
    for (std::size_t i = 0; i < compute.size(); ++i) {
        PairShape shape = options.shape;
        shape.ffn = i == 0 ? kFrom : kTo;
        PairRig rig(device, watch, shape);
        const PairOrder order = one_after_the_other(rig.nodes());
        compute[i] = repeated(watch, 2, [&] { return rig.compute_alone(order); }).seconds;
        exchange = repeated(watch, 2, [&] { return rig.one_by_one(); }).exchange;
    }
    const double per_column = (compute[1] - compute[0]) / static_cast<double>(kTo - kFrom);
    const double missing = ratio * exchange - compute[0];
    const double width = static_cast<double>(kFrom) + missing / std::max(per_column, 1e-12);
    return 128 * static_cast<std::uint64_t>(
                     std::llround(std::clamp(width, 128.0, static_cast<double>(kMost)) / 128));
}

nlohmann::ordered_json print(const Measured& at) {
    const double compute = at.compute.seconds, exchange = at.one_by_one.exchange;
    const double hidden = 1 - std::max(0.0, at.pair.seconds - compute) / exchange;
    // Kernels that pack and unpack take the device like all others.
    const double moves = at.one_by_one.moves;
    const double travel =
        1 - std::max(0.0, at.pair.seconds - compute - moves) / std::max(exchange - moves, 1e-9);
    const double covered = 1 - at.pair.bare;
    const double slower = at.pair.kernels / at.compute.kernels - 1;
    const double products = at.pair.products / at.compute.products - 1;
    std::printf("%6llu %7.2f %9.3f %9.3f %9.3f %11.3f %9.3f %15s %10.3f %7.1f %% %7.1f %% %7.1f %% "
                "%+7.1f %% "
                "%+7.1f %%\n",
                static_cast<unsigned long long>(at.ffn), compute / exchange, 1e3 * compute,
                1e3 * exchange, 1e3 * moves, 1e3 * at.one_by_one.seconds, 1e3 * at.pair.seconds,
                range_text(Spread{0, at.pair.least, at.pair.most}.scaled(1e3)).c_str(),
                1e3 * at.simulated, 100 * covered, 100 * hidden, 100 * travel, 100 * slower,
                100 * products);
    std::printf("       %s\n", to_text(at.pattern).c_str());
    std::fflush(stdout);
    return {{"ffn", at.ffn},
            {"compute_ms", 1e3 * compute},
            {"exchange_ms", 1e3 * exchange},
            {"exchange_kernels_ms", 1e3 * moves},
            {"one_by_one_ms", 1e3 * at.one_by_one.seconds},
            {"pair_ms", 1e3 * at.pair.seconds},
            {"pair_min_ms", 1e3 * at.pair.least},
            {"pair_max_ms", 1e3 * at.pair.most},
            {"simulated_ms", 1e3 * at.simulated},
            {"covered", covered},
            {"hidden", hidden},
            {"travel_hidden", travel},
            {"kernels_slower", slower},
            {"products_slower", products},
            {"order", to_text(at.pattern)}};
}

std::string run_all(World& world, const Options& options) {
    const bool leads = world.rank() == 0;
    DeviceOptions of_device =
        device_options_of_rank(options.common.device.value_or(kAnyDevice), world.local_rank());
    of_device.trace = true;
    const auto device = Device::create(of_device);
    Stopwatch watch(world);
    const PairShape& shape = options.shape;
    if (leads)
        std::printf(
            "%llu ranks on %s, %llu tokens x %llu, %llu blocks, top %llu of %llu experts, "
            "%s, device link %s; ms\n%6s %7s %9s %9s %9s %11s %9s %15s %10s %9s %9s %9s %9s %9s\n",
            static_cast<unsigned long long>(options.ranks), device->info().name.c_str(),
            static_cast<unsigned long long>(shape.tokens),
            static_cast<unsigned long long>(shape.hidden),
            static_cast<unsigned long long>(shape.layers),
            static_cast<unsigned long long>(shape.top_k),
            static_cast<unsigned long long>(shape.experts), shape.fp8 ? "fp8" : "bf16",
            shape.device_link.c_str(), "width", "ratio", "compute", "exchange", "kernels",
            "one by one", "pair", "min-max", "simulated", "covered", "hidden", "travel", "slower",
            "products");
    nlohmann::ordered_json all = nlohmann::ordered_json::array();
    bool any = false;
    for (const double ratio : options.ratios) {
        const std::string name =
            options.fixed_width ? "ffn" + std::to_string(shape.ffn) : printed("ratio%g", ratio);
        if (!options.common.wants(name))
            continue;
        any = true;
        PairShape at = shape;
        if (!options.fixed_width)
            at.ffn = width_for(watch, *device, options, ratio);
        const Measured measured = measure(watch, *device, options, at);
        if (leads)
            all.push_back(print(measured));
        if (options.fixed_width)
            break;
    }
    if (!any)
        throw Error(ErrorCode::InvalidArgument, "--filter matches no row");
    if (leads && options.common.json)
        write_file_durably(*options.common.json, all.dump(1) + "\n");
    return "";
}

} // namespace
} // namespace bellows::bench

int main(int argc, char** argv) {
    using namespace bellows::bench;
    return run_ranks("bench_overlap", kHelp, argc, argv, &take_options, &run_all);
}
