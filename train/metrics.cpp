// SPDX-License-Identifier: MIT
#include <bellows/train/metrics.hpp>

#include <bellows/base/error.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <limits>
#include <optional>
#include <string_view>
#include <utility>

#include <fcntl.h>
#include <unistd.h>

namespace bellows {

namespace {

using Json = nlohmann::json;

constexpr std::size_t kLongestLine = std::size_t{16} << 20;
constexpr std::size_t kWrittenAtOnce = std::size_t{1} << 20;

double real(const Json& json, const char* key) {
    const Json& value = json.at(key);
    return value.is_null() ? std::numeric_limits<double>::quiet_NaN() : value.get<double>();
}

std::optional<double> real_if_there(const Json& json, const char* key) {
    return json.contains(key) ? std::optional(real(json, key)) : std::nullopt;
}

/// JSON numbers convert into one another; a count is none of those with a sign or a point.
std::uint64_t count_of(const Json& value) {
    if (!value.is_number_unsigned())
        throw Json::type_error::create(302, "not a count", &value);
    return value.get<std::uint64_t>();
}

ExpertBalance parse_balance(const Json& json) {
    ExpertBalance balance{.layer = count_of(json.at("layer")),
                          .max_over_mean = real(json, "max_over_mean"),
                          .ranks_max_over_mean = real_if_there(json, "ranks_max_over_mean"),
                          .entropy = real(json, "entropy")};
    balance.dropped = real_if_there(json, "dropped");
    if (json.contains("loads"))
        for (const Json& load : json.at("loads"))
            balance.loads.push_back(count_of(load));
    return balance;
}

/// The names in metrics.jsonl.
template <class Parts, class Visit>
void for_each_part(Parts& parts, Visit visit) {
    visit("attention", parts.attention);
    visit("experts", parts.experts);
    visit("exchange", parts.exchange);
    visit("reductions", parts.reductions);
    visit("optimizer", parts.optimizer);
    visit("rest", parts.rest);
    visit("device", parts.device);
}

StepParts parse_parts(const Json& json) {
    StepParts parts;
    for_each_part(parts, [&](const char* name, double& seconds) { seconds = real(json, name); });
    return parts;
}

MovedExpert parse_move(const Json& json) {
    return {.layer = count_of(json.at("layer")),
            .expert = count_of(json.at("expert")),
            .from = count_of(json.at("from")),
            .to = count_of(json.at("to"))};
}

/// Without members that parse() finds wanting; empty where there is no such list.
template <class T>
std::vector<T> list_of(const Json& json, const char* key, T (*parse)(const Json&)) {
    std::vector<T> list;
    if (const auto found = json.find(key); found != json.end() && found->is_array())
        for (const Json& member : *found)
            try {
                list.push_back(parse(member));
            } catch (const Json::exception&) {
                continue;
            }
    return list;
}

/// Empty where there is no such list; a null in it is NaN.
std::vector<double> numbers_if_there(const Json& json, const char* key) {
    std::vector<double> numbers;
    if (const auto found = json.find(key); found != json.end())
        for (const Json& member : *found)
            numbers.push_back(member.is_null() ? std::numeric_limits<double>::quiet_NaN()
                                               : member.get<double>());
    return numbers;
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
        metrics.mtp_losses_nats_per_token = numbers_if_there(json, "mtp_losses_nats_per_token");
        metrics.model_flops_per_s_per_rank = real_if_there(json, "model_flops_per_s_per_rank");
        metrics.mfu = real_if_there(json, "mfu");
        if (json.contains("sequences"))
            metrics.sequences = count_of(json.at("sequences"));
        if (json.contains("parts"))
            metrics.parts = parse_parts(json.at("parts"));
        metrics.experts = list_of<ExpertBalance>(json, "experts", parse_balance);
        metrics.moves = list_of<MovedExpert>(json, "moves", parse_move);
        return metrics;
    } catch (const Json::exception&) {
        return std::nullopt;
    }
}

/// 1.0625 rather than 1.0624999999999998: nobody wants to know more, and the file stays small.
double four_digits(double value) {
    return std::round(value * 1e4) / 1e4;
}

nlohmann::ordered_json to_json(const ExpertBalance& balance) {
    nlohmann::ordered_json json = {{"layer", balance.layer},
                                   {"max_over_mean", four_digits(balance.max_over_mean)}};
    if (balance.ranks_max_over_mean)
        json["ranks_max_over_mean"] = four_digits(*balance.ranks_max_over_mean);
    json["entropy"] = four_digits(balance.entropy);
    if (balance.dropped)
        json["dropped"] = four_digits(*balance.dropped);
    if (!balance.loads.empty())
        json["loads"] = balance.loads;
    return json;
}

/// With all digits that seconds of a clock of nanoseconds have.
nlohmann::ordered_json to_json(const StepParts& parts) {
    nlohmann::ordered_json json;
    for_each_part(parts, [&](const char* name, double seconds) {
        json[name] = std::round(seconds * 1e9) / 1e9;
    });
    return json;
}

/// Calls each() for the lines of a file that are not too long; its last one may end without a
/// break.
void read_lines(const std::filesystem::path& path,
                const std::function<void(std::string_view)>& each) {
    std::uint64_t left = 0;
    const FileHandle file = open_regular_file(path, left);
    std::vector<char> read(std::size_t{1} << 20);
    std::string line;
    const auto end_line = [&] {
        if (line.size() <= kLongestLine)
            each(line);
        line.clear();
    };
    for (std::uint64_t at = 0; left > 0;) {
        const std::uint64_t bytes = std::min<std::uint64_t>(left, read.size());
        read_exactly(file.get(), read.data(), bytes, at, path);
        at += bytes;
        left -= bytes;
        std::string_view rest(read.data(), bytes);
        for (std::size_t length = rest.find('\n'); length != rest.npos; length = rest.find('\n')) {
            line += rest.substr(0, length);
            rest.remove_prefix(length + 1);
            end_line();
        }
        if (line.size() <= kLongestLine)
            line += rest;
    }
    end_line();
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
    add_if_there("model_flops_per_s_per_rank", metrics.model_flops_per_s_per_rank);
    add_if_there("mfu", metrics.mfu);
    if (metrics.sequences)
        json["sequences"] = *metrics.sequences;
    if (metrics.parts)
        json["parts"] = to_json(*metrics.parts);
    json["bytes_exchanged"] = metrics.bytes_exchanged;
    json["seconds_waited"] = metrics.seconds_waited;
    add_if_there("held_out_loss", metrics.held_out_loss);
    add_if_there("held_out_loss_nats_per_byte", metrics.held_out_loss_nats_per_byte);
    if (!metrics.mtp_losses_nats_per_token.empty())
        json["mtp_losses_nats_per_token"] = metrics.mtp_losses_nats_per_token;
    for (const ExpertBalance& balance : metrics.experts)
        json["experts"].push_back(to_json(balance));
    for (const MovedExpert& move : metrics.moves)
        json["moves"].push_back(
            {{"layer", move.layer}, {"expert", move.expert}, {"from", move.from}, {"to", move.to}});
    return json.dump();
}

void read_metrics(const std::filesystem::path& path,
                  const std::function<void(StepMetrics&& step)>& each) {
    read_lines(path, [&](std::string_view line) {
        if (std::optional<StepMetrics> metrics = parse_metrics(line))
            each(std::move(*metrics));
    });
}

std::vector<StepMetrics> read_metrics(const std::filesystem::path& path) {
    std::vector<StepMetrics> steps;
    read_metrics(path, [&](StepMetrics&& step) { steps.push_back(std::move(step)); });
    return steps;
}

MetricsLog::MetricsLog(std::filesystem::path path, std::uint64_t steps_done)
    : path_(std::move(path)) {
    std::filesystem::path temporary = path_;
    temporary += ".tmp";
    file_ = FileHandle(
        ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0644));
    if (file_.get() < 0)
        throw Error(ErrorCode::Io, errno_message("create", temporary, errno));
    std::string lines;
    const auto write = [&] {
        write_all(file_.get(), lines.data(), lines.size(), temporary);
        written_ += lines.size();
        lines.clear();
    };
    if (steps_done > 0 && std::filesystem::exists(path_))
        read_metrics(path_, [&](StepMetrics&& step) {
            if (step.step > steps_done)
                return;
            lines += format_metrics(step) + "\n";
            keep(std::move(step));
            if (lines.size() > kWrittenAtOnce)
                write();
        });
    write();
    if (::fsync(file_.get()) != 0)
        throw Error(ErrorCode::Io, errno_message("write", temporary, errno));
    std::error_code error;
    std::filesystem::rename(temporary, path_, error);
    if (error)
        throw Error(ErrorCode::Io, errno_message("create", path_, error.value()));
}

void MetricsLog::keep(StepMetrics step) {
    step.experts = {};
    step.moves = {};
    steps_.push_back(std::move(step));
}

void MetricsLog::add(const StepMetrics& metrics) {
    keep(metrics);
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
