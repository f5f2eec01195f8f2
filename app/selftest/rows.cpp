// SPDX-License-Identifier: MIT
#include "app/selftest/rows.hpp"

#include "app/progress.hpp"

#include <bellows/base/error.hpp>
#include <bellows/comm/host_collectives.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <limits>

namespace bellows::selftest {

namespace {

using Json = nlohmann::ordered_json;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

Json number_or_null(double value) {
    return std::isfinite(value) ? Json(value) : Json(nullptr);
}

double number_of(const Json& json) {
    return json.is_null() ? kInfinity : json.get<double>();
}

int badness(Verdict verdict) {
    return verdict == Verdict::Wrong ? 2 : verdict == Verdict::Skipped ? 1 : 0;
}

/// Keeps the worse verdict with its note, the larger errors, the longer time.
void merge(Row& into, const Row& other, int rank) {
    if (badness(other.verdict) > badness(into.verdict)) {
        into.verdict = other.verdict;
        into.note = "rank " + std::to_string(rank) + ": " + other.note;
    }
    into.cases = std::max(into.cases, other.cases);
    into.worst = std::max(into.worst, other.worst);
    for (const auto& [part, worst] : other.parts)
        into.parts[part] = std::max(into.parts[part], worst);
    into.seconds = std::max(into.seconds, other.seconds);
}

std::string worst_text(const Row& row) {
    if (row.verdict == Verdict::Skipped)
        return "-";
    if (!std::isfinite(row.worst))
        return "inf";
    char text[32];
    std::snprintf(text, sizeof text,
                  row.worst < 0.01  ? "%.1e"
                  : row.worst < 100 ? "%.3f"
                                    : "%.3g",
                  row.worst);
    return row.worst == 0 ? "exact" : text;
}

} // namespace

std::string name_with_ranks(const std::string& name, const World& world) {
    return name + ", " + std::to_string(world.size()) + (world.size() == 1 ? " rank" : " ranks");
}

std::vector<Row> worst_of_ranks(World& world, std::vector<Row> mine) {
    if (world.size() == 1)
        return mine;
    HostCollectives everyone(world, Group::all(world.size()));
    const std::string text = rows_to_json(mine);
    const auto texts = everyone.all_gather(std::as_bytes(std::span(text)));
    std::vector<Row> merged;
    for (std::size_t r = 0; r < texts.size(); ++r) {
        const std::vector<Row> rows =
            rows_from_json({reinterpret_cast<const char*>(texts[r].data()), texts[r].size()});
        if (r == 0)
            merged = rows;
        else if (rows.size() != merged.size())
            throw Error(ErrorCode::Internal, "ranks ran different checks");
        else
            for (std::size_t i = 0; i < rows.size(); ++i)
                merge(merged[i], rows[i], static_cast<int>(r));
    }
    return merged;
}

std::string rows_to_json(const std::vector<Row>& rows) {
    Json all = Json::array();
    for (const Row& row : rows) {
        Json parts = Json::object();
        for (const auto& [part, worst] : row.parts)
            parts[part] = number_or_null(worst);
        all.push_back({{"group", row.group},
                       {"what", row.what},
                       {"result", to_string(row.verdict)},
                       {"cases", row.cases},
                       {"worst_error_over_bound", number_or_null(row.worst)},
                       {"parts", parts},
                       {"note", row.note},
                       {"seconds", row.seconds}});
    }
    return all.dump(2, ' ', false, Json::error_handler_t::replace);
}

std::vector<Row> rows_from_json(std::string_view text) {
    std::vector<Row> rows;
    try {
        for (const Json& json : Json::parse(text)) {
            Row row;
            row.group = json.at("group").get<std::string>();
            row.what = json.at("what").get<std::string>();
            const auto verdict = json.at("result").get<std::string>();
            row.verdict = verdict == to_string(Verdict::Ok)        ? Verdict::Ok
                          : verdict == to_string(Verdict::Skipped) ? Verdict::Skipped
                                                                   : Verdict::Wrong;
            row.cases = json.at("cases").get<std::uint64_t>();
            row.worst = number_of(json.at("worst_error_over_bound"));
            for (const auto& [part, worst] : json.at("parts").items())
                row.parts[part] = number_of(worst);
            row.note = json.at("note").get<std::string>();
            row.seconds = json.at("seconds").get<double>();
            rows.push_back(std::move(row));
        }
    } catch (const Json::exception& error) {
        throw Error(ErrorCode::Corrupt,
                    std::string("the ranks' report cannot be read: ") + error.what());
    }
    return rows;
}

Table::Table(std::FILE* stream)
    : stream_(stream), terminal_(ProgressReporter::terminal_of(stream) != "0") {
    std::fprintf(stream_, "%-10s %-36s %6s  %12s  %-8s %7s\n", "group", "what", "cases",
                 "error/bound", "result", "seconds");
}

void Table::clear_progress() {
    if (std::exchange(progress_shown_, false))
        std::fputs("\r\x1b[K", stream_);
}

void Table::begin(const std::string& what, std::size_t number, std::size_t total) {
    if (!terminal_)
        return;
    clear_progress();
    std::fprintf(stream_, "running %zu/%zu: %s", number, total, what.c_str());
    std::fflush(stream_);
    progress_shown_ = true;
}

void Table::add(const Row& row) {
    clear_progress();
    std::fprintf(stream_, "%-10s %-36s %6llu  %12s  %-8s %7.2f\n", row.group.c_str(),
                 row.what.c_str(), static_cast<unsigned long long>(row.cases),
                 worst_text(row).c_str(), to_string(row.verdict), row.seconds);
    std::fflush(stream_);
    rows_.push_back(row);
}

bool Table::good() const noexcept {
    return std::none_of(rows_.begin(), rows_.end(),
                        [](const Row& row) { return row.verdict == Verdict::Wrong; });
}

void Table::finish() {
    clear_progress();
    for (const Verdict verdict : {Verdict::Skipped, Verdict::Wrong})
        for (const Row& row : rows_)
            if (row.verdict == verdict)
                std::fprintf(stream_, "%s: %s: %s\n", to_string(verdict), row.what.c_str(),
                             row.note.c_str());
    std::fflush(stream_);
}

} // namespace bellows::selftest
