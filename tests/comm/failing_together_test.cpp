// SPDX-License-Identifier: MIT

// A collective call on device tensors that fails on one rank fails on all, with the same code, in
// seconds and not after the time limits of those who wait: this program launches itself through
// mpirun, rank 1 hands in nonsense, runs out of memory or dies, and the others are in the middle of
// the call. Also where it is killed or stopped at any moment of exchanges without end.

#include "launched.hpp"
#include "support/test_device.hpp"
#include "support/transport_options.hpp"

#include <bellows/comm/collectives.hpp>
#include <bellows/comm/expert_exchange.hpp>
#include <bellows/comm/pipe.hpp>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <ostream>
#include <random>
#include <thread>

namespace bellows {
namespace {

using namespace std::chrono_literals;
using testing::Seen;
using testing::SteadyClock;

constexpr int kCulprit = 1;
/// In which the others come to be well inside their call.
#ifdef __SANITIZE_ADDRESS__
constexpr auto kHeadStart = 1s;
#else
constexpr auto kHeadStart = 400ms;
#endif

// --- the ranks -----------------------------------------------------------------------------------

/// What a rank works with; the world outlives it. linked: exchanges go from device to device.
struct Rig {
    Rig(World& in, bool linked)
        : world(in), device(testing::make_device()),
          transport(open_transport(in, testing::transport_options(*device, linked))),
          thread(*device, "network") {}

    bool culprit() const { return world.rank() == kCulprit; }
    TensorView tensor(DType dtype, std::uint64_t rows, std::uint64_t columns) {
        buffers.push_back(std::make_unique<Buffer>(
            *device, BufferDesc{.name = "tensor",
                                .bytes = std::max<std::uint64_t>(rows * columns * 4, 16)}));
        Recording clear(*device, QueueRole::Compute, "clear");
        clear.fill(buffers.back()->view(), 0);
        device->submit(clear).wait();
        return buffers.back()->tensor(dtype, {rows, columns});
    }

    World& world;
    std::unique_ptr<Device> device;
    std::unique_ptr<Transport> transport;
    HostThread thread;
    std::vector<std::unique_ptr<Buffer>> buffers;
};

/// All ranks begin; rank 1 when the others are well inside their call.
SteadyClock::time_point begin(Rig& rig) {
    testing::barrier_left_last_by(rig.world, kCulprit);
    const auto start = SteadyClock::now();
    if (rig.culprit())
        std::this_thread::sleep_for(kHeadStart);
    return start;
}

/// A dispatch that works, with the same kernels (some depend on the number of tokens), so that the
/// others are in the middle of the next one in no time.
void compile(Rig& rig, const ExchangeConfig& config) {
    ExpertExchange exchange(*rig.device, rig.world, *rig.transport, rig.thread, config);
    const auto handle = exchange.create_handle("first");
    const std::uint64_t tokens = config.max_tokens;
    exchange
        .dispatch(*handle, rig.tensor(DType::F32, tokens, config.hidden),
                  rig.tensor(DType::I32, tokens, config.top_k),
                  rig.tensor(DType::F32, tokens, config.top_k))
        .wait(60s);
    rig.device->wait_idle();
}

/// low_latency: in that mode, through staging memory as on GPUs.
void run_exchange(Rig& rig, const std::string& fault, SteadyClock::time_point& start,
                  bool low_latency) {
    constexpr std::uint64_t kTokens = 64, kHidden = 4096;
    ExchangeConfig config{.num_experts = 8,
                          .top_k = 2,
                          .hidden = kHidden,
                          .max_tokens = kTokens,
                          .mode =
                              low_latency ? ExchangeMode::LowLatency : ExchangeMode::HighThroughput,
                          .stage_always = low_latency};
    compile(rig, config);
    if (fault == "counts" && rig.culprit())
        config.max_tokens = 8;
    ExpertExchange exchange(*rig.device, rig.world, *rig.transport, rig.thread, config);
    const auto handle = exchange.create_handle("batch");
    if (fault == "memory" && rig.culprit())
        handle->add_row_tensor("huge", DType::F32, std::uint64_t{1} << 50);
    std::uint64_t tokens = kTokens;
    if (fault == "counts" && rig.culprit())
        tokens = 0;
    if (fault == "tokens" && rig.culprit())
        tokens = kTokens + 1;
    const TensorView x = rig.tensor(DType::F32, tokens,
                                    fault == "argument" && rig.culprit() ? kHidden + 8 : kHidden);
    const TensorView ids = rig.tensor(DType::I32, tokens, 2);
    const TensorView weights = rig.tensor(DType::F32, tokens, 2);
    std::vector<std::int32_t> chosen;
    for (std::uint64_t t = 0; t < tokens; ++t)
        for (const std::int32_t expert : {2, 4}) // of ranks 0 and 1
            chosen.push_back(expert);
    if (tokens > 0)
        rig.device->upload(ids.buffer.sub(0, chosen.size() * 4),
                           std::span<const std::int32_t>(chosen));
    start = begin(rig);
    if (fault == "kill" && rig.culprit())
        ::raise(SIGKILL);
    if (fault == "kill in records" && rig.culprit()) {
        const ExchangeHook never = exchange.dispatch_send(*handle, x, ids, weights);
        std::this_thread::sleep_for(500ms);
        ::raise(SIGKILL);
    }
    exchange.dispatch(*handle, x, ids, weights).wait(60s);
    // A rank whose own part is done hears of it at its next wait.
    exchange.combine(*handle, handle->rows(), x).wait(60s);
}

/// Kills or stops rank 1 ("kill 120": after 120 ms).
std::jthread end_culprit(const Rig& rig, const std::string& fault) {
    if (!rig.culprit())
        return {};
    return std::jthread([&fault] {
        std::this_thread::sleep_for(
            std::chrono::milliseconds(std::strtol(fault.c_str() + 5, nullptr, 10)));
        ::kill(::getpid(), fault.rfind("kill", 0) == 0 ? SIGKILL : SIGSTOP);
    });
}

constexpr int kSteps = 300;

/// Low latency in a world that outlives lost ranks: rank 1 is killed or stopped early in kSteps
/// steps, the others go on without it, say for how many, and then try what cannot do without it.
void outlive(Rig& rig, const std::string& fault, const std::string& folder,
             SteadyClock::time_point& start) {
    constexpr std::uint64_t kTokens = 32, kHidden = 256, kExperts = 8, kTopK = 3;
    constexpr std::uint64_t kExpertsOfRank = 2; // of 4
    ExchangeConfig config{.num_experts = kExperts,
                          .top_k = kTopK,
                          .hidden = kHidden,
                          .max_tokens = kTokens,
                          .mode = ExchangeMode::LowLatency,
                          .piece_bytes = 16384,
                          .stage_always = true};
    ExpertExchange exchange(*rig.device, rig.world, *rig.transport, rig.thread, config);
    const auto handle = exchange.create_handle("batch");
    const TensorView x = rig.tensor(DType::F32, kTokens, kHidden);
    const TensorView out = rig.tensor(DType::F32, kTokens, kHidden);
    const TensorView ids = rig.tensor(DType::I32, kTokens, kTopK);
    const TensorView weights = rig.tensor(DType::F32, kTokens, kTopK);
    std::vector<std::int32_t> chosen;
    std::vector<float> of_all(kTokens), of_survivors(kTokens);
    for (std::uint64_t slot = 0; slot < kTokens * kTopK; ++slot) {
        const std::uint64_t expert = (slot / kTopK + 3 * slot) % kExperts;
        chosen.push_back(static_cast<std::int32_t>(expert));
        of_all[slot / kTopK] += 1;
        of_survivors[slot / kTopK] += expert / kExpertsOfRank == kCulprit ? 0.0f : 1.0f;
    }
    const auto fill = [&](const TensorView& tensor, float value) {
        const std::vector<float> values(tensor.num_elements(), value);
        rig.device->upload(tensor.buffer.sub(0, values.size() * 4), std::span(values));
    };
    rig.device->upload(ids.buffer.sub(0, chosen.size() * 4), std::span<const std::int32_t>(chosen));
    fill(x, static_cast<float>(1 + rig.world.rank()));
    fill(weights, 1);
    std::vector<float> sums(kTokens * kHidden);
    const auto are = [&](const std::vector<float>& times) {
        for (std::uint64_t i = 0; i < sums.size(); ++i)
            if (sums[i] != times[i / kHidden] * static_cast<float>(1 + rig.world.rank()))
                return false;
        return true;
    };
    const auto there_and_back = [&] {
        exchange.dispatch(*handle, x, ids, weights).wait(60s);
        exchange.combine(*handle, handle->rows(), out).wait(60s);
        rig.device->download(out.buffer.sub(0, sums.size() * 4),
                             std::as_writable_bytes(std::span(sums)));
    };
    config.mode = ExchangeMode::HighThroughput;
    ExpertExchange needs_all(*rig.device, rig.world, *rig.transport, rig.thread, config);
    const auto other = needs_all.create_handle("all");
    needs_all.dispatch(*other, x, ids, weights).wait(60s); // compiled, for the end
    there_and_back();
    if (!are(of_all))
        throw Error(ErrorCode::Internal, "wrong sums of all ranks");
    testing::barrier_left_last_by(rig.world, kCulprit);
    start = SteadyClock::now();
    const std::jthread ends_it = end_culprit(rig, fault);
    int steps_without = 0;
    for (int step = 0; step < kSteps; ++step) { // as many on all ranks, whenever each hears of it
        const bool without = !exchange.masked_ranks().empty();
        there_and_back();
        if (!are(of_survivors) && (without || !are(of_all)))
            throw Error(ErrorCode::Internal, "wrong sums of the survivors");
        steps_without += without ? 1 : 0;
    }
    std::ofstream(folder + "/without" + std::to_string(rig.world.rank())) << steps_without;
    for (const bool send : {true, false}) // what fails next must not meet anybody's last step
        for (int rank = 0; rank < rig.world.size(); ++rank)
            if (rank != kCulprit && send)
                rig.world.control().send(rank, 998, {});
            else if (rank != kCulprit)
                rig.world.control().recv(rank, 998, 60s);
    if (fault.rfind("stop", 0) == 0 && rig.world.rank() == 0) // mpirun would wait for it
        ::kill(static_cast<pid_t>(rig.world.control().peer_pid(kCulprit)), SIGKILL);
    needs_all.dispatch(*other, x, ids, weights).wait(60s);
}

/// Dispatches and combines one after the other, in halves where there are hooks; rank 1 is killed
/// or stopped.
void run_on(Rig& rig, const std::string& fault, SteadyClock::time_point& start, bool low_latency,
            bool hooks) {
    constexpr std::uint64_t kTokens = 64, kHidden = 1024, kExperts = 8, kTopK = 3;
    ExpertExchange exchange(
        *rig.device, rig.world, *rig.transport, rig.thread,
        {.num_experts = kExperts,
         .top_k = kTopK,
         .hidden = kHidden,
         .max_tokens = kTokens,
         .mode = low_latency ? ExchangeMode::LowLatency : ExchangeMode::HighThroughput,
         .piece_bytes = 16384,
         .stage_always = low_latency});
    const auto handle = exchange.create_handle("batch");
    const TensorView x = rig.tensor(DType::F32, kTokens, kHidden);
    const TensorView ids = rig.tensor(DType::I32, kTokens, kTopK);
    const TensorView weights = rig.tensor(DType::F32, kTokens, kTopK);
    std::vector<std::int32_t> chosen;
    for (std::uint64_t slot = 0; slot < kTokens * kTopK; ++slot)
        chosen.push_back(static_cast<std::int32_t>((slot * slot / kTopK + 3 * slot) % kExperts));
    rig.device->upload(ids.buffer.sub(0, chosen.size() * 4), std::span<const std::int32_t>(chosen));
    const auto in_halves = [&](const auto& send) {
        ExchangeHook hook = send();
        std::this_thread::sleep_for(2ms);
        hook().wait(60s);
    };
    const auto there_and_back = [&] {
        if (hooks) {
            in_halves([&] { return exchange.dispatch_send(*handle, x, ids, weights); });
            in_halves([&] { return exchange.combine_send(*handle, handle->rows(), x); });
        } else {
            exchange.dispatch(*handle, x, ids, weights).wait(60s);
            exchange.combine(*handle, handle->rows(), x).wait(60s);
        }
    };
    there_and_back(); // kernels are compiled
    testing::barrier_left_last_by(rig.world, kCulprit);
    start = SteadyClock::now();
    const std::jthread ends_it = end_culprit(rig, fault);
    while (SteadyClock::now() - start < 60s)
        there_and_back();
}

void run_all_reduce(Rig& rig, const std::string& fault, SteadyClock::time_point& start) {
    CollectivesOptions options;
    options.timeout =
        std::chrono::milliseconds(fault == "time limit" && rig.world.rank() == 0 ? 1000 : 60'000);
    Collectives collectives(*rig.device, rig.world, *rig.transport, rig.thread,
                            Group::all(rig.world.size()), options);
    const TensorView x =
        rig.tensor(fault == "argument" && rig.culprit() ? DType::BF16 : DType::F32, 512, 64);
    collectives.all_reduce(rig.tensor(DType::F32, 512, 64)).wait(60s);
    start = begin(rig);
    if (fault == "kill" && rig.culprit())
        ::raise(SIGKILL);
    if (fault == "device" && rig.culprit())
        rig.device->abort(Error(ErrorCode::DeviceLost, "the device is gone"));
    if (fault == "time limit" && rig.culprit())
        rig.world.control().recv(0, 1, 60s); // never comes to the call
    collectives.all_reduce(x).wait(60s);
}

void run_pipe(Rig& rig, const std::string& fault, SteadyClock::time_point& start) {
    PipeOptions options;
    options.timeout =
        std::chrono::milliseconds(fault == "time limit" && rig.world.rank() == 0 ? 1000 : 60'000);
    Pipe pipe(*rig.device, rig.world, *rig.transport, rig.thread, options);
    const TensorView x = rig.tensor(DType::F32, 4, 64);
    start = begin(rig);
    if (!rig.culprit())
        pipe.recv(kCulprit, x).wait(60s);
    if (fault == "kill")
        ::raise(SIGKILL);
    if (fault == "argument") {
        TensorView strided = x;
        strided.extent[1] = 4;
        pipe.send(0, strided);
    }
    rig.world.control().recv(0, 1, 60s);
}

int run_rank(int argc, char** argv) {
    const std::string phase = argv[2], fault = argv[3], folder = argv[4];
    int rank = -1, exit_code = 0;
    std::string reason;
    auto start = SteadyClock::now();
    try {
        WorldOptions options;
        if (phase.rfind("by node", 0) == 0)
            options.ranks_per_node = 2;
        options.control.outlive_lost_ranks = phase.rfind("outlive", 0) == 0;
        World world = World::init(argc, argv, options);
        rank = world.rank();
        try {
            Rig rig(world, phase.find("linked") != std::string::npos);
            if (phase.rfind("outlive", 0) == 0)
                outlive(rig, fault, folder, start);
            else if (phase.find("on and on") != std::string::npos)
                run_on(rig, fault, start, phase.find("low_latency") != std::string::npos,
                       phase.find("hooks") != std::string::npos);
            else if (phase == "exchange" || phase == "by node")
                run_exchange(rig, fault, start, false);
            else if (phase == "low_latency")
                run_exchange(rig, fault, start, true);
            else if (phase.find("all_reduce") != std::string::npos)
                run_all_reduce(rig, fault, start);
            else
                run_pipe(rig, fault, start);
        } catch (const Error& error) {
            testing::write_seen(folder, rank, error, start);
            exit_code = error.code() == ErrorCode::PeerLost ? 4 : 1;
            reason = error.message();
        }
        world.close();
    } catch (const std::exception& error) {
        exit_code = exit_code == 0 ? 1 : exit_code;
    }
    report_exit(rank, exit_code, reason);
    return exit_code;
}

// --- the tests -----------------------------------------------------------------------------------

struct Case {
    const char* phase;
    const char* fault;
    const char* code;
    const char* origin; ///< what rank 1 (or who else it was) says of it
    const char* middle; ///< what rank 0 says of its own part; "": it was the one
    int ranks = 3;
};

void PrintTo(const Case& c, std::ostream* out) {
    *out << c.phase << ", " << c.fault;
}

const Case kCases[] = {
    {"exchange", "argument", "InvalidArgument", "rank 1: batch: x must be a contiguous f32",
     "'batch DISPATCH(F): counts' (exchange 2), 2 of 3 messages done: from rank 1 expected"},
    {"exchange", "tokens", "InvalidArgument", "rank 1: batch: 65 tokens, but max_tokens is 64",
     "'batch DISPATCH(F): counts'"},
    {"exchange", "memory", "OutOfMemory",
     "rank 1: 'batch DISPATCH(F): memory for 192 tokens, 192 rows' (exchange 2)", "'batch "},
    {"exchange", "counts", "InvalidArgument",
     "rank 1: 'batch DISPATCH(F): counts' (exchange 2), 3 of 3 messages done out: rank 0 sends 64 "
     "rows, max_tokens is 8 here",
     "'batch "},
    {"exchange", "kill", "PeerLost", "rank 1 (pid ",
     "'batch DISPATCH(F): counts' (exchange 2), 2 of 3 messages done: from rank 1 expected"},
    {"exchange", "kill in records", "PeerLost", "rank 1 (pid ",
     "to rank 1 expected 1049600 bytes, saw 0"},
    {"low_latency", "tokens", "InvalidArgument", "rank 1: batch: 65 tokens, but max_tokens is 64",
     "from rank 1 expected 1049600 bytes, saw 0"},
    {"low_latency", "kill", "PeerLost", "rank 1 (pid ",
     "'batch DISPATCH(F): records' (exchange 2), 1 of 2 messages done: from rank 1 expected"},
    {"low_latency", "kill in records", "PeerLost", "rank 1 (pid ",
     "to rank 1 expected 1049600 bytes, saw 0"},
    {"by node", "kill", "PeerLost", "rank 1 (pid ",
     "'batch DISPATCH(F): counts' (exchange 3), 1 of 2 messages done: from rank 1 expected", 4},
    {"by node", "memory", "OutOfMemory", "rank 1: 'batch DISPATCH(F): memory for ", "'batch ", 4},
    {"by node", "counts", "InvalidArgument", "rank 3 sends 64 rows, max_tokens is 8 here",
     "'batch DISPATCH(F): counts'", 4},
    {"by node", "kill in records", "PeerLost", "rank 1 (pid ",
     "'batch DISPATCH(F): counts' (exchange 3), 1 of 2 messages done: from rank 1 expected", 4},
    {"all_reduce", "argument", "InvalidArgument", "rank 1: collectives ALL_REDUCE: x is bf16",
     "'collectives ALL_REDUCE: parts to sum', 0 of 1 chunks done, "},
    {"all_reduce", "device", "DeviceLost", "rank 1: the device is gone",
     "'collectives ALL_REDUCE: parts to sum', 0 of 1 chunks done, "},
    {"all_reduce", "time limit", "Timeout", "rank 0 waited 1", ""},
    {"all_reduce", "kill", "PeerLost", "rank 1 (pid ", "from rank 1 expected"},
    {"linked all_reduce", "time limit", "Timeout", "rank 0 waited 1", ""},
    {"linked all_reduce", "kill", "PeerLost", "rank 1 (pid ", "from rank 1 expected"},
    {"pipe", "argument", "InvalidArgument", "rank 1: pipe to 0: the tensor must be contiguous",
     "'pipe RECV from 1', message 0 of 1024 bytes from rank 1 has not arrived"},
    {"pipe", "time limit", "Timeout", "message 0 of 1024 bytes from rank 1", ""},
    {"pipe", "kill", "PeerLost", "rank 1 (pid ",
     "'pipe RECV from 1', message 0 of 1024 bytes from rank 1 has not arrived"},
    {"linked pipe", "kill", "PeerLost", "rank 1 (pid ",
     "'pipe RECV from 1', message 0 of 1024 bytes from rank 1 has not arrived"},
};

class FailingTogether : public testing::Launched, public ::testing::WithParamInterface<Case> {};

TEST_P(FailingTogether, EveryRankGetsTheSameErrorInSeconds) {
    const Case& c = GetParam();
    const std::string fault = c.fault;
    const LaunchResult result = launch(c.ranks, c.phase, fault);
    EXPECT_NE(result.exit_code, 0);
    EXPECT_FALSE(result.killed) << "every rank must end by itself";
    EXPECT_LT(took_, 40s);
    for (int rank = 0; rank < c.ranks; ++rank) {
        if (rank == kCulprit && fault.rfind("kill", 0) == 0)
            continue;
        const Seen one = seen(rank);
        EXPECT_EQ(one.code, c.code) << "rank " << rank << ": " << one.message;
        EXPECT_LT(one.milliseconds, 15'000) << "rank " << rank << ": " << one.message;
        const std::string origin = c.origin;
        const bool itself = origin.rfind("rank 1: ", 0) == 0 && rank == kCulprit;
        EXPECT_TRUE(one.says(itself ? origin.substr(8) : origin)) << one.message;
    }
    EXPECT_TRUE(seen(0).says(c.middle)) << seen(0).message;
    if (*c.middle != '\0') {
        EXPECT_TRUE(seen(0).says("; meanwhile rank 0 was in ")) << seen(0).message;
    }
}

INSTANTIATE_TEST_SUITE_P(Cases, FailingTogether, ::testing::ValuesIn(kCases), [](const auto& one) {
    std::string name = std::string(one.param.phase) + "_" + one.param.fault;
    std::replace(name.begin(), name.end(), ' ', '_');
    return name;
});

struct Moment {
    const char* phase;
    const char* signal;
};

class FailingAtAnyMoment : public testing::Launched, public ::testing::WithParamInterface<Moment> {
protected:
    std::random_device draw_;
};

TEST_P(FailingAtAnyMoment, EveryOtherRankHearsOfIt) {
    constexpr int kRanks = 4;
    const std::string signal = GetParam().signal;
    const std::string fault =
        signal + " " + std::to_string(std::uniform_int_distribution<int>(0, 500)(draw_));
    SCOPED_TRACE(fault);
    ::setenv("BELLOWS_STALL_SECONDS", "2", 1);
    const LaunchResult result = launch(kRanks, GetParam().phase, fault);
    ::unsetenv("BELLOWS_STALL_SECONDS");
    EXPECT_NE(result.exit_code, 0);
    EXPECT_LT(took_, 40s);
    for (int rank = 0; rank < kRanks; ++rank) {
        if (rank == kCulprit)
            continue;
        const Seen one = seen(rank);
        EXPECT_EQ(one.code, "PeerLost") << "rank " << rank << ": " << one.message;
        EXPECT_EQ(one.rank, kCulprit) << one.message;
        EXPECT_LT(one.milliseconds, 15'000) << "rank " << rank << ": " << one.message;
        EXPECT_TRUE(one.says(signal == "stop" ? "stalled" : "rank 1 (pid ")) << one.message;
    }
}

INSTANTIATE_TEST_SUITE_P(
    Exchanges, FailingAtAnyMoment,
    ::testing::Values(
        Moment{"exchange on and on", "kill"}, Moment{"exchange on and on", "stop"},
        Moment{"low_latency on and on", "kill"}, Moment{"low_latency on and on", "stop"},
        Moment{"by node on and on", "kill"}, Moment{"by node on and on", "stop"},
        Moment{"by node hooks on and on", "kill"}, Moment{"by node hooks on and on", "stop"},
        Moment{"low_latency hooks on and on", "kill"}, Moment{"linked on and on", "kill"},
        Moment{"linked on and on", "stop"}, Moment{"linked low_latency on and on", "kill"}),
    [](const auto& one) {
        std::string name = std::string(one.param.phase) + "_" + one.param.signal;
        std::replace(name.begin(), name.end(), ' ', '_');
        return name;
    });

class OutlivingALostRank : public testing::Launched,
                           public ::testing::WithParamInterface<Moment> {};

TEST_P(OutlivingALostRank, LowLatencyGoesOnWithoutIt) {
    constexpr int kRanks = 4;
    ::setenv("BELLOWS_STALL_SECONDS", "2", 1);
    const LaunchResult result = launch(kRanks, GetParam().phase, GetParam().signal, 60s);
    ::unsetenv("BELLOWS_STALL_SECONDS");
    EXPECT_NE(result.exit_code, 0);
    EXPECT_FALSE(result.killed) << "every rank must end by itself";
    EXPECT_LT(took_, 40s);
    for (int rank = 0; rank < kRanks; ++rank) {
        if (rank == kCulprit)
            continue;
        int steps = 0;
        std::ifstream(folder_ + "/without" + std::to_string(rank)) >> steps;
        EXPECT_GT(steps, 10) << "rank " << rank;
        EXPECT_LT(steps, kSteps) << "rank " << rank;
        const Seen one = seen(rank);
        EXPECT_EQ(one.code, "PeerLost") << "rank " << rank << ": " << one.message;
        EXPECT_EQ(one.rank, kCulprit) << one.message;
    }
}

INSTANTIATE_TEST_SUITE_P(Exchanges, OutlivingALostRank,
                         ::testing::Values(Moment{"outlive", "kill 30"},
                                           Moment{"outlive", "stop 30"},
                                           Moment{"outlive linked", "kill 30"}),
                         [](const auto& one) {
                             std::string name =
                                 std::string(one.param.phase) + "_" + one.param.signal;
                             std::replace(name.begin(), name.end(), ' ', '_');
                             return name;
                         });

} // namespace
} // namespace bellows

int main(int argc, char** argv) {
    if (argc == 5 && std::string(argv[1]) == "--rank")
        return bellows::run_rank(argc, argv);
    ::testing::InitGoogleTest(&argc, argv);
    return RUN_ALL_TESTS();
}
