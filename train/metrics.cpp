// SPDX-License-Identifier: MIT
#include <bellows/train/metrics.hpp>

#include <bellows/base/error.hpp>

#include <nlohmann/json.hpp>

#include <cerrno>
#include <limits>
#include <optional>
#include <sstream>
#include <string_view>
#include <utility>

#include <fcntl.h>
#include <unistd.h>

namespace bellows {

namespace {

using Json = nlohmann::json;

constexpr std::uint64_t kLargestMetrics = std::uint64_t{1} << 32;

double real(const Json& json, const char* key) {
    const Json& value = json.at(key);
    return value.is_null() ? std::numeric_limits<double>::quiet_NaN() : value.get<double>();
}

std::optional<double> real_if_there(const Json& json, const char* key) {
    return json.contains(key) ? std::optional(real(json, key)) : std::nullopt;
}

std::optional<StepMetrics> parse_metrics(std::string_view line) {
    const Json json = Json::parse(line, nullptr, false);
    if (!json.is_object()) {
        return std::nullopt;
    }
    try {
        StepMetrics metrics;
        metrics.step = json.at("step").get<std::uint64_t>();
        metrics.loss = real(json, "loss");
        metrics.grad_norm = real(json, "grad_norm");
        metrics.lr = real(json, "lr");
        metrics.tokens_per_s = real(json, "tokens_per_s");
        metrics.seconds = real(json, "seconds");
        metrics.model_flops_per_s = real(json, "model_flops_per_s");
        metrics.bytes_exchanged = json.at("bytes_exchanged").get<std::uint64_t>();
        metrics.seconds_waited = real(json, "seconds_waited");
        metrics.loss_nats_per_byte = real_if_there(json, "loss_nats_per_byte");
        metrics.held_out_loss = real_if_there(json, "held_out_loss");
        metrics.held_out_loss_nats_per_byte = real_if_there(json, "held_out_loss_nats_per_byte");
        return metrics;
    } catch (const Json::exception&) {
        return std::nullopt;
    }
}

} // namespace

std::string format_metrics(const StepMetrics& metrics) {
    nlohmann::ordered_json json = {{"step", metrics.step},
                                   {"loss", metrics.loss}, // the name that older readers know
                                   {"loss_nats_per_token", metrics.loss}};
    const auto add_if_there = [&json](const char* key, const std::optional<double>& value) {
        if (value)
            json[key] = *value;
    };
    add_if_there("loss_nats_per_byte", metrics.loss_nats_per_byte);
    json["grad_norm"] = metrics.grad_norm;
    json["lr"] = metrics.lr;
    json["tokens_per_s"] = metrics.tokens_per_s;
    json["seconds"] = metrics.seconds;
    json["model_flops_per_s"] = metrics.model_flops_per_s;
    json["bytes_exchanged"] = metrics.bytes_exchanged;
    json["seconds_waited"] = metrics.seconds_waited;
    add_if_there("held_out_loss", metrics.held_out_loss);
    add_if_there("held_out_loss_nats_per_byte", metrics.held_out_loss_nats_per_byte);
    return json.dump();
}

std::vector<StepMetrics> read_metrics(const std::filesystem::path& path) {
    std::istringstream lines(read_file(path, kLargestMetrics));
    std::vector<StepMetrics> steps;
    for (std::string line; std::getline(lines, line);) {
        if (const std::optional<StepMetrics> metrics = parse_metrics(line)) {
            steps.push_back(*metrics);
        }
    }
    return steps;
}

MetricsLog::MetricsLog(std::filesystem::path path, std::uint64_t steps_done)
    : path_(std::move(path)) {
    std::string kept;
    if (steps_done > 0 && std::filesystem::exists(path_)) {
        for (const StepMetrics& step : read_metrics(path_)) {
            if (step.step <= steps_done) {
                kept += format_metrics(step) + "\n";
                steps_.push_back(step);
            }
        }
    }
    written_ = kept.size();
    std::filesystem::path temporary = path_;
    temporary += ".tmp";
    write_file_durably(temporary, kept);
    std::error_code error;
    std::filesystem::rename(temporary, path_, error);
    file_ = FileHandle(::open(path_.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC));
    if (error || file_.get() < 0) {
        throw Error(ErrorCode::Io, errno_message("create", path_, error ? error.value() : errno));
    }
}

void MetricsLog::add(const StepMetrics& metrics) {
    steps_.push_back(metrics);
    missing_ += format_metrics(metrics) + "\n";
    try {
        write_all(file_.get(), missing_.data(), missing_.size(), path_);
    } catch (const Error&) { // a part of a line may be there
        if (::ftruncate(file_.get(), static_cast<off_t>(written_)) != 0) {
            throw Error(ErrorCode::Io, errno_message("cut", path_, errno));
        }
        throw;
    }
    written_ += missing_.size();
    missing_.clear();
}

} // namespace bellows
