// SPDX-License-Identifier: MIT
// The memory report, what an Error says when memory runs out, arenas, and poisoning.

#include "support/temporary_folder.hpp"
#include "support/test_device.hpp"

#include <bellows/engine/arena.hpp>
#include <bellows/engine/gemm.hpp>
#include <bellows/engine/lane.hpp>
#include <bellows/engine/ops.hpp>
#include <bellows/engine/vulkan_interop.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

namespace bellows {
namespace {

using testing::make_device;
using testing::test_options;

constexpr MemoryCategory kAll[] = {MemoryCategory::Weights,       MemoryCategory::Gradients,
                                   MemoryCategory::Optimizer,     MemoryCategory::Activations,
                                   MemoryCategory::DeferredWgrad, MemoryCategory::Communication,
                                   MemoryCategory::Scratch,       MemoryCategory::Cache};
static_assert(std::size(kAll) == kNumMemoryCategories);

TEST(EngineMemory, TheReportCountsEveryCategory) {
    const auto device = make_device();
    const MemoryReport empty = device->memory_report();
    EXPECT_EQ(empty.bytes, 0u);
    EXPECT_GT(empty.device_bytes, 0u);
    EXPECT_GT(empty.budget_bytes, 0u);
    EXPECT_EQ(describe_memory(empty.sizes()), "0 B");

    std::vector<Buffer> buffers;
    for (std::size_t i = 0; i < kNumMemoryCategories; ++i)
        buffers.emplace_back(
            *device,
            BufferDesc{.name = to_string(kAll[i]), .bytes = 1000 * (i + 1), .category = kAll[i]});
    MemoryReport report = device->memory_report();
    for (std::size_t i = 0; i < kNumMemoryCategories; ++i) {
        EXPECT_EQ(report.of(kAll[i]).bytes, 1000 * (i + 1)) << to_string(kAll[i]);
        EXPECT_EQ(report.of(kAll[i]).num_buffers, 1u);
    }
    EXPECT_EQ(report.bytes, 36'000u);
    EXPECT_GE(report.held_bytes, report.bytes);
    EXPECT_LE(report.held_bytes, report.bytes * 5 / 4 + 256 * kNumMemoryCategories);
    EXPECT_EQ(report.largest(), MemoryCategory::Cache);
    const std::string text = describe_memory(report.sizes());
    EXPECT_EQ(text.find("35.2 KiB: cache 7.8 KiB, scratch 6.8 KiB, "), 0u) << text;

    buffers[2] = Buffer(
        *device, {.name = "larger", .bytes = 100'000, .category = MemoryCategory::Optimizer});
    buffers.erase(buffers.begin() + 3);
    report = device->memory_report();
    EXPECT_EQ(report.largest(), MemoryCategory::Optimizer);
    EXPECT_EQ(report.of(MemoryCategory::Activations).num_buffers, 0u);
    EXPECT_EQ(report.of(MemoryCategory::Activations).peak_bytes, 4000u);
    EXPECT_GE(report.pooled_bytes, 7000u) << "released memory is kept for the next request";
    buffers.clear();
    EXPECT_EQ(device->memory_report().bytes, 0u);
    EXPECT_GE(device->memory_report().peak_bytes, 129'000u);
}

TEST(EngineMemory, OutOfMemoryNamesTheLargestPartAndAWayOut) {
    const auto device = make_device();
    const Buffer weights(
        *device, {.name = "weights", .bytes = 3 << 20, .category = MemoryCategory::Weights});
    // More than any machine has; the second and third would wrap if sizes were rounded carelessly.
    for (const std::uint64_t bytes :
         {std::uint64_t{1} << 50, ~std::uint64_t{0}, ~std::uint64_t{0} - 4096})
        try {
            const Buffer buffer(
                *device,
                {.name = "layer 3 keys", .bytes = bytes, .category = MemoryCategory::Activations});
            ADD_FAILURE() << "got " << bytes << " bytes";
        } catch (const Error& error) {
            EXPECT_EQ(error.code(), ErrorCode::OutOfMemory);
            for (const char* part :
                 {"layer 3 keys (activations)", "In use are 3.0 MiB: weights 3.0 MiB.",
                  "One buffer may have at most ",
                  "The largest part is activations; make micro-batches smaller"})
                EXPECT_NE(error.message().find(part), std::string::npos) << error.message();
        }
    // Nothing was changed.
    EXPECT_EQ(device->memory_report().of(MemoryCategory::Activations).num_buffers, 0u);
    const Buffer small(*device, {.name = "small", .bytes = 64});
    EXPECT_TRUE(small.bound());
}

TEST(EngineMemory, FramesOfAnArenaShareItsBytesOneAfterAnother) {
    const auto device = make_device(); // the happens-before checker is on
    Arena arena(*device, "micro-batch", MemoryCategory::Activations);
    const Buffer results(*device, {.name = "results", .bytes = 2 * 4000});
    std::vector<Recording> recordings;
    std::uint64_t most = 0;
    for (std::uint32_t i = 0; i < 2; ++i) {
        Arena::Frame frame = arena.begin();
        const TensorView first = frame.tensor(DType::F32, {10 + i});
        const TensorView second = frame.tensor(DType::U32, {1000});
        EXPECT_EQ(first.buffer.offset, 0u);
        EXPECT_EQ(second.buffer.offset, 256u);
        Recording& recording = recordings.emplace_back(*device, QueueRole::Compute, "frame");
        recording.fill(first.buffer, 100);
        recording.fill(second.buffer, i + 1);
        recording.copy(second.buffer, results.view().sub(i * 4000, 4000));
        most = std::max(most, frame.bytes());
    }
    EXPECT_EQ(most, 256u + 4096u);
    EXPECT_EQ(arena.size(), 0u);
    arena.reserve(most);
    EXPECT_GE(arena.size(), most);
    EXPECT_EQ(device->memory_report().of(MemoryCategory::Activations).num_buffers, 1u);
    for (int round = 0; round < 3; ++round) {
        for (Recording& recording : recordings)
            device->submit(recording);
        if (round == 1)
            arena.reserve(10 * most); // grows after the work that is under way
        arena.reserve(1);             // never shrinks
        const auto words = testing::read_back<std::uint32_t>(*device, results.view());
        EXPECT_EQ(words, [] {
            std::vector<std::uint32_t> expected(2000, 1);
            std::fill(expected.begin() + 1000, expected.end(), 2);
            return expected;
        }());
    }
    EXPECT_GE(arena.size(), 10 * most);
}

TEST(EngineMemory, NewAndReleasedMemoryIsPoisoned) {
    const std::vector<std::uint32_t> poison(1024, 0xffff'ffff);
    for (const MemoryKind kind : {MemoryKind::Device, MemoryKind::Upload, MemoryKind::Readback}) {
        const auto device = make_device();
        const BufferDesc desc{.name = "buffer", .bytes = 4096, .kind = kind};
        VkBuffer last = VK_NULL_HANDLE;
        for (int round = 0; round < 3; ++round) { // the same memory again
            const Buffer buffer(*device, desc);
            const VkBuffer now = vulkan_range(buffer.view()).buffer;
            EXPECT_TRUE(round == 0 || now == last);
            last = now;
            if (kind == MemoryKind::Device) {
                EXPECT_EQ(testing::read_back<std::uint32_t>(*device, buffer.view()), poison);
            } else {
                const auto words = buffer.mapped_as<const std::uint32_t>();
                EXPECT_TRUE(std::equal(words.begin(), words.end(), poison.begin(), poison.end()));
            }
            Recording fill(*device, QueueRole::Compute, "fill");
            fill.fill(buffer.view(), 5);
            device->submit(fill).wait();
        }
    }
}

TEST(EngineMemory, PoisonComesBeforeTheFirstUseOnAnyQueue) {
    // Also where memory is bound after the work that uses it was handed in.
    const auto device = make_device();
    HostThread thread(*device, "host");
    Lane lane = thread.add_lane("lane");
    constexpr std::uint64_t kBytes = 1 << 20;
    const Buffer result(*device, {.name = "result", .bytes = kBytes});
    for (const QueueRole role : {QueueRole::Compute, QueueRole::TransferIn, QueueRole::TransferOut})
        for (std::uint32_t round = 1; round <= 8; ++round) {
            Buffer late = Buffer::declare(*device, {.name = "late"});
            Recording inside(*device, role, "inside");
            inside.fill(late.view().sub(0, kBytes / 2), round);
            Recording after(*device, role, "after");
            after.fill(late.view().sub(kBytes / 2, kBytes / 2), round);
            after.copy(late.view().sub(0, kBytes), result.view());
            lane.post({.name = "bind",
                       .waits = {},
                       .accesses = {{late.view(), Access::Write}},
                       .step = [&](LaneContext& context) {
                           context.bind(late, kBytes);
                           context.submit(inside);
                           return Progress::Done;
                       }});
            device->submit(after).wait();
            EXPECT_EQ(testing::read_back<std::uint32_t>(*device, result.view()),
                      std::vector<std::uint32_t>(kBytes / 4, round))
                << to_string(role);
        }
}

TEST(EngineMemory, LentMemoryIsKeptUntilTheWorkOfItsBorrowersHasEnded) {
    const auto device = make_device();
    HostThread thread(*device, "thread");
    Lane lane = thread.add_lane("gate");
    const auto bytes_held = [&] {
        static_cast<void>(Buffer(*device, {.name = "passing", .bytes = 4})); // collects
        return device->memory_report().of(MemoryCategory::Communication).bytes;
    };
    constexpr std::uint64_t kBytes = 4096;
    std::optional<Buffer> lender(std::in_place, *device,
                                 BufferDesc{.name = "lender",
                                            .bytes = kBytes,
                                            .kind = MemoryKind::Readback,
                                            .category = MemoryCategory::Communication});
    std::optional<Buffer> borrower(
        Buffer::declare(*device, {.name = "borrower", .category = MemoryCategory::Communication}));
    EXPECT_FALSE(lender->lent());
    borrower->bind(*lender);
    EXPECT_TRUE(lender->lent());
    EXPECT_EQ(bytes_held(), kBytes); // once
    EXPECT_THROW(lender->bind(kBytes), Error);
    EXPECT_THROW(Buffer::declare(*device, {.name = "other"}).bind(*borrower), Error);
    EXPECT_THROW(Buffer::declare(*device, {.name = "other"}).bind(*lender), Error);
    Recording fill(*device, QueueRole::Compute, "fill");
    fill.fill(borrower->view().sub(0, kBytes), 0x0c0c0c0c);
    device->submit(fill).wait();
    EXPECT_EQ(lender->mapped_as<std::uint32_t>().back(), 0x0c0c0c0cu);

    std::atomic<bool> open{false};
    const TimePoint gate =
        lane.post({.name = "gate", .waits = {}, .accesses = {}, .step = [&](LaneContext&) {
                       return open ? Progress::Done : Progress::Again;
                   }});
    const TimePoint filled = device->submit(fill, std::span(&gate, 1));
    borrower.reset();
    EXPECT_TRUE(lender->lent());
    lender.reset();
    EXPECT_EQ(bytes_held(), kBytes);
    open = true;
    filled.wait();
    bytes_held(); // the borrower's end is seen first
    EXPECT_EQ(bytes_held(), 0u);
}

/// Anonymous memory that two processes could share, mapped twice.
struct SharedPages {
    explicit SharedPages(std::size_t size) : bytes(size), fd(::memfd_create("test", 0)) {
        EXPECT_EQ(::ftruncate(fd, static_cast<off_t>(size)), 0);
        mine = map();
        theirs = map();
    }
    ~SharedPages() {
        ::munmap(mine, bytes);
        ::munmap(theirs, bytes);
        ::close(fd);
    }
    std::byte* map() const {
        return static_cast<std::byte*>(
            ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
    }
    std::span<std::byte> all() const { return {mine, bytes}; }

    std::size_t bytes;
    int fd;
    std::byte *mine, *theirs;
};

TEST(EngineMemory, ImportedHostMemoryIsReadAndWrittenWhereItStands) {
    const auto device = make_device();
    const std::uint64_t alignment = device->info().host_import_alignment;
    if (alignment == 0)
        return; // AWrongImportIsRefused looks at the error
    SharedPages pages(4 * alignment);
    {
        const Buffer imported = Buffer::import_host(*device, pages.all(), "pages");
        const MemoryReport report = device->memory_report();
        EXPECT_EQ(report.of(MemoryCategory::Communication).bytes, pages.bytes);
        EXPECT_EQ(imported.mapped(), pages.mine);
        Buffer copy(*device, {.name = "copy", .bytes = alignment});
        pages.theirs[alignment] = std::byte{77}; // the other mapping writes
        Recording recording(*device, QueueRole::TransferIn, "both ways");
        recording.fill(imported.view().sub(0, alignment), 0x01020304);
        recording.copy(imported.view().sub(alignment, alignment), copy.view());
        device->submit(recording).wait();
        EXPECT_EQ(pages.theirs[0], std::byte{4});
        EXPECT_EQ(pages.theirs[alignment - 1], std::byte{1});
        EXPECT_EQ(testing::read_back<std::uint32_t>(*device, copy.view())[0] & 0xff, 77u);
    }
    device->wait_idle();
    EXPECT_EQ(device->memory_report().of(MemoryCategory::Communication).bytes, 0u);
    EXPECT_EQ(pages.mine[0], std::byte{4}) << "the caller's memory is left as it is";

    // A lane job gives a declared buffer such memory, and another piece of it later.
    HostThread thread(*device, "thread");
    Lane lane = thread.add_lane("lane");
    Buffer late = Buffer::declare(*device, {.name = "late", .kind = MemoryKind::Readback});
    Recording fill(*device, QueueRole::Compute, "fill");
    fill.fill(late.view().sub(0, 16), 0x0b0b0b0b);
    for (const std::uint64_t part : {2u, 3u}) {
        lane.post({.name = "bind",
                   .waits = {},
                   .accesses = {{late.view(), Access::Write}},
                   .step = [&](LaneContext& context) {
                       context.bind(late, pages.all().subspan(part * alignment, alignment));
                       return Progress::Done;
                   }});
        device->submit(fill).wait();
        EXPECT_EQ(pages.theirs[part * alignment], std::byte{0x0b});
    }
}

TEST(EngineMemory, AWrongImportIsRefused) {
    const auto device = make_device();
    const std::uint64_t alignment = device->info().host_import_alignment;
    const auto refusal = [&](std::span<std::byte> memory) {
        try {
            const Buffer imported = Buffer::import_host(*device, memory, "odd memory");
        } catch (const Error& error) {
            EXPECT_NE(error.message().find("odd memory"), std::string::npos) << error.message();
            return error.code();
        }
        return ErrorCode::Internal;
    };
    SharedPages pages(1 << 20);
    const ErrorCode expected = alignment == 0 ? ErrorCode::Unsupported : ErrorCode::InvalidArgument;
    EXPECT_EQ(refusal(pages.all().subspan(16)), expected);
    EXPECT_EQ(refusal(pages.all().first(100)), expected);
    EXPECT_EQ(refusal({}), expected);
    EXPECT_EQ(device->memory_report().bytes, 0u);
}

TEST(EngineMemory, WhatIsNoMemoryOfTheDeviceIsRefused) {
    const auto device = make_device();
    const auto refusal = [&](int file) {
        try {
            const Buffer imported =
                Buffer::import_opaque(*device, {.file = file, .bytes = 1 << 20}, "odd memory");
        } catch (const Error& error) {
            EXPECT_NE(error.message().find("odd memory"), std::string::npos) << error.message();
            return error.code();
        }
        return ErrorCode::Internal;
    };
    const bool takes = device->info().imports_opaque_memory;
    EXPECT_EQ(refusal(-1), takes ? ErrorCode::InvalidArgument : ErrorCode::Unsupported);
    EXPECT_EQ(device->memory_report().bytes, 0u);
}

/// Sizes are 64-bit: what lies beyond 2^32 bytes of a buffer is filled, copied, uploaded and read
/// by kernels as what lies before is. On GPUs alone: it takes 14 GB there and 5 GB of the host's.
TEST(EngineMemory, BuffersOfMoreThan4GiBAreReachedAsAWhole) {
    const auto device = make_device();
    constexpr std::uint64_t kPiece = std::uint64_t{1} << 28, kPieces = 20,
                            kBytes = kPieces * kPiece;
    if (device->info().is_cpu || device->memory_report().budget_bytes < 4 * kBytes)
        GTEST_SKIP() << "takes a GPU with 21 GB free";
    const Buffer from(*device, {.name = "from", .bytes = kBytes}),
        to(*device, {.name = "to", .bytes = kBytes}),
        half(*device, {.name = "half", .bytes = kBytes / 2});
    const auto value_of = [](std::uint64_t piece) { return static_cast<float>(3 * piece + 1); };
    const auto bits_of = [&](std::uint64_t piece) {
        return std::bit_cast<std::uint32_t>(value_of(piece));
    };
    // The first and last word of each piece.
    const auto holds = [&](const Buffer& buffer, const char* what) {
        for (std::uint64_t piece = 0; piece < kPieces; ++piece)
            for (const std::uint64_t at : {piece * kPiece, (piece + 1) * kPiece - 4}) {
                std::uint32_t word = 0;
                device->download(buffer.view().sub(at, 4),
                                 std::as_writable_bytes(std::span(&word, 1)));
                EXPECT_EQ(word, bits_of(piece)) << what << ", byte " << at;
            }
    };
    const auto run = [&](const std::function<void(Recording&)>& record) {
        Recording recording(*device, QueueRole::Compute, "work");
        record(recording);
        device->submit(recording).wait();
    };
    run([&](Recording& r) {
        for (std::uint64_t piece = 0; piece < kPieces; ++piece)
            r.fill(from.view().sub(piece * kPiece, kPiece), bits_of(piece));
    });
    holds(from, "filled");
    run([&](Recording& r) { r.copy(from.view(), to.view()); });
    holds(to, "copied");
    run([&](Recording& r) { r.fill(to.view(), 0); });
    std::vector<float> values(kBytes / 4);
    for (std::uint64_t piece = 0; piece < kPieces; ++piece)
        std::fill_n(values.begin() + static_cast<std::ptrdiff_t>(piece * kPiece / 4), kPiece / 4,
                    value_of(piece));
    device->upload(to.view(), std::span<const float>(values));
    holds(to, "uploaded");
    run([&](Recording& r) {
        ops::cast(r, from.tensor(DType::F32, {kBytes / 4}), half.tensor(DType::BF16, {kBytes / 4}));
        r.fill(to.view(), 0);
        ops::cast(r, half.tensor(DType::BF16, {kBytes / 4}), to.tensor(DType::F32, {kBytes / 4}));
    });
    holds(to, "cast there and back");
    const std::uint64_t each = kBytes / 4 / ops::num_partials(kBytes / 4);
    const Buffer sums(*device, {.name = "sums", .bytes = kBytes / each});
    run([&](Recording& r) {
        ops::scale(r, from.tensor(DType::F32, {kBytes / 4}), to.tensor(DType::F32, {kBytes / 4}),
                   -1);
        ops::scale(r, to.tensor(DType::F32, {kBytes / 4}), to.tensor(DType::F32, {kBytes / 4}), -1);
        ops::sum_partials(r, to.tensor(DType::F32, {kBytes / 4}),
                          sums.tensor(DType::F32, {kBytes / 4 / each}));
    });
    holds(to, "scaled");
    std::vector<float> partials(kBytes / 4 / each);
    device->download(sums.view(), std::span<float>(partials));
    for (std::uint64_t i = 0; i < partials.size(); ++i)
        ASSERT_EQ(partials[i], value_of(4 * each * i / kPiece) * static_cast<float>(each))
            << "the sum from byte " << 4 * each * i << " on";
}

TEST(EngineMemory, VectorsArraysAndSpansGoUpAndDown) {
    const auto device = make_device();
    const Buffer buffer(*device, {.name = "words", .bytes = 12});
    const std::vector<std::uint32_t> words = {1, 2, 3};
    std::vector<std::uint32_t> vector(3);
    device->upload(buffer.view(), words);
    device->download(buffer.view(), vector);
    EXPECT_EQ(vector, words);
    constexpr std::array<float, 3> kFloats = {0.5f, 1.5f, 2.5f};
    std::array<float, 3> array{};
    device->upload(buffer.view(), kFloats);
    device->download(buffer.view(), array);
    EXPECT_EQ(array, kFloats);
    const std::int32_t ids[] = {-1, 0, 7};
    std::int32_t plain[3] = {};
    device->upload(buffer.view(), ids);
    device->download(buffer.view(), std::span(plain));
    EXPECT_TRUE(std::ranges::equal(plain, ids));
    std::vector<std::byte> bytes(8, std::byte{9});
    device->upload(buffer.view().sub(0, 8), bytes);
    device->download(buffer.view().sub(4, 8), bytes);
    EXPECT_EQ(bytes[0], std::byte{9});
    EXPECT_EQ(bytes[4], std::byte{7});
    EXPECT_BELLOWS_ERROR(device->upload(buffer.view(), bytes), InvalidArgument, "8 bytes");
    EXPECT_BELLOWS_ERROR(device->download(buffer.view(), bytes), InvalidArgument, "12 bytes");
}

TEST(EngineMemory, AMatrixThatAKernelDoesNotReachIsRefused) {
    const auto device = make_device();
    const Buffer small(*device, {.name = "small", .bytes = 1 << 20});
    const std::uint64_t columns = 1 << 10, rows = (std::uint64_t{1} << 30) / columns;
    Recording recording(*device, QueueRole::Compute, "work");
    const auto refusal = [&](const std::function<void()>& record) {
        try {
            record();
        } catch (const Error& error) {
            return error.message();
        }
        return std::string();
    };
    const TensorView weight = small.tensor(DType::F32, {8, columns});
    for (const std::uint64_t more : {0, 1}) {
        const auto grown = [&](TensorView view) { // of whose rows no more is there
            view.extent[0] = rows + more;
            return view;
        };
        const TensorView large = grown(small.tensor(DType::F32, {1, columns}));
        const std::string product = refusal([&] {
            ops::gemm_nt(recording, large, weight, grown(small.tensor(DType::F32, {1, 8})), false);
        });
        EXPECT_EQ(product.find("reaches 4 GiB") != std::string::npos, more > 0) << product;
        const std::string norm = refusal([&] {
            ops::rmsnorm_forward(recording, large, small.tensor(DType::F32, {columns}), large,
                                 grown(small.tensor(DType::F32, {1})), 1e-6f);
        });
        EXPECT_EQ(norm.find("reaches 4 GiB") != std::string::npos, more > 0) << norm;
    }
}

TEST(EngineMemory, SizesAreToldLargestFirst) {
    MemoryReport full;
    full.categories[static_cast<std::size_t>(MemoryCategory::Weights)] = {1 << 20, 3 << 20, 3};
    full.categories[static_cast<std::size_t>(MemoryCategory::DeferredWgrad)] = {5 << 20, 5 << 20,
                                                                                9};
    EXPECT_EQ(full.largest(), MemoryCategory::DeferredWgrad);
    EXPECT_EQ(describe_memory(full.sizes()),
              "6.0 MiB: deferred weight gradients 5.0 MiB, weights 1.0 MiB");
    EXPECT_EQ(describe_memory(full.peaks()),
              "8.0 MiB: deferred weight gradients 5.0 MiB, weights 3.0 MiB");
    EXPECT_EQ(format_bytes(1023), "1023 B");
    EXPECT_EQ(format_bytes(23 << 20), "23.0 MiB");
    EXPECT_EQ(format_bytes(std::uint64_t{3} << 50), "3.0 PiB");
}

} // namespace
} // namespace bellows
