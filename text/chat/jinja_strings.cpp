// SPDX-License-Identifier: MIT
#include "jinja_strings.hpp"

#include "text/bpe/utf8.hpp"

#include <algorithm>

namespace bellows::text::jinja {

namespace {

bool is_stripped(std::string_view character, std::string_view characters) {
    return characters.empty() ? is_white_space(utf8_step(character).character) ||
                                    (character[0] >= 0x1c && character[0] <= 0x1f)
                              : characters.find(character) != std::string_view::npos;
}

std::vector<MarkedText> split_at_spaces(const MarkedText& text, std::int64_t most) {
    std::vector<MarkedText> parts;
    MarkedText rest = stripped(text, Side::Left, "");
    while (!rest.text.empty()) {
        if (most >= 0 && static_cast<std::int64_t>(parts.size()) == most) {
            parts.push_back(stripped(rest, Side::Right, ""));
            break;
        }
        std::size_t end = 0;
        while (end < rest.text.size()) {
            const Utf8Step step = utf8_step(std::string_view(rest.text).substr(end));
            if (is_white_space(step.character)) {
                break;
            }
            end += step.bytes;
        }
        parts.push_back(rest.part(0, end));
        rest = stripped(rest.part(end), Side::Left, "");
    }
    return parts;
}

} // namespace

MarkedText stripped(const MarkedText& text, Side side, std::string_view characters) {
    const std::string_view all(text.text);
    std::size_t first = 0;
    std::size_t end = all.size();
    while (side != Side::Right && first < end) {
        const std::size_t bytes = utf8_step(all.substr(first)).bytes;
        if (!is_stripped(all.substr(first, bytes), characters)) {
            break;
        }
        first += bytes;
    }
    while (side != Side::Left && first < end) {
        std::size_t bytes = 0;
        last_character(all.substr(first, end - first), bytes);
        if (!is_stripped(all.substr(end - bytes, bytes), characters)) {
            break;
        }
        end -= bytes;
    }
    return text.part(first, end - first);
}

std::vector<MarkedText> split(const MarkedText& text, std::string_view separator, std::int64_t most,
                              bool from_right) {
    if (separator.empty()) {
        return split_at_spaces(text, most);
    }
    std::vector<std::size_t> cuts;
    const std::string_view all(text.text);
    const auto full = [&] { return most >= 0 && static_cast<std::int64_t>(cuts.size()) >= most; };
    if (from_right) {
        std::size_t end = all.size();
        while (!full() && end >= separator.size()) {
            const std::size_t at = all.rfind(separator, end - separator.size());
            if (at == std::string_view::npos) {
                break;
            }
            cuts.push_back(at);
            end = at;
        }
        std::reverse(cuts.begin(), cuts.end());
    } else {
        for (std::size_t at = 0;
             !full() && (at = all.find(separator, at)) != std::string_view::npos;
             at += separator.size()) {
            cuts.push_back(at);
        }
    }
    std::vector<MarkedText> parts;
    std::size_t first = 0;
    for (const std::size_t cut : cuts) {
        parts.push_back(text.part(first, cut - first));
        first = cut + separator.size();
    }
    parts.push_back(text.part(first));
    return parts;
}

MarkedText replaced(const MarkedText& text, std::string_view what, const MarkedText& by) {
    MarkedText out;
    bool first = true;
    for (const MarkedText& part : split(text, what, -1, false)) {
        if (!first) {
            out.append(by);
        }
        out.append(part);
        first = false;
    }
    return out;
}

MarkedText in_upper_case(MarkedText text) {
    for (char& c : text.text) {
        c = c >= 'a' && c <= 'z' ? static_cast<char>(c - 'a' + 'A') : c;
    }
    return text;
}

MarkedText in_lower_case(MarkedText text) {
    for (char& c : text.text) {
        c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
    }
    return text;
}

std::vector<std::size_t> character_places(std::string_view text) {
    std::vector<std::size_t> places;
    for (std::size_t at = 0; at < text.size(); ++at) {
        if ((static_cast<unsigned char>(text[at]) & 0xc0) != 0x80) {
            places.push_back(at);
        }
    }
    places.push_back(text.size());
    return places;
}

} // namespace bellows::text::jinja
