// SPDX-License-Identifier: MIT
#pragma once

// The result of one check, a row of `bellows selftest`: comparisons are collected, the worst is
// kept, and what is wrong is told once. A plain value of one thread; ranks send theirs as JSON.

#include "verify/reference/compare.hpp"

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace bellows::checks {

enum class Verdict : std::uint8_t { Ok, Wrong, Skipped };
const char* to_string(Verdict verdict) noexcept;

struct Row {
    std::string group; ///< "codecs", "ops", "fp8", "exchange", "training"
    std::string what;
    Verdict verdict = Verdict::Ok;
    std::uint64_t cases = 0;
    double worst = 0;                    ///< largest error in units of its bound
    std::map<std::string, double> parts; ///< the same by part: "forward", "input gradient", ...
    std::string note;                    ///< the first thing wrong, or why it was skipped
    double seconds = 0;
};

class Check {
public:
    /// fault: one number of the first comparison is changed before it is looked at, which must
    /// make the row Wrong (a test of the self-test).
    explicit Check(Row& row, bool fault = false) : row_(row), fault_(fault) {}

    /// What follows belongs to another case, which `name` describes in messages.
    void begin_case(std::string name) {
        case_ = std::move(name);
        ++row_.cases;
    }

    /// Every actual[i] within bound(i, expected[i]) of expected[i].
    template <class T, class Expected, class Bound>
    void elements(const char* part, std::vector<T> actual, const Expected& expected,
                  const std::vector<std::uint64_t>& shape, Bound&& bound) {
        if (spoils(actual.size())) {
            const std::size_t i = actual.size() / 2;
            const double e = static_cast<double>(expected[i]);
            actual[i] = static_cast<T>(e + 4 * bound(i, e) + std::abs(e) / 64 + 1);
        }
        const auto result = reference::compare_elements(actual, expected, shape, bound);
        take(part, result.good, result.worst, result.text);
    }
    /// The same numbers; a NaN equals nothing.
    template <class T, class Expected>
    void exact(const char* part, std::vector<T> actual, const Expected& expected) {
        elements(part, std::move(actual), expected, {}, reference::within(0, 0));
    }
    /// |value - expected| <= bound.
    void number(const char* part, double value, double expected, double bound);
    /// A claim without numbers.
    void that(const char* part, bool holds, const std::string& otherwise);
    /// None of what stands around a result (OpRig::outside) was written.
    void untouched(const char* part, const std::vector<float>& around);

private:
    bool spoils(std::size_t elements) { return elements > 0 && std::exchange(fault_, false); }
    void take(const char* part, bool good, double worst, const std::string& text);

    Row& row_;
    bool fault_;
    std::string case_;
};

/// Runs `body` as one row with its time. What it throws as bellows::Error is a wrong result,
/// except Error{Unsupported}, which is a reason to skip. collective: other ranks take part, which
/// cannot go on without this one; then errors are thrown on.
Row run_row(std::string group, std::string what, const std::string& fault,
            const std::function<void(Check&)>& body, bool collective = false);

} // namespace bellows::checks
