// SPDX-License-Identifier: MIT
// The expert exchange: tokens travel to the ranks that own their experts (dispatch), each expert
// multiplies its rows by its own matrix, and the results come back to the tokens, summed by their
// routing weights (combine). Every rank compares its results with the same sums on the host.
//
//   mpirun -n 2 ./expert_exchange    or any other number of ranks; without mpirun: one

#include <bellows/base/error.hpp>
#include <bellows/comm/expert_exchange.hpp>
#include <bellows/comm/world.hpp>
#include <bellows/engine/device_choice.hpp>
#include <bellows/engine/gemm.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <vector>

namespace {

using bellows::Buffer;
using bellows::DType;

constexpr std::uint64_t kExpertsOfRank = 4, kTopK = 2, kHidden = 64, kMaxTokens = 40;

/// What a rank hands in. Ranks may have different numbers of tokens, or none.
struct Tokens {
    std::uint64_t count;
    std::vector<float> x;          ///< [count, kHidden]
    std::vector<std::int32_t> ids; ///< [count, kTopK], global experts; -1: none
    std::vector<float> weights;    ///< [count, kTopK]
};

Tokens tokens_of(std::uint64_t rank, std::uint64_t experts) {
    Tokens tokens{kMaxTokens - 8 * (rank % 4), {}, {}, {}};
    for (std::uint64_t t = 0; t < tokens.count; ++t) {
        for (std::uint64_t i = 0; i < kHidden; ++i)
            tokens.x.push_back(std::sin(static_cast<float>(1 + rank + 7 * t + 3 * i)));
        for (std::uint64_t k = 0; k < kTopK; ++k)
            tokens.ids.push_back(static_cast<std::int32_t>((t * t + rank + k) % experts));
        tokens.weights.insert(tokens.weights.end(), {0.75f, 0.25f});
    }
    return tokens;
}

/// Element i of an expert's matrix, [kHidden, kHidden].
float element_of(std::uint64_t expert, std::uint64_t i) {
    return std::cos(static_cast<float>((expert + 1) * (i % 97)));
}

/// y[t] = sum over k of weights[t, k] * matrix of ids[t, k] * x[t], in f64.
std::vector<double> expected_of(const Tokens& tokens) {
    std::vector<double> y(tokens.count * kHidden, 0.0);
    for (std::uint64_t slot = 0; slot < tokens.count * kTopK; ++slot)
        for (std::uint64_t i = 0; i < kHidden * kHidden; ++i) {
            const std::uint64_t token = slot / kTopK, row = i / kHidden, column = i % kHidden;
            y[token * kHidden + row] +=
                double{tokens.weights[slot]} *
                element_of(static_cast<std::uint64_t>(tokens.ids[slot]), i) *
                tokens.x[token * kHidden + column];
        }
    return y;
}

Buffer memory(bellows::Device& device, std::uint64_t bytes) {
    return {device, {.name = "expert_exchange", .bytes = bytes}};
}

template <class T>
Buffer uploaded(bellows::Device& device, const std::vector<T>& values) {
    Buffer buffer = memory(device, values.size() * sizeof(T));
    device.upload(buffer.view(), values);
    return buffer;
}

int run(bellows::World& world) {
    // Each of these uses what stands before it, and is destroyed first. Where a host has several
    // GPUs of one name, its ranks take them in turn.
    const auto device = bellows::Device::create(
        bellows::device_options_of_rank(bellows::kAnyDevice, world.local_rank()));
    // With a device named, records travel from device to device where those can be linked.
    const auto transport = bellows::open_transport(world, {.device = device.get()});
    bellows::HostThread thread(*device, "network");
    const std::uint64_t experts = kExpertsOfRank * static_cast<std::uint64_t>(world.size());
    const bellows::ExchangeConfig config{
        .num_experts = experts, .top_k = kTopK, .hidden = kHidden, .max_tokens = kMaxTokens};
    bellows::ExpertExchange exchange(*device, world, *transport, thread, config);
    const auto handle = exchange.create_handle("batch"); // one for each batch in flight
    // The results of the experts. Their memory comes with that of the rows, whose number no host
    // knows before they arrive.
    const auto results = handle->add_row_tensor("results", DType::F32, kHidden);

    const Tokens tokens = tokens_of(static_cast<std::uint64_t>(world.rank()), experts);
    const auto x = uploaded(*device, tokens.x), weights = uploaded(*device, tokens.weights);
    const auto ids = uploaded(*device, tokens.ids);
    const auto y = memory(*device, tokens.count * kHidden * 4);
    std::vector<float> matrices;
    for (std::uint64_t e = 0; e < exchange.num_local_experts(); ++e)
        for (std::uint64_t i = 0; i < kHidden * kHidden; ++i)
            matrices.push_back(element_of(exchange.first_local_expert() + e, i));
    const auto w = uploaded(*device, matrices);

    // The rows are grouped by local expert; where each group begins stands on the device.
    bellows::Recording compute(*device, bellows::QueueRole::Compute, "experts");
    const auto list = memory(
        *device, bellows::ops::group_tiles_bytes(*device, handle->capacity(), kExpertsOfRank));
    const auto tiles = bellows::ops::make_group_tiles(compute, handle->expert_offsets(),
                                                      handle->capacity(), {kHidden}, list.view());
    bellows::ops::grouped_gemm_nt(compute, handle->rows(),
                                  w.tensor(DType::F32, {kExpertsOfRank, kHidden, kHidden}), results,
                                  tiles);

    // These three calls return at once. The order of the work follows from what it reads and
    // writes, so the product waits for the rows, and the results wait for the product.
    exchange.dispatch(*handle, x.tensor(DType::F32, {tokens.count, kHidden}),
                      ids.tensor(DType::I32, {tokens.count, kTopK}),
                      weights.tensor(DType::F32, {tokens.count, kTopK}));
    device->submit(compute);
    const bellows::TimePoint combined = exchange.combine(
        *handle, results, y.tensor(DType::F32, {tokens.count, kHidden}), {.weighted = true});
    combined.wait();

    std::vector<float> actual(tokens.count * kHidden);
    std::vector<std::uint32_t> rows(kExpertsOfRank); // for each of this rank's experts
    device->download(y.view(), actual);
    device->download(handle->expert_counts().buffer, rows);
    double worst = 0;
    const auto expected = expected_of(tokens);
    for (std::size_t i = 0; i < expected.size(); ++i) {
        const double difference = std::abs(actual[i] - expected[i]);
        worst = std::isnan(difference) ? HUGE_VAL : std::max(worst, difference);
    }
    const bool good = worst < 1e-4; // f32 sums of 64 terms of up to 1
    std::printf("rank %d of %d: handed in %llu tokens, %u rows arrived, largest error %.1e%s\n",
                world.rank(), world.size(), static_cast<unsigned long long>(tokens.count),
                std::accumulate(rows.begin(), rows.end(), 0u), worst, good ? "" : ": wrong");
    return good ? 0 : 1;
}

} // namespace

int main() {
    try {
        return bellows::in_world(run); // with MPI where mpirun started this process
    } catch (const bellows::Error& error) {
        std::fprintf(stderr, "expert_exchange: %s\n", error.what());
        return 3;
    }
}
