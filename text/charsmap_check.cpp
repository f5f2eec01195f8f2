// SPDX-License-Identifier: MIT
#include "model_check.hpp"

#include "bpe/utf8.hpp"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

namespace bellows::text {

namespace {

/// A unit of darts-clone's double array (BSD, S. Yata), as its reader takes it apart.
struct Unit {
    std::uint32_t bits;
    bool has_leaf() const noexcept { return (bits >> 8 & 1) != 0; }
    std::uint32_t value() const noexcept { return bits & 0x7fffffffu; }
    std::uint32_t label() const noexcept { return bits & 0x800000ffu; }
    std::uint32_t offset() const noexcept { return bits >> 10 << ((bits & 0x200u) >> 6); }
};

/// The library finds all keys that a text begins with, and has room for this many.
constexpr std::uint8_t kMostKeysOnAPath = 32;

class Trie {
public:
    explicit Trie(std::string_view bytes) : units_(bytes.size() / sizeof(Unit)) {
        std::memcpy(units_.data(), bytes.data(), units_.size() * sizeof(Unit));
    }

    /// Checks every unit that a walk from the root can reach; visit_value(v) for each leaf. Paths
    /// may join (the builder shares ends of keys) and must not be circles.
    template <class Visit>
    void walk(Visit&& visit_value) {
        std::vector<Step> path{enter(0, visit_value)};
        while (!path.empty()) {
            Step& step = path.back();
            if (step.next_byte == kLabels) {
                leave(path);
                continue;
            }
            const std::uint32_t byte = step.next_byte++;
            const std::uint32_t child = step.children ^ byte;
            if (units_[child].label() != byte) {
                continue;
            }
            if (keys_[child] == kOpen) {
                throw BadModel("the normaliser's trie goes in a circle");
            }
            if (keys_[child] == kUnseen) {
                path.push_back(enter(child, visit_value));
            } else {
                step.keys_below = std::max(step.keys_below, keys_[child]);
            }
        }
    }

private:
    static constexpr std::uint32_t kLabels = 256;
    static constexpr std::uint8_t kUnseen = 255, kOpen = 254;

    struct Step {
        std::uint32_t unit;
        std::uint32_t children; ///< that of a byte is children ^ byte; a sound leaf's is that of 0
        std::uint32_t next_byte = 0;
        std::uint8_t keys_below = 0; ///< the most on a path below
    };

    template <class Visit>
    Step enter(std::uint32_t unit, Visit&& visit_value) {
        keys_[unit] = kOpen;
        const Step step{unit, unit ^ units_[unit].offset()};
        // A walk looks at children ^ byte for any byte, whether that child exists or not.
        if ((step.children | (kLabels - 1)) >= units_.size()) {
            throw BadModel("the normaliser's trie points out of its " +
                           std::to_string(units_.size()) + " units");
        }
        if (units_[unit].has_leaf()) {
            visit_value(units_[step.children].value());
        }
        return step;
    }

    void leave(std::vector<Step>& path) {
        const Step step = path.back();
        path.pop_back();
        const std::uint8_t keys = step.keys_below + (units_[step.unit].has_leaf() ? 1 : 0);
        if (keys > kMostKeysOnAPath) {
            throw BadModel("a string of the normaliser begins with more than " +
                           std::to_string(kMostKeysOnAPath) + " others");
        }
        keys_[step.unit] = keys;
        if (!path.empty()) {
            path.back().keys_below = std::max(path.back().keys_below, keys);
        }
    }

    std::vector<Unit> units_;
    std::vector<std::uint8_t> keys_ = std::vector<std::uint8_t>(units_.size(), kUnseen);
};

} // namespace

void check_charsmap(std::string_view charsmap) {
    constexpr std::size_t kSizeField = 4;
    /// Compatibility forms of Unicode stay far below; a longer one would blow a text up.
    constexpr std::size_t kLongestForm = 1024;
    std::uint32_t trie_bytes = 0;
    if (charsmap.size() < kSizeField) {
        throw BadModel("the normaliser's table is cut off");
    }
    std::memcpy(&trie_bytes, charsmap.data(), kSizeField);
    charsmap.remove_prefix(kSizeField);
    if (trie_bytes == 0 || trie_bytes % sizeof(Unit) != 0 || trie_bytes >= charsmap.size()) {
        throw BadModel("the normaliser's trie of " + std::to_string(trie_bytes) +
                       " bytes does not fit its table of " + std::to_string(charsmap.size()));
    }
    const std::string_view forms = charsmap.substr(trie_bytes);
    if (forms.back() != '\0') {
        throw BadModel("the normaliser's strings do not end");
    }
    std::vector<bool> checked(forms.size());
    Trie(charsmap.substr(0, trie_bytes)).walk([&](std::uint32_t value) {
        if (value >= forms.size()) {
            throw BadModel("the normaliser's trie points out of its strings");
        }
        if (checked[value]) {
            return;
        }
        checked[value] = true;
        const std::string_view rest = forms.substr(value, kLongestForm + 1);
        const std::size_t end = rest.find('\0');
        if (end == std::string_view::npos || !is_utf8(rest.substr(0, end))) {
            throw BadModel("a normalised string is longer than " + std::to_string(kLongestForm) +
                           " bytes or no UTF-8");
        }
    });
}

} // namespace bellows::text
