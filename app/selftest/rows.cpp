// SPDX-License-Identifier: MIT
#include "app/selftest/rows.hpp"

#include "app/units.hpp"

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

namespace {

constexpr unsigned kWide = 79; ///< columns of the whole table

/// A line of the table; a narrow terminal has room for the row's name and result alone.
std::string line_of(const ProgressReporter::Options& screen, const std::string& group,
                    const std::string& what, const std::string& cases, const std::string& error,
                    const std::string& result, const std::string& seconds) {
    char line[256];
    if (!screen.terminal || screen.columns >= kWide) {
        std::snprintf(line, sizeof line, "%-9s %-34s %5s %11s  %-7s %7s\n", group.c_str(),
                      what.c_str(), cases.c_str(), error.c_str(), result.c_str(), seconds.c_str());
        return line;
    }
    const int width = std::max(static_cast<int>(screen.columns) - 8, 1); // beside "skipped"
    std::snprintf(line, sizeof line, "%-*s %s\n", width, what.c_str(), result.c_str());
    return folded(line, screen.columns);
}

} // namespace

Table::Table(std::FILE* stream) : stream_(stream), screen_(ProgressReporter::detect(stream)) {
    std::fputs(
        line_of(screen_, "group", "what", "cases", "error/bound", "result", "seconds").c_str(),
        stream_);
}

void Table::clear_progress() {
    if (std::exchange(progress_shown_, false))
        std::fputs("\r\x1b[K", stream_);
}

void Table::begin(const std::string& what, std::size_t number, std::size_t total) {
    if (!screen_.terminal)
        return;
    clear_progress();
    const std::string line =
        "running " + std::to_string(number) + "/" + std::to_string(total) + ": " + what;
    std::fputs(line.substr(0, std::max(screen_.columns, 1u) - 1).c_str(), stream_);
    std::fflush(stream_);
    progress_shown_ = true;
}

void Table::add(const Row& row) {
    clear_progress();
    std::fputs(line_of(screen_, row.group, row.what, std::to_string(row.cases), worst_text(row),
                       to_string(row.verdict), printed("%.2f", row.seconds))
                   .c_str(),
               stream_);
    std::fflush(stream_);
    rows_.push_back(row);
}

void Table::say(const std::string& text) {
    clear_progress();
    std::fputs((screen_.terminal ? folded(text, screen_.columns) : text).c_str(), stream_);
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
                say(std::string(to_string(verdict)) + ": " + row.what + ": " + row.note + "\n");
    std::fflush(stream_);
}

} // namespace bellows::selftest
