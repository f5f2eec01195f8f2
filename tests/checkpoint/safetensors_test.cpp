// SPDX-License-Identifier: MIT
#include <bellows/base/parallel.hpp>
#include <bellows/checkpoint/safetensors.hpp>

#include "support/temporary_folder.hpp"

#include <bit>
#include <csignal>
#include <cstring>
#include <random>

#include <sys/resource.h>

using namespace bellows;
namespace fs = std::filesystem;

namespace {

template <class T>
std::span<const std::byte> bytes(const std::vector<T>& values) {
    return std::as_bytes(std::span(values));
}

std::string file_with(std::string_view header, std::string_view data = {}) {
    std::string out(8, '\0');
    const std::uint64_t size = header.size();
    std::memcpy(out.data(), &size, 8);
    return out + std::string(header) + std::string(data);
}

fs::path write_sample(const fs::path& path) {
    SafetensorsWriter writer(path,
                             {{"w", StoredType::F32, {2, 3}},
                              {"none", StoredType::BF16, {0, 7}},
                              {"scalar", StoredType::I64, {}},
                              {"bias", StoredType::BF16, {3}},
                              {"raw", StoredType::U8, {5}}},
                             {{"made by", "a \"test\""}});
    const std::vector<float> w = {1, -2, 3.5f, 0, 5, 6};
    writer.write("w", bytes(w).first(7));
    writer.write("w", bytes(w).subspan(7));
    writer.write("scalar", bytes(std::vector<std::int64_t>{-9}));
    writer.write("bias", bytes(std::vector<std::uint16_t>{0x3f80, 0xbf80, 0x7fc0}));
    writer.write("raw", bytes(std::vector<std::uint8_t>{1, 2, 3, 4, 5}));
    writer.finish();
    return path;
}

} // namespace

TEST(Safetensors, WritesWhatItReads) {
    TemporaryFolder folder;
    const SafetensorsReader reader(write_sample(folder.path() / "a.safetensors"));
    EXPECT_TRUE(reader.has_checksums());
    ASSERT_EQ(reader.tensors().size(), 5u);
    EXPECT_EQ(reader.metadata(), (std::map<std::string, std::string>{{"made by", "a \"test\""}}));
    EXPECT_EQ(reader.tensors()[0].offset % 8, 0u) << "the data begins aligned";

    const auto* w = reader.find("w");
    ASSERT_NE(w, nullptr);
    EXPECT_EQ(w->type, StoredType::F32);
    EXPECT_EQ(w->shape, (std::vector<std::uint64_t>{2, 3}));
    std::vector<float> values(6);
    reader.read("w", std::as_writable_bytes(std::span(values)));
    EXPECT_EQ(values, (std::vector<float>{1, -2, 3.5f, 0, 5, 6}));

    std::vector<std::byte> raw;
    reader.read("raw", 2, [&](std::uint64_t offset, std::span<const std::byte> piece) {
        EXPECT_EQ(offset, raw.size());
        EXPECT_LE(piece.size(), 2u);
        raw.insert(raw.end(), piece.begin(), piece.end());
    });
    ASSERT_EQ(raw.size(), 5u);
    EXPECT_EQ(raw[4], std::byte{5});
    EXPECT_NO_THROW(reader.verify());
    EXPECT_EQ(reader.find("absent"), nullptr);
    EXPECT_BELLOWS_ERROR(reader.read("absent", {}), InvalidArgument, "absent");
    EXPECT_BELLOWS_ERROR(reader.read("w", {}), InvalidArgument, "24 bytes");
}

TEST(Safetensors, SameTensorsGiveTheSameFile) {
    TemporaryFolder folder;
    EXPECT_EQ(content_of(write_sample(folder.path() / "a")),
              content_of(write_sample(folder.path() / "b")));
}

TEST(Safetensors, PiecesInAnyOrderGiveTheSameFile) {
    TemporaryFolder folder;
    constexpr std::size_t kPiece = 1000, kPieces = 50;
    std::vector<std::uint8_t> data(kPiece * kPieces - 7);
    for (std::size_t i = 0; i < data.size(); ++i)
        data[i] = static_cast<std::uint8_t>(i * i % 251);
    const std::vector<StoredTensor> tensors = {{"a", StoredType::U8, {data.size()}},
                                               {"none", StoredType::F32, {0}},
                                               {"b", StoredType::U8, {data.size()}}};
    SafetensorsWriter whole(folder.path() / "whole", tensors);
    whole.write("a", bytes(data));
    whole.write("b", bytes(data));
    whole.finish();
    SafetensorsWriter pieces(folder.path() / "pieces", tensors);
    parallel_for(2 * kPieces, [&](std::size_t i) {
        const std::size_t at = (kPieces - 1 - i / 2) * kPiece;
        pieces.write_piece(i % 2 == 0 ? "b" : "a", at,
                           bytes(data).subspan(at, std::min(kPiece, data.size() - at)));
    });
    pieces.finish();
    EXPECT_EQ(content_of(folder.path() / "pieces"), content_of(folder.path() / "whole"));
    EXPECT_NO_THROW(SafetensorsReader(folder.path() / "pieces").verify());
}

TEST(Safetensors, WriterRefusesWrongPieces) {
    TemporaryFolder folder;
    const std::vector<std::uint8_t> data(8);
    const auto written = [&](std::initializer_list<std::pair<std::uint64_t, std::size_t>> pieces) {
        SafetensorsWriter writer(folder.path() / "a", {{"a", StoredType::U8, {6}}});
        for (const auto& [at, count] : pieces)
            writer.write_piece("a", at, bytes(data).first(count));
        writer.finish();
        return true;
    };
    EXPECT_TRUE(written({{2, 4}, {0, 2}}));
    EXPECT_BELLOWS_ERROR(written({{2, 4}}), InvalidArgument, "incomplete, 4 of 6");
    EXPECT_BELLOWS_ERROR(written({{0, 2}, {3, 3}}), InvalidArgument, "incomplete, 5 of 6");
    EXPECT_BELLOWS_ERROR(written({{0, 4}, {2, 4}}), InvalidArgument, "twice, 8 of 6");
    EXPECT_BELLOWS_ERROR(written({{3, 4}}), InvalidArgument, "has 6 bytes and got 4 from 3 on");
    EXPECT_BELLOWS_ERROR(written({{~std::uint64_t{0}, 4}}), InvalidArgument, "has 6 bytes");
    SafetensorsWriter writer(folder.path() / "b", {{"a", StoredType::U8, {6}}});
    EXPECT_BELLOWS_ERROR((writer.write_piece("c", 0, {}), 0), InvalidArgument, "no tensor \"c\"");
}

TEST(Safetensors, WriterRefusesWrongOrderAndSizes) {
    TemporaryFolder folder;
    const fs::path path = folder.path() / "a.safetensors";
    const std::vector<StoredTensor> two = {{"a", StoredType::U8, {4}}, {"b", StoredType::U8, {4}}};
    const std::vector<std::uint8_t> data(8);
    {
        SafetensorsWriter writer(path, two);
        EXPECT_BELLOWS_ERROR(writer.write("b", bytes(data).first(4)), InvalidArgument, "\"a\"");
        EXPECT_BELLOWS_ERROR(writer.write("a", bytes(data)), InvalidArgument, "lacks 4");
        writer.write("a", bytes(data).first(4));
        EXPECT_BELLOWS_ERROR(writer.finish(), InvalidArgument, "incomplete");
        writer.write("b", bytes(data).first(4));
        EXPECT_BELLOWS_ERROR(writer.write("b", bytes(data).first(1)), InvalidArgument, "last");
    }
    EXPECT_FALSE(fs::exists(path)) << "an unfinished file must not stay";
    const auto twice = [&] { SafetensorsWriter(path, {two[0], two[0]}); };
    EXPECT_BELLOWS_ERROR((twice(), 0), InvalidArgument, "two tensors");
    const auto huge = [&] {
        SafetensorsWriter(path, {{"h", StoredType::F32, {1ull << 33, 1ull << 31}}});
    };
    EXPECT_BELLOWS_ERROR((huge(), 0), InvalidArgument, "64 bits");
    const auto not_utf8 = [&] { SafetensorsWriter(path, {{"\xff", StoredType::F32, {1}}}); };
    EXPECT_BELLOWS_ERROR((not_utf8(), 0), InvalidArgument, "UTF-8");
    const auto reserved = [&] { SafetensorsWriter(path, two, {{"bellows.header_crc32", "x"}}); };
    EXPECT_BELLOWS_ERROR((reserved(), 0), InvalidArgument, "reserved");
    const auto nowhere = [&] { SafetensorsWriter(folder.path() / "no" / "where", two); };
    EXPECT_BELLOWS_ERROR((nowhere(), 0), Io, "where");
}

struct HostileFile {
    const char* name;
    std::string content;
    const char* message;
};

class Hostile : public testing::TestWithParam<HostileFile> {};

TEST_P(Hostile, IsRefusedWithItsName) {
    TemporaryFolder folder;
    const fs::path path = folder.write("bad.safetensors", GetParam().content);
    EXPECT_BELLOWS_ERROR(SafetensorsReader{path}, Corrupt, GetParam().message);
    EXPECT_BELLOWS_ERROR(SafetensorsReader{path}, Corrupt, "bad.safetensors");
}

const std::string kOne = R"("dtype":"U8","shape":[4])";

INSTANTIATE_TEST_SUITE_P(
    Headers, Hostile,
    testing::Values(
        HostileFile{"empty", "", "too few"}, HostileFile{"short", "1234567", "too few"},
        HostileFile{"length_beyond_file", std::string("\x10\0\0\0\0\0\0\0{}", 10), "claims"},
        HostileFile{"length_overflows", std::string(8, '\xff') + "{}", "claims"},
        HostileFile{"no_header", std::string(8, '\0'), "'{'"},
        HostileFile{"not_json", file_with("{\"a\":"), "not JSON"},
        HostileFile{"json_with_rest", file_with("{} {}"), "not JSON"},
        HostileFile{"not_utf8", file_with("{\"\xff\":{}}"), "not JSON"},
        HostileFile{"array", file_with("[]"), "'{'"},
        HostileFile{"number_as_tensor", file_with(R"({"a":1})"), "object of tensors"},
        HostileFile{"no_fields", file_with(R"({"a":{}})"), "lacks one"},
        HostileFile{"unknown_field",
                    file_with("{\"a\":{" + kOne + ",\"data_offsets\":[0,4],\"x\":1}}", "abcd"),
                    "\"x\""},
        HostileFile{"field_twice", file_with("{\"a\":{" + kOne + ",\"dtype\":\"U8\"}}"), "twice"},
        HostileFile{"deep", file_with("{\"a\":{\"shape\":" + std::string(99999, '[')), "shape"},
        HostileFile{"deep_objects", file_with(R"({"a":{"shape":{"b":{"c":{}}}}})"), "object"},
        HostileFile{"negative", file_with(R"({"a":{"dtype":"U8","shape":[-4]}})"), "shape"},
        HostileFile{"fraction", file_with(R"({"a":{"dtype":"U8","shape":[4.0]}})"), "shape"},
        HostileFile{"beyond_64_bits",
                    file_with(R"({"a":{"dtype":"U8","shape":[18446744073709551616]}})"), "shape"},
        HostileFile{"unknown_dtype", file_with(R"({"a":{"dtype":"F31"}})"), "F31"},
        HostileFile{"three_offsets", file_with("{\"a\":{" + kOne + ",\"data_offsets\":[0,4,8]}}"),
                    "data_offsets"},
        HostileFile{"name_twice",
                    file_with("{\"a\":{" + kOne + ",\"data_offsets\":[0,4]},\"a\":{" + kOne +
                                  ",\"data_offsets\":[4,8]}}",
                              "abcdefgh"),
                    "twice"},
        HostileFile{"metadata_number", file_with(R"({"__metadata__":{"a":1}})"), "\"a\""},
        HostileFile{"metadata_object", file_with(R"({"__metadata__":{"a":{}}})"), "object"},
        HostileFile{"wrong_bytes",
                    file_with("{\"a\":{" + kOne + ",\"data_offsets\":[0,5]}}", "abcde"),
                    "needs 4 bytes"},
        HostileFile{"end_before_begin",
                    file_with("{\"a\":{" + kOne + ",\"data_offsets\":[4,0]}}", "abcd"), "\"a\""},
        HostileFile{"overlap",
                    file_with("{\"a\":{" + kOne + ",\"data_offsets\":[0,4]},\"b\":{" + kOne +
                                  ",\"data_offsets\":[2,6]}}",
                              "abcdef"),
                    "\"b\""},
        HostileFile{"gap", file_with("{\"a\":{" + kOne + ",\"data_offsets\":[1,5]}}", "abcde"),
                    "begin at 0"},
        HostileFile{"truncated", file_with("{\"a\":{" + kOne + ",\"data_offsets\":[0,4]}}", "abc"),
                    "truncated"},
        HostileFile{"trailing", file_with("{\"a\":{" + kOne + ",\"data_offsets\":[0,4]}}", "abcde"),
                    "1 bytes behind"},
        HostileFile{
            "shape_overflows",
            file_with(
                R"({"a":{"dtype":"F32","shape":[4611686018427387904,2],"data_offsets":[0,0]}})"),
            "64 bits"},
        HostileFile{"shape_overflows_to_four",
                    file_with(R"({"a":{"dtype":"F32","shape":[4611686018427387905],)"
                              R"("data_offsets":[0,4]}})",
                              "abcd"),
                    "64 bits"},
        HostileFile{"wrong_header_sum",
                    file_with(R"({"__metadata__":{"bellows.header_crc32":"00000001"}})"),
                    "check sum"},
        HostileFile{"odd_sum", file_with(R"({"__metadata__":{"bellows.crc32.a":"1"}})"),
                    "no check sum"},
        HostileFile{"newline_in_name",
                    file_with("{\"a\\n\":{" + kOne + ",\"data_offsets\":[0,5]}}", "abcde"),
                    "\\x0a"}),
    [](const auto& hostile) { return std::string(hostile.param.name); });

TEST(Safetensors, ReadsFilesOfOthers) {
    TemporaryFolder folder;
    // Blanks behind the header, tensors not in the order of their bytes, no check sums.
    const fs::path path =
        folder.write("other.safetensors", file_with(R"({"b":{"dtype":"I16","shape":[1],)"
                                                    R"("data_offsets":[4,6]},"a":{"shape":[4],)"
                                                    R"("data_offsets":[0,4],"dtype":"U8"}}   )",
                                                    "abcdef"));
    const SafetensorsReader reader(path);
    EXPECT_FALSE(reader.has_checksums());
    ASSERT_EQ(reader.tensors().size(), 2u);
    EXPECT_EQ(reader.tensors()[0].name, "a");
    EXPECT_NO_THROW(reader.verify());
    const fs::path empty = folder.write("empty.safetensors", file_with("{}"));
    EXPECT_TRUE(SafetensorsReader(empty).tensors().empty());
}

// One changed bit anywhere is refused: when opening, or at the latest when reading the tensors.
TEST(Safetensors, AnyChangedBitIsRefused) {
    TemporaryFolder folder;
    const std::string good = content_of(write_sample(folder.path() / "a.safetensors"));
    for (std::size_t bit = 0; bit < good.size() * 8; ++bit) {
        std::string bad = good;
        bad[bit / 8] = static_cast<char>(bad[bit / 8] ^ (1 << bit % 8));
        const fs::path path = folder.write("b.safetensors", bad);
        bool refused = false;
        try {
            const SafetensorsReader reader(path);
            refused = !reader.has_checksums(); // what a checkpoint asks for as well
            reader.verify();
        } catch (const Error& error) {
            refused = error.code() == ErrorCode::Corrupt;
        }
        ASSERT_TRUE(refused) << "bit " << bit;
    }
}

TEST(Safetensors, AnyTruncationIsRefused) {
    TemporaryFolder folder;
    const std::string good = content_of(write_sample(folder.path() / "a.safetensors"));
    for (std::size_t size = 0; size < good.size(); ++size) {
        const fs::path path = folder.write("b.safetensors", good.substr(0, size));
        ASSERT_THROW(SafetensorsReader{path}, Error) << size;
    }
}

// Random damage must give an Error, never a crash or a large allocation.
TEST(Safetensors, RandomHeadersNeverCrash) {
    TemporaryFolder folder;
    const std::string good = content_of(write_sample(folder.path() / "a.safetensors"));
    std::mt19937_64 random(5);
    for (int round = 0; round < 3000; ++round) {
        std::string bad = good;
        for (int changes = 1 + static_cast<int>(random() % 4); changes > 0; --changes) {
            static constexpr std::string_view kLetters = "{}[]\",:0123456789-eE.\\u ";
            const std::size_t at = 8 + random() % (bad.size() - 8);
            if (random() % 2 == 0) {
                bad[at] = kLetters[random() % kLetters.size()];
            } else {
                bad.erase(at, random() % 9);
            }
        }
        const fs::path path = folder.write("b.safetensors", bad);
        try {
            SafetensorsReader(path).verify();
        } catch (const Error& error) {
            ASSERT_EQ(error.code(), ErrorCode::Corrupt) << error.message();
        }
    }
}

TEST(Safetensors, TooLargeForTheDiskGivesIoAndNoFile) {
    // The limit on the size of a file acts like a full disk.
    struct sigaction ignore{};
    struct sigaction before{};
    ignore.sa_handler = SIG_IGN;
    ASSERT_EQ(::sigaction(SIGXFSZ, &ignore, &before), 0);
    rlimit old{};
    ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &old), 0);
    const rlimit small{65536, old.rlim_max};
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
    TemporaryFolder folder;
    const fs::path path = folder.path() / "a.safetensors";
    const auto write = [&] {
        SafetensorsWriter writer(path, {{"a", StoredType::U8, {100000}}});
        writer.write("a", bytes(std::vector<std::uint8_t>(100000)));
        writer.finish();
    };
    EXPECT_BELLOWS_ERROR((write(), 0), Io, "a.safetensors");
    EXPECT_FALSE(fs::exists(path));
    ::setrlimit(RLIMIT_FSIZE, &old);
    ::sigaction(SIGXFSZ, &before, nullptr);
    EXPECT_NO_THROW(write());
}

TEST(Safetensors, KnowsTypesThatNobodyReads) {
    TemporaryFolder folder;
    const auto reads = [&](const char* type, const char* shape, std::size_t bytes) {
        const std::string header = "{\"w\": {\"dtype\": \"" + std::string(type) +
                                   "\", \"shape\": " + shape + ", \"data_offsets\": [0, " +
                                   std::to_string(bytes) + "]}}";
        const SafetensorsReader reader(
            folder.write("a.safetensors", file_with(header, std::string(bytes, 'x'))));
        return reader.tensors().at(0).type;
    };
    EXPECT_EQ(reads("F8_E8M0", "[4]", 4), StoredType::F8_E8M0);
    EXPECT_EQ(reads("F8_E4M3FNUZ", "[4]", 4), StoredType::F8_E4M3FNUZ);
    EXPECT_EQ(reads("C64", "[2]", 16), StoredType::C64);
    EXPECT_EQ(reads("F4", "[6]", 3), StoredType::F4);
    EXPECT_EQ(reads("F6_E2M3", "[2, 4]", 6), StoredType::F6_E2M3);
    EXPECT_BELLOWS_ERROR(reads("F4", "[3]", 2), Corrupt, "no whole number of bytes");
    EXPECT_BELLOWS_ERROR(reads("F4", "[4]", 4), Corrupt, "its shape needs 2 bytes");
    EXPECT_BELLOWS_ERROR(reads("F5", "[8]", 5), Corrupt, "unknown dtype");
    EXPECT_STREQ(to_string(StoredType::F6_E3M2), "F6_E3M2");
}
