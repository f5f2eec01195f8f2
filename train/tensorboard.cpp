// SPDX-License-Identifier: MIT
#include <bellows/train/tensorboard.hpp>

#include <bellows/base/error.hpp>

#include <array>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <optional>

#include <fcntl.h>
#include <unistd.h>

namespace bellows {

namespace {

// ---- Protobuf: fields of a message, each with its number and its kind of coding -----------------

enum WireType : std::uint64_t { Varint = 0, Fixed64 = 1, Bytes = 2, Fixed32 = 5 };

void put_little_endian(std::string& out, std::uint64_t value, int bytes) {
    for (int i = 0; i < bytes; ++i)
        out += static_cast<char>(value >> (8 * i) & 0xff);
}

void put_varint(std::string& out, std::uint64_t value) {
    for (; value >= 0x80; value >>= 7)
        out += static_cast<char>((value & 0x7f) | 0x80);
    out += static_cast<char>(value);
}

void put_key(std::string& out, std::uint64_t field, WireType type) {
    put_varint(out, field << 3 | type);
}

void put_integer(std::string& out, std::uint64_t field, std::uint64_t value) {
    put_key(out, field, Varint);
    put_varint(out, value);
}

void put_double(std::string& out, std::uint64_t field, double value) {
    put_key(out, field, Fixed64);
    put_little_endian(out, std::bit_cast<std::uint64_t>(value), 8);
}

void put_float(std::string& out, std::uint64_t field, float value) {
    put_key(out, field, Fixed32);
    put_little_endian(out, std::bit_cast<std::uint32_t>(value), 4);
}

void put_bytes(std::string& out, std::uint64_t field, std::string_view bytes) {
    put_key(out, field, Bytes);
    put_varint(out, bytes.size());
    out += bytes;
}

// ---- tensorflow.Event, tensorflow.Summary
// --------------------------------------------------------

std::string begin_event(std::uint64_t step) {
    const auto now = std::chrono::system_clock::now().time_since_epoch();
    std::string event;
    put_double(event, 1, std::chrono::duration<double>(now).count()); // wall_time
    put_integer(event, 2, step);
    return event;
}

std::string version_event() {
    std::string event = begin_event(0);
    put_bytes(event, 3, "brain.Event:2"); // file_version
    return event;
}

/// A session that begins before this step: what was written of it and of later ones does not count.
std::string start_event(std::uint64_t step) {
    std::string session, event = begin_event(step);
    put_integer(session, 1, 1); // SessionLog.status = START
    put_bytes(event, 7, session);
    return event;
}

std::string summary_event(const StepMetrics& metrics) {
    std::string summary;
    const auto add = [&summary](std::string_view tag, std::optional<double> number) {
        if (!number)
            return;
        std::string value;
        put_bytes(value, 1, tag);
        put_float(value, 2, static_cast<float>(*number)); // simple_value
        put_bytes(summary, 1, value);
    };
    add("loss/nats_per_token", metrics.loss);
    add("loss/nats_per_byte", metrics.loss_nats_per_byte);
    add("held_out_loss/nats_per_token", metrics.held_out_loss);
    add("held_out_loss/nats_per_byte", metrics.held_out_loss_nats_per_byte);
    for (std::size_t k = 0; k < metrics.mtp_losses_nats_per_token.size(); ++k)
        add("mtp_loss/nats_per_token/module_" + std::to_string(k),
            metrics.mtp_losses_nats_per_token[k]);
    add("training/grad_norm", metrics.grad_norm);
    add("training/lr", metrics.lr);
    add("speed/tokens_per_s", metrics.tokens_per_s);
    add("speed/seconds", metrics.seconds);
    add("speed/model_flops_per_s", metrics.model_flops_per_s);
    add("speed/model_flops_per_s_per_rank", metrics.model_flops_per_s_per_rank);
    add("speed/mfu", metrics.mfu);
    if (metrics.sequences)
        add("training/sequences", static_cast<double>(*metrics.sequences));
    if (metrics.parts) {
        add("seconds_of_part/attention", metrics.parts->attention);
        add("seconds_of_part/experts", metrics.parts->experts);
        add("seconds_of_part/exchange", metrics.parts->exchange);
        add("seconds_of_part/reductions", metrics.parts->reductions);
        add("seconds_of_part/optimizer", metrics.parts->optimizer);
        add("seconds_of_part/rest", metrics.parts->rest);
        add("seconds_of_part/device", metrics.parts->device);
    }
    add("speed/bytes_exchanged", static_cast<double>(metrics.bytes_exchanged));
    add("speed/seconds_waited", metrics.seconds_waited);
    for (const ExpertBalance& balance : metrics.experts) {
        const std::string layer = "/layer_" + std::to_string(balance.layer);
        add("experts_max_over_mean" + layer, balance.max_over_mean);
        add("experts_ranks_max_over_mean" + layer, balance.ranks_max_over_mean);
        add("experts_entropy" + layer, balance.entropy);
        add("experts_dropped" + layer, balance.dropped);
    }
    std::string event = begin_event(metrics.step);
    put_bytes(event, 5, summary);
    return event;
}

// ---- TFRecord
// ------------------------------------------------------------------------------------

constexpr std::array<std::uint32_t, 256> kCrcTable = [] {
    constexpr std::uint32_t kReversedPolynomial = 0x82f63b78;
    std::array<std::uint32_t, 256> table{};
    for (std::uint32_t byte = 0; byte < table.size(); ++byte) {
        std::uint32_t crc = byte;
        for (int bit = 0; bit < 8; ++bit)
            crc = crc >> 1 ^ ((crc & 1) != 0 ? kReversedPolynomial : 0);
        table[byte] = crc;
    }
    return table;
}();

/// A checksum of data that may hold checksums.
std::uint32_t masked(std::uint32_t crc) {
    return (crc >> 15 | crc << 17) + 0xa282ead8u;
}

std::string record(const std::string& data) {
    std::string out;
    put_little_endian(out, data.size(), 8);
    put_little_endian(out, masked(crc32c(out)), 4);
    out += data;
    put_little_endian(out, masked(crc32c(data)), 4);
    return out;
}

} // namespace

std::uint32_t crc32c(std::string_view data) noexcept {
    std::uint32_t crc = 0xffffffffu;
    for (const char c : data)
        crc = crc >> 8 ^ kCrcTable[(crc ^ static_cast<unsigned char>(c)) & 0xff];
    return ~crc;
}

TensorboardLog::TensorboardLog(const std::filesystem::path& folder, std::uint64_t steps_done) {
    auto seconds =
        static_cast<unsigned long long>(std::chrono::duration_cast<std::chrono::seconds>(
                                            std::chrono::system_clock::now().time_since_epoch())
                                            .count());
    do { // files are read in the order of their names: each start has one of its own
        std::array<char, 64> name{};
        std::snprintf(name.data(), name.size(), "events.out.tfevents.%010llu.bellows", seconds++);
        path_ = folder / name.data();
        file_ = FileHandle(
            ::open(path_.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
    } while (file_.get() < 0 && errno == EEXIST);
    if (file_.get() < 0)
        throw Error(ErrorCode::Io, errno_message("create", path_, errno));
    missing_ = record(version_event()) + record(start_event(steps_done + 1));
    write();
}

void TensorboardLog::add(const StepMetrics& metrics) {
    missing_ += record(summary_event(metrics));
    write();
}

void TensorboardLog::write() {
    try {
        write_all(file_.get(), missing_.data(), missing_.size(), path_);
    } catch (const Error&) { // a part of a record may be there
        if (::ftruncate(file_.get(), static_cast<off_t>(written_)) != 0)
            throw Error(ErrorCode::Io, errno_message("cut", path_, errno));
        throw;
    }
    written_ += missing_.size();
    missing_.clear();
}

} // namespace bellows
