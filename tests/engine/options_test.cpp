// SPDX-License-Identifier: MIT
// What a device is told: the environment's choices, and the file of compiled pipelines, which may
// hold anything.

#include "engine/runtime/driver_defects.hpp"
#include "support/temporary_folder.hpp"
#include "support/test_device.hpp"

#include <bellows/engine/device_choice.hpp>
#include <bellows/engine/ops.hpp>

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include <sys/stat.h>

namespace bellows {
namespace {

using testing::test_options;

/// Sets a variable for a scope.
class Variable {
public:
    Variable(const char* name, const char* value) : name_(name) {
        if (const char* old = std::getenv(name))
            old_ = old;
        else
            was_set_ = false;
        ::setenv(name, value, 1);
    }
    ~Variable() {
        if (was_set_)
            ::setenv(name_, old_.c_str(), 1);
        else
            ::unsetenv(name_);
    }
    Variable(const Variable&) = delete;
    Variable& operator=(const Variable&) = delete;

private:
    const char* name_;
    std::string old_;
    bool was_set_ = true;
};

// What the presets dev, asan and tsan promise, seen through a device.
TEST(EngineOptions, TheCheckerIsOnByDefaultWhereAssertionsAre) {
#ifdef NDEBUG
    constexpr bool kAssertions = false;
#else
    constexpr bool kAssertions = true;
#endif
    const auto device = Device::create({});
    EXPECT_EQ(device->options().check_happens_before, kAssertions);
    const Buffer buffer(*device, {.name = "buffer", .bytes = 64});
    Recording fill(*device, QueueRole::Compute, "fill");
    fill.fill(buffer.view(), 1);
    device->submit(fill).wait();
    EXPECT_EQ(device->num_checked_accesses() > 0, kAssertions);
}

TEST(EngineOptions, TheEnvironmentLeavesFeaturesOut) {
    const Variable variable("BELLOWS_LEAVE_OUT", "no_graphics_queue,,int64");
    const DeviceOptions options = DeviceOptions::from_environment({});
    EXPECT_EQ(options.leave_out, (std::vector<std::string>{"no_graphics_queue", "int64"}));
    EXPECT_TRUE(Device::create({})->has_feature("int64"));
    EXPECT_FALSE(Device::create(options)->has_feature("int64"));
}

TEST(EngineOptions, TheEnvironmentChoosesTheOrderOfWork) {
    const auto sync = [](const char* text) {
        const Variable variable("BELLOWS_SYNC", text);
        return DeviceOptions::from_environment({});
    };
    EXPECT_EQ(sync("serial").sync, SyncMode::Serial);
    EXPECT_EQ(sync("overlap").sync, SyncMode::Overlap);
    EXPECT_EQ(sync("shuffle").sync, SyncMode::Shuffle);
    EXPECT_EQ(sync("shuffle:77").sync, SyncMode::Shuffle);
    EXPECT_EQ(sync("shuffle:77").shuffle_seed, 77u);
    EXPECT_THROW(sync("sideways"), Error);
    EXPECT_THROW(sync("shuffled"), Error);
    EXPECT_THROW(sync("shuffle:"), Error);
    EXPECT_THROW(sync("shuffle:7x"), Error);
    const Variable check("BELLOWS_CHECK", "yes");
    EXPECT_THROW(DeviceOptions::from_environment({}), Error);
}

TEST(EngineOptions, ADeviceThatIsNotThereIsNamedWithThoseThatAre) {
    DeviceOptions options;
    options.select = "99";
    try {
        const auto device = Device::create(options);
        FAIL() << "device 99";
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::Unsupported);
        EXPECT_NE(error.message().find("\"99\""), std::string::npos);
        EXPECT_NE(error.message().find(list_devices().at(0).name), std::string::npos);
    }
}

std::vector<std::filesystem::path> files_in(const std::filesystem::path& folder) {
    std::vector<std::filesystem::path> files;
    for (const auto& entry : std::filesystem::directory_iterator(folder))
        files.push_back(entry.path());
    return files;
}

void compute(const std::string& cache) {
    DeviceOptions options = test_options();
    options.pipeline_cache_file = cache;
    std::uint32_t compiled = 0;
    options.on_pipeline_compiled = [&](const std::string&, std::uint32_t count) {
        compiled = count;
    };
    const auto device = Device::create(options);
    const Buffer buffer(*device, {.name = "values", .bytes = 400});
    const std::vector<float> ones(100, 1.0f);
    device->upload(buffer.view(), std::span<const float>(ones));
    Recording recording(*device, QueueRole::Compute, "scale");
    const TensorView x = buffer.tensor(DType::F32, {100});
    ops::scale(recording, x, x, 3.0f);
    device->submit(recording).wait();
    EXPECT_EQ(testing::read_back<float>(*device, buffer.view()), std::vector<float>(100, 3.0f));
    EXPECT_EQ(compiled, 1u);
}

TEST(EngineOptions, CompiledPipelinesAreKeptAndDamagedFilesAreNot) {
    const TemporaryFolder folder;
    const std::string cache = (folder.path() / "deeper" / "pipelines").string();
    compute(cache);
    const auto files = files_in(folder.path() / "deeper");
    ASSERT_EQ(files.size(), 1u) << "one file, no temporary one";
    EXPECT_EQ(files[0].filename().string().rfind("pipelines.", 0), 0u);
    std::ifstream in(files[0], std::ios::binary);
    const std::string good{std::istreambuf_iterator<char>(in), {}};
    EXPECT_GT(good.size(), 24u); // more than our header
    compute(cache);

    std::string flipped = good;
    flipped[good.size() / 2] = static_cast<char>(flipped[good.size() / 2] ^ 0x10);
    for (const std::string& damaged :
         {std::string(), good.substr(0, 20), good.substr(0, good.size() - 1), flipped,
          good + "more", std::string(5000, '\xff')}) {
        std::ofstream(files[0], std::ios::binary | std::ios::trunc) << damaged;
        compute(cache); // right, and the file is whole again
        std::ifstream again(files[0], std::ios::binary);
        const std::string now{std::istreambuf_iterator<char>(again), {}};
        EXPECT_EQ(now.substr(0, 8), "bellows1");
        EXPECT_NE(now, damaged);
    }
    // What is no file is left alone: reading a pipe would wait for ever.
    std::filesystem::remove(files[0]);
    ASSERT_EQ(::mkfifo(files[0].c_str(), 0600), 0);
    compute(cache);
    std::filesystem::remove(files[0]);
    std::filesystem::create_directories(files[0] / "full");
    compute(cache);
    EXPECT_EQ(files_in(folder.path() / "deeper").size(), 1u) << "no temporary one";
}

TEST(EngineOptions, ListsOfDevicesAreCheckedWordByWord) {
    EXPECT_EQ(parse_devices("gpu"), (std::vector<std::string>{"gpu"}));
    EXPECT_EQ(parse_devices("0,1,cpu").size(), 3u);
    EXPECT_EQ(parse_devices("f81d4fae-7dec-11d0-a765-00a0c91e6bf6").size(), 1u);
    for (const char* bad : {"", ",", "0,", ",0", "-1", "99999", "GPU", "0 1", "f81d4fae-7dec"}) {
        EXPECT_BELLOWS_ERROR(parse_devices(bad), InvalidArgument, "device");
    }
}

TEST(EngineOptions, RanksTakeGpusOfOneNameInTurn) {
    const auto device = [](const char* name, const char* uuid, bool cpu = false) {
        DeviceInfo info;
        info.name = name;
        info.uuid = uuid;
        info.is_cpu = cpu;
        return info;
    };
    std::vector<DeviceInfo> all = {device("cpu", "c", true), device("big", "1"),
                                   device("small", "2"), device("big", "3"), device("big", "4")};
    all[3].unmet_requirements = {"timeline semaphores"};
    for (const auto& [rank, uuid] : {std::pair(0, "1"), {1, "4"}, {2, "1"}, {3, "4"}})
        EXPECT_EQ(uuid_in_turn(all, rank), uuid) << rank;
    all.pop_back();
    EXPECT_EQ(uuid_in_turn(all, 1), "") << "one of a name is the best by itself";
    EXPECT_EQ(uuid_in_turn({all.front()}, 1), "");
    EXPECT_EQ(uuid_in_turn({}, 0), "");
}

TEST(EngineOptions, DriversThatCrashAreKnownByWhatTheyReport) {
    DeviceInfo info;
    info.is_cpu = true;
    info.subgroup_size = 16;
    info.driver = "llvmpipe Mesa 26.2.6-1 (LLVM 22.1.8)";
    EXPECT_NE(detail::known_crash(info).find("LP_NATIVE_VECTOR_WIDTH"), std::string::npos);
    info.subgroup_size = 8;
    EXPECT_EQ(detail::known_crash(info), "");
    info.subgroup_size = 16;
    info.driver = "llvmpipe Mesa 22.3.6 (LLVM 15.0.6)";
    EXPECT_EQ(detail::known_crash(info), "");
    EXPECT_EQ(detail::mesa_version(info), 22);
    info.driver = "NVIDIA 580.159";
    EXPECT_EQ(detail::known_crash(info), "");
    EXPECT_EQ(detail::mesa_version(info), std::nullopt);
}

} // namespace
} // namespace bellows
