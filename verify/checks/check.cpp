// SPDX-License-Identifier: MIT
#include "verify/checks/check.hpp"

#include "verify/checks/op_rig.hpp"

#include <bellows/base/error.hpp>

#include <algorithm>
#include <chrono>
#include <limits>
#include <utility>

namespace bellows::checks {

const char* to_string(Verdict verdict) noexcept {
    switch (verdict) {
    case Verdict::Ok:
        return "ok";
    case Verdict::Wrong:
        return "WRONG";
    case Verdict::Skipped:
        return "not run";
    }
    return "unknown";
}

void Check::take(const char* part, bool good, double worst, const std::string& text) {
    row_.worst = std::max(row_.worst, worst);
    double& of_part = row_.parts[part];
    of_part = std::max(of_part, worst);
    if (good)
        return;
    if (row_.verdict != Verdict::Wrong)
        row_.note = (case_.empty() ? "" : case_ + ", ") + part + ": " + text;
    row_.verdict = Verdict::Wrong;
}

void Check::number(const char* part, double value, double expected, double bound) {
    elements(part, std::vector<double>{value}, std::vector<double>{expected}, {},
             reference::within(bound, 0));
}

void Check::that(const char* part, bool holds, const std::string& otherwise) {
    const bool good = holds && !spoils(1);
    take(part, good, good ? 0 : std::numeric_limits<double>::infinity(), otherwise);
}

void Check::untouched(const char* part, const std::vector<float>& around) {
    const auto written = std::find_if_not(around.begin(), around.end(),
                                          [](float value) { return checks::untouched(value); });
    that(part, written == around.end(),
         "element " + std::to_string(written - around.begin()) + " of " +
             std::to_string(around.size()) + " around the result was written");
}

Row run_row(std::string group, std::string what, const std::string& fault,
            const std::function<void(Check&)>& body, bool collective) {
    Row row;
    row.group = std::move(group);
    row.what = std::move(what);
    Check check(row, !fault.empty() && fault == row.what);
    const auto start = std::chrono::steady_clock::now();
    const auto fail = [&row](const std::string& text) {
        if (row.verdict != Verdict::Wrong)
            row.note = text;
        row.verdict = Verdict::Wrong;
        row.worst = std::numeric_limits<double>::infinity();
    };
    try {
        body(check);
        if (row.cases == 0)
            fail("no case ran");
    } catch (const Error& error) {
        if (collective)
            throw;
        if (error.code() == ErrorCode::Unsupported && row.verdict == Verdict::Ok) {
            row.verdict = Verdict::Skipped;
            row.note = error.message();
        } else {
            fail(std::string(to_string(error.code())) + ": " + error.message());
        }
    } catch (const std::exception& error) {
        if (collective)
            throw Error(ErrorCode::Internal, row.what + ": " + error.what());
        fail(error.what());
    }
    row.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return row;
}

} // namespace bellows::checks
