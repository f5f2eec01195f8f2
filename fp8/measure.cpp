// SPDX-License-Identifier: MIT
#include <bellows/fp8/choice.hpp>

#include "product_case.hpp"

#include <bellows/base/error.hpp>

#include <algorithm>
#include <chrono>
#include <functional>
#include <map>

namespace bellows::fp8 {

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

double seconds_of(Device& device, Recording& recording) {
    const auto begin = Clock::now();
    device.submit(recording).wait();
    return seconds_since(begin);
}

/// What it takes to hand work in and to learn that it has ended.
double submission_seconds(Device& device) {
    const Buffer buffer(device, {.name = "nothing", .bytes = 16});
    Recording recording(device, QueueRole::Compute, "nothing");
    recording.fill(buffer.view(), 0);
    double least = seconds_of(device, recording);
    for (int i = 0; i < 10; ++i)
        least = std::min(least, seconds_of(device, recording));
    return least;
}

/// A product's recording, with as many repetitions as make up for the submission.
struct Turn {
    double* seconds;
    Recording recording;
    std::uint64_t repetitions;
};

struct TileTurn {
    Variant variant;
    TileTime* time;
};

class Stopwatch {
public:
    explicit Stopwatch(Device& device)
        : device_(device), cpu_(device.info().is_cpu), submission_(submission_seconds(device)) {}

    /// Of variants that can compute it.
    void time(const ProductCase& product, Measurement& measurement, Timed which) {
        std::string usual_class;
        for (const VariantTime& v : measurement.variants)
            if (v.variant == measurement.usual)
                usual_class = v.numeric_class;
        std::vector<Turn> turns;
        for (VariantTime& v : measurement.variants)
            if (v.why_not.empty() && (which != Timed::Usual || v.numeric_class == usual_class))
                turns.push_back(prepare(product, v.variant, v.seconds));
        run(turns);
    }

    /// Of tiles.
    void time(const ProductCase& product, const std::vector<TileTurn>& tiles) {
        std::vector<Turn> turns;
        for (const TileTurn& t : tiles)
            turns.push_back(prepare(product, {t.variant, t.time->tile}, t.time->seconds));
        run(turns);
    }

    /// Seconds of first runs.
    double compiling() const noexcept { return compiling_; }

private:
    static constexpr int kRounds = 4;

    Turn prepare(const ProductCase& product, const Way& way, double& result) {
        Recording once(device_, QueueRole::Compute, "a product to be timed");
        product.record(once, way, 0);
        compiling_ += seconds_of(device_, once);
        const double estimate = std::max(seconds_of(device_, once) - submission_, 1e-6);
        const double target = cpu_ ? 4e-3 : 1.5e-3;
        const auto repetitions =
            static_cast<std::uint64_t>(std::clamp(target / estimate, 1.0, 100.0));
        Turn turn{&result, Recording(device_, QueueRole::Compute, "products to be timed"),
                  repetitions};
        for (std::uint64_t i = 0; i < repetitions; ++i)
            product.record(turn.recording, way, i);
        return turn;
    }

    /// The least time of some rounds in which they take turns.
    void run(std::vector<Turn>& turns) {
        warm_up(turns);
        const auto start = Clock::now();
        for (int round = 0; round < kRounds; ++round) {
            for (Turn& turn : turns) {
                const double taken = seconds_of(device_, turn.recording);
                const double net = std::max(taken - submission_, 0.1 * taken) /
                                   static_cast<double>(turn.repetitions);
                double& least = *turn.seconds;
                least = least == 0 ? net : std::min(least, net);
            }
            if (round > 0 && seconds_since(start) > (cpu_ ? 0.03 : 0.1))
                break;
        }
    }

    /// Clocks of a GPU that waited while pipelines were compiled take a while to rise.
    void warm_up(std::vector<Turn>& turns) {
        constexpr double kWarm = 0.1; // seconds
        if (cpu_ || turns.empty())
            return;
        for (const auto start = Clock::now(); seconds_since(start) < kWarm;)
            for (Turn& turn : turns)
                seconds_of(device_, turn.recording);
    }

    Device& device_;
    bool cpu_;
    double submission_;
    double compiling_ = 0;
};

/// With operands that have memory; nothing is timed where that lacks.
template <class Time>
void try_to_time(ProductCase& product, Time time) {
    try {
        product.allocate();
        time();
    } catch (const Error& error) {
        if (error.code() != ErrorCode::OutOfMemory)
            throw;
    }
}

/// Kind, sizes and variants with their tiles; nothing timed.
Measurement facts_of(Device& device, const ProductCase& usual) {
    static constexpr std::uint64_t kRows[] = {64, 48, 24, 16, 12, 4};
    Measurement m = usual.facts();
    for (const std::uint64_t rows : kRows) {
        if (rows >= m.rows || (m.kind.rows > 0 && rows <= ProductKind::kMostRows[m.kind.rows - 1u]))
            continue;
        const ProductCase fewer(device, m.kind, rows);
        for (std::size_t i = 0; i < m.variants.size(); ++i)
            for (const TileTimes& other : fewer.facts().variants[i].tiles) {
                auto& known = m.variants[i].tiles;
                if (std::none_of(known.begin(), known.end(), [&](const TileTimes& t) {
                        return t.tiles.front().tile == other.tiles.front().tile;
                    }))
                    known.push_back(other);
            }
    }
    return m;
}

/// By rows, most first.
using TileTurns = std::map<std::uint64_t, std::vector<TileTurn>, std::greater<>>;

/// Where there is something to choose.
TileTurns tile_turns(Measurement& m) {
    TileTurns turns;
    for (VariantTime& v : m.variants)
        for (TileTimes& t : v.tiles)
            for (TileTime& time : t.tiles)
                if (v.seconds > 0 && t.tiles.size() > 1)
                    turns[t.rows].push_back({v.variant, &time});
    return turns;
}

/// Experts' products first: what dense ones take has mostly been compiled then. Last those of bf16,
/// which have few tiles.
std::vector<Measurement*> in_order_of_tiles(std::vector<Measurement>& all) {
    std::vector<Measurement*> order;
    for (const bool bf16 : {false, true})
        for (const Grouping grouping :
             {Grouping::Grouped, Grouping::Masked, Grouping::ByIds, Grouping::Dense})
            for (Measurement& m : all)
                if (m.kind.grouping == grouping && (m.kind.pair == Pair::Bf16) == bf16)
                    order.push_back(&m);
    return order;
}

} // namespace

std::vector<Measurement> measure(Device& device, const MeasureOptions& options) {
    constexpr double kUsualLimit = 20, kUsualTileLimit = 30; // seconds
    const double limit = options.limit > 0 ? options.limit : kUsualLimit;
    const double tile_limit = options.tile_limit > 0 ? options.tile_limit : kUsualTileLimit;
    const auto& kinds = options.kinds.empty() ? product_kinds() : options.kinds;
    const bool tiles = options.timed == Timed::Tiles;
    std::uint64_t done = 0;
    const auto tell = [&] {
        ++done;
        if (options.on_progress)
            options.on_progress(done, kinds.size() * (tiles ? 2 : 1));
    };

    auto start = Clock::now();
    std::optional<Stopwatch> stopwatch;
    if (options.timed != Timed::None)
        stopwatch.emplace(device);
    std::vector<Measurement> all;
    for (const ProductKind& kind : kinds) {
        ProductCase product(device, kind);
        Measurement& m = all.emplace_back(facts_of(device, product));
        if (stopwatch && seconds_since(start) - stopwatch->compiling() < limit)
            try_to_time(product, [&] { stopwatch->time(product, m, options.timed); });
        tell();
    }
    start = Clock::now();
    for (Measurement* m : tiles ? in_order_of_tiles(all) : std::vector<Measurement*>{}) {
        for (const auto& [rows, turns] : tile_turns(*m)) {
            if (seconds_since(start) >= tile_limit)
                break;
            ProductCase product(device, m->kind, rows);
            try_to_time(product, [&] { stopwatch->time(product, turns); });
        }
        tell();
    }
    return all;
}

} // namespace bellows::fp8
