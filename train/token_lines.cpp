// SPDX-License-Identifier: MIT
#include "token_lines.hpp"

#include <bellows/engine/embedding.hpp>
#include <bellows/engine/loss.hpp>

#include <algorithm>

namespace bellows {

namespace {

bool has_target(std::span<const std::uint32_t> line, std::uint64_t at, std::uint64_t module,
                std::optional<std::uint32_t> end_of_document) {
    const std::uint64_t target = at + module + 2;
    if (target >= line.size())
        return false;
    return !end_of_document ||
           std::ranges::count(line.subspan(at, module + 1), *end_of_document) == 0;
}

} // namespace

std::vector<std::uint32_t> tokens_ahead(const TokenLines& lines, std::uint64_t ahead) {
    std::vector<std::uint32_t> tokens;
    for (std::uint64_t i = 0; i < lines.sequences(); ++i)
        for (std::uint64_t at = 0; at < lines.seq; ++at)
            tokens.push_back(lines.line(i)[std::min(at + ahead, lines.seq)]);
    return tokens;
}

std::vector<std::uint32_t> targets_of_model(const TokenLines& lines) {
    std::vector<std::uint32_t> targets = tokens_ahead(lines, 1);
    const std::uint64_t some = std::min(lines.with_targets, lines.sequences());
    std::fill(targets.begin() + static_cast<std::ptrdiff_t>(some * lines.seq), targets.end(),
              ops::kIgnoreTarget);
    return targets;
}

std::vector<std::uint32_t> targets_of_module(const TokenLines& lines, std::uint64_t module) {
    std::vector<std::uint32_t> targets;
    for (std::uint64_t i = 0; i < lines.sequences(); ++i)
        for (std::uint64_t at = 0; at < lines.seq; ++at)
            targets.push_back(i < lines.with_targets &&
                                      has_target(lines.line(i), at, module, lines.end_of_document)
                                  ? lines.line(i)[at + module + 2]
                                  : ops::kIgnoreTarget);
    return targets;
}

std::uint64_t predicted_by_module(std::span<const std::uint32_t> line, std::uint64_t module,
                                  std::optional<std::uint32_t> end_of_document) {
    std::uint64_t count = 0;
    for (std::uint64_t at = 0; at + 1 < line.size(); ++at)
        count += has_target(line, at, module, end_of_document);
    return count;
}

} // namespace bellows
