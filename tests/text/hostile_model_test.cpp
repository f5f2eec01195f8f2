// SPDX-License-Identifier: MIT
// Models that the library would read out of bounds with, or die of: refused with one line.
#include "support/temporary_folder.hpp"
#include "text/small_model.hpp"

#include <bellows/text/tokenizer.hpp>

#include <cstring>
#include <limits>
#include <random>
#include <string>

using namespace bellows;

namespace {

std::string varint(std::uint64_t value) {
    std::string out;
    for (; value >= 0x80; value >>= 7) {
        out += static_cast<char>(value | 0x80);
    }
    return out + static_cast<char>(value);
}

std::string bytes_field(int number, const std::string& content) {
    return varint(static_cast<std::uint64_t>(number) << 3 | 2) + varint(content.size()) + content;
}

std::string number_field(int number, std::uint64_t value) {
    return varint(static_cast<std::uint64_t>(number) << 3) + varint(value);
}

std::string piece(const std::string& text, std::uint64_t type = 1, float score = -1) {
    std::string out = bytes_field(1, text) + varint(2 << 3 | 5) + std::string(4, '\0');
    std::memcpy(out.data() + out.size() - 4, &score, 4);
    return bytes_field(1, out + number_field(3, type));
}

std::string good() {
    return piece("<unk>", 2) + piece("a") + piece("\xe2\x96\x81") + piece("b");
}

using Units = std::vector<std::uint32_t>;

/// A normaliser's table of so many units, the first of which are given.
std::string charsmap(Units first, std::size_t units = 256, const std::string& forms = {"x\0", 2}) {
    first.resize(units);
    std::string out(4 + 4 * units, '\0');
    const auto bytes = static_cast<std::uint32_t>(4 * units);
    std::memcpy(out.data(), &bytes, 4);
    std::memcpy(out.data() + 4, first.data(), 4 * units);
    return bytes_field(3, bytes_field(2, out + forms));
}

void expect_refused(const std::string& model, const char* part) {
    EXPECT_BELLOWS_ERROR(Tokenizer::from_model(model, "hostile"), Corrupt, part);
}

} // namespace

TEST(HostileModel, TheGoodOneServes) {
    const Tokenizer tokenizer = Tokenizer::from_model(good(), "good");
    EXPECT_EQ(tokenizer.decode(tokenizer.encode("a b")), "a b");
}

TEST(HostileModel, IsRefused) {
    expect_refused("", "0 pieces for what is unknown");
    expect_refused(good() + piece("<u>", 2), "2 pieces");
    expect_refused(good() + piece(""), "piece 4 is empty");
    expect_refused(good() + piece("a"), "library");
    expect_refused(good() + piece(std::string("c\0d", 3)), "UTF-8");
    expect_refused(good() + piece("\xff"), "UTF-8");
    expect_refused(good() + piece(std::string(5000, 'c')), "5000 bytes");
    expect_refused(good() + piece("c", 7), "type 7");
    expect_refused(good() + piece("c", ~std::uint64_t{0}), "type");
    expect_refused(good() + piece("c", 1, std::numeric_limits<float>::quiet_NaN()), "score");
    expect_refused(good() + piece("c", 1, std::numeric_limits<float>::infinity()), "score");
    expect_refused(good() + bytes_field(2, number_field(3, 9)), "model type 9");
    expect_refused(good() + bytes_field(2, bytes_field(44, std::string(5000, 'u'))), "unk_surface");
    expect_refused(good() + number_field(3, 1), "wrong type");
    expect_refused(good() + bytes_field(0, "x"), "impossible number");
    expect_refused(good() + "\x0b", "wire type 3");
    expect_refused(good() + std::string(11, '\xff'), "64 bits");
    expect_refused(good() + "\x0a\xff\xff\xff\xff\x0f", "cut off");
    std::string nested = good();
    for (int i = 1; i <= 80; ++i) {
        nested += piece(std::string(static_cast<std::size_t>(i), 'u'), 4);
    }
    expect_refused(nested, "begins with more than");
}

TEST(HostileModel, NormaliserIsRefused) {
    const std::string model = good();
    expect_refused(model + bytes_field(3, bytes_field(2, "\1")), "cut off");
    expect_refused(model + bytes_field(3, bytes_field(2, std::string("\xff\xff\xff\x7f"
                                                                     "abcd"))),
                   "does not fit");
    expect_refused(model + bytes_field(3, bytes_field(2, std::string("\0\0\0\0abcd", 8))),
                   "does not fit");
    expect_refused(model + charsmap({}, 255), "units");
    expect_refused(model + charsmap({1u << 31 >> 1}), "out of its 256 units");
    expect_refused(model + charsmap({1u << 8 | 1u << 10, 7u}, 256, std::string("x\0", 2)),
                   "out of its strings");
    expect_refused(model + charsmap({}, 256, "x"), "do not end");
    expect_refused(model + charsmap({1u << 8 | 1u << 10, 0}, 256, std::string(2000, 'x') + '\0'),
                   "longer than");
    expect_refused(model + charsmap({1u << 8 | 1u << 10, 0}, 256, std::string("\xff\0", 2)),
                   "UTF-8");
    // A zero byte of a text leads to a unit that points far away.
    expect_refused(model + charsmap({1u << 10, 1u << 29}), "out of its 256 units");
    // Unit 'a' is its own child.
    Units circle(256);
    circle['a'] = 'a' | static_cast<std::uint32_t>('a') << 10;
    circle[0] = 0;
    expect_refused(model + charsmap(circle), "circle");
    expect_refused(model + bytes_field(5, bytes_field(2, "\1")), "cut off"); // the denormaliser's
}

// Whatever one byte of a good model becomes: an error or a model that works.
TEST(HostileModel, OneWrongByteDoesNoHarm) {
    TemporaryFolder folder;
    const std::string whole = content_of(small_model(folder, "--byte_fallback=true"));
    std::mt19937 random(1);
    for (int i = 0; i < 150; ++i) {
        std::string model = whole;
        const std::size_t at = i % 2 == 0 ? random() % 4000 : random() % model.size();
        model[at] = static_cast<char>(random());
        try {
            const Tokenizer tokenizer = Tokenizer::from_model(model, "changed");
            const std::vector<std::uint32_t> ids =
                tokenizer.encode("the \xef\xbd\xb6\xef\xbe\x9e forge\n breathes \xff 7");
            (void)tokenizer.decode(ids);
        } catch (const Error& error) {
            EXPECT_EQ(error.message().find('\n'), std::string::npos);
        }
    }
    for (std::size_t bytes = 0; bytes < 400; ++bytes) {
        EXPECT_THROW(Tokenizer::from_model(whole.substr(0, bytes * 40), "cut"), Error) << bytes;
    }
}
