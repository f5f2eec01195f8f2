// SPDX-License-Identifier: MIT

// The expert exchange by itself: what arrives where and what comes back summed, to the bit, for
// every bound on the workgroups and in the hook form; what it refuses; who owns what when a handle
// goes while its lane still works.

#include "support/mpi_test.hpp"
#include "support/test_device.hpp"

#include <bellows/comm/chunked_exchange.hpp>
#include <bellows/comm/expert_exchange.hpp>
#include <bellows/comm/mpi_interop.hpp>

#include <condition_variable>
#include <functional>
#include <mutex>
#include <numeric>
#include <optional>
#include <thread>
#include <vector>

namespace bellows {
namespace {

using namespace std::chrono_literals;
using testing::make_device;
using testing::read_back;
using testing::test_options;
using testing::world;

constexpr std::uint64_t kExperts = 7, kTopK = 3, kHidden = 40, kAlignment = 4, kMost = 200;

/// What a rank hands in, the same wherever it is worked out. The values are small whole numbers, so
/// that every order of a sum gives the same bits.
struct Input {
    explicit Input(int rank) : tokens(rank == 1 ? 0 : 150 + 13 * static_cast<std::uint64_t>(rank)) {
        for (std::uint64_t i = 0; i < tokens * kHidden; ++i)
            x.push_back(static_cast<float>((i * 37 + static_cast<std::uint64_t>(rank) * 11) % 251));
        for (std::uint64_t t = 0; t < tokens; ++t)
            for (std::uint64_t k = 0; k < kTopK; ++k) {
                const bool absent = (t + k) % 5 == 0;
                ids.push_back(absent ? -1 : static_cast<std::int32_t>((t * t + 2 * k) % kExperts));
                weights.push_back(static_cast<float>(t * kTopK + k) / 64);
            }
    }
    float slots(std::uint64_t token) const {
        float count = 0;
        for (std::uint64_t k = 0; k < kTopK; ++k)
            count += ids[token * kTopK + k] >= 0 ? 1.0f : 0.0f;
        return count;
    }

    std::uint64_t tokens;
    std::vector<float> x, weights;
    std::vector<std::int32_t> ids;
};

struct Rig {
    explicit Rig(World& in = world(), const DeviceOptions& options = test_options(),
                 ExchangeConfig config = config_of())
        : device(make_device(options)), transport(open_transport(in)),
          thread(std::make_unique<HostThread>(*device, "network")),
          exchange(std::make_unique<ExpertExchange>(*device, in, *transport, *thread, config)),
          mine(world().rank()) {
        x = filled(DType::F32, kHidden, mine.x.data());
        ids = filled(DType::I32, kTopK, mine.ids.data());
        weights = filled(DType::F32, kTopK, mine.weights.data());
        out = filled(DType::F32, kHidden, nullptr);
    }
    static ExchangeConfig config_of() {
        ExchangeConfig config;
        config.num_experts = kExperts;
        config.top_k = kTopK;
        config.hidden = kHidden;
        config.max_tokens = kMost;
        config.alignment = kAlignment;
        return config;
    }
    TensorView filled(DType dtype, std::uint64_t columns, const void* values) {
        const std::uint64_t bytes = mine.tokens * columns * 4;
        buffers.push_back(std::make_unique<Buffer>(
            *device, BufferDesc{.name = "tensor", .bytes = std::max<std::uint64_t>(bytes, 16)}));
        if (bytes > 0 && values != nullptr)
            device->upload(buffers.back()->view().sub(0, bytes),
                           std::span(static_cast<const std::byte*>(values), bytes));
        return buffers.back()->tensor(dtype, {mine.tokens, columns});
    }
    std::vector<float> values(const TensorView& view) const {
        if (view.num_bytes() == 0)
            return {};
        return read_back<float>(*device, view.buffer.sub(0, view.num_bytes()));
    }

    /// Rows in the order (expert, rank, token), zeros between the experts' rows.
    std::vector<float> expected_rows(const std::function<float(const Input&, std::uint64_t)>& of,
                                     std::uint64_t columns) const {
        std::vector<float> rows;
        const auto first = static_cast<std::int32_t>(exchange->first_local_expert());
        const auto end = first + static_cast<std::int32_t>(exchange->num_local_experts());
        for (std::int32_t e = first; e < end; ++e) {
            for (int rank = 0; rank < world().size(); ++rank) {
                const Input in(rank);
                for (std::uint64_t slot = 0; slot < in.ids.size(); ++slot)
                    for (std::uint64_t c = 0; in.ids[slot] == e && c < columns; ++c)
                        rows.push_back(of(in, columns == 1 ? slot : slot / kTopK * columns + c));
            }
            rows.resize((rows.size() + kAlignment * columns - 1) / (kAlignment * columns) *
                        kAlignment * columns);
        }
        return rows;
    }
    bool rows_arrived(const ExchangeHandle& handle) const {
        const auto expected =
            expected_rows([](const Input& in, std::uint64_t i) { return in.x[i]; }, kHidden);
        return values(handle.rows().rows(0, expected.size() / kHidden)) == expected;
    }
    bool gradients_arrived(const ExchangeHandle& handle) const {
        const auto expected =
            expected_rows([](const Input& in, std::uint64_t i) { return in.x[i]; }, kHidden);
        return values(handle.d_results().rows(0, expected.size() / kHidden)) == expected;
    }
    /// Rows that come back as they are: every token times the number of its experts.
    bool summed() const {
        std::vector<float> expected = mine.x;
        for (std::uint64_t i = 0; i < expected.size(); ++i)
            expected[i] *= mine.slots(i / kHidden);
        return values(out) == expected;
    }

    std::unique_ptr<Device> device;
    std::unique_ptr<Transport> transport;
    std::unique_ptr<HostThread> thread;
    std::unique_ptr<ExpertExchange> exchange;
    std::vector<std::unique_ptr<Buffer>> buffers;
    Input mine;
    TensorView x, ids, weights, out;
};

TEST(Exchange, ThereAndBackAndBothGradientsForEveryBoundOnWorkgroups) {
    Rig rig;
    const auto handle = rig.exchange->create_handle("batch");
    for (const std::uint32_t most : {0u, 1u, 3u, 0u}) {
        // The ranks need not agree on it.
        rig.exchange->set_workgroups(world().rank() % 2 == 0 ? most : 0);
        rig.exchange->dispatch(*handle, rig.x, rig.ids, rig.weights).wait();
        ALL_RANKS_TRUE(rig.rows_arrived(*handle));
        const auto weights = rig.expected_rows(
            [](const Input& in, std::uint64_t slot) { return in.weights[slot]; }, 1);
        const auto arrived = rig.values(handle->row_weights().rows(0, weights.size()));
        ALL_RANKS_TRUE(arrived == weights);
        rig.exchange->combine(*handle, handle->rows(), rig.out).wait();
        ALL_RANKS_TRUE(rig.summed());
        rig.exchange->combine_backward(*handle, rig.x).wait();
        ALL_RANKS_TRUE(rig.gradients_arrived(*handle));
        rig.exchange->dispatch_backward(*handle, handle->d_results(), {}, rig.out, false, {})
            .wait();
        ALL_RANKS_TRUE(rig.summed());
    }
    ALL_RANKS_TRUE(rig.device->num_checked_accesses() > 0);
}

/// Both forward legs in halves; what happens between them is the caller's.
bool in_halves(const DeviceOptions& options, const std::function<void(Rig&)>& between) {
    Rig rig(world(), options);
    const auto handle = rig.exchange->create_handle("batch");
    bool good = true;
    for (int round = 0; round < 3; ++round) {
        ExchangeHook arrive = rig.exchange->dispatch_send(*handle, rig.x, rig.ids, rig.weights);
        between(rig);
        arrive().wait();
        good = good && rig.rows_arrived(*handle);
        ExchangeHook back = rig.exchange->combine_send(*handle, handle->rows(), rig.out);
        between(rig);
        back().wait();
        good = good && rig.summed();
    }
    rig.device->wait_idle();
    return good;
}

TEST(ExchangeHooks, GiveTheSameBitsInEveryOrderOfExecution) {
    // Compute that is handed in, and waited for, between the halves goes on.
    const auto compute = [](Rig& rig) {
        Buffer buffer(*rig.device, {.name = "between", .bytes = 4096});
        Recording fill(*rig.device, QueueRole::Compute, "between");
        fill.fill(buffer.view(), 7);
        rig.device->submit(fill).wait();
    };
    DeviceOptions options = test_options();
    for (const SyncMode sync : {SyncMode::Overlap, SyncMode::Serial, SyncMode::Shuffle}) {
        options.sync = sync;
        ALL_RANKS_TRUE(in_halves(options, compute));
    }
}

TEST(ExchangeStatistics, SayWhatWentBetweenWhom) {
    Rig rig;
    const auto handle = rig.exchange->create_handle("batch");
    rig.exchange->dispatch(*handle, rig.x, rig.ids, rig.weights).wait();
    rig.exchange->combine(*handle, handle->rows(), rig.out).wait();
    rig.device->wait_idle(); // what is still sent is counted
    const ExchangeStats all = rig.exchange->stats();
    const std::vector<ExchangePeerStats> peers = rig.exchange->peer_stats();
    ALL_RANKS_TRUE(peers.size() + 1 == static_cast<std::size_t>(world().size()));
    std::uint64_t sent = 0, received = 0, messages = 0;
    for (const ExchangePeerStats& peer : peers) {
        sent += peer.bytes_sent;
        received += peer.bytes_received;
        messages += peer.messages_sent;
        world().control().send(peer.rank, 77, std::as_bytes(std::span(&peer.bytes_sent, 1)));
    }
    ALL_RANKS_TRUE(sent == all.bytes_sent && received == all.bytes_received);
    ALL_RANKS_TRUE(messages == all.messages_sent);
    ALL_RANKS_TRUE(all.seconds_for_counts > 0 && all.seconds_for_memory > 0);
    ALL_RANKS_TRUE(all.bytes_received == 0 || all.seconds_moving > 0);
    bool alike = true; // what a rank has sent its peer has received
    for (const ExchangePeerStats& peer : peers) {
        const std::vector<std::byte> bytes = world().control().recv(peer.rank, 77, 30s);
        std::uint64_t theirs = 0;
        std::memcpy(&theirs, bytes.data(), sizeof theirs);
        alike = alike && theirs == peer.bytes_received &&
                (peer.bytes_received == 0 || peer.seconds_waited > 0);
    }
    ALL_RANKS_TRUE(alike);
}

TEST(ExchangeMemory, OfAHandleIsKnownBeforeToTheByte) {
    for (const ExchangeMode mode : {ExchangeMode::HighThroughput, ExchangeMode::LowLatency})
        for (const ExchangeLayout layout :
             {ExchangeLayout::ExpertMajor, ExchangeLayout::ExpertSlots,
              ExchangeLayout::RankMajor}) {
            if (layout == ExchangeLayout::ExpertSlots && mode == ExchangeMode::LowLatency)
                continue;
            ExchangeConfig config = Rig::config_of();
            config.mode = mode;
            config.layout = layout;
            config.alignment = 1;
            config.token_wire = config.gradient_wire = DType::F8E4M3;
            config.stage_always = true; // memory that ranks share is not the device's
            Rig rig(world(), test_options(), config);
            const auto in_use = [&] { return rig.device->memory_report().bytes; };
            const std::uint64_t before = in_use();
            const auto handle = rig.exchange->create_handle("batch");
            ALL_RANKS_TRUE(in_use() - before == rig.exchange->handle_bytes());
        }
}

TEST(ExchangeMemory, MaxTokensAreAsManyAsFit) {
    for (const ExchangeMode mode : {ExchangeMode::HighThroughput, ExchangeMode::LowLatency}) {
        ExchangeConfig config = Rig::config_of();
        config.mode = mode;
        const auto bytes_of = [&](std::uint64_t tokens) {
            ExchangeConfig of = config;
            of.max_tokens = tokens;
            return exchange_handle_bytes(world().topology(), world().rank(), of);
        };
        const auto most_within = [&](const ExchangeConfig& of, std::uint64_t bytes) {
            return max_exchange_tokens(world().topology(), world().rank(), of, bytes);
        };
        const std::uint64_t least = bytes_of(1), all = bytes_of(kMost);
        for (const std::uint64_t bytes : {least, (least + all) / 2, all - 1}) {
            const std::uint64_t most = most_within(config, bytes);
            ALL_RANKS_TRUE(most > 0 && bytes_of(most) <= bytes && bytes_of(most + 1) > bytes);
        }
        ALL_RANKS_TRUE(most_within(config, all) == kMost);
        ALL_RANKS_TRUE(most_within(config, least - 1) == 0);
        config.max_tokens = std::uint64_t{1} << 40; // more than kernels address
        ALL_RANKS_TRUE(bytes_of(most_within(config, all)) <= all);
    }
}

/// What a dispatch adds is about what was foreseen, also where tokens pass through another rank.
TEST(ExchangeMemory, OfRecordsIsForeseen) {
    for (const int ranks_per_node : {0, 2}) {
        WorldOptions options;
        if (ranks_per_node > 0)
            options.ranks_per_node = ranks_per_node;
        World inner = join_world(MPI_COMM_WORLD, options);
        ExchangeConfig config = Rig::config_of();
        config.num_experts = 16;
        config.hidden = 256;
        Rig rig(inner);
        if (!rig.device->info().is_cpu)
            GTEST_SKIP() << "what a GPU's records pass through counts, too";
        // Memory that ranks share is not the device's.
        const auto transport = open_transport(inner, {.share_memory = false});
        ExpertExchange exchange(*rig.device, inner, *transport, *rig.thread, config);
        const std::uint64_t tokens = kMost;
        std::vector<std::int32_t> ids; // evenly
        for (std::uint64_t slot = 0; slot < tokens * kTopK; ++slot)
            ids.push_back(static_cast<std::int32_t>((slot * 7 + slot / kTopK * 5) % 16));
        Buffer x(*rig.device, {.name = "x", .bytes = tokens * config.hidden * 4});
        Buffer of_ids(*rig.device, {.name = "ids", .bytes = ids.size() * 4});
        rig.device->upload(of_ids.view(), std::span<const std::int32_t>(ids));
        const auto handle = exchange.create_handle("batch");
        const auto in_use = [&] {
            return rig.device->memory_report().of(MemoryCategory::Communication).bytes;
        };
        const std::uint64_t before = in_use();
        const TensorView ids_view = of_ids.tensor(DType::I32, {tokens, kTopK});
        exchange
            .dispatch(*handle, x.tensor(DType::F32, {tokens, config.hidden}), ids_view,
                      of_ids.tensor(DType::F32, {tokens, kTopK}))
            .wait();
        const auto added = static_cast<double>(in_use() - before);
        const auto foreseen = static_cast<double>(
            exchange_record_bytes(inner.topology(), inner.rank(), exchange.config(), 1));
        EXPECT_NEAR(added, foreseen, 0.25 * foreseen) << ranks_per_node << " ranks per node";
        ALL_RANKS_TRUE(exchange.by_node() ==
                       (ranks_per_node == 2 && inner.size() % 2 == 0 && inner.size() > 2));
    }
}

/// Low latency; the experts give each row back as it is.
struct Decoder {
    Decoder(Rig& of, ExchangeLayout layout) : rig(of), by_tokens(layout == kByTokens) {}

    TensorView experts(ExchangeHandle& handle) {
        if (!by_tokens)
            return handle.rows();
        recordings.push_back(
            std::make_unique<Recording>(*rig.device, QueueRole::Compute, "experts"));
        ops::copy(*recordings.back(), handle.rows(), handle.results());
        rig.device->submit(*recordings.back());
        return handle.results();
    }

    static constexpr ExchangeLayout kByTokens = ExchangeLayout::RankMajor;
    Rig& rig;
    bool by_tokens;
    std::vector<std::unique_ptr<Recording>> recordings;
};

TEST(ExchangeChunks, GiveTheBitsOfOneCall) {
    const std::uint64_t most = Input(std::max(world().size() - 1, 0)).tokens;
    for (const ExchangeLayout layout : {ExchangeLayout::ExpertMajor, ExchangeLayout::RankMajor}) {
        ExchangeConfig config = Rig::config_of();
        config.mode = ExchangeMode::LowLatency;
        config.layout = layout;
        Rig rig(world(), test_options(), config);
        Decoder decoder(rig, layout);
        const auto whole = rig.exchange->create_handle("whole");
        rig.exchange->dispatch(*whole, rig.x, rig.ids, rig.weights);
        const CombineOptions with_bias{.bias = rig.x};
        rig.exchange->combine(*whole, decoder.experts(*whole), rig.out, with_bias).wait();
        const std::vector<float> expected = rig.values(rig.out);
        config.max_tokens = 32;
        ExpertExchange exchange(*rig.device, world(), *rig.transport, *rig.thread, config);
        ChunkedExchange chunked(exchange, "decode");
        const std::uint64_t chunks = chunked.num_chunks(std::max(most, Input(0).tokens));
        ALL_RANKS_TRUE(chunks >= 5 && chunked.num_chunks(0) == 1);
        const TensorView out = rig.filled(DType::F32, kHidden, nullptr);
        std::uint64_t calls = 0;
        const auto experts = [&](ExchangeHandle& handle) {
            ++calls;
            return decoder.experts(handle);
        };
        chunked.run(rig.x, rig.ids, rig.weights, out, chunks, experts, with_bias).wait();
        ALL_RANKS_TRUE(calls == chunks);
        ALL_RANKS_TRUE(rig.values(out) == expected);
        ALL_RANKS_TRUE(world().rank() == 1 || expected != std::vector<float>(expected.size()));
    }
}

TEST(ExchangeChunks, TooFewAreRefusedEverywhere) {
    World inner = join_world(MPI_COMM_WORLD, {});
    ExchangeConfig config = Rig::config_of();
    ErrorCode of_mode = ErrorCode::Internal, of_number = ErrorCode::Internal;
    config.mode = ExchangeMode::LowLatency;
    config.max_tokens = 32;
    Rig rig(inner, test_options(), config);
    Rig other(world());
    ChunkedExchange chunked(*rig.exchange, "decode");
    Decoder decoder(rig, ExchangeLayout::ExpertMajor);
    try {
        ChunkedExchange of_training(*other.exchange, "training");
    } catch (const Error& error) {
        of_mode = error.code();
    }
    ALL_RANKS_TRUE(of_mode == ErrorCode::InvalidArgument);
    try { // rank 0 has more
        const std::uint64_t chunks = world().rank() == 0 ? 1 : 9;
        const auto experts = [&](ExchangeHandle& handle) { return decoder.experts(handle); };
        chunked.run(rig.x, rig.ids, rig.weights, rig.out, chunks, experts).wait(30s);
    } catch (const Error& error) {
        of_number = error.code();
    }
    ALL_RANKS_TRUE(of_number == ErrorCode::InvalidArgument);
}

TEST(ExchangeHooks, ReceiveOnlyWhenAsked) {
    DeviceOptions options = test_options();
    options.sync = SyncMode::Overlap;
    Rig rig(world(), options);
    rig.exchange->dispatch(*rig.exchange->create_handle("first"), rig.x, rig.ids, rig.weights)
        .wait(); // kernels are compiled
    ExchangeConfig config = Rig::config_of();
    config.timeout = 2s;
    ExpertExchange exchange(*rig.device, world(), *rig.transport, *rig.thread, config);
    const auto handle = exchange.create_handle("batch");
    exchange.dispatch(*handle, rig.x, rig.ids, rig.weights).wait();
    const ExchangeStats before = exchange.stats();
    ExchangeHook arrive = exchange.dispatch_send(*handle, rig.x, rig.ids, rig.weights);
    for (int i = 0; i < 5000 && exchange.stats().exchanges == before.exchanges; ++i)
        std::this_thread::sleep_for(1ms);
    std::this_thread::sleep_for(2500ms); // more than the time limit, which does not run
    const ExchangeStats between = exchange.stats();
    ALL_RANKS_TRUE(between.exchanges == before.exchanges + 1);
    ALL_RANKS_TRUE(between.bytes_sent == 2 * before.bytes_sent);
    ALL_RANKS_TRUE(between.bytes_received == before.bytes_received);
    arrive().wait();
    ALL_RANKS_TRUE(exchange.stats().bytes_received == 2 * before.bytes_received);
    ALL_RANKS_TRUE(rig.rows_arrived(*handle));
    bool refused = false;
    try {
        arrive();
    } catch (const Error& error) {
        refused = error.code() == ErrorCode::InvalidArgument;
    }
    ALL_RANKS_TRUE(refused && !world().control().failed());
}

/// The first rank gives its results up, at times by way of another node's ranks.
void check_dropped_hooks(const WorldOptions& options) {
    World inner = join_world(MPI_COMM_WORLD, options);
    Rig rig(inner);
    const auto handle = rig.exchange->create_handle("batch");
    if (world().rank() == 0) {
        {
            const ExchangeHook dropped =
                rig.exchange->dispatch_send(*handle, rig.x, rig.ids, rig.weights);
        }
        rig.device->wait_idle();
    } else {
        rig.exchange->dispatch(*handle, rig.x, rig.ids, rig.weights).wait();
    }
    ALL_RANKS_TRUE(world().rank() == 0 || rig.rows_arrived(*handle));
    // Nothing to combine on rank 0: it refuses, and so everybody hears of it.
    ErrorCode code = ErrorCode::Internal;
    try {
        if (world().rank() == 0)
            std::this_thread::sleep_for(300ms); // the others have nothing left to say by then
        rig.exchange->combine(*handle, handle->rows(), rig.out).wait(30s);
        inner.control().recv(0, 1, 30s);
    } catch (const Error& error) {
        code = error.code();
    }
    ALL_RANKS_TRUE(code == ErrorCode::InvalidArgument);
}

TEST(ExchangeHooks, RanksMayUseDifferentFormsAndDropThem) {
    check_dropped_hooks({});
}

TEST(ExchangeHooks, RanksThatPassTokensOnDoSoWithADroppedHook) {
    WorldOptions options;
    options.ranks_per_node = 2;
    check_dropped_hooks(options);
}

TEST(Exchange, OptionsThatDoNotExistYetAreRefused) {
    const auto code_of = [](const std::function<void(ExchangeConfig&)>& change) {
        ExchangeConfig config = Rig::config_of();
        change(config);
        try {
            Rig rig(world(), test_options(), config);
        } catch (const Error& error) {
            return std::optional(error.code());
        }
        return std::optional<ErrorCode>();
    };
    ALL_RANKS_TRUE(code_of([](ExchangeConfig& c) { c.token_wire = DType::F8E5M2; }) ==
                   ErrorCode::Unsupported);
    ALL_RANKS_TRUE(code_of([](ExchangeConfig& c) { c.gradient_wire = DType::F8E5M2; }) ==
                   ErrorCode::Unsupported);
    ALL_RANKS_TRUE(code_of([](ExchangeConfig& c) { c.sum_wire = DType::BF16; }) ==
                   ErrorCode::Unsupported);
    ALL_RANKS_TRUE(code_of([](ExchangeConfig& c) { c.sum_wire = c.token_wire = DType::F32; }) ==
                   std::nullopt);
    ALL_RANKS_TRUE(code_of([](ExchangeConfig& c) { c.hidden = 12; }) == ErrorCode::InvalidArgument);
    ALL_RANKS_TRUE(code_of([](ExchangeConfig& c) {
                       c.layout = ExchangeLayout::ExpertSlots;
                       c.alignment = 8;
                   }) == ErrorCode::InvalidArgument);
    ALL_RANKS_TRUE(!world().control().failed());
}

// --- lifetime ------------------------------------------------------------------------------------

/// A look whether something has arrived takes until somebody lets it end; then zeros have.
class StuckTransport final : public Transport {
public:
    struct Gate {
        std::mutex mutex;
        std::condition_variable changed;
        bool looking = false, released = false;

        bool wait_for_look() {
            std::unique_lock lock(mutex);
            return changed.wait_for(lock, 20s, [this] { return looking; });
        }
        void release() {
            const std::lock_guard lock(mutex);
            released = true;
            changed.notify_all();
        }
    };

    explicit StuckTransport(World& in) : Transport(in) {}
    std::string_view name() const noexcept override { return "stuck"; }
    Transfer post_send(int peer, Tag tag, std::span<const std::byte> bytes) override {
        return Transfer(Direction::Send, peer, tag, bytes.size(), nullptr);
    }
    Transfer post_recv(int peer, Tag tag, std::span<std::byte> bytes) override {
        return Transfer(Direction::Receive, peer, tag, bytes.size(),
                        std::make_unique<Look>(gate, bytes));
    }
    void progress() override {}

    Gate gate;

private:
    struct Look final : Transfer::State {
        Look(Gate& of, std::span<std::byte> into) : gate(of), bytes(into) {}
        bool test() override {
            std::unique_lock lock(gate.mutex);
            gate.looking = true;
            gate.changed.notify_all();
            gate.changed.wait_for(lock, 20s, [this] { return gate.released; });
            std::fill(bytes.begin(), bytes.end(), std::byte{0}); // its memory must be there
            return gate.released;
        }
        bool cancel() noexcept override { return true; }
        std::uint64_t seen_bytes() const noexcept override { return 0; }
        Gate& gate;
        std::span<std::byte> bytes;
    };
};

// The sanitizers' business above all: the handle and the exchange are gone while the lane is in the
// middle of a step, which goes on and takes the counts, binds memory, moves records.
TEST(ExchangeLifetime, AHandleMayGoAfterAnAbortWhileItsLaneWorks) {
    World alone = World::single();
    StuckTransport transport(alone);
    const auto device = make_device();
    auto thread = std::make_unique<HostThread>(*device, "network");
    auto exchange =
        std::make_unique<ExpertExchange>(*device, alone, transport, *thread, Rig::config_of());
    auto handle = exchange->create_handle("batch");
    Buffer x(*device, {.name = "x", .bytes = 8 * kHidden * 4});
    Buffer ids(*device, {.name = "ids", .bytes = 8 * kTopK * 4});
    Recording clear(*device, QueueRole::Compute, "clear");
    clear.fill(x.view(), 0);
    clear.fill(ids.view(), 0);
    device->submit(clear);
    const TimePoint point =
        exchange->dispatch(*handle, x.tensor(DType::F32, {8, kHidden}),
                           ids.tensor(DType::I32, {8, kTopK}), ids.tensor(DType::F32, {8, kTopK}));
    ASSERT_TRUE(transport.gate.wait_for_look());
    device->abort(Error(ErrorCode::Aborted, "enough"));
    EXPECT_EQ(point.state(), TimePoint::State::Failed);
    const auto start = std::chrono::steady_clock::now();
    handle.reset();
    exchange.reset();
    EXPECT_LT(std::chrono::steady_clock::now() - start, 5s) << "they wait for the network";
    transport.gate.release();
    std::this_thread::sleep_for(20ms);
    thread.reset();
}

} // namespace
} // namespace bellows
