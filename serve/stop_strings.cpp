// SPDX-License-Identifier: MIT
#include <bellows/serve/stop_strings.hpp>

#include <algorithm>
#include <string_view>
#include <utility>

namespace bellows {

AnswerText::AnswerText(const Tokenizer& tokenizer, std::vector<std::string> stop,
                       bool special_tokens)
    : decoder_(tokenizer, special_tokens), stops_(std::move(stop)) {
    std::erase(stops_, "");
}

bool AnswerText::may_begin_stop(std::string_view text) const noexcept {
    return std::ranges::any_of(stops_,
                               [&](const std::string& stop) { return stop.starts_with(text); });
}

/// What of the text goes through, behind what was held back. Byte by byte, so that it does not
/// matter how the text comes.
std::string AnswerText::pass(const std::string& text) {
    if (stops_.empty()) {
        return text;
    }
    std::string shown;
    for (const char byte : text) {
        held_.push_back(byte);
        for (const std::string& stop : stops_) {
            if (held_.ends_with(stop) && stop.size() > stop_.size()) {
                stop_ = stop;
            }
        }
        if (!stop_.empty()) {
            stopped_ = true;
            shown.append(held_, 0, held_.size() - stop_.size());
            held_.clear();
            break;
        }
        std::size_t past = 0;
        while (!may_begin_stop(std::string_view(held_).substr(past))) { // "" begins every stop
            ++past;
        }
        shown.append(held_, 0, past);
        held_.erase(0, past);
    }
    return shown;
}

std::string AnswerText::add(std::span<const std::uint32_t> ids) {
    std::string shown;
    for (const std::uint32_t id : ids) {
        if (stopped_) {
            break;
        }
        shown += pass(decoder_.add(id));
    }
    return shown;
}

std::string AnswerText::finish() {
    if (stopped_) {
        return "";
    }
    std::string shown = pass(decoder_.finish());
    shown += std::exchange(held_, "");
    return shown;
}

} // namespace bellows
