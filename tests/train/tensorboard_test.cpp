// SPDX-License-Identifier: MIT
// Event files of TensorBoard, read back by a reader of their own.
#include "support/temporary_folder.hpp"

#include <bellows/train/tensorboard.hpp>

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

using namespace bellows;
namespace fs = std::filesystem;

namespace {

/// Takes fixed-size little-endian values and protobuf's fields off the front of a text.
class Reader {
public:
    explicit Reader(std::string_view bytes) : left_(bytes) {}
    bool done() const { return left_.empty(); }
    std::string_view take(std::uint64_t bytes) {
        if (bytes > left_.size())
            throw std::runtime_error("the file ends within a record");
        const std::string_view taken = left_.substr(0, bytes);
        left_.remove_prefix(bytes);
        return taken;
    }
    template <class T>
    T value() {
        T out;
        std::memcpy(&out, take(sizeof out).data(), sizeof out);
        return out;
    }
    std::uint64_t varint() {
        std::uint64_t out = 0;
        for (int shift = 0;; shift += 7) {
            const auto byte = value<unsigned char>();
            out |= std::uint64_t{byte & 0x7fu} << shift;
            if ((byte & 0x80u) == 0)
                return out;
        }
    }

private:
    std::string_view left_;
};

/// The fields of a message by number: raw bytes, integers as 8 bytes.
std::multimap<std::uint64_t, std::string> fields(std::string_view message) {
    std::multimap<std::uint64_t, std::string> all;
    for (Reader reader(message); !reader.done();) {
        const std::uint64_t key = reader.varint();
        std::string& out = all.emplace(key >> 3, "")->second;
        switch (key & 7) {
        case 0: {
            const std::uint64_t value = reader.varint();
            out.assign(reinterpret_cast<const char*>(&value), sizeof value);
            break;
        }
        case 1:
            out = reader.take(8);
            break;
        case 2:
            out = reader.take(reader.varint());
            break;
        case 5:
            out = reader.take(4);
            break;
        default:
            throw std::runtime_error("no such wire type");
        }
    }
    return all;
}

template <class T>
T as(const std::string& bytes) {
    T out;
    EXPECT_EQ(bytes.size(), sizeof out);
    std::memcpy(&out, bytes.data(), std::min(bytes.size(), sizeof out));
    return out;
}

struct Event {
    double wall_time = 0;
    std::uint64_t step = 0;
    std::string version;
    bool starts = false;
    std::map<std::string, float> scalars;
};

/// Checksums of the records are checked on the way.
std::vector<Event> read_events(const std::string& text) {
    const auto check = [](std::string_view data, std::uint32_t masked) {
        const std::uint32_t rotated = masked - 0xa282ead8u;
        EXPECT_EQ(rotated << 15 | rotated >> 17, crc32c(data));
    };
    std::vector<Event> events;
    for (Reader reader(text); !reader.done();) {
        const std::string_view length = reader.take(8);
        check(length, reader.value<std::uint32_t>());
        const std::string_view data = reader.take(Reader(length).value<std::uint64_t>());
        check(data, reader.value<std::uint32_t>());
        Event& event = events.emplace_back();
        for (const auto& [number, bytes] : fields(data)) {
            if (number == 1)
                event.wall_time = as<double>(bytes);
            else if (number == 2)
                event.step = as<std::uint64_t>(bytes);
            else if (number == 3)
                event.version = bytes;
            else if (number == 7)
                event.starts = as<std::uint64_t>(fields(bytes).find(1)->second) == 1;
            else if (number == 5)
                for (const auto& [one, value] : fields(bytes)) {
                    EXPECT_EQ(one, 1u);
                    const auto of_value = fields(value);
                    event.scalars[of_value.find(1)->second] = as<float>(of_value.find(2)->second);
                }
            else
                ADD_FAILURE() << "field " << number << " of an event";
        }
    }
    return events;
}

StepMetrics step_at(std::uint64_t step, double loss) {
    return {step, loss, 0.5, 1e-3, 1000, 2, 3e9, 4096, 0.25};
}

} // namespace

// RFC 3720, appendix B.4.
TEST(Tensorboard, ChecksumsAreThoseOfTheStandard) {
    EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8a9136aau);
    EXPECT_EQ(crc32c(std::string(32, '\xff')), 0x62a8ab43u);
    std::string ascending;
    for (char c = 0; c < 32; ++c)
        ascending += c;
    EXPECT_EQ(crc32c(ascending), 0x46dd794eu);
    EXPECT_EQ(crc32c("123456789"), 0xe3069283u);
}

TEST(Tensorboard, StepsComeBackAsTheyWereAdded) {
    const TemporaryFolder folder;
    TensorboardLog log(folder.path(), 3);
    EXPECT_TRUE(log.path().filename().string().starts_with("events.out.tfevents."));
    log.add(step_at(4, 5.5));
    StepMetrics looked = step_at(300, std::nan(""));
    looked.loss_nats_per_byte = 2.25;
    looked.held_out_loss = 7.5;
    looked.held_out_loss_nats_per_byte = 3.75;
    looked.experts = {{1, 1.5, 1.25, 0.5}, {2, 3, {}, 0.75}};
    looked.mfu = 0.25;
    looked.sequences = 24;
    looked.parts = StepParts{.attention = 0.5};
    log.add(looked);
    const std::vector<Event> events = read_events(content_of(log.path()));
    ASSERT_EQ(events.size(), 4u);
    EXPECT_EQ(events[0].version, "brain.Event:2");
    EXPECT_TRUE(events[1].starts);
    EXPECT_EQ(events[1].step, 4u) << "steps that an earlier file has from there on are void";
    EXPECT_EQ(events[2].step, 4u);
    EXPECT_GT(events[2].wall_time, 1.6e9);
    EXPECT_EQ(events[2].scalars, (std::map<std::string, float>{{"loss/nats_per_token", 5.5f},
                                                               {"training/grad_norm", 0.5f},
                                                               {"training/lr", 1e-3f},
                                                               {"speed/tokens_per_s", 1000.0f},
                                                               {"speed/seconds", 2.0f},
                                                               {"speed/model_flops_per_s", 3e9f},
                                                               {"speed/bytes_exchanged", 4096.0f},
                                                               {"speed/seconds_waited", 0.25f}}));
    EXPECT_EQ(events[3].step, 300u);
    EXPECT_TRUE(std::isnan(events[3].scalars.at("loss/nats_per_token")));
    EXPECT_EQ(events[3].scalars.at("loss/nats_per_byte"), 2.25f);
    EXPECT_EQ(events[3].scalars.at("held_out_loss/nats_per_token"), 7.5f);
    EXPECT_EQ(events[3].scalars.at("held_out_loss/nats_per_byte"), 3.75f);
    EXPECT_EQ(events[3].scalars.at("experts_max_over_mean/layer_1"), 1.5f);
    EXPECT_EQ(events[3].scalars.at("experts_ranks_max_over_mean/layer_1"), 1.25f);
    EXPECT_EQ(events[3].scalars.at("experts_entropy/layer_1"), 0.5f);
    EXPECT_EQ(events[3].scalars.at("experts_max_over_mean/layer_2"), 3.0f);
    EXPECT_EQ(events[3].scalars.at("experts_entropy/layer_2"), 0.75f);
    EXPECT_EQ(events[3].scalars.at("speed/mfu"), 0.25f);
    EXPECT_EQ(events[3].scalars.at("training/sequences"), 24.0f);
    EXPECT_EQ(events[3].scalars.at("seconds_of_part/attention"), 0.5f);
    EXPECT_FALSE(events[3].scalars.contains("experts_ranks_max_over_mean/layer_2"));
}

TEST(Tensorboard, EachStartHasItsFileBehindTheOthers) {
    const TemporaryFolder folder;
    const TensorboardLog first(folder.path(), 0), second(folder.path(), 5), third(folder.path(), 9);
    EXPECT_LT(first.path(), second.path());
    EXPECT_LT(second.path(), third.path());
    EXPECT_BELLOWS_ERROR(TensorboardLog(folder.path() / "none", 0), Io, "none");
}
