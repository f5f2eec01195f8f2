// SPDX-License-Identifier: MIT
#pragma once

// Rows of the self-test on their way: from ranks to one, to the starting process, to a person and
// to a file. JSON is the form between processes and of `--json`.

#include "app/progress.hpp"
#include "verify/checks/check.hpp"

#include <bellows/comm/world.hpp>

#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

namespace bellows::selftest {

using checks::Row;
using checks::Verdict;

/// "NAME, 2 ranks".
std::string name_with_ranks(const std::string& name, const World& world);

/// Collective. Row by row the worst of what the ranks found, the same on every rank.
std::vector<Row> worst_of_ranks(World& world, std::vector<Row> mine);

/// An array of objects. Infinite errors become null.
std::string rows_to_json(const std::vector<Row>& rows);
/// Throws Error{Corrupt} unless it is what rows_to_json() wrote.
std::vector<Row> rows_from_json(std::string_view text);

/// The table on standard output, a line as soon as its row is known; on a terminal the row that
/// runs stands below.
class Table {
public:
    explicit Table(std::FILE* stream);
    void begin(const std::string& what, std::size_t number, std::size_t total);
    void add(const Row& row);
    /// Lines below it, which a terminal breaks at spaces.
    void say(const std::string& text);
    /// The table's end: which rows are wrong, with all that they say.
    void finish();
    const std::vector<Row>& rows() const noexcept { return rows_; }
    bool good() const noexcept;

private:
    void clear_progress();

    std::FILE* stream_;
    ProgressReporter::Options screen_;
    bool progress_shown_ = false;
    std::vector<Row> rows_;
};

} // namespace bellows::selftest
