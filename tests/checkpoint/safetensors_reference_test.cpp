// SPDX-License-Identifier: MIT
// Our safetensors files against the reference Python library, both ways. Only built where CMake
// found a Python with it (BELLOWS_TEST_PYTHON); BELLOWS_TEST_SCRIPT is the Python side.
#include <bellows/checkpoint/safetensors.hpp>

#include "support/temporary_folder.hpp"

#include <cstdlib>
#include <vector>

using namespace bellows;
namespace fs = std::filesystem;

namespace {

template <class T>
void add(SafetensorsWriter& writer, const char* name, const std::vector<T>& values) {
    writer.write(name, std::as_bytes(std::span(values)));
}

template <class T>
std::vector<T> take(const SafetensorsReader& reader, const char* name) {
    std::vector<T> values(reader.find(name)->bytes / sizeof(T));
    reader.read(name, std::as_writable_bytes(std::span(values)));
    return values;
}

} // namespace

TEST(SafetensorsReference, BothReadWhatTheOtherWrote) {
    TemporaryFolder folder;
    const fs::path ours = folder.path() / "ours.safetensors";
    const fs::path theirs = folder.path() / "theirs.safetensors";
    SafetensorsWriter writer(ours,
                             {{"f32", StoredType::F32, {2, 3}},
                              {"u8", StoredType::U8, {5}},
                              {"i64", StoredType::I64, {2}},
                              {"empty", StoredType::F32, {0, 4}},
                              {"scalar", StoredType::F32, {}},
                              {"bf16", StoredType::BF16, {2, 2}}},
                             {{"made by", "bellows"}});
    add(writer, "f32", std::vector<float>{-1, -0.5f, 0, 0.5f, 1, 1.5f});
    add(writer, "u8", std::vector<std::uint8_t>{0, 1, 2, 3, 4});
    add(writer, "i64", std::vector<std::int64_t>{-(std::int64_t{1} << 62), 3});
    add(writer, "scalar", std::vector<float>{7.5f});
    add(writer, "bf16", std::vector<std::uint16_t>{0x3f80, 0x4000, 0xbf80, 0});
    writer.finish();

    const std::string command = std::string("'") + BELLOWS_TEST_PYTHON + "' '" +
                                BELLOWS_TEST_SCRIPT + "' '" + ours.string() + "' '" +
                                theirs.string() + "'";
    ASSERT_EQ(std::system(command.c_str()), 0) << command;

    const SafetensorsReader reader(theirs);
    EXPECT_EQ(reader.tensors().size(), 4u);
    EXPECT_EQ(reader.metadata().at("made by"), "the reference");
    const std::vector<float> weights = take<float>(reader, "weights");
    ASSERT_EQ(weights.size(), 12u);
    EXPECT_EQ(weights[11], 11);
    EXPECT_EQ(reader.find("weights")->shape, (std::vector<std::uint64_t>{3, 4}));
    EXPECT_EQ(take<std::int64_t>(reader, "ids"),
              (std::vector<std::int64_t>{1, std::int64_t{1} << 40, -3}));
    EXPECT_EQ(take<std::uint8_t>(reader, "bytes"), (std::vector<std::uint8_t>{0, 1, 2}));
    EXPECT_EQ(take<std::uint16_t>(reader, "half"), (std::vector<std::uint16_t>{0x3e00}));
    EXPECT_EQ(reader.find("half")->type, StoredType::F16);
}
