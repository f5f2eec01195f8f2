// SPDX-License-Identifier: MIT

// Messages between pipeline stages: every byte, FIFO per edge, no deadlock whatever the order of
// edges, the same in every order of execution.

#include "support/compare.hpp"
#include "support/mpi_test.hpp"
#include "support/test_device.hpp"
#include "support/transport_options.hpp"

#include <bellows/comm/mpi_interop.hpp>
#include <bellows/comm/pipe.hpp>

#include <algorithm>
#include <memory>
#include <thread>
#include <vector>

namespace bellows {
namespace {

using testing::make_device;
using testing::read_back;
using testing::test_options;
using testing::world;

int next_rank() {
    return (world().rank() + 1) % world().size();
}
int previous_rank() {
    return (world().rank() + world().size() - 1) % world().size();
}

/// Bits of the k-th message of an edge.
std::vector<std::uint32_t> message(int from, int to, std::uint64_t k, std::uint64_t words) {
    test::Random random(static_cast<std::uint64_t>(from * 100 + to) * 1000 + k);
    std::vector<std::uint32_t> values(words);
    for (std::uint32_t& value : values)
        value = static_cast<std::uint32_t>(random.bits());
    return values;
}

class PipeOver : public testing::OverEitherMemory {};

INSTANTIATE_TEST_SUITE_P(Memory, PipeOver, ::testing::Bool(), PipeOver::name);

struct Rig {
    explicit Rig(const DeviceOptions& device_options = test_options(), std::uint64_t delay_seed = 0,
                 PipeOptions options = {}, World& in = world())
        : device(make_device(device_options)),
          transport(open_transport(in, testing::transport_options(*device, PipeOver::linked()))),
          thread(std::make_unique<HostThread>(*device, "network")) {
        if (device->info().is_cpu) {
            EXPECT_EQ(transport->device_link() != nullptr, PipeOver::linked() && in.size() > 1);
        }
        if (delay_seed != 0)
            thread->delay_jobs(std::chrono::microseconds(2000),
                               delay_seed * 31 + static_cast<std::uint64_t>(world().rank()));
        pipe = std::make_unique<Pipe>(*device, in, *transport, *thread, std::move(options));
    }
    Buffer buffer(std::uint64_t words) {
        return Buffer(*device, {.name = "message", .bytes = std::max<std::uint64_t>(words, 4) * 4});
    }
    Buffer filled(const std::vector<std::uint32_t>& values) {
        Buffer made = buffer(values.size());
        if (!values.empty())
            device->upload(made.view().sub(0, values.size() * 4),
                           std::span<const std::uint32_t>(values));
        return made;
    }
    std::vector<std::uint32_t> words(const Buffer& from, std::uint64_t count) {
        if (count == 0)
            return {};
        return read_back<std::uint32_t>(*device, from.view().sub(0, count * 4));
    }

    std::unique_ptr<Device> device;
    std::unique_ptr<Transport> transport;
    std::unique_ptr<HostThread> thread;
    std::unique_ptr<Pipe> pipe;
};

TensorView as_tensor(const Buffer& buffer, std::uint64_t words) {
    return buffer.tensor(DType::U32, {words});
}

TEST_P(PipeOver, RingInAllSizes) {
    Rig rig;
    std::uint64_t k = 0;
    for (const std::uint64_t words : {0u, 1u, 3u, 1000u, 100'003u}) {
        Buffer out = rig.filled(message(world().rank(), next_rank(), k, words));
        Buffer in = rig.buffer(words);
        const TimePoint sent = rig.pipe->send(next_rank(), as_tensor(out, words));
        const TimePoint received = rig.pipe->recv(previous_rank(), as_tensor(in, words));
        sent.wait();
        received.wait();
        ALL_RANKS_TRUE(rig.words(in, words) == message(previous_rank(), world().rank(), k, words));
        ++k;
    }
    ALL_RANKS_TRUE(rig.pipe->stats().messages_received == k);
    ALL_RANKS_TRUE(rig.pipe->stats().bytes_sent == (1 + 3 + 1000 + 100'003) * 4);
    ALL_RANKS_TRUE(rig.device->num_checked_accesses() > 0);
}

/// Both directions at once, several messages each, handed in by all ranks in the given order.
bool exchange(const DeviceOptions& options, bool receive_first, std::uint64_t delay_seed) {
    constexpr std::uint64_t kMessages = 12;
    Rig rig(options, delay_seed);
    const auto size = [](std::uint64_t k) { return 1 + k * 771 % 5000; };
    std::vector<Buffer> up_out, down_out, up_in, down_in;
    for (std::uint64_t k = 0; k < kMessages; ++k) {
        up_out.push_back(rig.filled(message(world().rank(), next_rank(), k, size(k))));
        down_out.push_back(rig.filled(message(world().rank(), previous_rank(), k, size(k))));
        up_in.push_back(rig.buffer(size(k)));
        down_in.push_back(rig.buffer(size(k)));
    }
    const auto send = [&] {
        for (std::uint64_t k = 0; k < kMessages; ++k) {
            rig.pipe->send(next_rank(), as_tensor(up_out[k], size(k)));
            rig.pipe->send(previous_rank(), as_tensor(down_out[k], size(k)));
        }
    };
    // With two ranks both directions go to one peer and share an edge, with one to oneself.
    const auto receive = [&] {
        for (std::uint64_t k = 0; k < kMessages; ++k) {
            rig.pipe->recv(previous_rank(), as_tensor(up_in[k], size(k)));
            rig.pipe->recv(next_rank(), as_tensor(down_in[k], size(k)));
        }
    };
    if (receive_first) {
        receive();
        send();
    } else {
        send();
        receive();
    }
    bool good = true;
    for (std::uint64_t k = 0; k < kMessages; ++k) {
        good = good &&
               rig.words(up_in[k], size(k)) == message(previous_rank(), world().rank(), k, size(k));
        good = good &&
               rig.words(down_in[k], size(k)) == message(next_rank(), world().rank(), k, size(k));
    }
    return good;
}

TEST_P(PipeOver, BothDirectionsAtOnceInEveryOrderOfExecution) {
    DeviceOptions options = test_options();
    options.sync = SyncMode::Serial;
    ALL_RANKS_TRUE(exchange(options, false, 0));
    options.sync = SyncMode::Overlap;
    ALL_RANKS_TRUE(exchange(options, false, 1));
    ALL_RANKS_TRUE(exchange(options, true, 2));
    options.sync = SyncMode::Shuffle;
    for (options.shuffle_seed = 1; options.shuffle_seed <= 3; ++options.shuffle_seed)
        ALL_RANKS_TRUE(exchange(options, options.shuffle_seed % 2 == 0, options.shuffle_seed));
}

TEST_P(PipeOver, WorkBeforeAndAfterAMessageIsOrdered) {
    constexpr std::uint64_t kWords = 4096;
    constexpr std::uint32_t kRounds = 20;
    Rig rig(test_options(), 7);
    Buffer out = rig.buffer(kWords), in = rig.buffer(kWords), kept = rig.buffer(kRounds);
    std::vector<std::unique_ptr<Recording>> recordings;
    const auto record = [&](const char* name) -> Recording& {
        recordings.push_back(std::make_unique<Recording>(*rig.device, QueueRole::Compute, name));
        return *recordings.back();
    };
    // The same two tensors are used again and again without any wait on the host.
    for (std::uint32_t round = 0; round < kRounds; ++round) {
        Recording& produce = record("produce");
        produce.fill(out.view().sub(0, kWords * 4),
                     round * 1000 + static_cast<std::uint32_t>(world().rank()));
        rig.device->submit(produce);
        rig.pipe->send(next_rank(), as_tensor(out, kWords));
        rig.pipe->recv(previous_rank(), as_tensor(in, kWords));
        Recording& consume = record("consume");
        consume.copy(in.view().sub((kWords - 1) * 4, 4), kept.view().sub(round * 4, 4));
        rig.device->submit(consume);
    }
    std::vector<std::uint32_t> expected;
    for (std::uint32_t round = 0; round < kRounds; ++round)
        expected.push_back(round * 1000 + static_cast<std::uint32_t>(previous_rank()));
    ALL_RANKS_TRUE(rig.words(kept, kRounds) == expected);
}

TEST_P(PipeOver, HalvesKeepWhatSharesTheirLastWord) {
    Rig rig;
    for (const std::uint64_t count : {1u, 7u, 8u, 1001u}) {
        const std::uint64_t words = (count + 1) / 2;
        std::vector<std::uint16_t> sent(words * 2 + 2), blank(words * 2, 0xABCD);
        for (std::size_t i = 0; i < sent.size(); ++i)
            sent[i] = static_cast<std::uint16_t>(i * 7 + static_cast<std::size_t>(world().rank()));
        Buffer out = rig.buffer(words + 1), in = rig.buffer(words);
        rig.device->upload(out.view().sub(0, words * 4 + 4), std::span<const std::uint16_t>(sent));
        rig.device->upload(in.view().sub(0, words * 4), std::span<const std::uint16_t>(blank));
        // The source begins inside a word.
        rig.pipe->send(next_rank(), out.tensor(DType::BF16, {count + 1}).rows(1, count));
        rig.pipe->recv(previous_rank(), in.tensor(DType::BF16, {count}));
        std::vector<std::uint16_t> expected = blank;
        for (std::size_t i = 0; i < count; ++i)
            expected[i] =
                static_cast<std::uint16_t>((i + 1) * 7 + static_cast<std::size_t>(previous_rank()));
        ALL_RANKS_TRUE(read_back<std::uint16_t>(*rig.device, in.view().sub(0, words * 4)) ==
                       expected);
    }
}

TEST_P(PipeOver, WhatWasSentArrivesAfterThePipeIsGone) {
    constexpr std::uint64_t kWords = 200'000; // more than MPI buffers on its own
    Rig rig;
    Buffer out = rig.filled(message(world().rank(), next_rank(), 0, kWords));
    Buffer in = rig.buffer(kWords);
    rig.pipe->send(next_rank(), as_tensor(out, kWords));
    if (world().rank() % 2 == 1)
        std::this_thread::sleep_for(std::chrono::milliseconds(200));
    rig.pipe->recv(previous_rank(), as_tensor(in, kWords)).wait();
    rig.pipe.reset();
    ALL_RANKS_TRUE(rig.words(in, kWords) == message(previous_rank(), world().rank(), 0, kWords));
}

TEST_P(PipeOver, AReceiveThatNobodyServesNamesThePeerAndEndsTheJob) {
    World inner = join_world(MPI_COMM_WORLD);
    PipeOptions options;
    options.timeout = std::chrono::milliseconds(200);
    Rig rig(test_options(), 0, options, inner);
    Buffer in = rig.buffer(64);
    Error error(ErrorCode::Internal, "none");
    inner.control().barrier(std::chrono::seconds(30));
    world().control().barrier(std::chrono::seconds(30)); // nobody is still in the barrier before
    // Only the last rank waits for a message; all of them hear that it does not come.
    if (inner.rank() == inner.size() - 1) {
        const TimePoint received = rig.pipe->recv(previous_rank(), as_tensor(in, 64));
        try {
            received.wait(std::chrono::seconds(20));
        } catch (const Error& caught) {
            error = caught;
        }
    } else {
        try {
            inner.control().recv(inner.size() - 1, 1, std::chrono::seconds(20));
        } catch (const Error& caught) {
            error = caught;
        }
    }
    ALL_RANKS_TRUE(error.code() == ErrorCode::Timeout);
    ALL_RANKS_TRUE(error.rank() == (world().size() + world().size() - 2) % world().size());
    ALL_RANKS_TRUE(error.message().find("256 bytes") != std::string::npos);
}

/// With more than one rank a refusal ends the job for all; with one nothing has happened.
template <class Call>
bool refused(const Call& call) {
    World inner = join_world(MPI_COMM_WORLD);
    Rig rig(test_options(), 0, {}, inner);
    Buffer buffer = rig.buffer(64);
    world().control().barrier(std::chrono::seconds(30)); // nobody is ended while it prepares
    bool good = false;
    try {
        call(*rig.pipe, buffer);
    } catch (const Error& error) {
        good = error.code() == ErrorCode::InvalidArgument;
    }
    const auto failure = inner.control().failure();
    return good && (inner.size() == 1 ? !failure
                                      : failure && failure->code() == ErrorCode::InvalidArgument);
}

TEST_P(PipeOver, WrongArgumentsAreRefused) {
    ALL_RANKS_TRUE(
        refused([](Pipe& pipe, const Buffer& b) { pipe.send(world().size(), as_tensor(b, 4)); }));
    ALL_RANKS_TRUE(refused([](Pipe& pipe, const Buffer& b) { pipe.recv(-1, as_tensor(b, 4)); }));
    ALL_RANKS_TRUE(refused([](Pipe& pipe, const Buffer& b) {
        TensorView strided = b.tensor(DType::F32, {4, 8});
        strided.extent[1] = 4;
        pipe.send(next_rank(), strided);
    }));
    ALL_RANKS_TRUE(refused([](Pipe& pipe, const Buffer& b) {
        pipe.recv(previous_rank(), b.tensor(DType::BF16, {9}).rows(1, 8));
    }));
}

} // namespace
} // namespace bellows
